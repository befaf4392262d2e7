"""Rows as one flat list of tokens: without padding, and with each shared prompt once.

The samples of a group begin with the same prompt. Attention is causal, so the prompt's keys and
values are the same in all: the first sample computes them, and the others attend to them. Different
prompts share a beginning, such as the rules of an environment. Attention works on blocks of a
sample's queries, and a block reads only the keys up to its own last query.

Axes: **B** samples, **T** tokens of a sample, **F** flat tokens (those that are computed), **N**
flat tokens with a query, **S** keys of all samples, **R** samples not yet assigned, **W** keys of a
block, **H** heads, **K** key–value heads, **Q** queries of a key–value head, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES = 192
"""Queries in a block."""
SHARED = 16
"""Shortest prompt in tokens that is computed in one sample for the others."""
BEGINNING = 64
"""Shortest beginning in tokens of different prompts that is computed in one of them."""


class Block(NamedTuple):
    """Neighbouring queries of one sample, and the keys that the last of them sees.

    `queries` are flat tokens with a query, `keys` are among the keys of all samples. All queries
    see the first `seen` of the keys; `mask` is −∞ where one does not see a later key.
    """

    queries: slice
    keys: slice
    seen: int
    mask: Tensor

    @property
    def num_pairs(self) -> int:
        """Queries times keys."""
        return len(self.mask) * (self.seen + self.mask.shape[2])

    def rows(self, group: int) -> slice:
        """The queries where `group` heads of each are rows of one matrix."""
        return slice(self.queries.start * group, self.queries.stop * group)

    def weights(self, q_KQD: Tensor, k_KWD: Tensor) -> Tensor:
        """The attention (K, Q, W) of its scaled queries to its keys."""
        scores_KQW = torch.bmm(q_KQD, k_KWD.transpose(1, 2))
        grouped = scores_KQW.view(len(scores_KQW), len(self.mask), -1, scores_KQW.shape[2])
        grouped[..., self.seen :].add_(self.mask)
        return torch.softmax(scores_KQW, dim=-1)


class Blocks(NamedTuple):
    """The blocks of a batch, and the flat token (S,) of each sample's keys (`Packing.keys_S`)."""

    keys_S: Tensor
    each: list[Block]


class Packing(NamedTuple):
    """Which tokens of a padded batch a forward computes, and which keys their queries see.

    `places` are row and column of each flat token; the column is its position. `wanted_N` are the
    flat tokens whose states are wanted. `shared_B` counts the tokens of each sample that others
    compute. `keys_S` are the flat tokens that its queries see: those that it shares, then its own.
    """

    places: tuple[Tensor, Tensor]
    wanted_N: Tensor
    keys_S: Tensor
    shared_B: Tensor
    own_BT: Tensor
    wanted_BT: Tensor

    def blocks(self, only_wanted: bool = False) -> Blocks:
        """The blocks of the flat tokens, or of the wanted ones, row by row."""
        chosen_BT = self.wanted_BT if only_wanted else self.own_BT
        sizes_B = self.own_BT.sum(1) + self.shared_B
        starts = (sizes_B.cumsum(0) - sizes_B).tolist()
        blocks, query = [], 0
        for chosen_T, start in zip(chosen_BT, starts, strict=True):
            for columns in chosen_T.nonzero()[:, 0].split(QUERIES):
                if len(columns):
                    seen, end = int(columns[0]) + 1, int(columns[-1]) + 1
                    hidden = torch.arange(seen, end) > columns[:, None]
                    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
                    queries = slice(query, query + len(columns))
                    blocks.append(Block(queries, slice(start, start + end), seen, mask))
                    query += len(columns)
        return Blocks(self.keys_S, blocks)


def pack(token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor) -> Packing:
    """Pack rows padded on the right; all tensors are on the CPU, so that no GPU is waited for."""
    origin_B, shared_B = shared_prefixes(token_ids_BT, lengths_B, wanted_BT)
    columns_T = torch.arange(token_ids_BT.shape[1])
    own_BT = (columns_T >= shared_B[:, None]) & (columns_T < lengths_B[:, None])
    rows_F, columns_F = own_BT.nonzero(as_tuple=True)
    wanted_N = wanted_BT[rows_F, columns_F].nonzero()[:, 0]
    assert len(wanted_N) == int(wanted_BT.sum()), "wanted beyond a row's length"
    own = torch.arange(len(columns_F)).split(own_BT.sum(1).tolist())
    keys: list[Tensor] = []  # an origin comes before the samples that share with it
    for origin, shared, own_F in zip(origin_B.tolist(), shared_B.tolist(), own, strict=True):
        keys.append(torch.cat((keys[origin][:shared], own_F)) if shared else own_F)
    return Packing((rows_F, columns_F), wanted_N, torch.cat(keys), shared_B, own_BT, wanted_BT)


def shared_prefixes(
    token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """For each sample: which earlier sample it shares a beginning with, and how many tokens.

    The prompt is the tokens before the first wanted position. If an earlier sample has the same
    prompt, the first such sample computes it. Otherwise a sample shares the longest beginning of
    its prompt that an earlier sample has, from `BEGINNING` tokens on. A sample that computes all of
    its tokens has its own number and 0 tokens.
    """
    origin_B, shared_B = torch.arange(len(lengths_B)), torch.zeros_like(lengths_B)
    columns_T = torch.arange(token_ids_BT.shape[1])
    prompt_B = torch.where(wanted_BT, columns_T, lengths_B[:, None]).amin(1)

    def common_with(row: int, others_R: Tensor) -> Tensor:
        same_RT = token_ids_BT[others_R] == token_ids_BT[row]
        return same_RT.cumprod(1).sum(1).minimum(lengths_B[row]).minimum(lengths_B[others_R])

    left_R = origin_B.clone()
    firsts: list[int] = []  # of each prompt
    while len(left_R):
        first, others_R = int(left_R[0]), left_R[1:]
        if prompt_B[first] >= BEGINNING and firsts:
            common_R = common_with(first, torch.tensor(firsts)).minimum(prompt_B[first])
            longest = int(common_R.argmax())
            if common_R[longest] >= BEGINNING:
                origin_B[first], shared_B[first] = firsts[longest], common_R[longest]
        firsts.append(first)
        is_member_R = (prompt_B[others_R] >= SHARED) & (
            common_with(first, others_R) >= prompt_B[others_R]
        )
        members_R = others_R[is_member_R]
        origin_B[members_R], shared_B[members_R] = first, prompt_B[members_R]
        left_R = others_R[~is_member_R]
    return origin_B, shared_B


def attend(
    q_NHD: Tensor, k_FKD: Tensor, v_FKD: Tensor, blocks: Blocks, kept: list[Tensor] | None
) -> Tensor:
    """Attention of scaled queries, block by block; each block's weights are added to `kept`."""
    q_KQD, group = by_key_head(q_NHD, k_FKD), q_NHD.shape[1] // k_FKD.shape[1]
    k_KSD, v_KSD = (x[blocks.keys_S].transpose(0, 1) for x in (k_FKD, v_FKD))
    out_KQD = q_KQD.new_empty(*q_KQD.shape[:2], v_FKD.shape[2])
    for block in blocks.each:
        rows = block.rows(group)
        weights_KQW = block.weights(q_KQD[:, rows], k_KSD[:, block.keys])
        out_KQD[:, rows] = torch.bmm(weights_KQW, v_KSD[:, block.keys])
        if kept is not None:
            kept.append(weights_KQW)
    return from_key_head(out_KQD, group)


def attend_backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_FKD: Tensor,
    v_FKD: Tensor,
    out_NHD: Tensor,
    blocks: Blocks,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` by queries, keys and values; weights are those `kept`, or computed."""
    group = q_NHD.shape[1] // k_FKD.shape[1]
    # The gradient of a softmax: dS = P ⊙ (dP − Σ dP ⊙ P), and the sum equals Σ dO ⊙ O.
    sum_NH1 = (grad_NHD * out_NHD).sum(-1, keepdim=True)
    q_KQD, grad_KQD, sum_KQ1 = (by_key_head(x, k_FKD) for x in (q_NHD, grad_NHD, sum_NH1))
    k_KSD, v_KSD = (x[blocks.keys_S].transpose(0, 1) for x in (k_FKD, v_FKD))
    grad_q = torch.empty_like(q_KQD)
    grad_k, grad_v = torch.zeros_like(k_KSD), torch.zeros_like(v_KSD)
    for index, block in enumerate(blocks.each):
        rows, keys = block.rows(group), block.keys
        q, k, grad = q_KQD[:, rows], k_KSD[:, keys], grad_KQD[:, rows]
        weights = kept[index] if kept else block.weights(q, k)
        grad_v[:, keys].baddbmm_(weights.transpose(1, 2), grad)
        inner = torch.bmm(grad, v_KSD[:, keys].transpose(1, 2))
        inner.sub_(sum_KQ1[:, rows]).mul_(weights)
        grad_q[:, rows] = torch.bmm(inner, k)
        grad_k[:, keys].baddbmm_(inner.transpose(1, 2), q)
    grad_k, grad_v = (
        torch.zeros_like(x_FKD).index_add_(0, blocks.keys_S, grad_KSD.transpose(0, 1))
        for x_FKD, grad_KSD in ((k_FKD, grad_k), (v_FKD, grad_v))
    )
    return from_key_head(grad_q, group), grad_k, grad_v


def by_key_head(x_NHD: Tensor, k_FKD: Tensor) -> Tensor:
    """(N, H, D) to (K, N · H/K, D): queries that read the same keys are rows of one matrix."""
    x_NKGD = x_NHD.unflatten(1, (k_FKD.shape[1], -1))
    x_KQD: Tensor = x_NKGD.transpose(0, 1).flatten(1, 2)
    return x_KQD


def from_key_head(x_KQD: Tensor, group: int) -> Tensor:
    """The inverse of `by_key_head`, (N, H, D); `group` heads share a key–value head."""
    x_KNGD = x_KQD.unflatten(1, (x_KQD.shape[1] // group, group))
    x_NHD: Tensor = x_KNGD.transpose(0, 1).flatten(1, 2)
    return x_NHD
