"""Decoding by CUDA graphs: a forward of fixed shapes is recorded once, and replayed without Python.

A graph always reads and writes the same memory. So a decode has few shapes (`bucket`), static
inputs, and the preallocated keys and values of `HFDecoder`, whose slots have sequences of different
lengths; transformers' `StaticCache` has one length for all. Weights are updated in place.

Axes: **N** rows of a call, **R** rows of a graph, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from ragen.networks.decoder import HFDecoder, logits_of
from ragen.networks.device import to_device

LEAST_ROWS, LEAST_WIDTH = 8, 256
"""Fewest rows, and fewest stored positions, of a graph."""

WARM_UPS = 3
"""Forwards before one is recorded: torch's libraries choose kernels and reserve memory in them."""

Compute = Callable[[], Tensor]


class CannotRecord(Exception):
    """A model asks the GPU what to compute next, as some mixtures of experts do."""


def recorder() -> Callable[[Compute], Compute]:
    """A function that records what another computes, and returns its replay.

    A replay overwrites the result of the one before. Graphs share memory for intermediate results,
    as they never run together. A forward that waits for the GPU raises `CannotRecord`.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Compute) -> Compute:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = compute()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's own check, or the driver's
            raise CannotRecord from error

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record


def bucket(size: int, least: int, most: int) -> int:
    """The smallest power of two that holds `size`, from `least` to `most`.

    Example:
        >>> [bucket(size, 8, 100) for size in (1, 8, 9, 64, 65)]
        [8, 8, 16, 64, 100]
    """
    return min(most, max(least, 1 << (size - 1).bit_length()))


class GraphDecoder(HFDecoder):
    """An `HFDecoder` that decodes by replays of what `record` recorded.

    Rows beyond those of a call write to a spare slot. The graph for all slots reads them in place:
    its row r is slot r. Others read copies. A model that cannot be recorded decodes without graphs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_length: int,
        record: Callable[[Compute], Compute],
    ) -> None:
        super().__init__(model, num_slots + 1, max_length)
        self._spare, self._record = num_slots, record
        self._can_record = self.places is None  # positions that pictures move are not recorded
        self._graphs: dict[tuple[int, int], tuple[Tensor, Compute]] = {}
        self._addresses: list[int] = []

    @override
    @torch.no_grad()
    def decode(self, slots_N: Tensor, starts_N: Tensor, tokens_N: Tensor) -> Tensor:
        if not self._can_record:
            return super().decode(slots_N, starts_N, tokens_N)
        count = len(slots_N)
        rows = bucket(count, LEAST_ROWS, self._spare)
        width = bucket(int(starts_N.max()) + 1, LEAST_WIDTH, self.cache.max_length)
        rows_N = slots_N if rows == self._spare else torch.arange(count)
        inputs_4R = torch.zeros(4, rows, dtype=torch.long)
        inputs_4R[0] = self._spare
        inputs_4R[:3, rows_N] = torch.stack((slots_N, starts_N, tokens_N))
        inputs_4R[3, :count] = rows_N
        inputs_4R = to_device(inputs_4R, self.model.device)
        if (rows, width) in self._graphs:
            inputs_4R = self._graphs[rows, width][0].copy_(inputs_4R)
        else:
            try:
                self._graphs[rows, width] = inputs_4R, self._recorded(inputs_4R, width)
            except CannotRecord:
                self._can_record = False
                return super().decode(slots_N, starts_N, tokens_N)
        states_RD = self._graphs[rows, width][1]()
        return logits_of(self.model, states_RD[inputs_4R[3, :count]])

    @override
    def refresh(self, is_idle: bool = True) -> None:
        """Drop the graphs if the weights have moved; changes in place need no new graphs."""
        super().refresh(is_idle)
        tensors = chain(self.model.parameters(), self.model.buffers())
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._graphs.clear()
        self._addresses = addresses

    def _recorded(self, inputs_4R: Tensor, width: int) -> Compute:
        """The states (R, D) of these inputs; to compute them again stores the same once more."""
        slots_R, positions_R, tokens_R, _ = inputs_4R
        read = slice(0, self._spare) if len(slots_R) == self._spare else slots_R

        def compute() -> Tensor:
            self.cache.aim(read, width, (slice(None), 0), slots_R, positions_R)
            given = {"input_ids": tokens_R[:, None]}
            return self._forward(given, positions_R[:, None], positions_R[:, None], width)[:, 0]

        return self._record(compute)
