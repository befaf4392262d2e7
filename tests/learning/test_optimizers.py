"""Muon against its formula, and against torch's in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from ragen.learning.optimizers import Muon, orthogonal

SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5)]
LR, DECAY = 0.1, 0.2


def weights_and_gradients(dtype: torch.dtype) -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    """Weights of `SHAPES` and their gradients in three steps."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, int]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    weights = [nn.Parameter(draw(shape)) for shape in SHAPES]
    return weights, [[draw(shape) for shape in SHAPES] for _ in range(3)]


def train(
    optimizer: torch.optim.Optimizer, weights: Iterable[nn.Parameter], steps: list[list[Tensor]]
) -> None:
    for gradients in steps:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()


def by_formula(weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """One matrix at a time, with singular values: a polynomial of a matrix is one of these."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        left, values, right = torch.linalg.svd(
            0.95 * momentum + 0.05 * gradient, full_matrices=False
        )
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        length = LR * max(1, weight.shape[0] / weight.shape[1]) ** 0.5
        weight = (1 - LR * DECAY) * weight - length * (left * values) @ right
    return weight


def test_muon_is_its_formula() -> None:
    weights, steps = weights_and_gradients(torch.float64)
    begun = [weight.detach().clone() for weight in weights]
    train(Muon(weights, LR, DECAY), weights, steps)
    for weight, first, gradients in zip(weights, begun, zip(*steps, strict=True), strict=True):
        torch.testing.assert_close(
            weight.detach(), by_formula(first, list(gradients)), rtol=1e-12, atol=1e-12
        )


def test_muon_is_that_of_torch_up_to_bfloat16() -> None:
    ours, steps = weights_and_gradients(torch.float32)
    theirs, _ = weights_and_gradients(torch.float32)
    train(Muon(ours, LR, DECAY), ours, steps)
    train(torch.optim.Muon(theirs, LR, DECAY), theirs, steps)
    for one, other in zip(ours, theirs, strict=True):
        difference = (one - other).abs().max().item()
        assert 0 < difference < 3 * LR * 2**-6, "three steps of entries up to about 1"


def test_a_weight_without_a_gradient_stays() -> None:
    weights, steps = weights_and_gradients(torch.float32)
    begun = weights[0].detach().clone()
    optimizer = Muon(weights, LR, DECAY)
    for weight, gradient in zip(weights[1:], steps[0][1:], strict=True):
        weight.grad = gradient
    optimizer.step()
    assert torch.equal(weights[0].detach(), begun)


@pytest.mark.parametrize("shape", [(3, 8), (8, 3)])
def test_singular_values_move_to_one(shape: tuple[int, int]) -> None:
    rows, columns = shape
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(rows, 3)).Q
    right = torch.linalg.qr(torch.randn(columns, 3)).Q
    values = torch.tensor([1.0, 0.1, 0.011]) * 1000
    matrix = (left * values) @ right.mT
    found = torch.linalg.svdvals(orthogonal(matrix[None])[0])[:3]
    assert found.min() > 0.6 and found.max() < 1.3
    assert math.isfinite(orthogonal(torch.zeros(1, *shape)).sum().item())
