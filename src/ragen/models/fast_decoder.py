"""A fast counterpart of `ragen.models.decoder.HFDecoder` for a plain float32 Qwen2.

Layers that read the same input are fused. New tokens of all slots pass the linear layers as one
flat list; only attention distinguishes slots. After the last layer's keys, only the tokens whose
logits are needed are computed.

Axes: **F** flat tokens, **N** slots of a call, **R** stored slots that are read, **T** new tokens
of a slot, **W** stored positions in use, **H** heads, **K** key–value heads, **D** width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ragen.models.fast_qwen2 import (
    as_complex,
    chunks,
    effective_weight,
    gate_and_up,
    inverse_rms,
    projection_biases,
    projections,
    rope_table,
)

SCORES = 2**20
"""Attention scores that are in memory at once (4 MB)."""


@torch.no_grad()
def fused_layers(model: PreTrainedModel) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Copies of each layer's weights, with q, k, v fused, gate and up fused, and norms folded in.

    They are (inputs, outputs): q, k and v with their biases, the output of attention, gate and up,
    and down. Queries include the scale 1/√D.
    """
    fused = []
    for layer in model.model.layers:
        attn = layer.self_attn
        qkv = torch.cat(projections(attn)) * layer.input_layernorm.weight
        bias = torch.cat(projection_biases(attn))
        qkv[: attn.q_proj.out_features] *= attn.scaling
        bias[: attn.q_proj.out_features] *= attn.scaling
        gate_up = gate_and_up(layer)
        mix, down = (effective_weight(x).clone() for x in (attn.o_proj, layer.mlp.down_proj))
        fused.append((qkv.t(), bias, mix.t(), gate_up.t(), down.t()))
    return fused


class Qwen2Decoder:
    """Key–value slots for a model that `ragen.models.fast_qwen2.supports` accepts.

    It holds `num_slots` sequences of at most `max_length` tokens. The fused weights are copies:
    call `refresh` when the model has changed.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model = model
        attn = model.model.layers[0].self_attn
        self.heads = attn.q_proj.out_features // attn.head_dim
        self.kv_heads = attn.k_proj.out_features // attn.head_dim
        self.max_length = max_length
        # In each layer the keys of the heads, then their values, so that both are one write.
        shape = (num_slots, 2 * self.kv_heads, max_length, attn.head_dim)
        self.cached = [_zeros(shape, model.device) for _ in model.model.layers]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights."""
        self.rope_T1R = rope_table(self.model.model, self.max_length)
        self.weights = fused_layers(self.model)
        self.head = (self.model.lm_head.weight * self.model.model.norm.weight).t()
        self.embedding = self.model.model.embed_tokens.weight.clone()

    def copy(self, source: int, target: int, length: int) -> None:
        """See `HFDecoder.copy`."""
        for stored in self.cached:
            stored[target, :, :length] = stored[source, :, :length]

    @torch.no_grad()
    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """See `HFDecoder.prefill`: flat through the linear layers, padded inside attention."""
        device = self.model.device
        slots_N, starts_N = torch.tensor(slots), torch.tensor(starts)
        counts_N = torch.tensor([len(row) for row in tokens])
        every = _Reach(slots_N, starts_N, counts_N, device)
        last = _Reach(slots_N, starts_N + counts_N - 1, torch.ones_like(counts_N), device)
        tokens_F = torch.tensor(list(chain.from_iterable(tokens)), device=device)
        return self._forward(tokens_F, every, last, (counts_N.cumsum(0) - 1).to(device))

    @torch.no_grad()
    def decode(self, slots_N: Tensor, starts_N: Tensor, tokens_N: Tensor) -> Tensor:
        """See `HFDecoder.decode`."""
        device = self.model.device
        reach = _Reach(slots_N, starts_N, torch.ones_like(slots_N), device)
        return self._forward(tokens_N.to(device), reach, reach, None)

    def _forward(
        self, tokens_F: Tensor, every: _Reach, last: _Reach, last_N: Tensor | None
    ) -> Tensor:
        """Logits (N, V). `last_N` are the flat rows that are needed after the last layer's keys."""
        slots_F, positions_F = every.places
        epsilon = self.model.config.rms_norm_eps
        rope_F1R = self.rope_T1R[positions_F]
        heads, all_heads = self.heads, self.heads + self.kv_heads
        x_FD = self.embedding[tokens_F]
        for (qkv, bias, mix, gate_up, down), stored in zip(self.weights, self.cached, strict=True):
            qkv_FE = torch.addmm(bias, x_FD * inverse_rms(x_FD, epsilon), qkv)
            qkv_FHD = qkv_FE.view(len(x_FD), all_heads + self.kv_heads, -1)
            as_complex(qkv_FHD[:, :all_heads]).mul_(rope_F1R)
            stored[slots_F, :, positions_F] = qkv_FHD[:, heads:]
            q_FHD, reach = qkv_FHD[:, :heads], every
            if stored is self.cached[-1]:
                reach = last
                if last_N is not None:
                    x_FD, q_FHD = x_FD[last_N], q_FHD[last_N]
            x_FD = torch.addmm(x_FD, reach.attend(q_FHD, stored), mix)
            for part in chunks(x_FD):
                x = x_FD[part]
                gate, up = ((x * inverse_rms(x, epsilon)) @ gate_up).chunk(2, dim=1)
                x.addmm_(functional.silu(gate).mul_(up), down)
        logits_NV: Tensor = (x_FD * inverse_rms(x_FD, epsilon)) @ self.head
        return logits_NV


class _Reach:
    """The stored keys that the queries of one forward see: those up to their own position.

    `slots_N` ascend where they can be, `starts_N` are the positions of their first queries, and
    `counts_N` the numbers of their queries. `places` are slot and position of each flat query.
    """

    def __init__(
        self, slots_N: Tensor, starts_N: Tensor, counts_N: Tensor, device: torch.device
    ) -> None:
        rows_F = torch.repeat_interleave(counts_N)
        columns_F = torch.arange(len(rows_F)) - (counts_N.cumsum(0) - counts_N)[rows_F]
        # The slot with the latest start need not be the one with the most queries.
        positions_F = starts_N[rows_F] + columns_F
        self.places = slots_N[rows_F].to(device), positions_F.to(device)
        self.most, self.width = int(counts_N.max()), int(positions_F.max()) + 1
        rows_N = torch.arange(len(slots_N))
        first, end = int(slots_N.min()), int(slots_N.max()) + 1
        self.slots: slice | Tensor = slots_N.to(device)
        self.num_rows = len(slots_N)
        # Neighbouring slots are read in place, with the idle ones between them; others are copied.
        ascending = bool((slots_N.diff() > 0).all())
        if ascending and end - first <= 3 * len(slots_N):
            self.slots, self.num_rows = slice(first, end), end - first
            rows_N = slots_N - first
        starts_R = torch.zeros(self.num_rows, dtype=torch.long)
        starts_R[rows_N] = starts_N
        self.dense = self.most == 1 and self.num_rows == len(slots_N)
        self.flat = rows_N[rows_F].to(device), columns_F.to(device)
        last_RT = starts_R[:, None] + torch.arange(self.most)
        hidden_RTW = torch.arange(self.width) > last_RT[:, :, None]
        self.mask_R1TW = torch.zeros(hidden_RTW.shape).masked_fill_(hidden_RTW, -torch.inf)[:, None]
        self.mask_R1TW = self.mask_R1TW.to(device)

    def attend(self, q_FHD: Tensor, stored: Tensor) -> Tensor:
        """Attention of the flat queries, which are already scaled, (F, H · D)."""
        heads, head_dim = q_FHD.shape[1:]
        kv_heads = stored.shape[1] // 2
        if self.dense:
            q_RTHD = q_FHD
        else:
            q_RTHD = q_FHD.new_zeros(self.num_rows, self.most, heads, head_dim)
            q_RTHD[self.flat] = q_FHD
        # Heads that share keys are rows of one product: (R, KV, H/KV · T, D).
        q_RKGTD = q_RTHD.view(self.num_rows, self.most, kv_heads, -1, head_dim).permute(
            0, 2, 3, 1, 4
        )
        q_RKQD = q_RKGTD.reshape(self.num_rows, kv_heads, -1, head_dim)
        k_RKWD, v_RKWD = stored[self.slots, :, : self.width].chunk(2, dim=1)
        out_RKQD = torch.empty_like(q_RKQD)
        step = max(1, SCORES // (heads * self.most * self.width))
        for start in range(0, self.num_rows, step):
            part = slice(start, start + step)
            scores = matmul(q_RKQD[part], k_RKWD[part].transpose(2, 3))
            shape = scores.shape
            scores = scores.view(len(scores), heads, self.most, self.width)
            weights = torch.softmax(scores.add_(self.mask_R1TW[part]), dim=-1).view(shape)
            out_RKQD[part] = matmul(weights, v_RKWD[part])
        out_RTHD = out_RKQD.view(q_RKGTD.shape).permute(0, 3, 1, 2, 4)
        if self.dense:
            return out_RTHD.reshape(self.num_rows, -1)
        return out_RTHD.reshape(self.num_rows, self.most, -1)[self.flat]


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros; on a CPU from NumPy, which requests huge pages, unlike torch."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of small matrices; NumPy's is several times as fast as torch's on a CPU."""
    if a.device.type != "cpu":
        return a @ b
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))
