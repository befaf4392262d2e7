"""Qwen2 in float32 for learning: the same function as transformers' model, with less around it.

Training keeps the tokens of all samples flat through every linear layer and pads inside attention
only; in the last layer only the wanted positions have a query, and all that follows it. Rows pass
through the wide layers in chunks that fit the processor's cache, forward and backward. Decoding
keeps keys and values where they are and fuses what reads the same input.

Axes: **B** samples, **T** tokens, **F** flat tokens, **N** rows of a call, **H** heads, **D**
    width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

CHUNK = 512
"""Rows that go through a wide layer at once on a CPU (512 × 1,024 floats are 2 MB)."""


def supports(model: PreTrainedModel) -> bool:
    """Whether this model (or backbone) is a plain float32 Qwen2: no adapters, no sliding window."""
    config: Any = model.config
    if config.model_type != "qwen2" or model.dtype != torch.float32:
        return False
    backbone: Any = getattr(model, "model", model)
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
    backbone: Any = getattr(model, "model", model)
    layout = _Layout(token_ids_BT, lengths_B, wanted_BT)
    cos_T1R, sin_T1R = rope_table(backbone, token_ids_BT.shape[1])
    cos_F1R, sin_F1R = cos_T1R[layout.columns_F], sin_T1R[layout.columns_F]
    states_FD = backbone.embed_tokens(token_ids_BT[layout.rows_F, layout.columns_F])
    *body, last = backbone.layers
    for layer in body:
        attn = layer.self_attn
        weight, bias = fuse([attn.q_proj, attn.k_proj, attn.v_proj], layer.input_layernorm)
        qkv_FE = _NormLinear.apply(states_FD, weight, bias, layer.input_layernorm.variance_epsilon)
        mixed_FE = _causal_attention(attn, qkv_FE, cos_F1R, sin_F1R, layout)
        states_FD = torch.addmm(states_FD, mixed_FE, attn.o_proj.weight.t())
        states_FD = _mlp(layer, states_FD)

    attn, norm = last.self_attn, last.input_layernorm
    wanted_F = layout.wanted_F
    weight, bias = fuse([attn.k_proj, attn.v_proj], norm)
    kv_FE = _NormLinear.apply(states_FD, weight, bias, norm.variance_epsilon)
    states_ND = states_FD[wanted_F]
    weight, bias = fuse([attn.q_proj], norm)
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
    heads, kv_heads = num_heads(attn)
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
    heads, kv_heads = num_heads(attn)
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
    weight, _ = fuse([layer.mlp.gate_proj, layer.mlp.up_proj], norm)
    out: Tensor = _NormMLP.apply(
        states_FD, weight, layer.mlp.down_proj.weight, norm.variance_epsilon
    )
    return out


def fuse(linears: Sequence[nn.Linear], norm: Any) -> tuple[Tensor, Tensor | None]:
    """One weight for linears that read the same normed input; the norm's gain is folded into it."""
    weight: Tensor = torch.cat(tuple(linear.weight for linear in linears)) * norm.weight
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return weight, torch.cat(biases) if biases else None


def num_heads(attn: Any) -> tuple[int, int]:
    """Heads of the queries, and of the keys and values."""
    return attn.q_proj.out_features // attn.head_dim, attn.k_proj.out_features // attn.head_dim


def rope_table(backbone: Any, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, 1, D/2) of each position's rotation."""
    inverse_R = backbone.rotary_emb.inv_freq.float()
    angles_TR = torch.arange(length, device=inverse_R.device)[:, None] * inverse_R
    return angles_TR.cos()[:, None], angles_TR.sin()[:, None]


def rotate(x_FHD: Tensor, cos_F1R: Tensor, sin_F1R: Tensor, sign: float = 1.0) -> Tensor:
    """Rotate the pairs (i, i + D/2) of the last axis."""
    first, second = x_FHD.chunk(2, dim=-1)
    out = torch.empty_like(x_FHD, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos_F1R, out=out_first).addcmul_(second, sin_F1R, value=-sign)
    torch.mul(second, cos_F1R, out=out_second).addcmul_(first, sin_F1R, value=sign)
    return out


def inverse_rms(x_FD: Tensor, epsilon: float) -> Tensor:
    """1 / √(mean x² + ε) of each row, (F, 1)."""
    norm_F1: Tensor = torch.linalg.vector_norm(x_FD, dim=1, keepdim=True)
    return norm_F1.square_().div_(x_FD.shape[1]).add_(epsilon).rsqrt_()


def _norm_backward(grad_FD: Tensor, normed_FD: Tensor, inverse_F1: Tensor) -> Tensor:
    """Gradient of n = x · r with r = 1/rms(x):  dx = r (dn − n · mean(dn · n))."""
    mean_F1 = (grad_FD * normed_FD).mean(dim=1, keepdim=True)
    grad_x_FD: Tensor = grad_FD.addcmul_(normed_FD, mean_F1, value=-1).mul_(inverse_F1)
    return grad_x_FD


def chunks(x_FD: Tensor) -> list[slice]:
    """The rows in parts that fit the cache of a CPU; on a GPU all at once."""
    size = CHUNK if x_FD.device.type == "cpu" else max(1, len(x_FD))
    return [slice(start, start + size) for start in range(0, len(x_FD), size)]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_FHD: Tensor, cos_F1R: Tensor, sin_F1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_F1R, sin_F1R)
        return rotate(x_FHD, cos_F1R, sin_F1R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_F1R, sin_F1R = ctx.saved_tensors
        return rotate(grads[0], cos_F1R, sin_F1R, sign=-1.0), None, None


class _NormLinear(torch.autograd.Function):
    """y = (x / rms(x)) Wᵀ + b, in chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any, x_FD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, epsilon: float
    ) -> Tensor:
        inverse_F1 = inverse_rms(x_FD, epsilon)
        out_FE = x_FD.new_empty(len(x_FD), len(weight_ED))
        for part in chunks(x_FD):
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
        for part in chunks(x_FD):
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
        inverse_F1 = inverse_rms(x_FD, epsilon)
        inner_FE = x_FD.new_empty(len(x_FD), len(gate_up_ED))
        out_FD = torch.empty_like(x_FD)
        for part in chunks(x_FD):
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
        for part in chunks(x_FD):
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
