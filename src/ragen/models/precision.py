"""What is computed in bfloat16 is added up in float32: weights, gradients and logits.

bfloat16 keeps 8 significant bits. A weight of 1 would not notice an update below 2⁻⁹, a sum of
gradients would stand still after some hundred alike, and a logit of 20 would be off by up to 0.06,
by one program up and by the other down. So each of the three has a place here where it is float32.
A model in float32 passes through untouched.

Axes: **N** positions, **V** vocabulary, **D** width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Masters:
    """The float32 weights that optimisers step on, and the gradients that they step by.

    A weight w that is kept in less has a master W in float32 (arXiv:1710.03740):

        G ← Σ over microbatches of float32(∂loss/∂w),   W ← optimiser(W, G),   w ← round(W)

    As soon as a backward pass has left a gradient at w, it is added to the master's and dropped; so
    a gradient in less than float32 never lives longer than its own layer's backward pass. A weight
    in float32 is its own master, at no cost.

    Args:
        weights: Named weights; those without `requires_grad` are left out.

    Attributes:
        trained: What optimisers and clipping work on, by the names of the weights.

    Example:
        >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> masters = Masters([("gain", weight)])
        >>> (0.001 * weight).sum().backward()
        >>> with torch.no_grad():
        ...     for _ in range(4):  # in bfloat16, 1.0078 is the next number after 1
        ...         _ = masters.trained["gain"].add_(0.003)
        ...         masters.round()
        ...         print(weight.item())
        1.0
        1.0078125
        1.0078125
        1.015625
    """

    def __init__(self, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.trained: dict[str, nn.Parameter] = {}
        self._rounded: dict[str, nn.Parameter] = {}
        for name, weight in weights:
            if weight.requires_grad:
                self.trained[name] = weight
                if weight.dtype != torch.float32:
                    self._rounded[name] = weight
                    self.trained[name] = _master_of(weight)

    @torch.no_grad()
    def round(self) -> None:
        """Give the weights the values of their masters; to be called after each step."""
        for name, weight in self._rounded.items():
            weight.copy_(self.trained[name])

    def tensors(self) -> dict[str, Tensor]:
        """The masters of weights that are kept in less: what a checkpoint needs besides them."""
        return {name: self.trained[name].detach() for name in self._rounded}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave.

        Raises:
            KeyError: A master is missing.
            RuntimeError: One has another shape.
        """
        for name in self._rounded:
            self.trained[name].copy_(tensors[name])
        self.round()


def _master_of(weight: nn.Parameter) -> nn.Parameter:
    """A float32 copy whose gradient takes up what backward passes leave at `weight`."""
    master = nn.Parameter(weight.detach().float())

    def take_gradient(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    weight.register_post_accumulate_grad_hook(take_gradient)  # type: ignore[no-untyped-call]
    return master


class Shape(NamedTuple):
    """What an architecture does to its logits behind the output layer: cap · tanh(scale · z / cap).

    Cohere and Granite scale, Gemma 2 caps (arXiv:2408.00118, section 2); `cap` 0 means none.
    """

    scale: float = 1.0
    cap: float = 0.0

    def of(self, logits: Tensor) -> Tensor:
        """The logits of the model, from those of its output layer.

        Example:
            >>> Shape(scale=2.0).of(torch.tensor([3.0])), Shape(cap=1.0).of(torch.tensor([9.0]))
            (tensor([6.]), tensor([1.0000]))
        """
        if self.scale != 1.0:
            logits = logits * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of `of`, from its result: scale · (1 − (y / cap)²)."""
        return self.scale * (1 - (logits / self.cap).square()) if self.cap else self.scale


def shape_of(model: nn.Module) -> Shape:
    """What the model's config says of its logits; `model.load_policy` sees whether it is so."""
    config: Any = getattr(model, "config", None)
    told = vars(config.get_text_config()) if config is not None else {}
    scale = (told.get("logit_scale") or 1.0) / (told.get("logits_scaling") or 1.0)
    return Shape(float(scale), float(told.get("final_logit_softcapping") or 0.0))


def output_logits(states_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """The output layer W h + b in float32 (N, V), whatever the states and weights are kept in.

    Its products are added up in float32 anyway; rounding the sums to bfloat16 would be the largest
    difference between a sampler's logprobs and a learner's (arXiv:2506.13585, section 3.2).

    Example:
        >>> half = torch.full((1, 2), 2.0**-9, dtype=torch.bfloat16)
        >>> one = torch.ones(1, 2, dtype=torch.bfloat16)
        >>> output_logits(one, one + half, None).dtype
        torch.float32
    """
    if weight_VD.dtype == torch.float32:
        return nn.functional.linear(states_ND, weight_VD, bias_V)
    if weight_VD.device.type == "cuda":
        logits_NV = torch.mm(states_ND, weight_VD.t(), out_dtype=torch.float32)
    else:  # no other device has a product that widens
        logits_NV = states_ND.float() @ weight_VD.float().t()
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)
