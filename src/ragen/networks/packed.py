"""Learning with any model of transformers on one flat list of tokens, each at its own position.

Only attention lets tokens see each other, and transformers lets a program replace it
(`ragen.networks.attention`). Here each query sees the keys of its own sample and of the prompt that
this shares (`ragen.networks.packing`, which names the axes): on a CPU block by block, on a GPU by
torch's attention for sequences of various lengths.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ragen.networks.attention import Attention, Run, UnknownAttention, can_replace, read
from ragen.networks.device import to_device
from ragen.networks.packing import SHARED, Blocks, Packing, attend, attend_backward, pack
from ragen.networks.pictures import Features, reader_of, row_places
from ragen.networks.precision import bfloat16_products


def longest(model: PreTrainedModel) -> float:
    """The longest row, in tokens, for which `read` is exact with this backbone; 0 if there is none.

    This is found by trying, once for each device and dtype. Every layer's attention must be
    replaceable, without additions like sinks, and nothing else may let tokens see each other, as
    pictures do whose tokens see all of the picture. A GPU must have a kernel for the dtype. A row
    must fit in a sliding window.
    """
    reader = reader_of(model)
    if reader is not None and reader.sees_ahead:
        return 0
    known = _LONGEST.setdefault(model, {})
    where = model.device.type, model.dtype
    if where not in known:
        known[where] = _try(model)
    return known[where]


_LONGEST: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, torch.dtype], float]]
_LONGEST = WeakKeyDictionary()


@torch.no_grad()
def _try(model: PreTrainedModel) -> float:
    """Compare two rows that share a prompt with the model's own padded forward."""
    text, device = model.config.get_text_config(), model.device
    if not can_replace(model):
        return 0
    if device.type != "cpu" and not _has_kernel(model):
        return 0
    length = SHARED + 3
    columns_T = torch.arange(length)
    token_ids_BT = columns_T.repeat(2, 1) + 1
    token_ids_BT[1, SHARED:] += 7
    token_ids_BT %= text.vocab_size
    lengths_B = torch.tensor([length, length - 1])
    wanted_BT = (columns_T >= SHARED) & (columns_T < lengths_B[:, None])
    padded_BTD = model(input_ids=to_device(token_ids_BT, device), use_cache=False).last_hidden_state
    expected_ND = padded_BTD[wanted_BT.to(device)]
    packing = pack(token_ids_BT, lengths_B, wanted_BT)
    run = Run(_learning(packing, device))
    try:
        states_FD = read(model, token_ids_BT[packing.places], packing.places[1], run)
    except UnknownAttention:
        return 0
    tolerance = torch.finfo(model.dtype).eps ** 0.5 * float(expected_ND.abs().max())
    states_ND = states_FD[packing.wanted_N.to(device)]
    agrees = torch.allclose(states_ND, expected_ND, rtol=0, atol=tolerance)
    return run.window if agrees and run.calls == text.num_hidden_layers else 0


def _has_kernel(model: PreTrainedModel) -> bool:
    """True if torch has attention for sequences of various lengths on the model's GPU."""
    is_half = model.dtype in (torch.bfloat16, torch.float16)
    if model.device.type != "cuda" or not is_half or torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return False
    return "window_size" in signature(varlen_attn).parameters  # since torch 2.11


@cache  # every layer asks
def _takes_groups(kernel: Callable[..., Any]) -> bool:
    return "enable_gqa" in signature(kernel).parameters


def hidden_states(
    model: PreTrainedModel,
    token_ids_BT: Tensor,
    lengths_B: Tensor,
    wanted_BT: Tensor,
    seen: Features | None = None,
) -> Tensor:
    """`ragen.networks.model.hidden_states` for a backbone and rows up to its `longest`."""
    packing = pack(token_ids_BT, lengths_B, wanted_BT)
    run = Run(_learning(packing, model.device))
    positions_F = packing.places[1]
    if seen is not None and reader_of(model).has_grid:
        positions_F = row_places(token_ids_BT, seen)[(slice(None), *packing.places)]
    states_FD = read(model, token_ids_BT[packing.places], positions_F, run, seen)
    return states_FD[to_device(packing.wanted_N, model.device)]


def _learning(packing: Packing, device: torch.device) -> Attention:
    if device.type != "cpu":
        return _Lengths.of(packing, device)
    blocks = packing.blocks()

    def attention(_: int, q_FHD: Tensor, k_FKD: Tensor, v_FKD: Tensor, scale: float) -> Tensor:
        mixed_FHD: Tensor = _BlockAttention.apply(q_FHD, k_FKD, v_FKD, blocks, scale)
        return mixed_FHD

    return attention


class _BlockAttention(torch.autograd.Function):
    """`attend` in float32; the backward pass computes the weights again, which would be large."""

    @staticmethod
    def forward(
        ctx: Any, q_FHD: Tensor, k_FKD: Tensor, v_FKD: Tensor, blocks: Blocks, scale: float
    ) -> Tensor:
        q, k, v = (x.float().contiguous() for x in (q_FHD, k_FKD, v_FKD))
        with bfloat16_products(q_FHD.dtype):
            mixed_FHD = attend(q.mul(scale), k, v, blocks, None).to(q_FHD.dtype)
        ctx.save_for_backward(q_FHD, k_FKD, v_FKD, mixed_FHD)
        ctx.blocks, ctx.scale = blocks, scale
        return mixed_FHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_FHD, k_FKD, v_FKD, mixed_FHD = ctx.saved_tensors
        dtype = q_FHD.dtype
        grad, q, k, v, mixed = (
            x.float().contiguous() for x in (grads[0], q_FHD, k_FKD, v_FKD, mixed_FHD)
        )
        q = q.mul(ctx.scale)
        with bfloat16_products(dtype):
            grad_q, grad_k, grad_v = attend_backward(grad, q, k, v, mixed, ctx.blocks)
        return grad_q.mul_(ctx.scale).to(dtype), grad_k.to(dtype), grad_v.to(dtype), None, None


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Attention of samples as sequences, each with its queries and its keys, on a GPU."""

    keys_S: Tensor
    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, packing: Packing, device: torch.device) -> _Lengths:
        """The sequences of a batch."""
        counts_B = packing.own_BT.sum(1)
        all_B = counts_B + packing.shared_B
        ends = [
            to_device(functional.pad(sizes_B.cumsum(0), (1, 0)).int(), device)
            for sizes_B in (counts_B, all_B)
        ]
        most = int(counts_B.max()), int(all_B.max())
        return cls(to_device(packing.keys_S, device), ends[0], ends[1], *most)

    def __call__(self, _: int, q_FHD: Tensor, k_FKD: Tensor, v_FKD: Tensor, scale: float) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        attend_to: Any = varlen_attn  # its type allows more results
        # Not `k_FKD[self.keys_S]`: its gradient sorts the indices, in ten launches a layer.
        k_SKD, v_SKD = (x.index_select(0, self.keys_S) for x in (k_FKD, v_FKD))
        grouped = q_FHD.shape[1] // k_FKD.shape[1]
        about: dict[str, Any] = {}
        if grouped > 1 and _takes_groups(varlen_attn):
            about["enable_gqa"] = True
        elif grouped > 1:  # torch 2.11
            k_SKD, v_SKD = (x.repeat_interleave(grouped, 1) for x in (k_SKD, v_SKD))
        mixed_FHD: Tensor = attend_to(
            q_FHD,
            k_SKD,
            v_SKD,
            self.query_ends,
            self.key_ends,
            self.most_queries,
            self.most_keys,
            scale=scale,
            window_size=(-1, 0),
            **about,
        )
        return mixed_FHD
