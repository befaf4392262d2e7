"""Float32 accumulation for bfloat16 models: weights, gradients, logits and, on some CPUs, products.

bfloat16 has 8 significant bits. A weight of 1 would lose an update below 2⁻⁹, a sum of gradients
would stop growing after some hundred equal terms, and a logit of 20 would err by up to 0.06,
differently in two programs. So all three are float32 here. Float32 models do not change.

Axes: **N** positions, **V** vocabulary, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override


class Masters:
    """The float32 weights that optimisers step on, and the gradients that they step by.

    A weight w of lower precision has a master W in float32 (arXiv:1710.03740):

        G ← Σ over microbatches of float32(∂loss/∂w),   W ← optimiser(W, G),   w ← round(W)

    As soon as a backward pass has stored a gradient at w, it is added to the master's and dropped;
    so a lower-precision gradient exists only during its own layer's backward pass. A float32 weight
    is its own master, at no cost. Weights without `requires_grad` are left out. `trained` are the
    float32 weights for optimisers and clipping, by name.

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
        """Copy the masters into the weights, rounded; call it after each step."""
        for name, weight in self._rounded.items():
            weight.copy_(self.trained[name])

    def tensors(self) -> dict[str, Tensor]:
        """The masters of lower-precision weights, which a checkpoint saves besides the weights."""
        return {name: self.trained[name].detach() for name in self._rounded}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned.

        Raises:
            KeyError: A master is missing.
            RuntimeError: One has another shape.
        """
        for name in self._rounded:
            self.trained[name].copy_(tensors[name])
        self.round()


def _master_of(weight: nn.Parameter) -> nn.Parameter:
    """A float32 copy that accumulates the gradients of `weight`."""
    master = nn.Parameter(weight.detach().float())

    def take_gradient(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    weight.register_post_accumulate_grad_hook(take_gradient)
    return master


class Shape(NamedTuple):
    """An architecture's transformation of its logits: cap · tanh(scale · z / cap).

    Cohere and Granite scale, Gemma 2 caps (arXiv:2408.00118, section 2); `cap` 0 means none.
    """

    scale: float = 1.0
    cap: float = 0.0

    def of(self, logits: Tensor) -> Tensor:
        """The logits of the model, from the logits of its output layer."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of `of`, from its result: scale · (1 − (y / cap)²)."""
        return self.scale * (1 - (logits / self.cap).square()) if self.cap else self.scale


def shape_of(model: nn.Module) -> Shape:
    """The logits' shape by the model's config; `loading.load_policy` verifies it."""
    config: Any = getattr(model, "config", None)
    settings = vars(config.get_text_config()) if config is not None else {}
    scale = (settings.get("logit_scale") or 1.0) / (settings.get("logits_scaling") or 1.0)
    return Shape(float(scale), float(settings.get("final_logit_softcapping") or 0.0))


def bfloat16_products(dtype: torch.dtype) -> AbstractContextManager[None]:
    """If `dtype` is bfloat16, let a CPU round the factors of float32 products, but not their sums.

    Factors that are bfloat16 already do not change, so the result is a float32 product at about
    twice the speed. Processors without AMX compute in float32, by oneDNN.
    """
    return _products("bf16") if dtype == torch.bfloat16 else nullcontext()


def mkl_products() -> AbstractContextManager[None]:
    """Compute float32 products with MKL even where `networks.machine.use_threads` chose oneDNN."""
    return _products("none")


@contextmanager
def _products(precision: str) -> Iterator[None]:
    libraries: Any = torch.backends
    setting = libraries.mkldnn.matmul
    before = setting.fp32_precision
    setting.fp32_precision = precision
    try:
        yield
    finally:
        setting.fp32_precision = before


WIDENED = 2048
"""Rows of a bfloat16 matrix that are widened to float32 at once on a CPU: they fit its cache, and a
large matrix, such as the gradient of an output layer, is not held a second time."""

WORTH_WIDENING = 4
"""The number of rows from which torch's own loops take longer than widening the weights."""


@cache
def multiplies_bfloat16() -> bool:
    """True if torch has a library for bfloat16 products on this processor.

    Without AVX-512, torch's own loops run at 1/8 of float32's rate, and at 1/30 in a backward pass.
    """
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def widens(factor: Tensor) -> bool:
    """True if products are computed in float32 because there is no library for them."""
    is_here = factor.dtype == torch.bfloat16 and factor.device.type == "cpu"
    return is_here and not multiplies_bfloat16()


@torch.no_grad()
def product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The matrices' product, plus the bias, rounded once to their dtype (M, N).

    Factors that `widens` names are widened: the products of two bfloat16 numbers are exact in
    float32, and the sums are float32 either way.
    """
    if not widens(a_MK):
        return a_MK @ b_KN if bias_N is None else torch.addmm(bias_N, a_MK, b_KN)
    parts = []
    for a_RK in a_MK.split(WIDENED):
        a_RS, b_SN = a_RK[:, :WIDENED].float(), b_KN[:WIDENED].float()
        sums_RN = a_RS @ b_SN if bias_N is None else torch.addmm(bias_N.float(), a_RS, b_SN)
        add_product(sums_RN, a_RK[:, WIDENED:], b_KN[WIDENED:])
        parts.append(sums_RN.to(a_MK.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def add_product(sums_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add the matrices' product to float32 sums.

    A library's bfloat16 product is rounded before it is added. Others need no memory of its size.
    """
    if a_MK.dtype == sums_MN.dtype:
        sums_MN.addmm_(a_MK, b_KN)
        return
    if not widens(a_MK):
        sums_MN += a_MK @ b_KN
        return
    for sums_RN, a_RK in zip(sums_MN.split(WIDENED), a_MK.split(WIDENED), strict=True):
        for a_RS, b_SN in zip(a_RK.split(WIDENED, 1), b_KN.split(WIDENED), strict=True):
            sums_RN.addmm_(a_RS.float(), b_SN.float())


class _Widened(torch.autograd.Function):
    """x Wᵀ + b by `product`, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return product(x_NI, weight_OI.t(), bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NO,), (x_NI, weight_OI) = grads, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad_NO, weight_OI) if of_x else None,
            product(grad_NO.t(), x_NI) if of_weight else None,
            grad_NO.sum(0) if of_bias else None,
        )


class WideLinear(nn.Linear):
    """A linear layer that multiplies by `product`, except for few rows: widening takes longer."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if input.numel() < WORTH_WIDENING * self.in_features or not widens(input):
            return super().forward(input)
        out_NO = _Widened.apply(input.flatten(0, -2), self.weight, self.bias)
        out: Tensor = out_NO.unflatten(0, input.shape[:-1])
        return out


def widen_products(model: nn.Module) -> None:
    """Let a model on this CPU multiply bfloat16 matrices in float32 if that is faster."""
    if not multiplies_bfloat16():
        for layer in model.modules():
            if type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16:
                layer.__class__ = WideLinear


def output_logits(states_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """The output layer W h + b in float32 (N, V), whatever the dtype of states and weights.

    Its products are accumulated in float32 anyway; rounding the sums to bfloat16 would cause the
    largest difference between a sampler's logprobs and a learner's (arXiv:2506.13585, section 3.2).
    """
    if weight_VD.dtype == torch.float32:
        return nn.functional.linear(states_ND, weight_VD, bias_V)
    if weight_VD.device.type == "cuda":
        logits_NV = torch.mm(states_ND, weight_VD.t(), out_dtype=torch.float32)
    else:  # only CUDA has a product that widens
        states_ND, parts = states_ND.float(), weight_VD.split(WIDENED)
        with bfloat16_products(weight_VD.dtype):
            logits_NV = torch.cat([states_ND @ part.float().t() for part in parts], dim=1)
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)
