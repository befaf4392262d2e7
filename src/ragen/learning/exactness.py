"""A check in every run that the trained tokens are the sampled tokens.

The sampler hashes a completion's ids and logprobs when it is sampled. This fingerprint travels with
the completion, apart from the tokens; just before the backward pass it is computed again from the
masked rows that the learner is about to train on. Any difference (an id, a logprob, a mask, the end
of a turn, a row that is lost, duplicated or of another episode) stops the run before the update.
So does a difference between the picture tokens of a turn's prompt and those before it in its row,
and a picture whose pixels are not those of its hash.

Axes: **B** samples (rows), **T** positions of a row, **K** turns of an episode, **N** sampled
tokens, row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ragen.algorithms.batch import Batch
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, total
from ragen.core.pictures import Picture
from ragen.core.types import Episode, fingerprint

NO_TURN = -1
"""Padding of `Batch.born_BK` after an episode's last turn; no fingerprint is negative."""

TurnId = tuple[int, int]
"""The episode and the turn that a completion belongs to."""


def with_fingerprints(batch: Batch, episodes: Sequence[Episode]) -> Batch:
    """The batch with the fingerprints of its episodes' completions, verified.

    They are read from the episodes, so they do not depend on how the batch was built. The check
    here means that credit is computed on correct tokens. `Batch.episode_B` indexes `episodes`.

    Raises:
        RagenError: A turn differs, an episode has no row, or the policy sets no fingerprints.
    """
    if set(batch.episode_B.tolist()) != set(range(len(episodes))):
        raise _inexact("the batch does not hold each episode of the step")
    num_turns = max(len(episode.turns) for episode in episodes)
    born_EK = torch.full((len(episodes), num_turns), NO_TURN)
    for row, episode in enumerate(episodes):
        for number, turn in enumerate(episode.turns):
            if turn.completion.fingerprint is None:
                raise RagenError(
                    "this policy's completions carry no fingerprint, so the trained tokens cannot "
                    "be compared with the sampled ones; let it set Completion.fingerprint to "
                    "ragen.core.types.fingerprint(token_ids, logprobs)"
                )
            seen = 0
            if turn.prompt.pictures:
                seen = _mark_of_pictures(np.asarray(turn.prompt.token_ids, dtype=np.int64))
            born_EK[row, number] = turn.completion.fingerprint ^ seen
    batch = replace(batch, born_BK=born_EK[batch.episode_B])
    verify([batch])
    return batch


def verify(microbatches: Sequence[Batch]) -> Metrics:
    """Check that one optimiser step's microbatches train exactly the sampled tokens.

    The microbatches hold all rows of some complete episodes. Returns how much was compared
    (``exactness/completions_checked``, ``exactness/tokens_checked``), and nothing for a batch
    without `born_BK`: demonstrations, which were not sampled.

    Raises:
        RagenError: They differ; the message names the first turn that does.
    """
    sampled: dict[TurnId, int] = {}
    trained: dict[TurnId, int] = {}
    num_tokens = 0
    _check_pictures(microbatches)
    for part in microbatches:
        if part.born_BK is None:
            return {}
        _check_masks(part)
        for episode, born_K in zip(part.episode_B.tolist(), part.born_BK.tolist(), strict=True):
            marks = enumerate(born_K)
            sampled |= {(episode, number): mark for number, mark in marks if mark != NO_TURN}
        for turn_id, mark in _trained_fingerprints(part):
            if turn_id in trained:
                raise _inexact(f"{_describe(turn_id)} would be trained twice")
            trained[turn_id] = mark
        num_tokens += part.num_tokens
    for turn_id in sorted(sampled.keys() | trained.keys()):
        if turn_id not in trained:
            raise _inexact(f"{_describe(turn_id)} was sampled and would not be trained")
        if turn_id not in sampled:
            raise _inexact(f"{_describe(turn_id)} would be trained and was never sampled")
        if sampled[turn_id] != trained[turn_id]:
            raise _inexact(
                f"the tokens, logprobs or pictures of {_describe(turn_id)} are not those that were "
                "sampled"
            )
    return {
        "exactness/completions_checked": total(len(trained)),
        "exactness/tokens_checked": total(num_tokens),
    }


def verify_share(batch: Batch, microbatches: Sequence[Batch]) -> Metrics:
    """`verify` for one of several processes, which trains on `microbatches` of the whole `batch`.

    Hashing takes time, so each process hashes the tokens of its own rows only. But the weights of
    these tokens follow from the masks of all rows.
    """
    if batch.born_BK is None:
        return {}
    _check_masks(batch)
    return verify(microbatches)


def verify_num_rows(batch: Batch, num_rows: int) -> None:
    """Check that the processes which train on a batch together have all of its rows.

    Raises:
        RagenError: They have more or fewer.
    """
    if num_rows != batch.num_rows:
        raise _inexact(f"the learners have {num_rows} rows of a minibatch of {batch.num_rows}")


def verify_split(batch: Batch, minibatches: Sequence[Batch], epochs: int) -> None:
    """Check that every episode of a collection is trained once per epoch.

    `verify` sees a single optimiser step, so it cannot notice an episode that is in none.

    Raises:
        RagenError: An episode is trained more or less often.

    Example:
        >>> from ragen.algorithms.batch import collate, minibatches
        >>> from ragen.core.types import Sample
        >>> mask = (False, True)
        >>> row = Sample((1, 8), mask, (0.0, -0.5), (-1, 0), mask, 0, 0)
        >>> batch = replace(collate([row] * 5), episode_B=torch.arange(5))
        >>> parts = minibatches(batch, minibatch_episodes=3, epochs=2, seed=0)
        >>> verify_split(batch, parts, epochs=2)
        >>> verify_split(batch, parts[1:], epochs=2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ragen.core.errors.RagenError: stopped before an update: the step's episode 0 was sampled ...
    """
    times = Counter(e for part in minibatches for e in set(part.episode_B.tolist()))
    for episode in sorted(set(batch.episode_B.tolist()) | times.keys()):
        if times[episode] < epochs:
            raise _inexact(f"the step's episode {episode} was sampled and would not be trained")
        if times[episode] > epochs:
            raise _inexact(f"the step's episode {episode} would be trained twice in an epoch")


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
        raise _inexact("the loss does not cover exactly the sampled tokens")
    next_BT = torch.nn.functional.pad(turn_BT[:, 1:], (0, 1), value=NO_TURN)
    if not torch.equal(part.turn_ends_BT, mask_BT & (turn_BT != next_BT)):
        raise _inexact("a turn's end is not on its last sampled token")


def _check_pictures(microbatches: Sequence[Batch]) -> None:
    shown = {id(each): each for part in microbatches for each in part.pictures}
    for picture in shown.values():
        if Picture.of(picture.pixels) != picture:
            raise _inexact(f"the picture {picture.hash} has changed since it was shown")


def _mark_of_pictures(ids: NDArray[np.int64]) -> int:
    """A hash of the picture tokens among ids, below 2⁶³; 0 without any."""
    shown = ids[ids < 0]
    return fingerprint(shown, np.zeros(len(shown))) if len(shown) else 0


def _trained_fingerprints(part: Batch) -> Iterator[tuple[TurnId, int]]:
    row_N, column_N = part.mask_BT.nonzero(as_tuple=True)
    ids_N = part.token_ids_BT[row_N, column_N].numpy()
    logprobs_N = part.sampled_logprobs_BT[row_N, column_N].numpy()
    stops = (part.turn_ends_BT[row_N, column_N].nonzero().flatten() + 1).tolist()
    episodes = part.episode_B[row_N].tolist()
    turns = part.turn_BT[row_N, column_N].tolist()
    start = 0
    for stop in stops:
        here = slice(start, stop)
        mark = fingerprint(ids_N[here], logprobs_N[here])
        if part.pictures:
            before = part.token_ids_BT[row_N[start], : column_N[start]].numpy()
            mark ^= _mark_of_pictures(before)
        yield (episodes[start], turns[start]), mark
        start = stop


def _describe(turn_id: TurnId) -> str:
    episode, turn = turn_id
    return f"turn {turn + 1} of the step's episode {episode}"


def _inexact(difference: str) -> RagenError:
    return RagenError(
        f"stopped before an update: {difference}; no weight was changed by it. This is a fault in "
        "RAGEN or in a policy or engine of your own: please report it"
    )
