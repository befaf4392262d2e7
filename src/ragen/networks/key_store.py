"""Stored keys and values of many sequences, and attention to them; without gradients.

A sequence that begins like another one does not store that beginning: it refers to the other's slot
until that slot is used for something else. Keys and values of a prompt are then held and read once
for all members of a group. Values have the model's dtype, and keys are float32, so that scores are
not rounded. Everything is on a CPU.

Three members of a group share a prompt p of six tokens, and slot 3 is alone:

    slot 0   p p p p p p a a . . .    the holder of the prompt
    slot 1   . . . . . . b b b . .    refers to slot 0 for its first six tokens
    slot 2   . . . . . . c . . . .    the same
    slot 3   d d d d d d d d . . .    refers to itself

A `Reach` is what the new tokens of some slots see. Each row's scores are two products side by side
under one softmax: with the P positions of its holder's beginning, and with the W positions of its
own slot from `low` on, where `low` is the shortest beginning of all rows. A mask hides the others:

    slot 1   [p p p p p p] [b b b]    P = 6, low = 6, W = 3
    slot 2   [p p p p p p] [c # #]

New tokens come as a flat list (F). Where rows have several, queries are padded to R × T.

Axes: **N** rows of a call, **F** flat new tokens of all rows, **R** stored slots that are read,
**T** new tokens of a row, **W** stored positions that are read, **S** sequences that hold a shared
beginning, **M** rows that share it, **P** its positions, **H** heads, **K** key–value heads, **G**
heads of each of these, **Q** queries of a key–value head (G × T), **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ragen.networks.fast_qwen2 import CHUNK
from ragen.networks.packing import BEGINNING, Block, by_key_head, from_key_head
from ragen.networks.precision import bfloat16_products, mkl_products

SCORES = 2**20
"""Attention scores that are in memory at once (4 MB)."""

FEW = 16
"""Rows of a product, or keys of a softmax, below which one's result depends on their number."""

Stored = tuple[Tensor, Tensor]
"""The keys of a layer, (slots, K, D, length), and its values, (slots, K, length, D): in this order
each is read along its rows by the products of few queries."""

HAVE_BAGS = ("AVX2", "AVX512")
"""Instructions for which torch has fast sums of rows (FBGEMM)."""

ROOM = 64
"""Positions by which the layout of stored keys and values grows."""

MANY = 16
"""Queries of a row from which oneDNN is faster, and bfloat16 in products with float32 keys."""


class KeyStore:
    """Slots of keys and values for `num_slots` sequences of at most `max_length` tokens.

    A layer's first write makes room for it. What lies at or beyond a sequence's length is not
    zeroed but masked, and must be finite (`erase`).

    Rows of keys are as long as the longest sequence so far needs, because sums read whole rows, and
    products read rows that are close together in two thirds of the time.

    If it is `independent`, attention to it is the same bit for bit whatever other rows there are,
    and `filled` makes products so.
    """

    def __init__(self, num_slots: int, max_length: int, dtype: torch.dtype = torch.float32) -> None:
        self.shape = num_slots, max_length
        self.dtype = dtype
        self.independent = False
        self.length = 0  # positions that there is room for in the present layout
        self.layers: list[Stored] = []
        self.memory: list[Stored] = []  # of the layers, for the greatest length
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        num_slots, _ = self.shape
        self._lay_out(0)
        self._source = torch.arange(num_slots)  # the slot that holds each one's beginning
        self._shared = torch.zeros(num_slots, dtype=torch.long)  # tokens of that beginning

    def erase(self) -> None:
        """Zero the memory where NaN or ∞ may be stored, which no mask hides: 0 · NaN is NaN."""
        for keys, values in self.memory:
            keys.zero_()
            values.zero_()

    def write(
        self, layer: int, places: tuple[Tensor, Tensor], k_FKD: Tensor, v_FKD: Tensor
    ) -> Stored:
        """Store keys and values at `places` (slots, positions); returns all of the layer's."""
        if layer == len(self.layers):
            num_slots, max_length = self.shape
            keys = _zeros((num_slots, *k_FKD.shape[1:], max_length), torch.float32)
            values = _zeros((num_slots, v_FKD.shape[1], max_length, v_FKD.shape[2]), self.dtype)
            self.memory.append((keys, values))
            self.layers.append((_part(keys, 3, self.length), _part(values, 2, self.length)))
        slots_F, positions_F = places
        keys, values = self.layers[layer]
        keys[slots_F, :, :, positions_F] = k_FKD.float()
        values[slots_F, :, positions_F] = v_FKD.to(values.dtype)
        return self.layers[layer]

    def _make_room(self, width: int) -> None:
        """Let sequences have `width` tokens; the stored ones stay."""
        if width <= self.length:
            return
        before, old = self.length, self.layers
        self._lay_out(min(-width // ROOM * -ROOM, self.shape[1]))
        for (old_keys, old_values), (keys, values) in zip(old, self.layers, strict=True):
            keys[..., :before] = old_keys.clone()  # the same memory
            values[:, :, :before] = old_values.clone()

    def _lay_out(self, length: int) -> None:
        self.length = length
        self.layers = [
            (_part(keys, 3, length), _part(values, 2, length)) for keys, values in self.memory
        ]

    def share(self, source: int, target: int, length: int) -> None:
        """Let `target` begin with the first `length` tokens of `source`."""
        self._release(target, 0)
        holder = int(self._source[source])
        if holder != source and length > int(self._shared[source]):
            self.copy(holder, source, int(self._shared[source]))
            self._source[source], holder = source, source
        if holder == source:
            self._shared[source] = max(length, int(self._shared[source]))
        self._source[target], self._shared[target] = holder, length

    def begin(self, slots_N: Tensor, starts_N: Tensor) -> None:
        """Prepare for new tokens from `starts_N` on: what others share there is saved for them."""
        changed_N = starts_N < self._shared[slots_N]
        for slot, start in zip(
            slots_N[changed_N].tolist(), starts_N[changed_N].tolist(), strict=True
        ):
            self._release(slot, start)

    def _release(self, slot: int, start: int) -> None:
        """Give a slot's beginning to the others that refer to it; it keeps `start` tokens."""
        holder, shared = int(self._source[slot]), int(self._shared[slot])
        if holder != slot:
            self.copy(holder, slot, min(start, shared))
        else:
            others = ((self._source == slot) & (self._shared > 0)).nonzero()[:, 0]
            others = others[others != slot]
            if len(others):
                heir = int(others[self._shared[others].argmax()])
                self.copy(slot, heir, int(self._shared[heir]))
                self._source[others] = heir
        self._source[slot], self._shared[slot] = slot, 0

    def filled(self, x_FD: Tensor) -> Tensor:
        """Rows for a product; if independent, some again at the end where a part had too few."""
        missing = FEW - (len(x_FD) % CHUNK or FEW)
        if not self.independent or missing <= 0:
            return x_FD
        return x_FD[torch.arange(len(x_FD) + missing) % len(x_FD)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Write the first `length` tokens of `source` into `target`."""
        for keys, values in self.layers:
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def reach(self, slots_N: Tensor, starts_N: Tensor, counts_N: Tensor) -> Reach:
        """The keys and values that new tokens see: `counts_N` of each slot, from `starts_N` on.

        The slots ascend where they can. They have been given to `begin`.
        """
        source_N, shared_N = self._source[slots_N], self._shared[slots_N]
        alone_N = (source_N == slots_N) & (torch.bincount(source_N)[source_N] == 1)
        shared_N = shared_N.masked_fill(alone_N, 0)
        least = min(FEW, self.shape[1]) if self.independent else 1
        reach = Reach(slots_N, starts_N, counts_N, source_N, shared_N, least)
        self._make_room(reach.width)
        return reach

    def reach_many(self, slots_N: Tensor, starts_N: Tensor, counts_N: Tensor) -> Reach | Apart:
        """The same for tokens of prompts; of an independent store, no slot shares a beginning."""
        if not self.independent:
            return self.reach(slots_N, starts_N, counts_N)
        reach = Apart(slots_N, starts_N, counts_N)
        self._make_room(reach.width)
        return reach


class Reach:
    """The stored keys that the queries of one forward see: those up to their own position.

    `source_N` and `shared_N` say which slot holds the beginning of each row, and how many tokens
    that is. `places` are slot and position of each flat query. Rows have at least `least` keys.
    """

    def __init__(
        self,
        slots_N: Tensor,
        starts_N: Tensor,
        counts_N: Tensor,
        source_N: Tensor,
        shared_N: Tensor,
        least: int,
    ) -> None:
        row_F, column_F = _numbered(counts_N)
        position_F = starts_N[row_F] + column_F
        self.places = slots_N[row_F], position_F
        # The slot with the latest start need not be the one with the most queries.
        self.most, self.width = int(counts_N.max()), max(least, int(position_F.max()) + 1)
        self.low = int(shared_N.min())
        # Neighbouring slots are read in place, with the idle ones between them; others are copied.
        first, end = int(slots_N.min()), int(slots_N.max()) + 1
        self.slots: slice | Tensor = slots_N
        self.num_rows, place_N = len(slots_N), torch.arange(len(slots_N))
        if bool((slots_N.diff() > 0).all()) and end - first <= 3 * len(slots_N):
            self.slots, self.num_rows, place_N = slice(first, end), end - first, slots_N - first
        self.dense = self.most == 1 and self.num_rows == len(slots_N)
        self.padded = place_N[row_F], column_F  # the place of each query in R × T
        last_R = torch.zeros(self.num_rows, dtype=torch.long)
        last_R[place_N] = starts_N
        last_RT = last_R[:, None] + torch.arange(self.most)
        hidden_RTW = torch.arange(self.low, self.width) > last_RT[:, :, None]
        self.prefix: _Prefix | None = None
        if bool(shared_N.any()):
            self.prefix = _Prefix(place_N, source_N, shared_N, self.num_rows)
            hidden_RTW = self.prefix.hide(hidden_RTW, self.low)
        mask_RTW = torch.zeros(hidden_RTW.shape).masked_fill_(hidden_RTW, -torch.inf)
        self.mask_R1TW = mask_RTW[:, None]
        self._bags: dict[torch.Size, tuple[Bags, Bags]] = {}  # by the shape of a layer's keys

    def attend(self, q_FHD: Tensor, stored: Stored) -> Tensor:
        """Attention of the flat queries, which are already scaled, (F, H · D of the values)."""
        heads, width = q_FHD.shape[1:]
        kv_heads = stored[0].shape[1]
        if self.most == 1 and self.prefix is None and has_bags(stored[1].dtype):
            return self._attend_singly(q_FHD, stored)
        if self.dense:
            q_RTHD = q_FHD
        else:
            q_RTHD = q_FHD.new_zeros(self.num_rows, self.most, heads, width)
            q_RTHD[self.padded] = q_FHD
        # Heads that share keys are rows of one product: (R, K, G · T, D).
        q_RTKGD = q_RTHD.view(self.num_rows, self.most, kv_heads, -1, width)
        q_RKQD = q_RTKGD.permute(0, 2, 3, 1, 4).reshape(self.num_rows, kv_heads, -1, width)
        k_RKDW = stored[0][self.slots, :, :, self.low : self.width]
        v_RKWD = stored[1][self.slots, :, self.low : self.width]
        # For a few queries, MKL is faster, and rounding the keys would take longer than it saves.
        with mkl_products() if self.most < MANY else bfloat16_products(v_RKWD.dtype):
            if self.prefix is not None:
                out_RKQD = self._attend_after(self.prefix, q_RKQD, k_RKDW, v_RKWD, stored)
            else:
                out_RKQD = self._attend_alone(q_RKQD, k_RKDW, v_RKWD)
        if self.most == 1:
            out_RE = out_RKQD.reshape(self.num_rows, -1)
            return out_RE if self.dense else out_RE[self.padded[0]]
        out_RKGTD = out_RKQD.view(self.num_rows, kv_heads, -1, self.most, v_RKWD.shape[3])
        out_RTE = out_RKGTD.permute(0, 3, 1, 2, 4).reshape(self.num_rows, self.most, -1)
        return out_RTE[self.padded]

    def _attend_singly(self, q_FHD: Tensor, stored: Stored) -> Tensor:
        """Attention of one query a row to its own keys, in about 0.6 of the time of products.

        Scores are sums of keys' rows weighted by the query, results sums of values weighted by the
        scores. torch has such sums for bags of embeddings; they read memory ahead and in place.
        """
        keys, values = stored
        if keys.shape not in self._bags:
            self._bags[keys.shape] = self._find_bags(q_FHD.shape[1], keys.shape)
        for_keys, for_values = self._bags[keys.shape]
        scores_FHL = for_keys.sum(keys, q_FHD).view(*q_FHD.shape[:2], -1)
        mask_R1W = self.mask_R1TW[:, :, 0]
        mask_F1W = mask_R1W if self.dense else mask_R1W[self.padded[0]]
        weights_FHW = torch.softmax(scores_FHL[:, :, self.low : self.width] + mask_F1W, dim=-1)
        return for_values.sum(values, weights_FHW).view(len(q_FHD), -1)

    def _find_bags(self, heads: int, shape: torch.Size) -> tuple[Bags, Bags]:
        """The rows of keys and values that each query head sums."""
        _, kv_heads, width, length = shape
        own_head_H = torch.arange(heads) // (heads // kv_heads)
        heads_FH1 = (self.places[0][:, None] * kv_heads + own_head_H)[:, :, None]
        return (
            Bags(heads_FH1 * width + torch.arange(width)),
            Bags(heads_FH1 * length + torch.arange(self.low, self.width)),
        )

    def _attend_alone(self, q_RKQD: Tensor, k_RKDW: Tensor, v_RKWD: Tensor) -> Tensor:
        out_RKQD = v_RKWD.new_empty(*q_RKQD.shape[:3], v_RKWD.shape[3])
        scores_per_row = q_RKQD.shape[1] * q_RKQD.shape[2] * self.width
        step = max(1, SCORES // scores_per_row)
        for start in range(0, self.num_rows, step):
            part = slice(start, start + step)
            scores = matmul(q_RKQD[part], k_RKDW[part])
            weights = self._weights(scores, self.mask_R1TW[part]).to(v_RKWD.dtype)
            out_RKQD[part] = matmul(weights, v_RKWD[part])
        return out_RKQD

    def _attend_after(
        self, prefix: _Prefix, q_RKQD: Tensor, k_RKDW: Tensor, v_RKWD: Tensor, stored: Stored
    ) -> Tensor:
        """Attention to shared beginnings and to the rows' own keys, under one softmax."""
        keys, values = stored
        of_shared = prefix.multiply(q_RKQD, keys[prefix.sources, :, :, : prefix.length])
        values = values[prefix.sources, :, : prefix.length]
        own = matmul(q_RKQD, k_RKDW)
        weights = self._weights(torch.cat((of_shared, own), dim=3), self.mask_R1TW)
        weights = weights.to(values.dtype)
        of_shared, own = weights.split((of_shared.shape[3], own.shape[3]), dim=3)
        return prefix.multiply(of_shared, values).add_(matmul(own, v_RKWD))

    def _weights(self, scores_RKQW: Tensor, mask_R1TW: Tensor) -> Tensor:
        shape = scores_RKQW.shape
        scores_RHTW = scores_RKQW.view(shape[0], -1, self.most, shape[3])
        return torch.softmax(scores_RHTW.add_(mask_R1TW), dim=-1).view(shape)


class Apart:
    """A `Reach` whose numbers are the same whatever the other rows of the forward are.

    Products of other shapes add in other orders. So each row has products of its own, of queries
    in blocks that begin at multiples of `BEGINNING` and of the keys up to each block's end.
    """

    def __init__(self, slots_N: Tensor, starts_N: Tensor, counts_N: Tensor) -> None:
        row_F, column_F = _numbered(counts_N)
        self.places = slots_N[row_F], starts_N[row_F] + column_F
        self.width = int((starts_N + counts_N).max())
        later_QQ = torch.full((BEGINNING, BEGINNING), -torch.inf).triu(1)[:, None]
        self._blocks: list[tuple[int, Block]] = []
        query = 0
        for slot, start, count in torch.stack((slots_N, starts_N, counts_N), dim=1).tolist():
            cuts = range(start // BEGINNING * BEGINNING + BEGINNING, start + count, BEGINNING)
            for first, end in pairwise([start, *cuts, start + count]):
                size = end - first
                queries = slice(query, query + size)
                mask = later_QQ[:size, :, :size]
                self._blocks.append((slot, Block(queries, slice(end), first, mask)))
                query += size

    def attend(self, q_FHD: Tensor, stored: Stored) -> Tensor:
        """Attention of the flat queries, which are already scaled, (F, H · D of the values)."""
        keys, values = stored
        q_KQD, group = by_key_head(q_FHD, values), q_FHD.shape[1] // values.shape[1]
        out_KQD = values.new_empty(*q_KQD.shape[:2], values.shape[3])
        for slot, block in self._blocks:
            rows = block.rows(group)
            k_KWD = keys[slot, :, :, block.keys].transpose(1, 2)
            weights_KQW = block.weights(q_KQD[:, rows], k_KWD)
            out_KQD[:, rows] = torch.bmm(weights_KQW, values[slot, :, block.keys])
        return from_key_head(out_KQD, group).flatten(1)


def _numbered(counts_N: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each flat token, and its number in the row."""
    row_F = torch.repeat_interleave(counts_N)
    return row_F, torch.arange(len(row_F)) - (counts_N.cumsum(0) - counts_N)[row_F]


def has_bags(dtype: torch.dtype) -> bool:
    """True if torch has fast sums of rows of this dtype here; they add row by row, in order."""
    return dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() in HAVE_BAGS


class Bags:
    """Weighted sums of rows of a memory, one for each query head; the rows (F, H, N) are numbered.

    Example:
        >>> memory = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> Bags(torch.tensor([[[0, 2]]])).sum(memory, torch.tensor([[[1.0, 0.5]]]))
        tensor([[3.5000, 5.0000]])
    """

    def __init__(self, rows_FHN: Tensor) -> None:
        self._rows = rows_FHN.flatten().int()
        self._starts = torch.arange(0, len(self._rows), rows_FHN.shape[2], dtype=torch.int32)

    def sum(self, memory: Tensor, weights_FHN: Tensor) -> Tensor:
        """The sums, (F · H, length of a row)."""
        rows = memory.view(-1, memory.shape[-1])
        weights = weights_FHN.reshape(-1)
        return functional.embedding_bag(
            self._rows, rows, self._starts, mode="sum", per_sample_weights=weights
        )


class _Prefix:
    """The beginnings that the rows of a forward share, each read once for all its rows."""

    def __init__(self, place_N: Tensor, source_N: Tensor, shared_N: Tensor, num_rows: int) -> None:
        self.length = int(shared_N.max())
        self.shared_R = torch.zeros(num_rows, dtype=torch.long)
        self.shared_R[place_N] = shared_N
        self.rows_N, source_N = place_N[shared_N > 0], source_N[shared_N > 0]
        sources_S, group_N = source_N.unique(return_inverse=True)
        self.sources: slice | Tensor = sources_S
        steps = sources_S.diff().unique().tolist() or [1]
        if len(steps) == 1:  # at equal distances they are read in place
            self.sources = slice(int(sources_S[0]), int(sources_S[-1]) + 1, steps[0])
        is_of_NS = functional.one_hot(group_N)
        member_N = is_of_NS.cumsum(0).gather(1, group_N[:, None])[:, 0] - 1
        self.members, self.places = int(is_of_NS.sum(0).max()), (group_N, member_N)
        # Often all rows are there, group by group: then no index is needed.
        every_R = torch.arange(num_rows)
        self.is_grid = (
            num_rows == self.members * len(sources_S)
            and torch.equal(self.rows_N, every_R)
            and torch.equal(group_N * self.members + member_N, every_R)
        )

    def hide(self, hidden_RTW: Tensor, low: int) -> Tensor:
        """The mask of the shared keys, then of the rows' own, the first at position `low`."""
        shared_R11 = self.shared_R[:, None, None]
        own_W = torch.arange(low, low + hidden_RTW.shape[2])
        before_RTP = (torch.arange(self.length) >= shared_R11).expand(-1, hidden_RTW.shape[1], -1)
        return torch.cat((before_RTP, hidden_RTW | (own_W < shared_R11)), dim=2)

    def multiply(self, x_RKQA: Tensor, y_SKAB: Tensor) -> Tensor:
        """Products of each row's matrix with the matrix of its beginning, (R, K, Q, B)."""
        num_rows, heads, queries, inner = x_RKQA.shape
        count = len(y_SKAB)
        if self.is_grid:
            x_SMKQA = x_RKQA.view(count, self.members, heads, queries, inner)
        else:
            x_SMKQA = x_RKQA.new_zeros(count, self.members, heads, queries, inner)
            x_SMKQA[self.places] = x_RKQA[self.rows_N]
        x_SKMA = x_SMKQA.transpose(1, 2).reshape(count, heads, -1, inner)
        out_SKMB = matmul(x_SKMA, y_SKAB)
        out_SMKQB = out_SKMB.view(count, heads, self.members, queries, -1).transpose(1, 2)
        if self.is_grid:
            return out_SMKQB.reshape(num_rows, heads, queries, -1)
        out_RKQB = x_RKQA.new_zeros(num_rows, heads, queries, y_SKAB.shape[3])
        out_RKQB[self.rows_N] = out_SMKQB[self.places]
        return out_RKQB


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros from NumPy, which requests huge pages, unlike torch."""
    size = prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def matmul(a_RKQA: Tensor, b_RKAB: Tensor) -> Tensor:
    """Batched product; as one batch, which is twice as fast as two nested ones on a CPU."""
    rows, heads = a_RKQA.shape[:2]
    product = torch.bmm(a_RKQA.flatten(0, 1), b_RKAB.flatten(0, 1))
    return product.view(rows, heads, *product.shape[1:])


def _part(memory: Tensor, dim: int, length: int) -> Tensor:
    """The start of a tensor's memory as a tensor with this length in one dimension."""
    shape = [*memory.shape]
    shape[dim] = length
    return memory.view(-1)[: prod(shape)].view(shape)
