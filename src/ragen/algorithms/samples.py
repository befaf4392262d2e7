"""From episodes to samples: the flat token sequences that are trained on.

A turn whose prompt extends the tokens so far joins that sample; any other turn opens a new sample.
So an episode with its full history becomes one sample, and an episode with a window of context
becomes one sample per turn. Every sampled token is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable

from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Group, Prompt, Sample

Exchange = tuple[Prompt, Completion]
"""One turn's prompt and completion."""


def to_samples(groups: Iterable[Group]) -> tuple[list[Sample], list[Episode]]:
    """Flatten the episodes of `groups`, in order.

    Failed episodes and episodes that were cut before their first completion are left out.
    `Sample.episode` indexes the returned episodes, `Sample.group` indexes `groups`.

    Raises:
        RagenError: A completion has no token ids or no logprobs, as from a chat endpoint. It can be
            evaluated, but not trained on.
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


def join(exchanges: Iterable[Exchange], episode: int, group: int) -> list[Sample]:
    """The samples of one episode, from the prompts and completions of its turns.

    Raises:
        RagenError: As `to_samples`.

    Example:
        >>> reply = Completion((8, 2), (-0.5, -0.1), "", "stop", 0)
        >>> first, second = (Prompt((), ids, 0, 8, 1.0, 0) for ids in ((1,), (1, 8, 2, 3)))
        >>> [sample.token_ids for sample in join([(first, reply), (second, reply)], 0, 0)]
        [(1, 8, 2, 3, 8, 2)]
    """
    parts: list[_SampleBuilder] = []
    for number, exchange in enumerate(exchanges):
        prompt, completion, logprobs = _tokens(*exchange)
        if not parts or not parts[-1].extends_to(prompt):
            parts.append(_SampleBuilder())
        parts[-1].add(prompt, completion, logprobs, number)
    return [part.sample(episode, group) for part in parts]


def _tokens(
    prompt: Prompt, completion: Completion
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    if prompt.token_ids is None or completion.token_ids is None or completion.logprobs is None:
        raise RagenError(
            "this policy returns text without token ids and logprobs, which cannot be trained on "
            "exactly: train with a local model and keep the endpoint for evaluation"
        )
    return prompt.token_ids, completion.token_ids, completion.logprobs


class _SampleBuilder:
    """A sample to which turns are appended."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.turn: list[int] = []
        self.ends: list[bool] = []

    def extends_to(self, prompt: tuple[int, ...]) -> bool:
        return len(prompt) > len(self.ids) and list(prompt[: len(self.ids)]) == self.ids

    def add(
        self,
        prompt: tuple[int, ...],
        completion: tuple[int, ...],
        logprobs: tuple[float, ...],
        number: int,
    ) -> None:
        assert completion, "a completion has at least its end-of-turn token"
        context, sampled = prompt[len(self.ids) :], len(completion)
        self.ids += context + completion
        self.mask += [False] * len(context) + [True] * sampled
        self.logprobs += (0.0,) * len(context) + logprobs
        self.turn += [-1] * len(context) + [number] * sampled
        self.ends += [False] * (len(context) + sampled - 1) + [True]

    def sample(self, episode: int, group: int) -> Sample:
        ids, mask, logprobs = tuple(self.ids), tuple(self.mask), tuple(self.logprobs)
        turn, ends = tuple(self.turn), tuple(self.ends)
        assert len({len(field) for field in (ids, mask, logprobs, turn, ends)}) == 1
        return Sample(ids, mask, logprobs, turn, ends, episode, group)
