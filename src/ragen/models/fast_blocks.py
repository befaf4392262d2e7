"""Which tokens a forward computes, and which keys its queries see.

The samples of a group begin with the same prompt. Attention is causal, so the prompt's keys and
values are the same in all of them: the first sample computes them, and the others attend to them.

Axes: **B** samples, **T** tokens of a sample, **F** flat tokens (those that are computed), **R**
samples not yet assigned, **W** keys of a block, **K** key–value heads, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

QUERIES = 96
"""Queries in a block."""
SHARED = 16
"""Shortest prompt in tokens that is computed in one sample for the others."""


def shared_prefixes(
    token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """For each sample: which sample computes its prompt, and how many tokens that saves.

    The prompt is the tokens before the first wanted position. A sample whose prompt no earlier
    sample has computes its own; its entries are its own number and 0 tokens.
    """
    origin_B, shared_B = torch.arange(len(lengths_B)), torch.zeros_like(lengths_B)
    columns_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
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


def blocks_of(origin_B: Tensor, shared_B: Tensor, own_BT: Tensor, wanted_BT: Tensor) -> list[Block]:
    """The blocks of the wanted positions, row by row; `own_BT` is true on computed tokens."""
    counts_B = own_BT.sum(1)
    starts = (counts_B.cumsum(0) - counts_B).tolist()
    blocks, query = [], 0
    for row, (origin, shared) in enumerate(zip(origin_B.tolist(), shared_B.tolist(), strict=True)):
        prefix = slice(starts[origin], starts[origin] + shared)
        for columns in wanted_BT[row].nonzero()[:, 0].split(QUERIES):
            if len(columns):
                seen, end = int(columns[0]) + 1, int(columns[-1]) + 1
                hidden = torch.arange(seen, end, device=columns.device) > columns[:, None]
                mask = torch.zeros(hidden.shape, device=columns.device)
                mask = mask.masked_fill_(hidden, -torch.inf)[:, None]
                queries = slice(query, query + len(columns))
                own = slice(starts[row], starts[row] + end - shared)
                blocks.append(Block(queries, prefix, own, seen, mask))
                query += len(columns)
    return blocks
