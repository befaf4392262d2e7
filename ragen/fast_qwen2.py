"""Qwen2 on short sequences in float32: the same function as transformers' model, with less around it.

Training keeps the tokens of all samples flat through every linear layer and pads inside attention only; in
the last layer only the wanted positions have a query, and all that follows it. Rows pass through the wide
layers in chunks that fit the processor's cache, forward and backward. Decoding keeps keys and values where
they are and fuses what reads the same input.

Axes: **B** samples, **T** tokens, **F** flat tokens, **N** rows of a call, **H** heads, **D** width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

CHUNK = 512
"""Rows that go through a wide layer at once on a CPU (512 × 1,024 floats are 2 MB)."""
SCORES = 2**20
"""Attention scores that decoding holds at once (4 MB)."""


def supports(model: PreTrainedModel) -> bool:
    """Whether this model, or backbone, is a plain float32 Qwen2: no adapters, shards, sliding window."""
    config = model.config
    if config.model_type != "qwen2" or model.dtype != torch.float32:
        return False
    backbone = getattr(model, "model", model)
    linears = [
        getattr(block, name + "_proj")
        for layer in backbone.layers
        for block, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down")))
        for name in names
    ]
    return (
        config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] == "default"
        and set(config.layer_types) == {"full_attention"}
        and config.attention_dropout == 0.0
        and all(type(linear) is nn.Linear for linear in linears)
        and all(type(weight) is nn.Parameter for weight in model.parameters())
    )


def hidden_states(
    model: PreTrainedModel, token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor
) -> Tensor:
    """`ragen.model.hidden_states` for a model that `supports` accepts; differentiable."""
    backbone = getattr(model, "model", model)
    layout = _Layout(token_ids_BT, lengths_B, wanted_BT)
    cos_T1R, sin_T1R = _rope_table(backbone, token_ids_BT.shape[1])
    cos_F1R, sin_F1R = cos_T1R[layout.columns_F], sin_T1R[layout.columns_F]
    states_FD = backbone.embed_tokens(token_ids_BT[layout.rows_F, layout.columns_F])
    *body, last = backbone.layers
    for layer in body:
        attn = layer.self_attn
        weight, bias = _fused([attn.q_proj, attn.k_proj, attn.v_proj], layer.input_layernorm)
        qkv_FE = _NormLinear.apply(states_FD, weight, bias, layer.input_layernorm.variance_epsilon)
        mixed_FE = _causal_attention(attn, qkv_FE, cos_F1R, sin_F1R, layout)
        states_FD = torch.addmm(states_FD, mixed_FE, attn.o_proj.weight.t())
        states_FD = _mlp(layer, states_FD)

    attn, norm = last.self_attn, last.input_layernorm
    wanted_F = layout.wanted_F
    weight, bias = _fused([attn.k_proj, attn.v_proj], norm)
    kv_FE = _NormLinear.apply(states_FD, weight, bias, norm.variance_epsilon)
    states_ND = states_FD[wanted_F]
    weight, bias = _fused([attn.q_proj], norm)
    q_NE = _NormLinear.apply(states_ND, weight, bias, norm.variance_epsilon)
    mixed_NE = _wanted_attention(attn, q_NE, kv_FE, cos_F1R, sin_F1R, layout)
    states_ND = torch.addmm(states_ND, mixed_NE, attn.o_proj.weight.t())
    final_ND: Tensor = backbone.norm(_mlp(last, states_ND))
    return final_ND


class _Layout:
    """Where the flat tokens of a padded batch sit in it."""

    def __init__(self, token_ids_BT: Tensor, lengths_B: Tensor, wanted_BT: Tensor) -> None:
        self.shape = token_ids_BT.shape
        columns_T = torch.arange(self.shape[1], device=token_ids_BT.device)
        real_BT = columns_T < lengths_B[:, None]
        self.rows_F, self.columns_F = real_BT.nonzero(as_tuple=True)
        self.wanted_F = wanted_BT[self.rows_F, self.columns_F].nonzero()[:, 0]
        # The wanted positions again, packed to the left: (B, most in a row).
        self.rows_N, columns_N = wanted_BT.nonzero(as_tuple=True)
        self.places_N = (wanted_BT.cumsum(1) - 1)[self.rows_N, columns_N]
        assert len(self.wanted_F) == len(self.rows_N), "wanted beyond a row's length"
        width = int(self.places_N.max()) + 1 if len(self.places_N) else 0
        positions_BQ = columns_T.new_zeros(self.shape[0], width)
        positions_BQ[self.rows_N, self.places_N] = columns_N
        self.visible_B1QT = (columns_T <= positions_BQ[:, :, None])[:, None]

    def pad(self, flat_FHD: Tensor) -> Tensor:
        """(F, H, D) to (B, H, T, D), zeros behind each row's end."""
        num_rows, width = self.shape
        if len(flat_FHD) == num_rows * width:
            return flat_FHD.view(num_rows, width, *flat_FHD.shape[1:]).transpose(1, 2)
        padded = flat_FHD.new_zeros(num_rows, width, *flat_FHD.shape[1:])
        return padded.index_put((self.rows_F, self.columns_F), flat_FHD).transpose(1, 2)


def _causal_attention(
    attn: Any, qkv_FE: Tensor, cos_F1R: Tensor, sin_F1R: Tensor, layout: _Layout
) -> Tensor:
    heads, kv_heads = _heads(attn)
    qkv_FHD = qkv_FE.view(len(qkv_FE), heads + 2 * kv_heads, attn.head_dim)
    qk_FHD = _Rope.apply(qkv_FHD[:, : heads + kv_heads], cos_F1R, sin_F1R)
    mixed_BHTD = functional.scaled_dot_product_attention(
        layout.pad(qk_FHD[:, :heads]),
        layout.pad(qk_FHD[:, heads:]),
        layout.pad(qkv_FHD[:, heads + kv_heads :]),
        is_causal=True,
        enable_gqa=True,
    )
    return mixed_BHTD.transpose(1, 2)[layout.rows_F, layout.columns_F].flatten(1)


def _wanted_attention(
    attn: Any, q_NE: Tensor, kv_FE: Tensor, cos_F1R: Tensor, sin_F1R: Tensor, layout: _Layout
) -> Tensor:
    heads, kv_heads = _heads(attn)
    kv_FHD = kv_FE.view(len(kv_FE), 2 * kv_heads, attn.head_dim)
    k_FHD = _Rope.apply(kv_FHD[:, :kv_heads], cos_F1R, sin_F1R)
    q_NHD = q_NE.view(len(q_NE), heads, attn.head_dim)
    q_NHD = _Rope.apply(q_NHD, cos_F1R[layout.wanted_F], sin_F1R[layout.wanted_F])
    q_BQHD = q_NHD.new_zeros(*layout.visible_B1QT.shape[::2], heads, attn.head_dim)
    q_BQHD = q_BQHD.index_put((layout.rows_N, layout.places_N), q_NHD)
    mixed_BHQD = functional.scaled_dot_product_attention(
        q_BQHD.transpose(1, 2),
        layout.pad(k_FHD),
        layout.pad(kv_FHD[:, kv_heads:]),
        attn_mask=layout.visible_B1QT,
        enable_gqa=True,
    )
    return mixed_BHQD.transpose(1, 2)[layout.rows_N, layout.places_N].flatten(1)


def _mlp(layer: Any, states_FD: Tensor) -> Tensor:
    norm = layer.post_attention_layernorm
    weight, _ = _fused([layer.mlp.gate_proj, layer.mlp.up_proj], norm)
    out: Tensor = _NormMLP.apply(
        states_FD, weight, layer.mlp.down_proj.weight, norm.variance_epsilon
    )
    return out


def _fused(linears: Sequence[nn.Linear], norm: Any) -> tuple[Tensor, Tensor | None]:
    """One weight for linears that read the same normed input; the norm's gain is folded into it."""
    weight = torch.cat([linear.weight for linear in linears]) * norm.weight
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weight, torch.cat(biases) if biases else None


def _heads(attn: Any) -> tuple[int, int]:
    return attn.q_proj.out_features // attn.head_dim, attn.k_proj.out_features // attn.head_dim


def _rope_table(backbone: Any, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, 1, D/2) of each position's rotation."""
    inverse_R = backbone.rotary_emb.inv_freq.float()
    angles_TR = torch.arange(length, device=inverse_R.device)[:, None] * inverse_R
    return angles_TR.cos()[:, None], angles_TR.sin()[:, None]


def _rotate(x_FHD: Tensor, cos_F1R: Tensor, sin_F1R: Tensor, sign: float = 1.0) -> Tensor:
    """Rotate the pairs (i, i + D/2) of the last axis."""
    first, second = x_FHD.chunk(2, dim=-1)
    out = torch.empty_like(x_FHD, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos_F1R, out=out_first).addcmul_(second, sin_F1R, value=-sign)
    torch.mul(second, cos_F1R, out=out_second).addcmul_(first, sin_F1R, value=sign)
    return out


def _inverse_rms(x_FD: Tensor, epsilon: float) -> Tensor:
    """1 / √(mean x² + ε) of each row, (F, 1)."""
    norm_F1 = torch.linalg.vector_norm(x_FD, dim=1, keepdim=True)
    return norm_F1.square_().div_(x_FD.shape[1]).add_(epsilon).rsqrt_()


def _norm_backward(grad_FD: Tensor, normed_FD: Tensor, inverse_F1: Tensor) -> Tensor:
    """dx of n = x · r with r = 1/rms(x):  r (dn − n · mean(dn · n))."""
    mean_F1 = (grad_FD * normed_FD).mean(dim=1, keepdim=True)
    return grad_FD.addcmul_(normed_FD, mean_F1, value=-1).mul_(inverse_F1)


def _chunks(x_FD: Tensor) -> list[slice]:
    size = CHUNK if x_FD.device.type == "cpu" else max(1, len(x_FD))
    return [slice(start, start + size) for start in range(0, len(x_FD), size)]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_FHD: Tensor, cos_F1R: Tensor, sin_F1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_F1R, sin_F1R)
        return _rotate(x_FHD, cos_F1R, sin_F1R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grads[0], *ctx.saved_tensors, sign=-1.0), None, None


class _NormLinear(torch.autograd.Function):
    """y = (x / rms(x)) Wᵀ + b, in chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any, x_FD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, epsilon: float
    ) -> Tensor:
        inverse_F1 = _inverse_rms(x_FD, epsilon)
        out_FE = x_FD.new_empty(len(x_FD), len(weight_ED))
        for part in _chunks(x_FD):
            normed = x_FD[part] * inverse_F1[part]
            if bias_E is None:
                torch.mm(normed, weight_ED.t(), out=out_FE[part])
            else:
                torch.addmm(bias_E, normed, weight_ED.t(), out=out_FE[part])
        ctx.save_for_backward(x_FD, weight_ED, inverse_F1)
        ctx.has_bias = bias_E is not None
        return out_FE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_FE = grads[0]
        x_FD, weight_ED, inverse_F1 = ctx.saved_tensors
        grad_x_FD = torch.empty_like(x_FD)
        grad_weight_ED = torch.zeros_like(weight_ED)
        for part in _chunks(x_FD):
            normed = x_FD[part] * inverse_F1[part]
            grad_weight_ED.addmm_(grad_FE[part].t(), normed)
            grad_x_FD[part] = _norm_backward(grad_FE[part] @ weight_ED, normed, inverse_F1[part])
        return grad_x_FD, grad_weight_ED, grad_FE.sum(0) if ctx.has_bias else None, None


class _NormMLP(torch.autograd.Function):
    """y = x + (silu(g) ⊙ u) Wdᵀ with (g, u) = (x / rms(x)) Wguᵀ, in chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any, x_FD: Tensor, gate_up_ED: Tensor, down_DM: Tensor, epsilon: float
    ) -> Tensor:
        inverse_F1 = _inverse_rms(x_FD, epsilon)
        inner_FE = x_FD.new_empty(len(x_FD), len(gate_up_ED))
        out_FD = torch.empty_like(x_FD)
        for part in _chunks(x_FD):
            torch.mm(x_FD[part] * inverse_F1[part], gate_up_ED.t(), out=inner_FE[part])
            gate, up = inner_FE[part].chunk(2, dim=1)
            mixed = functional.silu(gate).mul_(up)
            torch.addmm(x_FD[part], mixed, down_DM.t(), out=out_FD[part])
        ctx.save_for_backward(x_FD, gate_up_ED, down_DM, inverse_F1, inner_FE)
        return out_FD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_FD = grads[0]
        x_FD, gate_up_ED, down_DM, inverse_F1, inner_FE = ctx.saved_tensors
        grad_x_FD = torch.empty_like(x_FD)
        grad_gate_up_ED, grad_down_DM = torch.zeros_like(gate_up_ED), torch.zeros_like(down_DM)
        for part in _chunks(x_FD):
            gate, up = inner_FE[part].chunk(2, dim=1)
            silu = functional.silu(gate)
            grad_mixed = grad_FD[part] @ down_DM
            grad_inner = torch.empty_like(inner_FE[part])
            torch.mul(grad_mixed, silu, out=grad_inner[:, silu.shape[1] :])
            grad_inner[:, : silu.shape[1]] = torch.ops.aten.silu_backward(grad_mixed.mul_(up), gate)
            grad_down_DM.addmm_(grad_FD[part].t(), silu.mul_(up))
            normed = x_FD[part] * inverse_F1[part]
            grad_gate_up_ED.addmm_(grad_inner.t(), normed)
            grad_normed = grad_inner @ gate_up_ED
            grad_x_FD[part] = _norm_backward(grad_normed, normed, inverse_F1[part])
        return grad_x_FD.add_(grad_FD), grad_gate_up_ED, grad_down_DM, None


class Qwen2Decoder:
    """Key–value slots for a model that `supports` accepts; a `ragen.decoder.Decoder`.

    Args:
        model: The model. Its fused weights are copies: call `refresh` when it has changed.
        num_slots: Sequences that are held.
        max_length: Tokens that each may have.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model = model
        attn = model.model.layers[0].self_attn
        self.heads, self.kv_heads = _heads(attn)
        self.max_length = max_length
        shape = (num_slots, self.kv_heads, max_length, attn.head_dim)
        self.cached = [  # per layer: keys, values
            (_zeros(shape, model.device), _zeros(shape, model.device)) for _ in model.model.layers
        ]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights, fused: q, k, v and gate, up in one each, norms and 1/√D folded in."""
        self.cos_T1R, self.sin_T1R = _rope_table(self.model.model, self.max_length)
        self.weights = []
        for layer in self.model.model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            qkv, bias = _fused([attn.q_proj, attn.k_proj, attn.v_proj], layer.input_layernorm)
            assert bias is not None
            qkv[: attn.q_proj.out_features] *= attn.scaling
            bias[: attn.q_proj.out_features] *= attn.scaling
            gate_up, _ = _fused([mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm)
            mix, down = attn.o_proj.weight.clone(), mlp.down_proj.weight.clone()
            self.weights.append((qkv.t(), bias, mix.t(), gate_up.t(), down.t()))
        self.head = (self.model.lm_head.weight * self.model.model.norm.weight).t()
        self.embedding = self.model.model.embed_tokens.weight.clone()

    def copy(self, source: int, target: int, length: int) -> None:
        """See `Decoder.copy`."""
        for stored in chain.from_iterable(self.cached):
            stored[target, :, :length] = stored[source, :, :length]

    @torch.no_grad()
    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """See `Decoder.prefill`: flat through the linear layers, padded inside attention."""
        device = self.model.device
        slots_N, starts_N = torch.tensor(slots), torch.tensor(starts)
        counts_N = torch.tensor([len(row) for row in tokens])
        rows_F = torch.repeat_interleave(counts_N)
        columns_F = torch.arange(len(rows_F)) - (counts_N.cumsum(0) - counts_N)[rows_F]
        every = _Reach(slots_N, starts_N, int(counts_N.max()), (rows_F, columns_F), device)
        last = _Reach(slots_N, starts_N + counts_N - 1, 1, None, device)
        tokens_F = torch.tensor(list(chain.from_iterable(tokens)), device=device)
        places = slots_N[rows_F].to(device), (starts_N[rows_F] + columns_F).to(device)
        return self._forward(tokens_F, places, every, last, (counts_N.cumsum(0) - 1).to(device))

    @torch.no_grad()
    def decode(self, slots_N: Tensor, starts_N: Tensor, tokens_N: Tensor) -> Tensor:
        """See `Decoder.decode`."""
        device = self.model.device
        reach = _Reach(slots_N, starts_N, 1, None, device)
        places = slots_N.to(device), starts_N.to(device)
        return self._forward(tokens_N.to(device), places, reach, reach, None)

    def _forward(
        self,
        tokens_F: Tensor,
        places: tuple[Tensor, Tensor],
        every: _Reach,
        last: _Reach,
        last_N: Tensor | None,
    ) -> Tensor:
        """Logits (N, V). `last_N` are the flat rows that matter after the last layer's keys."""
        slots_F, positions_F = places
        epsilon = self.model.config.rms_norm_eps
        cos_F1R, sin_F1R = self.cos_T1R[positions_F], self.sin_T1R[positions_F]
        heads, all_heads = self.heads, self.heads + self.kv_heads
        x_FD = self.embedding[tokens_F]
        for (qkv, bias, mix, gate_up, down), (keys, values) in zip(
            self.weights, self.cached, strict=True
        ):
            qkv_FE = torch.addmm(bias, x_FD * _inverse_rms(x_FD, epsilon), qkv)
            qkv_FHD = qkv_FE.view(len(x_FD), all_heads + self.kv_heads, -1)
            qk_FHD = _rotate(qkv_FHD[:, :all_heads], cos_F1R, sin_F1R)
            keys[slots_F, :, positions_F] = qk_FHD[:, heads:]
            values[slots_F, :, positions_F] = qkv_FHD[:, all_heads:]
            q_FHD, reach = qk_FHD[:, :heads], every
            if keys is self.cached[-1][0]:
                reach = last
                if last_N is not None:
                    x_FD, q_FHD = x_FD[last_N], q_FHD[last_N]
            x_FD = torch.addmm(x_FD, reach.attend(q_FHD, keys, values), mix)
            for part in _chunks(x_FD):
                x = x_FD[part]
                gate, up = ((x * _inverse_rms(x, epsilon)) @ gate_up).chunk(2, dim=1)
                x.addmm_(functional.silu(gate).mul_(up), down)
        return (x_FD * _inverse_rms(x_FD, epsilon)) @ self.head


class _Reach:
    """Which stored keys the queries of one forward see: those up to their own position.

    Args:
        slots_N: The slots, ascending where they can be.
        starts_N: Position of each slot's first query.
        most: Queries of a slot at most (T).
        flat: Row and column of each flat query in (N, T); None where every slot has one query.
        device: Where the queries are.
    """

    def __init__(
        self,
        slots_N: Tensor,
        starts_N: Tensor,
        most: int,
        flat: tuple[Tensor, Tensor] | None,
        device: torch.device,
    ) -> None:
        self.most = most
        rows_N = torch.arange(len(slots_N))
        first, end = int(slots_N.min()), int(slots_N.max()) + 1
        self.slots: slice | Tensor = slots_N.to(device)
        self.num_rows = len(slots_N)
        # A run of neighbouring slots is read in place, with idle ones in between; else it is copied.
        ascending = bool((slots_N.diff() > 0).all())
        if ascending and end - first <= 3 * len(slots_N):
            self.slots, self.num_rows = slice(first, end), end - first
            rows_N = slots_N - first
        starts_R = torch.zeros(self.num_rows, dtype=torch.long)
        starts_R[rows_N] = starts_N
        self.dense = flat is None and self.num_rows == len(slots_N)
        rows_F, columns_F = (rows_N, torch.zeros_like(rows_N)) if flat is None else flat
        self.flat = (
            (rows_N[rows_F] if flat is not None else rows_F).to(device),
            columns_F.to(device),
        )
        self.width = int(starts_N.max()) + most
        last_RT = starts_R[:, None] + torch.arange(most)
        hidden_RTW = torch.arange(self.width) > last_RT[:, :, None]
        self.mask_R1TW = torch.zeros(hidden_RTW.shape).masked_fill_(hidden_RTW, -torch.inf)[:, None]
        self.mask_R1TW = self.mask_R1TW.to(device)

    def attend(self, q_FHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the flat queries (scaled already), (F, H · D)."""
        heads, head_dim = q_FHD.shape[1:]
        kv_heads = keys.shape[1]
        if self.dense:
            q_RTHD = q_FHD
        else:
            q_RTHD = q_FHD.new_zeros(self.num_rows, self.most, heads, head_dim)
            q_RTHD[self.flat] = q_FHD
        # Heads that share keys stand together, as rows of one product: (R, KV, H/KV · T, D).
        q_RKGTD = q_RTHD.view(self.num_rows, self.most, kv_heads, -1, head_dim).permute(
            0, 2, 3, 1, 4
        )
        q_RKQD = q_RKGTD.reshape(self.num_rows, kv_heads, -1, head_dim)
        k_RKWD, v_RKWD = (stored[self.slots, :, : self.width] for stored in (keys, values))
        out_RKQD = torch.empty_like(q_RKQD)
        step = max(1, SCORES // (heads * self.most * self.width))
        for start in range(0, self.num_rows, step):
            part = slice(start, start + step)
            scores = _matmul(q_RKQD[part], k_RKWD[part].transpose(2, 3))
            shape = scores.shape
            scores = scores.view(len(scores), heads, self.most, self.width)
            weights = torch.softmax(scores.add_(self.mask_R1TW[part]), dim=-1).view(shape)
            out_RKQD[part] = _matmul(weights, v_RKWD[part])
        out_RTHD = out_RKQD.view(q_RKGTD.shape).permute(0, 3, 1, 2, 4)
        if self.dense:
            return out_RTHD.reshape(self.num_rows, -1)
        return out_RTHD.reshape(self.num_rows, self.most, -1)[self.flat]


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros; on a CPU from numpy, which asks the system for huge pages where torch does not."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of small matrices: on a CPU numpy's is several times as fast as torch's."""
    if a.device.type != "cpu":
        return a @ b
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))
