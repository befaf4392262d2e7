"""Rows as one flat list of tokens: without padding, and with each shared prompt once.

The samples of a group begin with the same prompt. Attention is causal, so the prompt's keys and
values are the same in all of them: the first sample computes them, and the others attend to them.
Attention works on blocks of a sample's queries, and a block reads only the keys up to its own last
query.

Axes: **B** samples, **T** tokens of a sample, **F** flat tokens (those that are computed), **N**
flat tokens with a query, **R** samples not yet assigned, **W** keys of a block, **H** heads, **K**
key–value heads, **Q** queries of a key–value head, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES = 96
"""Queries in a block."""
SHARED = 16
"""Shortest prompt in tokens that is computed in one sample for the others."""


class Block(NamedTuple):
    """Neighbouring queries of one sample, and the keys that the last of them sees.

    The keys are a prefix that another sample computes, which may be empty, and the sample's own.
    All queries see the first `seen` of the keys; `mask` is −∞ where one does not see a later key.
    """

    queries: slice
    prefix: slice
    own: slice
    seen: int
    mask: Tensor

    @property
    def num_pairs(self) -> int:
        """Queries times keys."""
        return len(self.mask) * (self.seen + self.mask.shape[2])

    def keys(self, x_FKD: Tensor) -> Tensor:
        """The rows of the block's keys."""
        if self.prefix.start == self.prefix.stop:
            return x_FKD[self.own]
        return torch.cat((x_FKD[self.prefix], x_FKD[self.own]))

    def add(self, total_FKD: Tensor, x_WKD: Tensor) -> None:
        """Add to the rows of the block's keys."""
        num_prefix = self.prefix.stop - self.prefix.start
        total_FKD[self.prefix] += x_WKD[:num_prefix]
        total_FKD[self.own] += x_WKD[num_prefix:]

    def weights(self, q_NHD: Tensor, k_FKD: Tensor) -> Tensor:
        """The attention (K, Q, W) of scaled queries to keys."""
        k_WKD = self.keys(k_FKD)
        scores_KQW = torch.bmm(by_key_head(q_NHD[self.queries], k_FKD), k_WKD.permute(1, 2, 0))
        grouped = scores_KQW.view(len(scores_KQW), len(self.mask), -1, scores_KQW.shape[2])
        grouped[..., self.seen :].add_(self.mask)
        return torch.softmax(scores_KQW, dim=-1)


class Packing(NamedTuple):
    """Which tokens of a padded batch a forward computes, and what their queries see.

    `places` are row and column of each flat token in the batch; the column is its position.
    `wanted_N` are the flat tokens whose states are wanted. `origin_B` and `shared_B` say for each
    sample which sample computes its prompt, and how many tokens that saves.
    """

    places: tuple[Tensor, Tensor]
    wanted_N: Tensor
    origin_B: Tensor
    shared_B: Tensor
    own_BT: Tensor
    wanted_BT: Tensor

    def blocks(self, only_wanted: bool = False) -> list[Block]:
        """The blocks of the flat tokens, or of the wanted ones, row by row."""
        chosen_BT = self.wanted_BT if only_wanted else self.own_BT
        return _blocks(self.origin_B, self.shared_B, self.own_BT, chosen_BT)


def pack(token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor) -> Packing:
    """Pack rows that are padded on the right; `wanted_BT` is true only within `lengths_B`.

    All tensors are on the CPU, so that a GPU is never waited for.
    """
    origin_B, shared_B = shared_prefixes(token_ids_BT, lengths_B, wanted_BT)
    columns_T = torch.arange(token_ids_BT.shape[1])
    own_BT = (columns_T >= shared_B[:, None]) & (columns_T < lengths_B[:, None])
    rows_F, columns_F = own_BT.nonzero(as_tuple=True)
    wanted_N = wanted_BT[rows_F, columns_F].nonzero()[:, 0]
    assert len(wanted_N) == int(wanted_BT.sum()), "wanted beyond a row's length"
    return Packing((rows_F, columns_F), wanted_N, origin_B, shared_B, own_BT, wanted_BT)


def shared_prefixes(
    token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """For each sample: which sample computes its prompt, and how many tokens that saves.

    The prompt is the tokens before the first wanted position. A sample whose prompt no earlier
    sample has computes its own; its entries are its own number and 0 tokens.
    """
    origin_B, shared_B = torch.arange(len(lengths_B)), torch.zeros_like(lengths_B)
    columns_T = torch.arange(token_ids_BT.shape[1])
    prompt_B = torch.where(wanted_BT, columns_T, lengths_B[:, None]).amin(1)
    left = list(range(len(lengths_B)))
    while len(left) > 1:
        first, *others = left
        others_R = torch.tensor(others)
        same_RT = token_ids_BT[others_R] == token_ids_BT[first]
        common_R = same_RT.cumprod(1).sum(1).minimum(lengths_B[first])
        is_member_R = (prompt_B[others_R] >= SHARED) & (common_R >= prompt_B[others_R])
        members_R = others_R[is_member_R]
        origin_B[members_R], shared_B[members_R] = first, prompt_B[members_R]
        left = others_R[~is_member_R].tolist()
    return origin_B, shared_B


def _blocks(origin_B: Tensor, shared_B: Tensor, own_BT: Tensor, chosen_BT: Tensor) -> list[Block]:
    """The blocks of the chosen positions, row by row; `own_BT` is true on computed tokens."""
    counts_B = own_BT.sum(1)
    starts = (counts_B.cumsum(0) - counts_B).tolist()
    blocks, query = [], 0
    for row, (origin, shared) in enumerate(zip(origin_B.tolist(), shared_B.tolist(), strict=True)):
        prefix = slice(starts[origin], starts[origin] + shared)
        for columns in chosen_BT[row].nonzero()[:, 0].split(QUERIES):
            if len(columns):
                seen, end = int(columns[0]) + 1, int(columns[-1]) + 1
                hidden = torch.arange(seen, end) > columns[:, None]
                mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
                queries = slice(query, query + len(columns))
                own = slice(starts[row], starts[row] + end - shared)
                blocks.append(Block(queries, prefix, own, seen, mask))
                query += len(columns)
    return blocks


def attend(
    q_NHD: Tensor, k_FKD: Tensor, v_FKD: Tensor, blocks: Iterable[Block], kept: list[Tensor] | None
) -> Tensor:
    """Attention of scaled queries, block by block; each block's weights are added to `kept`."""
    out_NHD = q_NHD.new_empty(*q_NHD.shape[:2], v_FKD.shape[2])
    for block in blocks:
        weights_KQW = block.weights(q_NHD, k_FKD)
        mixed_KQD = torch.bmm(weights_KQW, block.keys(v_FKD).transpose(0, 1))
        from_key_head(mixed_KQD, out_NHD[block.queries])
        if kept is not None:
            kept.append(weights_KQW)
    return out_NHD


def attend_backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_FKD: Tensor,
    v_FKD: Tensor,
    out_NHD: Tensor,
    blocks: Iterable[tuple[Block, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` by queries, keys and values; `blocks` come with their weights."""
    # The gradient of a softmax: dS = P ⊙ (dP − Σ dP ⊙ P), and the sum is that of dO ⊙ O.
    sum_NH1 = (grad_NHD * out_NHD).sum(-1, keepdim=True)
    grad_q = torch.empty_like(q_NHD)
    grad_k, grad_v = torch.zeros_like(k_FKD), torch.zeros_like(v_FKD)
    for block, weight in blocks:
        queries = block.queries
        grad = by_key_head(grad_NHD[queries], k_FKD)
        block.add(grad_v, torch.bmm(weight.transpose(1, 2), grad).transpose(0, 1))
        inner = torch.bmm(grad, block.keys(v_FKD).permute(1, 2, 0))
        inner.sub_(by_key_head(sum_NH1[queries], k_FKD)).mul_(weight)
        from_key_head(torch.bmm(inner, block.keys(k_FKD).transpose(0, 1)), grad_q[queries])
        q = by_key_head(q_NHD[queries], k_FKD)
        block.add(grad_k, torch.bmm(inner.transpose(1, 2), q).transpose(0, 1))
    return grad_q, grad_k, grad_v


def by_key_head(x_NHD: Tensor, k_FKD: Tensor) -> Tensor:
    """(N, H, D) to (K, N · H/K, D): queries that read the same keys are rows of one matrix."""
    x_NKGD = x_NHD.view(len(x_NHD), k_FKD.shape[1], -1, x_NHD.shape[2])
    return x_NKGD.transpose(0, 1).reshape(k_FKD.shape[1], -1, x_NHD.shape[2])


def from_key_head(x_KQD: Tensor, out_NHD: Tensor) -> None:
    """The inverse of `by_key_head`, written into (N, H, D)."""
    num_kv, num_rows = len(x_KQD), len(out_NHD)
    x_KNGD = x_KQD.view(num_kv, num_rows, -1, x_KQD.shape[2])
    out_NHD.view(num_rows, num_kv, -1, x_KQD.shape[2]).copy_(x_KNGD.transpose(0, 1))
