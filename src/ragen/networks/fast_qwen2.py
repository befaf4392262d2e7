"""A fast float32 Qwen2 for learning on CPUs: the same function as transformers' model.

The tokens of all samples are one flat list (`packing`), from the embedding to the last norm. Rows
pass the wide layers in chunks that fit the processor's cache, forward and backward. After the last
layer's keys and values, only the wanted positions are computed.

Axes: **B** samples, **T** tokens, **F** flat tokens, **N** flat tokens with a query, **H** heads,
**K** key–value heads, **D** width, **E** heads times width, **R** half a head's width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ragen.networks.packing import Blocks, attend, attend_backward, pack
from ragen.networks.pictures import Features, embedded
from ragen.networks.sizes import KEPT_SCORES

CHUNK = 512
"""Rows that pass a wide layer at once on a CPU (512 × 1,024 floats are 2 MB)."""


def supports(model: PreTrainedModel) -> bool:
    """True for a plain float32 Qwen2 or its backbone, also with LoRA, without a sliding window.

    It may be the decoder of a model with a vision tower.
    """
    backbone: Any = model.get_decoder()
    config: Any = backbone.config
    if config.model_type != "qwen2" or model.dtype != torch.float32:
        return False
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
        and all(layer.self_attn.head_dim % 2 == 0 for layer in backbone.layers)
        and all(
            type(each.base_layer if hasattr(each, "lora_A") else each) is nn.Linear
            for each in linears
        )
        and all(type(weight) is nn.Parameter for weight in model.parameters())
    )


def hidden_states(
    model: PreTrainedModel,
    token_ids_BT: Tensor,
    lengths_B: Tensor,
    wanted_BT: Tensor,
    seen: Features | None = None,
) -> Tensor:
    """`ragen.networks.model.hidden_states` for a model that `supports` accepts; differentiable."""
    backbone: Any = model.get_decoder()
    packing = pack(token_ids_BT, lengths_B, wanted_BT)
    columns_F, wanted_N = packing.places[1], packing.wanted_N
    rope_T1R = rope_table(backbone, token_ids_BT.shape[1])
    rope_F1R, rope_N1R = rope_T1R[columns_F], rope_T1R[columns_F[wanted_N]]

    states_FD = embedded(backbone.embed_tokens, token_ids_BT[packing.places], seen)
    *body, last = backbone.layers
    every = packing.blocks()
    for layer in body:
        states_FD = _layer(layer, states_FD, states_FD, rope_F1R, rope_F1R, every)
    some = packing.blocks(only_wanted=True)
    states_ND = _layer(last, states_FD[wanted_N], states_FD, rope_N1R, rope_F1R, some)
    final_ND: Tensor = backbone.norm(states_ND)
    return final_ND


def _layer(
    layer: Any,
    states_ND: Tensor,
    states_FD: Tensor,
    rope_N1R: Tensor,
    rope_F1R: Tensor,
    blocks: Blocks,
) -> Tensor:
    """One layer for N of the F tokens; the others only provide keys and values."""
    attn, norm = layer.self_attn, layer.input_layernorm
    epsilon = norm.variance_epsilon
    query, key, value = projections(attn)
    query_bias, key_bias, value_bias = projection_biases(attn)
    kv_weight, kv_bias = torch.cat((key, value)), torch.cat((key_bias, value_bias))
    q_NE = _NormLinear.apply(states_ND, query * norm.weight, query_bias, epsilon)
    kv_FE = _NormLinear.apply(states_FD, kv_weight * norm.weight, kv_bias, epsilon)
    mixed_NE = _Attention.apply(q_NE, kv_FE, attn.head_dim, rope_N1R, rope_F1R, blocks)
    states_ND = torch.addmm(states_ND, mixed_NE, effective_weight(attn.o_proj).t())
    gate_up, down = gate_and_up(layer), effective_weight(layer.mlp.down_proj)
    out_ND: Tensor = _NormMLP.apply(states_ND, gate_up, down, epsilon)
    return out_ND


def effective_weight(linear: Any) -> Tensor:
    """A linear layer as one matrix: W, or W + (α / r) B A if it has an active LoRA adapter.

    The sum costs as much as r more rows of input; A and B get gradients through it.
    """
    weight: Tensor = linear.weight  # with adapters the base's
    if hasattr(linear, "lora_A") and not linear.disable_adapters:
        for name in linear.active_adapters:
            thin, wide = linear.lora_A[name].weight, linear.lora_B[name].weight
            weight = torch.addmm(weight, wide, thin, alpha=linear.scaling[name])
    return weight


def projections(attn: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of queries, keys and values, the first two `_paired`."""
    query, key, value = map(effective_weight, (attn.q_proj, attn.k_proj, attn.v_proj))
    return _paired(query, attn.head_dim), _paired(key, attn.head_dim), value


def projection_biases(attn: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Biases of queries, keys and values, the first two `_paired`."""
    query, key = _paired(attn.q_proj.bias, attn.head_dim), _paired(attn.k_proj.bias, attn.head_dim)
    return query, key, attn.v_proj.bias


def _paired(x: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head so that i and i + D/2, which rotate together, are neighbours.

    In memory, pairs of neighbours are complex numbers. The same new order in queries and keys
    leaves their products as they are.
    """
    pairs: Tensor = x.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2)
    return pairs.flatten(0, 2)


def gate_and_up(layer: Any) -> Tensor:
    """One weight for gate and up, with the gain of the norm before them folded in."""
    layers = (layer.mlp.gate_proj, layer.mlp.up_proj)
    gain: Tensor = layer.post_attention_layernorm.weight
    return torch.cat(tuple(map(effective_weight, layers))) * gain


def rope_table(backbone: Any, length: int) -> Tensor:
    """Rotation of each position as complex numbers e^(i angle), (T, 1, D/2)."""
    inverse_R = backbone.rotary_emb.inv_freq.float()
    angles_TR = torch.arange(length, device=inverse_R.device)[:, None] * inverse_R
    return torch.polar(torch.ones_like(angles_TR), angles_TR)[:, None]


def as_complex(x_FHD: Tensor) -> Tensor:
    """Neighbours on the last axis as complex numbers, (F, H, D/2), in the same memory."""
    return torch.view_as_complex(x_FHD.unflatten(-1, (-1, 2)))


def rotate(x_FHD: Tensor, rope_F1R: Tensor) -> Tensor:
    """Rotate each pair of neighbours on the last axis."""
    return torch.view_as_real(as_complex(x_FHD) * rope_F1R).flatten(-2)


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
    """Slices of rows that fit the cache of a CPU; on a GPU all rows are one slice."""
    size = CHUNK if x_FD.device.type == "cpu" else max(1, len(x_FD))
    return [slice(start, start + size) for start in range(0, len(x_FD), size)]


class _Attention(torch.autograd.Function):
    """Rotary embedding and causal attention, one block at a time and without padding."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NE: Tensor,
        kv_FE: Tensor,
        head_dim: int,
        rope_N1R: Tensor,
        rope_F1R: Tensor,
        blocks: Blocks,
    ) -> Tensor:
        q_NHD = rotate(q_NE.unflatten(1, (-1, head_dim)), rope_N1R).mul_(head_dim**-0.5)
        k_FKD, v_FKD = kv_FE.unflatten(1, (-1, head_dim)).chunk(2, dim=1)
        k_FKD = rotate(k_FKD, rope_F1R)
        num_scores = q_NHD.shape[1] * sum(block.num_pairs for block in blocks.each)
        weights = list[Tensor]() if num_scores <= KEPT_SCORES else None
        out_NHD = attend(q_NHD, k_FKD, v_FKD, blocks, weights)
        ctx.save_for_backward(q_NHD, k_FKD, v_FKD, out_NHD, rope_N1R, rope_F1R, *weights or ())
        ctx.blocks = blocks
        return out_NHD.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NHD, k_FKD, v_FKD, out_NHD, rope_N1R, rope_F1R, *weights = ctx.saved_tensors
        grad_NHD = grads[0].view(out_NHD.shape)
        grad_q, grad_k, grad_v = attend_backward(
            grad_NHD, q_NHD, k_FKD, v_FKD, out_NHD, ctx.blocks, weights
        )
        grad_q = rotate(grad_q, rope_N1R.conj()).mul_(q_NHD.shape[2] ** -0.5)
        grad_k = rotate(grad_k, rope_F1R.conj())
        grad_kv = torch.cat((grad_k, grad_v), dim=1)
        return grad_q.flatten(1), grad_kv.flatten(1), None, None, None, None


class _NormLinear(torch.autograd.Function):
    """y = (x / rms(x)) Wᵀ + b, in chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any, x_FD: Tensor, weight_ED: Tensor, bias_E: Tensor, epsilon: float
    ) -> Tensor:
        inverse_F1 = inverse_rms(x_FD, epsilon)
        out_FE = x_FD.new_empty(len(x_FD), len(weight_ED))
        for part in chunks(x_FD):
            normed = x_FD[part] * inverse_F1[part]
            torch.addmm(bias_E, normed, weight_ED.t(), out=out_FE[part])
        ctx.save_for_backward(x_FD, weight_ED, inverse_F1)
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
        return grad_x_FD, grad_weight_ED, grad_FE.sum(0), None


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
