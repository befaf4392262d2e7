"""Proof in every run that what is trained is what was sampled.

Whoever samples a completion hashes its ids and logprobs there and then. The hash travels with the
completion, apart from the tokens; just before the backward pass it is taken again from the masked
rows that the learner is about to train on. Whatever goes wrong in between (an id, a logprob, a
mask, the end of a turn, a row that is lost, comes twice or belongs to another episode) stops the
run before the update.

Axes: **B** samples (rows), **T** positions of a row, **K** turns of an episode, **N** sampled
tokens, row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch

from ragen.algorithms.batch import Batch
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, total
from ragen.core.types import Episode
from ragen.rollout.policies import fingerprint

NO_TURN = -1
"""Stands in `Batch.born_BK` beyond an episode's last turn; no fingerprint is negative."""

Place = tuple[int, int]
"""Episode and turn that a completion belongs to."""


def with_births(batch: Batch, episodes: Sequence[Episode]) -> Batch:
    """The batch with the fingerprints that its episodes' completions were born with, verified.

    They are read from the episodes, not from the samples, so they know nothing of how the batch
    was made. It is verified here already, so that what credit builds on is sound.

    Args:
        batch: All rows of `episodes`.
        episodes: What `Batch.episode_B` indexes.

    Raises:
        RagenError: As `verify`; an episode has no row; or the policy gives no fingerprints.
    """
    if set(batch.episode_B.tolist()) != set(range(len(episodes))):
        raise _inexact("the batch does not hold each episode of the step")
    num_turns = max(len(episode.turns) for episode in episodes)
    born_EK = torch.full((len(episodes), num_turns), NO_TURN)
    for row, episode in enumerate(episodes):
        for number, turn in enumerate(episode.turns):
            if turn.completion.fingerprint is None:
                raise RagenError(
                    "this policy's completions carry no fingerprint, so what is trained cannot be "
                    "compared with what was sampled; let it set Completion.fingerprint with "
                    "ragen.rollout.policies.fingerprint(token_ids, logprobs)"
                )
            born_EK[row, number] = turn.completion.fingerprint
    batch = replace(batch, born_BK=born_EK[batch.episode_B])
    verify([batch])
    return batch


def verify(microbatches: Sequence[Batch]) -> Metrics:
    """Make sure that one optimiser step's microbatches train exactly what was sampled.

    Args:
        microbatches: All rows of some whole episodes.

    Returns:
        How much was compared: ``exactness/completions_checked``, ``exactness/tokens_checked``.
        Nothing for a batch without `born_BK`: demonstrations, which nobody sampled.

    Raises:
        RagenError: The first difference, with the turn it is in.

    Example:
        >>> from ragen.algorithms.batch import collate
        >>> from ragen.core.types import Sample
        >>> mask = (False, True)
        >>> batch = collate([Sample((1, 8), mask, (0.0, -0.5), (-1, 0), mask, 0, 0)])
        >>> good, bad = torch.tensor([[fingerprint([8], [-0.5])]]), torch.tensor([[7]])
        >>> verify([replace(batch, born_BK=good)])["exactness/completions_checked"].value
        1.0
        >>> verify([replace(batch, born_BK=bad)])
        Traceback (most recent call last):
        ragen.core.errors.RagenError: stopped before an update: the tokens or logprobs of turn 1 of
        ...
    """
    born: dict[Place, int] = {}
    found: dict[Place, int] = {}
    num_tokens = 0
    for part in microbatches:
        if part.born_BK is None:
            return {}
        _check_masks(part)
        born |= _births(part)
        for place, mark in _fingerprints(part):
            if place in found:
                raise _inexact(f"{_words(place)} would be trained twice")
            found[place] = mark
        num_tokens += part.num_tokens
    for place in sorted(born.keys() | found.keys()):
        if place not in found:
            raise _inexact(f"{_words(place)} was sampled and would not be trained")
        if place not in born:
            raise _inexact(f"{_words(place)} would be trained and was never sampled")
        if born[place] != found[place]:
            raise _inexact(
                f"the tokens or logprobs of {_words(place)} are not those that were sampled"
            )
    return {
        "exactness/completions_checked": total(len(found)),
        "exactness/tokens_checked": total(num_tokens),
    }


def verify_split(batch: Batch, minibatches: Sequence[Batch], passes: int) -> None:
    """Make sure that every episode of a collection is trained once in each pass.

    `verify` sees one optimiser step and cannot miss an episode that no step has.

    Args:
        batch: The collection.
        minibatches: What it was split into.
        passes: How often it is gone through.

    Raises:
        RagenError: An episode comes more or less often.

    Example:
        >>> from ragen.algorithms.batch import collate, minibatches
        >>> from ragen.core.types import Sample
        >>> mask = (False, True)
        >>> row = Sample((1, 8), mask, (0.0, -0.5), (-1, 0), mask, 0, 0)
        >>> batch = replace(collate([row] * 5), episode_B=torch.arange(5))
        >>> parts = minibatches(batch, minibatch_episodes=3, passes=2, seed=0)
        >>> verify_split(batch, parts, passes=2)
        >>> verify_split(batch, parts[1:], passes=2)
        Traceback (most recent call last):
        ragen.core.errors.RagenError: stopped before an update: the step's episode 0 was sampled ...
    """
    times = Counter(e for part in minibatches for e in set(part.episode_B.tolist()))
    for episode in sorted(set(batch.episode_B.tolist()) | times.keys()):
        if times[episode] < passes:
            raise _inexact(f"the step's episode {episode} was sampled and would not be trained")
        if times[episode] > passes:
            raise _inexact(f"the step's episode {episode} would be trained twice in a pass")


def _check_masks(part: Batch) -> None:
    mask_BT, turn_BT = part.mask_BT, part.turn_BT
    for field in fields(part):
        tensor = getattr(part, field.name)
        if field.name.endswith("_BT") and tensor is not None and tensor.shape != mask_BT.shape:
            raise _inexact(f"{field.name} and the mask differ in length")
    position_T = torch.arange(mask_BT.shape[1])
    inside_BT = (position_T > 0) & (position_T < part.lengths_B[:, None])
    if not torch.equal(mask_BT, turn_BT >= 0) or bool((mask_BT & ~inside_BT).any()):
        raise _inexact("the mask is not true exactly on the tokens of turns")
    if not torch.equal(mask_BT, part.weight_BT > 0):
        raise _inexact("the loss does not look exactly at the sampled tokens")
    next_BT = torch.nn.functional.pad(turn_BT[:, 1:], (0, 1), value=NO_TURN)
    if not torch.equal(part.turn_ends_BT, mask_BT & (turn_BT != next_BT)):
        raise _inexact("a turn's end is not on its last sampled token")


def _births(part: Batch) -> Iterator[tuple[Place, int]]:
    """Each turn of the rows' episodes with the fingerprint it was born with."""
    assert part.born_BK is not None
    for episode, born_K in zip(part.episode_B.tolist(), part.born_BK.tolist(), strict=True):
        for number, mark in enumerate(born_K):
            if mark != NO_TURN:
                yield (episode, number), mark


def _fingerprints(part: Batch) -> Iterator[tuple[Place, int]]:
    """Each turn of the rows with the hash of its masked tokens as they stand there."""
    row_N, column_N = part.mask_BT.nonzero(as_tuple=True)
    ids_N = part.token_ids_BT[row_N, column_N].numpy()
    logprobs_N = part.sampled_logprobs_BT[row_N, column_N].numpy()
    stops = (part.turn_ends_BT[row_N, column_N].nonzero().flatten() + 1).tolist()
    episodes = part.episode_B[row_N].tolist()
    turns = part.turn_BT[row_N, column_N].tolist()
    start = 0
    for stop in stops:
        here = slice(start, stop)
        yield (episodes[start], turns[start]), fingerprint(ids_N[here], logprobs_N[here])
        start = stop


def _words(place: Place) -> str:
    return f"turn {place[1] + 1} of the step's episode {place[0]}"


def _inexact(difference: str) -> RagenError:
    return RagenError(
        f"stopped before an update: {difference}; no weight was changed by it. This is a fault in "
        "RAGEN or in a policy or engine of your own: please report it"
    )
