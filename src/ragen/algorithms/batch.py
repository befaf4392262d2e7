"""One step's samples as tensors, by row and by episode, and their split into parts.

Axes: **B** samples (rows), **T** positions of a row, **E** episodes, **S** sampled tokens of an
episode in time order, **N** the positions with weight in the loss, row by row.

Entry ``(b, t)`` of every field belongs to token t of row b. The value there is the critic's
estimate of the state *before* the token, and the logprob is that of the token given the tokens
before it. Both are the model's output at position t − 1, so a row's first token is never sampled
and has no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ragen.core.metrics import Metrics, mean
from ragen.core.pictures import Picture, by_key
from ragen.core.types import Sample
from ragen.networks.device import to_device


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples padded on the right to the longest; CPU tensors, never changed in place.

    From the start: `mask_BT` is true exactly on sampled tokens; `sampled_logprobs_BT`, `turn_BT`
    and `turn_ends_BT` are the fields of `Sample`. `episode_B` and `group_B` index the step's
    episodes and groups; an episode may have several rows.

    `weight_BT` is the weight of each token in the loss: at first 1 on sampled tokens, the
    `context_weight` of `collate` on others and 0 on picture tokens and padding, and after
    `losses.token_weights` a share of the minibatch.

    Added later with `dataclasses.replace`, ``None`` before: `old_logprobs_BT` (of the learner at
    the start of the update), `entropies_BT`, `reference_logprobs_BT`, `values_BT`, then
    `rewards_BT`, `advantages_BT` and `returns_BT`. `born_BK` are the fingerprints of all turns of a
    row's episode, −1 beyond the last turn (`exactness.with_fingerprints`). `pictures` are the
    distinct pictures of the whole step, in every part of it.
    """

    token_ids_BT: Tensor
    mask_BT: Tensor
    sampled_logprobs_BT: Tensor
    turn_BT: Tensor
    turn_ends_BT: Tensor
    weight_BT: Tensor
    lengths_B: Tensor
    episode_B: Tensor
    group_B: Tensor
    old_logprobs_BT: Tensor | None = None
    entropies_BT: Tensor | None = None
    reference_logprobs_BT: Tensor | None = None
    values_BT: Tensor | None = None
    rewards_BT: Tensor | None = None
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None
    born_BK: Tensor | None = None
    pictures: tuple[Picture, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of samples."""
        return self.token_ids_BT.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.mask_BT.sum())


def collate(samples: Sequence[Sample], context_weight: float = 0.0) -> Batch:
    """Pad samples to one rectangle, in their order.

    `context_weight` is the weight of prompts and observations in the loss: 0 in reinforcement
    learning, more for the auxiliary language-model loss of the embedded models.
    """
    assert samples, "a batch has at least one sample"
    lengths_B = torch.tensor([len(sample.token_ids) for sample in samples])
    mask_BT = _pad([sample.loss_mask for sample in samples], torch.bool, False)
    turn_BT = _pad([sample.turn_index for sample in samples], torch.long, -1)
    assert not bool(mask_BT[:, 0].any()), "a sampled token has a token before it"
    position_T = torch.arange(mask_BT.shape[1])
    token_ids_BT = _pad([sample.token_ids for sample in samples], torch.long, 0)
    context_BT = (turn_BT < 0) & (position_T > 0) & (position_T < lengths_B[:, None])
    context_BT &= token_ids_BT >= 0
    return Batch(
        token_ids_BT=token_ids_BT,
        mask_BT=mask_BT,
        sampled_logprobs_BT=_pad([sample.sampled_logprobs for sample in samples], torch.float, 0.0),
        turn_BT=turn_BT,
        turn_ends_BT=_pad([sample.turn_ends for sample in samples], torch.bool, False),
        weight_BT=mask_BT.float() + context_weight * context_BT.float(),
        lengths_B=lengths_B,
        episode_B=torch.tensor([sample.episode for sample in samples]),
        group_B=torch.tensor([sample.group for sample in samples]),
        pictures=tuple(by_key(chain.from_iterable(each.pictures for each in samples)).values()),
    )


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float) -> Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)


# Episodes: credit is assigned along an episode's sampled tokens, in whichever rows they are.


@dataclass(frozen=True, slots=True)
class EpisodeIndex:
    """The positions of each episode's sampled tokens in the batch, in time order.

    Token s of episode e is at row ``row_ES[e, s]``, column ``column_ES[e, s]``. `mask_ES` is true
    for ``s <`` the episode's number of sampled tokens. `turn_ES` is −1 off the mask. `episode_E`
    are the episodes by their number in `Batch.episode_B`, ascending, and `group_E` their groups.
    """

    row_ES: Tensor
    column_ES: Tensor
    mask_ES: Tensor
    turn_ES: Tensor
    turn_ends_ES: Tensor
    episode_E: Tensor
    group_E: Tensor
    shape_BT: tuple[int, int]


def episode_index(batch: Batch) -> EpisodeIndex:
    """Index the sampled tokens of each episode in time order.

    Time is (turn, position). A turn is in one row, so the order of the rows does not matter.
    """
    episode_E, rank_B = torch.unique(batch.episode_B, return_inverse=True)
    group_E = torch.zeros_like(episode_E).scatter_(0, rank_B, batch.group_B)

    row_N, column_N = batch.mask_BT.nonzero(as_tuple=True)
    rank_N, turn_N = rank_B[row_N], batch.turn_BT[row_N, column_N]
    num_turns = int(turn_N.max()) + 1 if len(turn_N) else 1
    order_N = torch.argsort(rank_N * num_turns + turn_N, stable=True)
    row_N, column_N = row_N[order_N], column_N[order_N]

    count_E = torch.bincount(rank_N, minlength=len(episode_E))
    mask_ES = torch.arange(int(count_E.max())) < count_E[:, None]

    def lay_out(field_N: Tensor, padding: int | bool) -> Tensor:
        return torch.full(mask_ES.shape, padding, dtype=field_N.dtype).masked_scatter_(
            mask_ES, field_N
        )

    return EpisodeIndex(
        row_ES=lay_out(row_N, 0),
        column_ES=lay_out(column_N, 0),
        mask_ES=mask_ES,
        turn_ES=lay_out(batch.turn_BT[row_N, column_N], -1),
        turn_ends_ES=lay_out(batch.turn_ends_BT[row_N, column_N], False),
        episode_E=episode_E,
        group_E=group_E,
        shape_BT=(batch.mask_BT.shape[0], batch.mask_BT.shape[1]),
    )


def to_episodes(field_BT: Tensor, index: EpisodeIndex) -> Tensor:
    """Gather a per-token field by episode, in time order: ``(E, S)``, 0 off the mask."""
    return field_BT[index.row_ES, index.column_ES].masked_fill(~index.mask_ES, 0)


def scatter_to_rows(field_ES: Tensor, index: EpisodeIndex) -> Tensor:
    """Scatter an episode-major field to the rows: ``(B, T)``, 0 on tokens that were not sampled."""
    field_BT = torch.zeros(index.shape_BT, dtype=field_ES.dtype)
    field_BT[index.row_ES[index.mask_ES], index.column_ES[index.mask_ES]] = field_ES[index.mask_ES]
    return field_BT


# Parts: a minibatch is one optimiser step, a microbatch fits in memory.


def take(batch: Batch, rows_R: Tensor) -> Batch:
    """The given rows in the given order, cut to the longest of them."""
    longest = int(batch.lengths_B[rows_R].max())
    chosen: dict[str, Any] = {}
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if isinstance(tensor, Tensor):
            per_token = field.name.endswith("_BT")
            chosen[field.name] = tensor[rows_R, :longest] if per_token else tensor[rows_R]
    return replace(batch, **chosen)


def num_minibatches(num_episodes: int, minibatch_episodes: int) -> int:
    """max(1, round(E ÷ minibatch_episodes)): the size stays near `minibatch_episodes`."""
    return max(1, round(num_episodes / minibatch_episodes))


def minibatches(batch: Batch, minibatch_episodes: int, epochs: int, seed: int) -> list[Batch]:
    """Split one collection into minibatches of whole episodes, one per optimiser step.

    An epoch has `num_minibatches` over freshly shuffled episodes; their sizes differ by at most 1.
    """
    episode_E = torch.unique(batch.episode_B)
    num_parts = num_minibatches(len(episode_E), minibatch_episodes)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(epochs):
        shuffled_E = episode_E[torch.randperm(len(episode_E), generator=generator)]
        for chosen in shuffled_E.tensor_split(num_parts):
            parts.append(take(batch, torch.isin(batch.episode_B, chosen).nonzero().flatten()))
    return parts


NEAR = 8
"""Rows share a microbatch if the shorter is at most an eighth shorter than the longest, or if the
microbatch has not reached an eighth of its greatest size. This leaves about 5 % of padding, for a
tenth more microbatches."""


def row_splits(
    batch: Batch, max_tokens: int, by_group: bool = False, whole_episodes: bool = False
) -> list[Tensor]:
    """The rows of each microbatch: rectangles of at most `max_tokens` tokens, padding included.

    Rows are sorted by length, and only similar lengths (`NEAR`) share a rectangle. The widest comes
    first, so that a lack of memory shows at once. A row (or episode) beyond `max_tokens` is alone.

    With `by_group` rows are sorted by group first, and rows of any lengths share a rectangle, for a
    model that computes the common prompt of a group once and skips padding. With `whole_episodes`
    the rows of an episode stay together, for a loss that needs all of it.
    """
    order_B = torch.argsort(batch.lengths_B, descending=True, stable=True)
    if by_group:
        order_B = order_B[torch.argsort(batch.group_B[order_B], stable=True)]
    units: dict[int, list[int]] = {}  # rows that stay together, in the order of their first row
    for row in order_B.tolist():
        units.setdefault(int(batch.episode_B[row]) if whole_episodes else row, []).append(row)
    splits: list[list[int]] = []
    longest = 0
    for unit in units.values():
        length = int(batch.lengths_B[unit].max())
        longest = max(longest, length)
        rows = len(splits[-1]) if splits else 0
        is_small = longest * rows < max_tokens / NEAR
        joins = by_group or is_small or length >= longest - longest / NEAR
        if rows and joins and longest * (rows + len(unit)) <= max_tokens:
            splits[-1].extend(unit)
        else:
            splits.append(unit)
            longest = length
    return [torch.tensor(rows) for rows in splits]


def padding(batches: Sequence[Batch]) -> Metrics:
    """The share of the batches' positions that is padding, as ``update/padding_fraction``."""
    positions = sum(batch.token_ids_BT.numel() for batch in batches)
    tokens = sum(int(batch.lengths_B.sum()) for batch in batches)
    return {"update/padding_fraction": mean(1 - tokens / positions, positions)}


@dataclass(frozen=True, slots=True)
class TokenFields:
    """The per-token fields at ``batch.weight_BT > 0``, flat, in row-major order.

    `mask_N` is true on sampled tokens, false on context tokens (reinforcement learning has none).
    """

    token_ids_N: Tensor
    mask_N: Tensor
    weights_N: Tensor
    episode_N: Tensor
    sampled_logprobs_N: Tensor
    old_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None

    def to(self, device: torch.device) -> TokenFields:
        """The same fields on another device."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {k: to_device(v, device) for k, v in given.items() if v is not None}
        return replace(self, **moved)


def flatten(batch: Batch) -> TokenFields:
    """The fields at the positions of weight above 0, row by row."""
    weighted_BT = batch.weight_BT > 0

    names = ("old_logprobs", "reference_logprobs", "values", "advantages", "returns")
    found = {name: getattr(batch, f"{name}_BT") for name in names}
    return TokenFields(
        token_ids_N=batch.token_ids_BT[weighted_BT],
        mask_N=batch.mask_BT[weighted_BT],
        weights_N=batch.weight_BT[weighted_BT],
        episode_N=batch.episode_B[:, None].expand(weighted_BT.shape)[weighted_BT],
        sampled_logprobs_N=batch.sampled_logprobs_BT[weighted_BT],
        **{f"{name}_N": field[weighted_BT] for name, field in found.items() if field is not None},
    )
