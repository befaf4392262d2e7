"""A fast counterpart of `ragen.networks.decoder.HFDecoder` for a plain float32 Qwen2.

Layers that read the same input are fused. New tokens of all slots pass the linear layers as one
flat list; only attention distinguishes slots. After the last layer's keys, only the tokens whose
logits are needed are computed.

Axes: **F** flat tokens, **N** slots of a call, **H** heads, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ragen.networks.fast_qwen2 import (
    as_complex,
    chunks,
    effective_weight,
    gate_and_up,
    inverse_rms,
    projection_biases,
    projections,
    rope_table,
)
from ragen.networks.key_store import Apart, KeyStore, Reach
from ragen.networks.pictures import Album, embedded


@torch.no_grad()
def fused_layers(model: PreTrainedModel) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Copies of each layer's weights, with q, k, v fused, gate and up fused, and norms folded in.

    They are (inputs, outputs): q, k and v with their biases, the output of attention, gate and up,
    and down. Queries include the scale 1/√D.
    """
    fused = []
    for layer in model.get_decoder().layers:
        attn = layer.self_attn
        qkv = torch.cat(projections(attn)) * layer.input_layernorm.weight
        bias = torch.cat(projection_biases(attn))
        qkv[: attn.q_proj.out_features] *= attn.scaling
        bias[: attn.q_proj.out_features] *= attn.scaling
        gate_up = gate_and_up(layer)
        mix, down = (effective_weight(x).clone() for x in (attn.o_proj, layer.mlp.down_proj))
        fused.append((qkv.t(), bias, mix.t(), gate_up.t(), down.t()))
    return fused


def project(
    x_FD: Tensor, weights: Sequence[Tensor], rope_F1R: Tensor, epsilon: float, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, already scaled, keys and values of a fused layer, (F, H, width of a head)."""
    qkv, bias, *_ = weights
    qkv_FE = torch.addmm(bias, x_FD * inverse_rms(x_FD, epsilon), qkv)
    qkv_FHD = qkv_FE.unflatten(1, (-1, 2 * rope_F1R.shape[2]))
    heads = qkv_FHD.shape[1] - 2 * kv_heads
    as_complex(qkv_FHD[:, : heads + kv_heads]).mul_(rope_F1R)
    q_FHD, k_FHD, v_FHD = qkv_FHD.split((heads, kv_heads, kv_heads), dim=1)
    return q_FHD, k_FHD, v_FHD


def finish(x_FD: Tensor, mixed_FE: Tensor, weights: Sequence[Tensor], epsilon: float) -> Tensor:
    """The states behind a fused layer, from those before it and what attention gave."""
    _, _, mix, gate_up, down = weights
    x_FD = torch.addmm(x_FD, mixed_FE, mix)
    for part in chunks(x_FD):
        x = x_FD[part]
        gate, up = ((x * inverse_rms(x, epsilon)) @ gate_up).chunk(2, dim=1)
        x.addmm_(functional.silu(gate).mul_(up), down)
    return x_FD


class Qwen2Decoder:
    """Slots for a model that `fast_qwen2.supports` accepts; `refresh` copies changed weights."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model, self.album = model, Album(model)
        self._backbone = model.get_decoder()
        attn = self._backbone.layers[0].self_attn
        self.kv_heads = attn.k_proj.out_features // attn.head_dim
        self.max_length = max_length
        self.store = KeyStore(num_slots, max_length)
        self.refresh()

    @torch.no_grad()
    def refresh(self, is_idle: bool = True) -> None:
        """Copy the weights."""
        if is_idle:
            self.store.clear()
        for name in ("weights", "head", "embedding"):
            vars(self).pop(name, None)  # or there would be two copies for a while
        self.album.forget()
        self.rope_T1R = rope_table(self._backbone, self.max_length)
        self.weights = fused_layers(self.model)
        self.head = (self.model.lm_head.weight * self._backbone.norm.weight).t()
        self.embedding = self._backbone.embed_tokens.weight.clone()

    def erase(self) -> None:
        """Zero all keys and values."""
        self.store.erase()

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy keys and values; for small models, to refer to another slot takes longer."""
        self.store.copy(source, target, length)

    @torch.no_grad()
    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Read new tokens: flat through the linear layers, padded inside attention."""
        slots_N, starts_N = torch.tensor(slots), torch.tensor(starts)
        counts_N = torch.tensor([len(row) for row in tokens])
        every = self.store.reach_many(slots_N, starts_N, counts_N)
        last = self.store.reach(slots_N, starts_N + counts_N - 1, torch.ones_like(counts_N))
        tokens_F = torch.tensor(list(chain.from_iterable(tokens)))
        return self._forward(tokens_F, every, last, counts_N.cumsum(0) - 1)

    @torch.no_grad()
    def decode(self, slots_N: Tensor, starts_N: Tensor, tokens_N: Tensor) -> Tensor:
        """Read one new token in each of several slots."""
        reach = self.store.reach(slots_N, starts_N, torch.ones_like(slots_N))
        return self._forward(tokens_N, reach, reach, None)

    def _forward(
        self, tokens_F: Tensor, every: Reach | Apart, last: Reach, last_N: Tensor | None
    ) -> Tensor:
        """Logits (N, V). `last_N` are the flat rows that are needed after the last layer's keys."""
        epsilon, count = self._backbone.config.rms_norm_eps, len(tokens_F)
        fill = self.store.filled
        rope_F1R = self.rope_T1R[fill(every.places[1])]
        seen = None if last_N is None else self.album.seen(tokens_F)
        x_FD = embedded(self.embedding.__getitem__, fill(tokens_F), seen)
        for layer, weights in enumerate(self.weights):
            q_FHD, k_FHD, v_FHD = project(x_FD, weights, rope_F1R, epsilon, self.kv_heads)
            stored = self.store.write(layer, every.places, k_FHD[:count], v_FHD[:count])
            reach = every
            if layer == len(self.weights) - 1:
                reach = last
                if last_N is not None:
                    x_FD, q_FHD, count = x_FD[fill(last_N)], q_FHD[last_N], len(last_N)
            mixed_FE = fill(reach.attend(q_FHD[:count], stored))
            x_FD = finish(x_FD, mixed_FE, weights, epsilon)
        logits_NV: Tensor = (x_FD * inverse_rms(x_FD, epsilon)) @ self.head
        return logits_NV[:count]
