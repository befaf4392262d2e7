"""Chain of Experts: RAGEN's own architecture, for small models made from scratch.

A Qwen2 whose feed-forward blocks are a mixture of experts that is passed several times
(arXiv:2506.18945). The folder of such a model loads as any other where this package is installed.

Axes: **T** tokens, **D** width, **E** experts, **M** width of an expert.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm
from typing_extensions import override

LOAD_WEIGHT = 0.001
"""Weight of `load`, as published."""
BLEND = 1e-3
"""Where the last chosen and the next expert differ by a smaller score, a token passes both."""


class ChainConfig(Qwen2Config):
    """The config of a Qwen2 with experts; ``intermediate_size`` is the width of all together."""

    model_type = "chain_of_experts"
    num_experts: int = 8
    num_experts_per_tok: int = 4
    """The number of experts that a token passes, over all iterations."""
    iterations: int = 2
    """C: the number of passes; with one it is a plain mixture of experts."""


class ChainOfExperts(Qwen2MLP):
    """The feed-forward block of a layer.

    With K experts a token, of which each of C iterations t has K/C by a router of its own:

        x⁰ = x,   xᵗ = xᵗ⁻¹ + Σᵢ gₜᵢ(xᵗ⁻¹) FFNᵢ(xᵗ⁻¹),   y = x^C

    g are the K/C highest of the E softmax scores, not scaled to sum 1, and 0 for the other experts.
    The layer's norm is the first step of each g and FFN, so that C = 1 is the usual mixture; the
    authors' code normalises x once, and goes on from the result.

    A choice would be a jump, and rounding would let sampler and learner jump apart. So g is
    continuous: near a tie, between scores a > b with a − b < `BLEND`, the last chosen expert counts
    ½ + (a − b) / (2 BLEND) and the next one the rest.

    The experts are one block, in which a token's scores weigh each expert's part: at these widths,
    that is faster than products of few rows. So experts that are not chosen are computed, too.
    """

    load_weight = 0.0
    """Weight of `load` in every backward pass. The saved model does not have it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.num_chosen = config.num_experts_per_tok // config.iterations
        self.routers = nn.ModuleDict(  # LoRA goes by the last name, which a list would number
            {
                f"router_{iteration}": nn.Linear(config.hidden_size, config.num_experts, bias=False)
                for iteration in range(config.iterations)
            }
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Y − x, to which the layer adds x; (…, T, D)."""
        added = torch.zeros_like(x)
        for router in self.routers.values():
            normed = self.norm(x + added)
            scores = router(normed).softmax(-1, dtype=torch.float32)
            between = scores.topk(self.num_chosen + 1).values[..., -2:].mean(-1, keepdim=True)
            chosen = ((scores - between) / BLEND + 0.5).clamp(0, 1).detach()
            weights = scores * chosen
            if self.load_weight and torch.is_grad_enabled():
                weights = _AlsoMinimise.apply(weights, self.load_weight * load(scores, chosen))
            inner = self.act_fn(self.gate_proj(normed)) * self.up_proj(normed)
            parts = inner.unflatten(-1, (scores.shape[-1], -1)) * weights.to(x.dtype)[..., None]
            added = added + self.down_proj(parts.flatten(-2))
        return added


def load(scores: Tensor, chosen: Tensor) -> Tensor:
    """How unevenly experts are used: E Σᵢ fᵢ Pᵢ, which is 1 if all are used alike.

    f is an expert's share of all choices, P the mean of its score; both arguments are (…, T, E).
    """
    share_E = chosen.flatten(0, -2).mean(0) / chosen.sum(-1).mean()
    return scores.shape[-1] * (share_E * scores.flatten(0, -2).mean(0)).sum()


class _AlsoMinimise(torch.autograd.Function):
    """The first argument; in the backward pass, the second is added to whatever is minimised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, also: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())


class ChainForCausalLM(Qwen2ForCausalLM):
    """The language model."""

    config_class = ChainConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.post_attention_layernorm = nn.Identity()  # the block has it
            layer.mlp = ChainOfExperts(config)
        self.post_init()
