"""From episodes to samples: the flat token sequences that are trained on.

The turns of an episode are a tree: a turn follows the one whose prompt and completion its prompt
extends. If that turn is the last of its sample, the turn joins the sample. If the sample has gone
on already, as where an agent forks, the turn opens a new sample, which repeats the tokens so far as
context. A turn that extends none, as with a window, opens a new sample, too. So every sampled token
is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ragen.core.errors import RagenError
from ragen.core.pictures import by_key, shown_in
from ragen.core.types import Completion, Episode, Group, Prompt, Sample

Exchange = tuple[Prompt, Completion]
"""One turn's prompt and completion."""


def to_samples(groups: Iterable[Group]) -> tuple[list[Sample], list[Episode]]:
    """Flatten the episodes of `groups`, in order.

    Failed episodes and episodes that were cut before their first completion are left out.
    `Sample.episode` indexes the returned episodes, `Sample.group` indexes `groups`.

    Raises:
        RagenError: An episode has no token ids or logprobs, as from a chat endpoint.
    """
    samples: list[Sample] = []
    episodes: list[Episode] = []
    for number, group in enumerate(groups):
        for episode in group.episodes:
            if episode.turns and not episode.failed:
                exchanges = [(turn.prompt, turn.completion) for turn in episode.turns]
                samples += join(exchanges, len(episodes), number)
                episodes.append(episode)
    return samples, episodes


def join(exchanges: Sequence[Exchange], episode: int, group: int) -> list[Sample]:
    """The samples of one episode, from the prompts and completions of its turns."""
    samples, empty = list[Sample](), Sample((), (), (), (), (), episode, group)
    ends: list[tuple[tuple[int, ...], int]] = []  # of each turn, with the number of its sample
    for number, (prompt, completion) in enumerate(exchanges):
        ids, sampled, logprobs = prompt.token_ids, completion.token_ids, completion.logprobs
        if ids is None or sampled is None or logprobs is None:
            raise RagenError(
                "this policy returns text without token ids and logprobs, which cannot be trained "
                "on exactly: train with a local model and keep the endpoint for evaluation"
            )
        assert sampled, "a completion has at least its end-of-turn token"
        assert len(sampled) == len(logprobs)
        before, place = max(
            (end for end in ends if _extends(ids, end[0])),
            key=lambda end: len(end[0]),
            default=((), -1),
        )
        joins = place >= 0 and samples[place].token_ids == before
        last = samples[place] if joins else empty
        context, spoken = len(ids) - len(last.token_ids), len(sampled)
        longer = Sample(
            ids + sampled,
            last.loss_mask + (False,) * context + (True,) * spoken,
            last.sampled_logprobs + (0.0,) * context + logprobs,
            last.turn_index + (-1,) * context + (number,) * spoken,
            last.turn_ends + (False,) * (context + spoken - 1) + (True,),
            episode,
            group,
        )
        if joins:
            samples[place] = longer
        else:
            place = len(samples)
            samples.append(longer)
        ends.append((longer.token_ids, place))
    pictures = by_key(picture for prompt, _ in exchanges for picture in prompt.pictures)
    if pictures:
        return [replace(each, pictures=shown_in(each.token_ids, pictures)) for each in samples]
    return samples


def _extends(ids: tuple[int, ...], earlier: tuple[int, ...]) -> bool:
    length = len(earlier)
    # The last token is compared first, because most sequences that begin alike differ there.
    return len(ids) > length and ids[length - 1] == earlier[-1] and ids[:length] == earlier
