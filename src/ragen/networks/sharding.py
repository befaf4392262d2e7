"""Weights split over processes by torch's FSDP2, which gathers them when they are used.

A `Unit` holds models whose weights are split evenly: each process keeps a part of every weight as a
`DTensor`. While a unit computes, its weights are whole again: the weights of a transformer's layer
only during that layer, the others (embedding, output layer) during the whole computation. Gradients
are added up over the processes, and each process keeps its part of the sum.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

T = TypeVar("T")


class Unit(nn.Module):
    """Modules whose weights are split; `within` a unit they are whole.

    `in_layers` also splits each layer of a transformer on its own: it is whole only until it has
    computed. Without it, all weights stay whole until `rest`, and gradients are added up once: this
    is faster if memory allows it, and code that reads weights of layers without calling them needs
    it. `apart` are modules within, called by their `forward`, of another dtype.
    """

    def __init__(
        self, modules: Sequence[nn.Module], apart: Sequence[nn.Module] = (), *, in_layers: bool
    ) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)
        layers = [each for each in self.modules() if isinstance(each, GradientCheckpointingLayer)]
        self._parts: tuple[Any, ...] = (*apart, *(layers if in_layers else ()), self)
        self._in_layers = in_layers
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for part in self._parts:
            fully_shard(part, reshard_after_forward=in_layers, mp_policy=policy)
            part.set_reshard_after_backward(in_layers)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def forward(self, compute: Callable[[], T]) -> T:
        """The result of `compute`; others call `within`."""
        return compute()

    def within(self, compute: Callable[[], T]) -> T:
        """The result of `compute`, computed with whole weights.

        All processes call it at the same time, equally often, with functions that use the same
        layers in the same order. Gradients flow back to the weights from the tensors it returns.
        """
        with warnings.catch_warnings():
            # A view must not be changed in place; nothing here does so.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            result: T = self(compute)
        return result

    def begin_pass(self, is_last: bool) -> None:
        """Say whether the next backward pass is the last before `rest`."""
        if not self._in_layers:
            self._parts[-1].set_requires_gradient_sync(is_last)

    def rest(self) -> None:
        """Split the weights again that are still whole."""
        for part in self._parts:
            part.reshard()


class Units:
    """The units of the modules that are split; without units, the modules compute unchanged."""

    def __init__(self) -> None:
        self._units: dict[nn.Module, Unit] = {}

    def __bool__(self) -> bool:
        return bool(self._units)

    def add(self, unit: Unit, *modules: nn.Module) -> None:
        """Compute these modules within a unit."""
        self._units |= dict.fromkeys(modules, unit)

    def within(self, module: nn.Module, compute: Callable[[], T]) -> T:
        """The result of `compute`, computed with the whole weights of a module's unit."""
        return self._units[module].within(compute) if self._units else compute()

    def begin_pass(self, is_last: bool) -> None:
        """Begin a pass in all units."""
        for unit in self._units.values():
            unit.begin_pass(is_last)

    def rest(self) -> None:
        """Free what only a pass needs, in all units."""
        for unit in self._units.values():
            unit.rest()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor whose parts are in the processes, which call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, which is all of it if it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Whole tensors by name, on the CPU; none without `keep`, for a process that only takes part.

    Names of one weight share its tensor. Besides these, one weight at a time is whole in memory.
    """
    known: dict[int, Tensor] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if id(tensor) not in known:
            full = whole(tensor.detach())
            known[id(tensor)] = full.cpu() if keep else torch.empty(0)
        if keep:
            kept[name] = known[id(tensor)]
    return kept


def like(weight: Tensor | None, tensor: Tensor) -> Tensor:
    """A whole tensor as `weight` is: on its device, and only this process's part if it is split."""
    if weight is None:
        return tensor
    tensor = tensor.to(weight.device)
    if not isinstance(weight, DTensor):
        return tensor
    return distribute_tensor(tensor, weight.device_mesh, weight.placements, src_data_rank=None)


@torch.no_grad()
def fill(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into weights of the same names, which may be split."""
    for name, weight in weights.items():
        weight.copy_(like(weight, tensors[name]))
