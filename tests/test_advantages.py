"""Estimators: numbers by hand, identities, degenerate cases, and ∇J by enumerating a small game."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import episode, groups, turn
from torch import Tensor

from ragen.advantages import ADVANTAGES, COMPARES_MEMBERS, NEEDS_VALUES
from ragen.advantages_critic import bi_level_gae, gae, whiten_tokens
from ragen.advantages_members import (
    dr_grpo,
    gigpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from ragen.batch import collate, episode_index, to_episodes
from ragen.config import AdvantageConfig
from ragen.rewards import token_rewards
from ragen.samples import to_samples as flat_samples
from ragen.samples import trainable
from ragen.types import Group

PLAIN: dict[str, Any] = {"bootstrap_E": None, "gamma": 1.0, "lam": 1.0, "whiten": False}


def test_config_names_the_estimators() -> None:
    choices = set(get_args(AdvantageConfig.model_fields["name"].annotation))
    assert choices == set(ADVANTAGES)
    assert set(ADVANTAGES) >= COMPARES_MEMBERS


def test_gae_golden() -> None:
    # r = 0 1 | V = .5 .8 | γ = .9, λ = .5, no state after the end
    # δ₁ = 1 − .8 = .2                A₁ = .2                    return₁ = 1
    # δ₀ = 0 + .9·.8 − .5 = .22       A₀ = .22 + .45·.2 = .31    return₀ = .81
    credit = gae(
        rewards_ES=torch.tensor([[0.0, 1.0]]),
        mask_ES=torch.ones(1, 2, dtype=torch.bool),
        values_ES=torch.tensor([[0.5, 0.8]]),
        **PLAIN | {"gamma": 0.9, "lam": 0.5},
    )
    assert credit.advantages_ES.tolist() == [pytest.approx([0.31, 0.2])]
    assert credit.returns_ES is not None
    assert credit.returns_ES.tolist() == [pytest.approx([0.81, 1.0])]


def test_gae_bootstraps_at_the_last_token_of_each_episode() -> None:
    # γ = λ = 1: A = (rewards to come + bootstrap) − V; the first episode ends after one token.
    credit = gae(
        rewards_ES=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        mask_ES=torch.tensor([[True, False], [True, True]]),
        values_ES=torch.tensor([[0.5, 9.0], [0.5, 0.5]]),
        **PLAIN | {"bootstrap_E": torch.tensor([2.0, 0.0])},
    )
    assert credit.advantages_ES.tolist() == [[2.5, 0.0], [0.5, 0.5]]
    assert credit.returns_ES is not None
    assert credit.returns_ES.tolist() == [[3.0, 0.0], [1.0, 1.0]]


def test_gae_needs_values() -> None:
    with pytest.raises(ValueError, match="critic"):
        gae(rewards_ES=torch.zeros(1, 1), mask_ES=torch.ones(1, 1) > 0, values_ES=None, **PLAIN)


@st.composite
def ragged(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask of a few episodes of unequal length; V is rubbish off the mask."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    mask_ES = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    rewards_ES = torch.randn(mask_ES.shape, generator=generator) * mask_ES
    return rewards_ES, torch.randn(mask_ES.shape, generator=generator), mask_ES


@given(ragged(), st.floats(0, 1))
def test_gae_with_lambda_one_is_return_minus_value(
    arrays: tuple[Tensor, Tensor, Tensor], gamma: float
) -> None:
    rewards_ES, values_ES, mask_ES = arrays
    credit = gae(
        rewards_ES=rewards_ES, values_ES=values_ES, mask_ES=mask_ES, **PLAIN | {"gamma": gamma}
    )
    for e, count in enumerate(mask_ES.sum(dim=1).tolist()):
        for s in range(count):
            to_come = sum(gamma**i * float(rewards_ES[e, s + i]) for i in range(count - s))
            assert credit.advantages_ES[e, s].item() == pytest.approx(
                to_come - float(values_ES[e, s]), abs=1e-5
            )
        assert torch.all(credit.advantages_ES[e, count:] == 0)


@given(ragged())
def test_gae_with_lambda_zero_is_the_td_error(arrays: tuple[Tensor, Tensor, Tensor]) -> None:
    rewards_ES, values_ES, mask_ES = arrays
    credit = gae(
        rewards_ES=rewards_ES,
        values_ES=values_ES,
        mask_ES=mask_ES,
        **PLAIN | {"gamma": 0.9, "lam": 0.0},
    )
    next_ES = torch.cat([values_ES[:, 1:] * mask_ES[:, 1:], torch.zeros(len(mask_ES), 1)], dim=1)
    td_ES = (rewards_ES + 0.9 * next_ES - values_ES) * mask_ES
    torch.testing.assert_close(credit.advantages_ES, td_ES)


def test_whitened_advantages_leave_the_returns_alone() -> None:
    arrays = {
        "rewards_ES": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        "values_ES": torch.tensor([[0.1, 0.3], [0.2, 0.0]]),
        "mask_ES": torch.tensor([[True, True], [True, False]]),
    }
    plain, white = gae(**arrays, **PLAIN), gae(**arrays, **PLAIN | {"whiten": True})
    on_N = white.advantages_ES[arrays["mask_ES"]]
    assert on_N.mean().item() == pytest.approx(0, abs=1e-6)
    assert on_N.std().item() == pytest.approx(1, abs=1e-5)
    assert white.returns_ES is not None and plain.returns_ES is not None
    assert torch.equal(white.returns_ES, plain.returns_ES)


@pytest.mark.parametrize("tokens", [[3.0], [2.0, 2.0, 2.0], []])
def test_whitening_nothing_gives_zero(tokens: list[float]) -> None:
    field_ES = torch.tensor([tokens])
    assert torch.all(whiten_tokens(field_ES, torch.ones(field_ES.shape, dtype=torch.bool)) == 0)


# Group estimators: R of four episodes, two tokens each, groups a (0, 1, 2) and b (one other value).
REWARDS_ES = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.1], [0.1, 0.0]])
GROUP_E = torch.tensor([7, 7, 7, 9, 9])
MASK_ES = torch.ones(5, 2, dtype=torch.bool)


def test_grpo_golden() -> None:
    # a: R = 0 1 2, mean 1, unbiased std 1 → ∓1 / (1 + 1e-6), 0.  b: both .1 → exactly 0.
    credit = grpo(rewards_ES=REWARDS_ES, mask_ES=MASK_ES, group_E=GROUP_E)
    assert credit.returns_ES is None
    assert credit.advantages_ES[:, 0].tolist() == pytest.approx([-1, 0, 1, 0, 0], abs=2e-6)
    assert torch.equal(credit.advantages_ES[:, 0], credit.advantages_ES[:, 1])
    assert torch.all(credit.advantages_ES[3:] == 0)


def test_dr_grpo_golden() -> None:
    # R = 0 4 with mean 2, and 1 0 with mean .5: the spread stays.
    credit = dr_grpo(
        rewards_ES=torch.tensor([[0.0], [1.0], [4.0], [0.0]]),
        mask_ES=torch.ones(4, 1, dtype=torch.bool),
        group_E=torch.tensor([0, 1, 0, 1]),
    )
    assert credit.advantages_ES.flatten().tolist() == [-2, 0.5, 2, -0.5]


@pytest.mark.parametrize("name", sorted(COMPARES_MEMBERS))
def test_a_lone_member_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="one member"):
        ADVANTAGES[name](
            rewards_ES=REWARDS_ES[:1], mask_ES=MASK_ES[:1], group_E=GROUP_E[:1], values_ES=None
        )


@given(st.floats(-4, 4), st.sampled_from([0.5, 2.0, 8.0]))
def test_grpo_ignores_a_shift_of_the_rewards_and_nearly_a_scale(shift: float, scale: float) -> None:
    def advantages(rewards_ES: Tensor) -> Tensor:
        return grpo(rewards_ES=rewards_ES, mask_ES=MASK_ES, group_E=GROUP_E).advantages_ES

    moved_ES = torch.tensor([[shift, 0.0]]) + scale * REWARDS_ES
    torch.testing.assert_close(advantages(moved_ES), advantages(REWARDS_ES), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_no_reward_and_no_value_is_no_advantage(name: str) -> None:
    credit = ADVANTAGES[name](
        rewards_ES=torch.zeros(5, 2),
        mask_ES=MASK_ES,
        values_ES=torch.zeros(5, 2),
        group_E=GROUP_E,
        **PLAIN,
    )
    assert torch.all(credit.advantages_ES == 0)


@given(groups(min_members=2))
def test_group_statistics_count_episodes_however_they_were_cut_into_rows(made: list[Group]) -> None:
    index = episode_index(collate(flat_samples(made)))
    rewards_ES = token_rewards([e for _, e in trainable(made)], index, "turn")
    credit = dr_grpo(rewards_ES=rewards_ES, mask_ES=index.mask_ES, group_E=index.group_E)
    at = 0
    for group in made:
        totals = [sum(t.reward + t.penalty for t in e.turns) for e in group.episodes]
        for reward in totals:
            expected = reward - sum(totals) / len(totals)
            assert credit.advantages_ES[at, 0].item() == pytest.approx(expected, abs=1e-5)
            at += 1


def test_three_contexts_give_the_same_credit() -> None:
    def credit(*prompts: tuple[int, ...]) -> Tensor:
        turns = [turn(float(k), prompt=p, sampled=(8, 9)) for k, p in enumerate(prompts)]
        batch = collate(flat_samples([Group((episode(*turns),))]))
        index = episode_index(batch)
        rewards_ES = token_rewards([episode(*turns)], index, "turn")
        values_ES = to_episodes((batch.token_ids_BT == 8).float(), index)
        arrays = {"rewards_ES": rewards_ES, "values_ES": values_ES, "mask_ES": index.mask_ES}
        return gae(**arrays, **PLAIN | {"gamma": 0.9, "lam": 0.8}).advantages_ES

    full = credit((1,), (1, 8, 9, 2), (1, 8, 9, 2, 8, 9, 3))
    window = credit((1,), (1, 8, 9, 2), (4, 8, 9, 3))
    assert torch.equal(full, window) and torch.equal(full, credit((1,), (2,), (3,)))


# A game of two binary choices; R is read off the pair; its policy is a table of three logits.

PAY = {(0, 0): 0.3, (0, 1): -0.2, (1, 0): 1.0, (1, 1): 0.1}


def _play(logits_3: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Token logprobs ``(4, 2)`` of the four possible episodes."""
    on_3, off_3 = (
        torch.nn.functional.logsigmoid(logits_3),
        torch.nn.functional.logsigmoid(-logits_3),
    )
    rows = []
    paths = list(product((0, 1), repeat=2))
    for first, second in paths:
        later = 1 + first
        rows.append(
            torch.stack([on_3[0] if first else off_3[0], on_3[later] if second else off_3[later]])
        )
    return torch.stack(rows), paths


def _true_gradient(logits_3: Tensor) -> Tensor:
    logprobs_42, paths = _play(logits_3)
    value = (logprobs_42.sum(dim=1).exp() * torch.tensor([PAY[p] for p in paths])).sum()
    return torch.autograd.grad(value, logits_3)[0]


def test_gae_with_lambda_one_estimates_the_true_gradient_whatever_the_values() -> None:
    logits_3 = torch.tensor([0.2, -0.4, 0.7], requires_grad=True)
    logprobs_42, paths = _play(logits_3)
    rewards_ES = torch.tensor([[0.0, PAY[p]] for p in paths])
    # A baseline may know the state, not the choice: V₀ for all, V₁ by the first choice.
    values_ES = torch.tensor([[0.4, -1.0 if first else 2.0] for first, _ in paths])
    credit = gae(rewards_ES=rewards_ES, values_ES=values_ES, mask_ES=rewards_ES > -9, **PLAIN)
    chance_4 = logprobs_42.sum(dim=1).exp().detach()
    surrogate = (chance_4[:, None] * credit.advantages_ES * logprobs_42).sum()
    torch.testing.assert_close(
        torch.autograd.grad(surrogate, logits_3)[0], _true_gradient(logits_3)
    )


def test_dr_grpo_estimates_the_true_gradient_shrunk_by_its_own_baseline() -> None:
    logits_3 = torch.tensor([0.2, -0.4, 0.7], requires_grad=True)
    logprobs_42, paths = _play(logits_3)
    chance_4 = logprobs_42.sum(dim=1).exp().detach()
    num_members, surrogate = 3, torch.zeros(())
    for members in product(range(4), repeat=num_members):
        chosen = list(members)
        rewards_ES = torch.tensor([[0.0, PAY[paths[i]]] for i in chosen])
        group_E = torch.zeros(num_members, dtype=torch.long)
        credit = dr_grpo(rewards_ES=rewards_ES, mask_ES=rewards_ES > -9, group_E=group_E)
        inner = (credit.advantages_ES * logprobs_42[chosen]).sum() / num_members
        surrogate = surrogate + chance_4[chosen].prod() * inner
    estimate_3 = torch.autograd.grad(surrogate, logits_3)[0]
    shrink = (num_members - 1) / num_members
    torch.testing.assert_close(estimate_3, shrink * _true_gradient(logits_3))
