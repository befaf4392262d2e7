"""Weights split over processes by torch's FSDP2, which gathers them where they are computed with.

A `Unit` holds models whose weights are split evenly: each process keeps a part of every weight as a
`DTensor`. While a unit computes, its weights are whole again: those of a transformer's layer only
during that layer, the others (embedding, output layer) during the whole computation. Gradients are
added up over the processes, and each process keeps its part of the sum.
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
    """Modules whose weights are split; calling it with a function computes with whole weights.

    All processes call it at the same time, equally often, with functions that use the same layers
    in the same order. The function returns tensors, from which gradients flow back to the weights.

    `in_layers` also splits each layer of a transformer on its own, so that only one of them is
    whole at a time. Code that reads the weights of layers without calling these needs it off.
    `apart` are modules within, called by their `forward`, whose dtype differs from the others'.
    """

    def __init__(
        self, modules: Sequence[nn.Module], apart: Sequence[nn.Module] = (), *, in_layers: bool
    ) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)
        layers = [each for each in self.modules() if isinstance(each, GradientCheckpointingLayer)]
        self._kept_whole = () if in_layers else (self, *apart)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for each in (*apart, *(layers if in_layers else ()), self):
            part: Any = fully_shard(each, reshard_after_forward=in_layers, mp_policy=policy)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def forward(self, compute: Callable[[], T]) -> T:
        """What `compute` returns; `within` is what others call."""
        return compute()

    def within(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, computed with whole weights."""
        with warnings.catch_warnings():
            # A view may not be changed in place, which nobody does.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            result: T = self(compute)
        if not torch.is_grad_enabled():  # a backward pass splits them again by itself
            for each in self._kept_whole:
                part: Any = each
                part.reshard()
        return result


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor whose parts are in the processes, which call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, which is all of it if it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Whole tensors by name, on the CPU; without `keep` none, for a process that only takes part.

    Names of one weight share its tensor. One weight at a time is whole in memory besides.
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
