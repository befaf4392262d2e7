"""The processes that train together: what each one computes, and how their results are combined.

A batch is split by whole episodes into shares with about the same number of tokens, since all wait
for the largest. The episodes of a group stay neighbours, so that few prompts that a model computes
once for all of them are computed in two processes.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ragen.algorithms.batch import Batch
from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.files import system_errors

T = TypeVar("T")

TIMEOUT_S = 600.0
"""Seconds without a change after which a process of an engine counts as lost."""

MEET_S = 60.0
"""Seconds for which a process waits for the others to meet it, on one machine."""

BUCKET = 2**22
"""Numbers of small tensors that are added up at once: a message takes a millisecond."""


class Ranks:
    """This process's place, `rank`, among `size` processes; a single one needs no communication.

    With `splits_weights` each process keeps a part of every weight, else each has all weights and
    takes the same optimiser steps. All processes call `sum`, `add_up`, `gather` and `together` at
    the same time.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        splits_weights: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.splits_weights = splits_weights and size > 1
        self._group = group

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the processes' tensors, which are on the CPU; `tensor` is changed."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace float32 tensors by their sums over the processes, which are equal in all."""
        left = deque(tensors)
        while left:
            bucket = [left.popleft()]
            numbers = bucket[0].numel()
            while left and numbers + left[0].numel() <= BUCKET:
                bucket.append(left.popleft())
                numbers += bucket[-1].numel()
            summed = self.sum(torch.cat([each.flatten() for each in bucket]))
            for tensor in bucket:
                part, summed = summed[: tensor.numel()], summed[tensor.numel() :]
                tensor.copy_(part.view_as(tensor))

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` in all processes; returns the result of this one once all have finished.

        Raises:
            RagenError, OSError: The work failed here, or in another process with such an error.
        """
        if self.size == 1:
            return work()
        error: RagenError | OSError | None = None
        try:
            with system_errors():
                result = work()
        except (RagenError, OSError) as raised:
            error = raised
        failure: tuple[type[OSError | RagenError], str] | None = None
        if isinstance(error, NotFiniteError):
            failure = NotFiniteError, error.numbers
        elif error is not None:
            failure = OSError if isinstance(error, OSError) else RagenError, str(error)
        failures = self.gather(failure)
        if error is not None:
            raise error
        for each in failures:
            if each is not None:
                kind, text = each
                raise kind(text)
        return result

    def shares(self, batch: Batch, shares_prompts: bool = False) -> list[Tensor]:
        """The rows of each process, ascending; none for some if there are few episodes.

        With `shares_prompts` the model computes the common prompt of several episodes only once.
        """
        if self.size == 1:
            return [torch.arange(batch.num_rows)]
        episode_E, rank_B = torch.unique(batch.episode_B, return_inverse=True)
        tokens_E = torch.zeros_like(episode_E).index_add_(0, rank_B, batch.lengths_B)
        group_E = torch.zeros_like(episode_E).scatter_(0, rank_B, batch.group_B)
        order_E = torch.argsort(group_E, stable=True)
        prompts_B = batch.mask_BT.int().argmax(1)
        prompts_E = tokens_E.scatter_reduce(0, rank_B, prompts_B, "amin")[order_E]
        follows_E = group_E[order_E].diff(prepend=torch.tensor([-1])) == 0
        common_E = torch.minimum(prompts_E, prompts_E.roll(1)) * follows_E * shares_prompts
        pieces = _pieces(tokens_E[order_E].tolist(), common_E.tolist(), self.size)
        owner_E = torch.empty_like(episode_E)
        owner_E[order_E] = torch.tensor(pieces)
        return [(owner_E[rank_B] == rank).nonzero()[:, 0] for rank in range(self.size)]


def _pieces(tokens: Sequence[int], common: Sequence[int], size: int) -> list[int]:
    """A process for each episode: neighbours, and the largest share is as small as possible.

    `common` are the tokens that an episode shares with the one before, which count once.

    Example:
        >>> _pieces([9, 9, 9, 9], [0, 8, 8, 8], 2), _pieces([9, 9, 9, 9], [0, 0, 8, 8], 2)
        ([0, 0, 1, 1], [0, 1, 1, 1])
    """

    def cut(most: int) -> list[int]:
        """Pieces of at most `most` tokens, or of one longer episode."""
        pieces, load = [0], tokens[0]
        for own, shared in zip(tokens[1:], common[1:], strict=True):
            load += own - shared
            pieces.append(pieces[-1] + (load > most))
            load = own if load > most else load
        return pieces

    least = max(tokens)
    bounds = range(least, sum(tokens) + 1)
    return cut(least + bisect_left(bounds, True, key=lambda most: cut(most)[-1] < size))


ALONE = Ranks()


def join(rank: int, size: int, address: str, timeout_s: float = TIMEOUT_S) -> Ranks:
    """Meet the other processes at an address, ``host:port`` or a URL that torch knows.

    Tensors on a CPU travel by gloo, those on a GPU by NCCL. A process that waits for another for
    longer than `timeout_s` fails.
    """
    _meet(rank, size, address if "://" in address else f"tcp://{address}", timeout_s)
    return Ranks(rank, size)


def join_here(rank: int, size: int, address: str, timeout_s: float = TIMEOUT_S) -> Ranks:
    """Meet the other processes of this machine, which all keep whole weights.

    `address` is ``file://`` with the path of a new file. They talk through the loopback interface,
    which no other machine reaches.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    _meet(rank, size, address, MEET_S)  # one that is lost until here is noticed soon
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    return Ranks(rank, size, splits_weights=False, group=group)


def _meet(rank: int, size: int, url: str, timeout_s: float) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=url,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def leave(ranks: Ranks) -> None:
    """Part from the other processes."""
    if ranks.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
