"""The distinct beginnings of thoughts, so that each is computed only once.

Beginnings form a tree: each continues a shorter one by one token. They are listed depth first and
cut into blocks. A beginning continues others of its block, and those that the first of the block
continues. So a block sees itself and one path, and its attention is a small matrix with a mask.

Axes: **F** beginnings, rounded up to whole blocks, **U** blocks, **B** beginnings of a block, **W**
beginnings that a block sees, **P** pairs of a beginning and the token that continues it, **N**
tokens of the thoughts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Beginnings in a block. Smaller blocks make slower products, larger ones more masked scores."""


@dataclass(frozen=True, slots=True)
class Beginnings:
    """The result of `find_beginnings`.

    Attributes:
        ids_F: The last token of each beginning.
        depths_F: The number of tokens before it.
        seen_UW: The beginnings that each block sees.
        hidden_UBW: True where a beginning of the block does not continue the one it would see.
        before_P: The beginning of each pair, counted from 1; 0 is the empty one.
        targets_P: The token that continues it.
        pairs_N: The pair of each token, thought by thought.
    """

    ids_F: Tensor
    depths_F: Tensor
    seen_UW: Tensor
    hidden_UBW: Tensor
    before_P: Tensor
    targets_P: Tensor
    pairs_N: Tensor


def find_beginnings(thoughts: Sequence[Sequence[int]]) -> Beginnings:
    """The beginnings of thoughts that a further token follows; each thought has at least one token.

    Example:
        Of (7, 8, 9) and (7, 5), only (7) and (7, 8) are continued. The first of the five tokens is
        the same, so there are four pairs.

        >>> found = find_beginnings([(7, 8, 9), (7, 5)])
        >>> found.ids_F[:2].tolist(), found.depths_F[:2].tolist()
        ([7, 8], [0, 1])
        >>> found.before_P.tolist(), found.targets_P.tolist()
        ([0, 1, 1, 2], [7, 5, 8, 9])
        >>> found.pairs_N.tolist()
        [0, 2, 3, 0, 1]
    """
    pairs, continued = dict[tuple[int, int], int](), dict[int, int]()
    ids, depths, before = list[int](), list[int](), list[int]()
    of_thought: dict[int, list[int]] = {}
    for row in sorted(range(len(thoughts)), key=lambda row: tuple(thoughts[row])):
        place, found = 0, of_thought.setdefault(row, [])
        for depth, token in enumerate(thoughts[row]):
            pair = pairs.setdefault((place, token), len(pairs))
            found.append(pair)
            if depth + 1 < len(thoughts[row]):
                if pair not in continued:
                    ids.append(token)
                    depths.append(depth)
                    before.append(place - 1)
                    continued[pair] = len(ids)
                place = continued[pair]
    filling = -len(ids) % BLOCK
    seen_UW, hidden_UBW = _blocks(before + [-1] * filling)
    states, targets = zip(*pairs, strict=True)
    pairs_N = [pair for row in range(len(thoughts)) for pair in of_thought[row]]
    return Beginnings(
        ids_F=torch.tensor(ids + [0] * filling, dtype=torch.long),
        depths_F=torch.tensor(depths + [0] * filling, dtype=torch.long),
        seen_UW=seen_UW,
        hidden_UBW=hidden_UBW,
        before_P=torch.tensor(states),
        targets_P=torch.tensor(targets),
        pairs_N=torch.tensor(pairs_N),
    )


def _blocks(before: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The fields `seen_UW` and `hidden_UBW`; `before` is what each beginning continues, or −1."""
    paths = list[list[int]]()
    for first in range(0, len(before), BLOCK):
        path, place = list[int](), before[first]
        while place >= 0:
            path.append(place)
            place = before[place]
        paths.append(path)
    ends = list(range(len(before)))  # the last one that continues it
    for place in reversed(range(len(before))):
        if before[place] >= 0:
            ends[before[place]] = max(ends[before[place]], ends[place])
    longest = max(map(len, paths), default=0)
    own_F = torch.arange(len(before))
    own_UB, ends_F = own_F.view(-1, BLOCK), torch.tensor(ends, dtype=torch.long)
    path_UW = torch.tensor([path + [-1] * (longest - len(path)) for path in paths])
    path_UW = path_UW.view(len(paths), longest).long()
    seen_UW = torch.cat((path_UW, own_UB), dim=1)
    is_filled_UW, seen_UW = seen_UW < 0, seen_UW.clamp_min(0)
    is_later_UBW = seen_UW[:, None] > own_UB[:, :, None]
    is_over_UBW = ends_F[seen_UW][:, None] < own_UB[:, :, None]
    return seen_UW, is_filled_UW[:, None] | is_later_UBW | is_over_UBW
