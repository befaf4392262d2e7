"""The processes that train together: what each one computes, and how their results are combined.

A batch is split by whole episodes into shares with about the same number of tokens. The episodes of
a group stay neighbours, so that few of the prompts that they share are computed in two processes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ragen.algorithms.batch import Batch
from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.files import system_errors

T = TypeVar("T")


class Ranks:
    """This process's place, `rank`, among `size` processes; a single one needs no communication.

    All processes call `sum`, `gather` and `together` at the same time.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the processes' tensors, which are on the CPU; `tensor` is changed."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
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

    def shares(self, batch: Batch) -> list[Tensor]:
        """The rows of each process, ascending; none for some if there are few episodes.

        Example:
            >>> from dataclasses import replace
            >>> from ragen.algorithms.batch import collate
            >>> from ragen.core.types import Sample
            >>> row = Sample((1, 8), (False, True), (0.0, 0.0), (-1, 0), (False, True), 0, 0)
            >>> batch = replace(collate([row] * 4), episode_B=torch.tensor([0, 1, 0, 2]))
            >>> Ranks(0, 2).shares(batch)
            [tensor([0, 2]), tensor([1, 3])]
        """
        if self.size == 1:
            return [torch.arange(batch.num_rows)]
        episode_E, rank_B = torch.unique(batch.episode_B, return_inverse=True)
        tokens_E = torch.zeros_like(episode_E).index_add_(0, rank_B, batch.lengths_B)
        group_E = torch.zeros_like(episode_E).scatter_(0, rank_B, batch.group_B)
        order_E = torch.argsort(group_E, stable=True)
        ends_E = tokens_E[order_E].cumsum(0)
        middle_E = ends_E - tokens_E[order_E] / 2
        owner_E = torch.empty_like(episode_E)
        owner_E[order_E] = (middle_E * self.size / ends_E[-1]).long()
        return [(owner_E[rank_B] == rank).nonzero()[:, 0] for rank in range(self.size)]


ALONE = Ranks()


def join(rank: int, size: int, address: str, timeout_s: float) -> Ranks:
    """Meet the other processes at an address, ``host:port`` or a URL that torch knows.

    Tensors on a CPU travel by gloo, those on a GPU by NCCL. A process that waits for another for
    longer than `timeout_s` fails.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        init_method=address if "://" in address else f"tcp://{address}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Ranks(rank, size)


def leave(ranks: Ranks) -> None:
    """Part from the other processes."""
    if ranks.size > 1:
        dist.destroy_process_group()
