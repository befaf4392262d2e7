"""Every estimator and every loss on degenerate and extreme inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ragen.algorithms.advantages import ADVANTAGES
from ragen.algorithms.batch import TokenFields
from ragen.algorithms.estimator import Estimator, estimate, whiten_tokens
from ragen.algorithms.losses import LOSSES, PolicyLoss, correct_for_sampler, k3, policy_loss


def advantages(estimator: Estimator, rewards_ES: Tensor, group_E: Tensor) -> Tensor:
    mask_ES = torch.ones_like(rewards_ES, dtype=torch.bool)
    ends_ES = torch.zeros_like(mask_ES)
    ends_ES[:, -1] = True
    ids_ES = torch.zeros(rewards_ES.shape, dtype=torch.long)
    inputs = {"rewards_ES": rewards_ES, "mask_ES": mask_ES, "turn_ES": ids_ES, "group_E": group_E}
    inputs |= {"values_ES": torch.zeros_like(rewards_ES), "turn_ends_ES": ends_ES}
    inputs |= {"state_values_ES": rewards_ES.sum(dim=1).median().expand_as(rewards_ES)}
    inputs |= {"state_ES": ids_ES, "gamma": 1.0, "gae_lambda": 1.0}
    inputs |= {"thought_ES": ~mask_ES, "success_E": torch.zeros(len(rewards_ES), dtype=torch.bool)}
    return estimate(estimator, **inputs, step_weight=1.0, whiten=True).advantages_ES


GROUPS = [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2], list(range(6))]


@pytest.mark.parametrize("estimator", ADVANTAGES.values(), ids=ADVANTAGES)
def test_equal_rewards_give_no_advantage_and_any_others_a_finite_one(estimator: Estimator) -> None:
    def at_the_end(groups: list[int], rewards_E: Tensor) -> Tensor:
        rewards_ES = torch.zeros(6, 9)
        rewards_ES[:, -1] = rewards_E
        return advantages(estimator, rewards_ES, torch.tensor(groups))

    for groups in GROUPS:
        for reward in (0.0, 0.1, -1.0, 1e-30, 1e30, 10 / 3):
            assert not at_the_end(groups, torch.tensor(reward)).any()
        for scale in (1e-30, 1e-3, 1.0, 1e6, 1e15):
            unlike_E = scale * torch.tensor([0.0, 1.0, -1.0, 1e-6, 3.0, 1.0])
            assert bool(at_the_end(groups, unlike_E).isfinite().all())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("size", [0.0, 1.0, 88.0, 1e4])
def test_extreme_log_ratios_give_finite_losses_and_gradients(loss: PolicyLoss, size: float) -> None:
    ones = torch.ones(4)
    old = torch.tensor([-1.0, -1.0 - size, -1.0, -1.0 - size])
    new = torch.tensor([-1.0 - size, -1.0, -1.0 - size, -1.0]).requires_grad_()
    ids = torch.arange(4)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    tokens = TokenFields(ids, ones.bool(), ones / 4, ids, old, old, advantages_N=signs)
    settings: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
    tokens, _ = correct_for_sampler(tokens, 2.0)
    found = policy_loss(loss, new, tokens, **settings)
    (found.value + k3(new, old).mean()).backward()
    assert bool(found.value.isfinite()) and new.grad is not None
    assert bool(new.grad.isfinite().all())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e10])
def test_whitening_equals_whitening_in_float64(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    field_ES = scale * torch.randn((40, 30), generator=generator)
    mask_ES = torch.rand((40, 30), generator=generator) < 0.7
    exact_N = field_ES.double()[mask_ES]
    expected_N = (exact_N - exact_N.mean()) / (exact_N.var() + 1e-8).sqrt()
    found_N = whiten_tokens(field_ES, mask_ES)[mask_ES]
    torch.testing.assert_close(found_N.double(), expected_N, rtol=0, atol=1e-5)
