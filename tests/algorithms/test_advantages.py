"""Estimators: goldens, identities and degenerate cases (exact means are in test_enumeration)."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import groups
from torch import Tensor

from ragen.algorithms.advantages import (
    ADVANTAGES,
    bi_level_gae,
    dr_grpo,
    gae,
    gigpo,
    reinforce_pp,
)
from ragen.algorithms.batch import collate, episode_index
from ragen.algorithms.credit import token_rewards
from ragen.algorithms.estimator import (
    compares_group,
    estimate,
    needs_values,
)
from ragen.algorithms.samples import to_samples
from ragen.config.extensions import ESTIMATOR, ESTIMATOR_INPUTS
from ragen.config.reading import merge
from ragen.config.sections import AdvantageConfig
from ragen.core.errors import RagenError
from ragen.core.inputs import inputs_of
from ragen.core.types import Group
from tests.tolerance import rounding

NEED_VALUES = {name for name, estimator in ADVANTAGES.items() if needs_values(estimator)}
COMPARE_GROUP = {name for name, estimator in ADVANTAGES.items() if compares_group(estimator)}

PLAIN: dict[str, Any] = {
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "step_weight": 1.0,
    "whiten": False,
}


def test_config_names_the_estimators() -> None:
    assert ESTIMATOR in AdvantageConfig.model_fields["name"].metadata
    assert set(ESTIMATOR.names) == set(ADVANTAGES)
    for estimator in ADVANTAGES.values():
        assert {*inputs_of(estimator, ESTIMATOR_INPUTS)} == {*signature(estimator).parameters}
    assert sorted(NEED_VALUES) == ["bi_level_gae", "gae"]
    assert set(ADVANTAGES) - COMPARE_GROUP - NEED_VALUES == {*("reinforce_pp", "raft", "vine")}


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_config_refuses_a_group_size_of_one_for_estimators_that_compare_groups(name: str) -> None:
    alone = {"advantage.name": name, "rollout.group_size": 1}
    alone |= {"reward.placement": "turn"} if name in ("bi_level_gae", "vine") else {}
    alone |= {"loss.kl": 0.0} if name == "vine" else {}
    if name in COMPARE_GROUP:
        with pytest.raises(RagenError, match="compares the episodes"):
            merge(None, alone)
    else:
        assert merge(None, alone).advantage.name == name


def test_gae_golden() -> None:
    # r = 0 1 | V = .5 .8 | γ = .9, λ = .5, V = 0 after the end
    # δ₁ = 1 − .8 = .2                A₁ = .2                    return₁ = 1
    # δ₀ = 0 + .9·.8 − .5 = .22       A₀ = .22 + .45·.2 = .31    return₀ = .81
    credit = estimate(
        gae,
        rewards_ES=torch.tensor([[0.0, 1.0]]),
        mask_ES=torch.ones(1, 2, dtype=torch.bool),
        values_ES=torch.tensor([[0.5, 0.8]]),
        **PLAIN | {"gamma": 0.9, "gae_lambda": 0.5},
    )
    assert credit.advantages_ES.tolist() == [pytest.approx([0.31, 0.2], abs=rounding(4))]
    assert credit.returns_ES is not None
    assert credit.returns_ES.tolist() == [pytest.approx([0.81, 1.0], abs=rounding(4))]


def test_estimators_with_a_critic_need_values() -> None:
    for name in NEED_VALUES:
        with pytest.raises(ValueError, match="critic"):
            estimate(ADVANTAGES[name], values_ES=None)


RAGGED = rounding(12, 8.0)  # up to six products and sums of standard normals


@st.composite
def ragged(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask of some episodes of unequal length; V is arbitrary off the mask."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    mask_ES = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    rewards_ES = torch.randn(mask_ES.shape, generator=generator) * mask_ES
    return rewards_ES, torch.randn(mask_ES.shape, generator=generator), mask_ES


# Bi-level GAE.


def test_bi_level_gae_golden() -> None:
    # Two turns of two tokens: r = 0 1 | 0 2, V = .5 .8 | .4 .6, γ = λ = .5.
    # Along turn ends:  δ₂ = 2 − .6 = 1.4              A = 1.4
    #                   δ₁ = 1 + .5·.6 − .8 = .5       A = .5 + .25·1.4 = .85
    # Within the turns: δ = 0 + .6 − .4 = .2           A = .2 + .5·1.4 = .9
    #                   δ = 0 + .8 − .5 = .3           A = .3 + .5·.85 = .725
    arrays = {
        "rewards_ES": torch.tensor([[0.0, 1.0, 0.0, 2.0]]),
        "mask_ES": torch.ones(1, 4, dtype=torch.bool),
        "values_ES": torch.tensor([[0.5, 0.8, 0.4, 0.6]]),
        "turn_ends_ES": torch.tensor([[False, True, False, True]]),
    }
    parameters = PLAIN | {"gamma": 0.5, "gae_lambda": 0.5}
    credit = estimate(bi_level_gae, **arrays, **parameters)
    assert credit.advantages_ES.tolist() == [
        pytest.approx([0.725, 0.85, 0.9, 1.4], abs=rounding(8, 2))
    ]
    assert credit.returns_ES is not None
    assert credit.returns_ES.tolist() == [
        pytest.approx([1.225, 1.65, 1.3, 2.0], abs=rounding(8, 2))
    ]


@given(ragged(), st.floats(0, 1), st.integers(0, 999))
def test_bi_level_gae_with_lambda_one_discounts_by_turns(
    arrays: tuple[Tensor, Tensor, Tensor], gamma: float, seed: int
) -> None:
    """Rewards may be on any token, as with a KL penalty."""
    rewards_ES, values_ES, mask_ES = arrays
    generator = torch.Generator().manual_seed(seed)
    ends_ES = (torch.rand(mask_ES.shape, generator=generator) < 0.4) & mask_ES
    ends_ES.scatter_(1, mask_ES.sum(dim=1, keepdim=True) - 1, True)
    turn_ES = ends_ES.cumsum(dim=1) - ends_ES.long()
    credit = estimate(
        bi_level_gae,
        rewards_ES=rewards_ES,
        values_ES=values_ES,
        mask_ES=mask_ES,
        turn_ends_ES=ends_ES,
        **PLAIN | {"gamma": gamma},
    )
    for e, count in enumerate(mask_ES.sum(dim=1).tolist()):
        turns, rewards = turn_ES[e].tolist(), rewards_ES[e].tolist()
        for s in range(count):
            reward_to_go = sum(gamma ** (turns[i] - turns[s]) * rewards[i] for i in range(s, count))
            assert credit.advantages_ES[e, s].item() == pytest.approx(
                reward_to_go - float(values_ES[e, s]), abs=RAGGED
            )
        assert torch.all(credit.advantages_ES[e, count:] == 0)


# Whitening.


def test_whitening_does_not_change_the_returns() -> None:
    arrays = {
        "rewards_ES": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        "values_ES": torch.tensor([[0.1, 0.3], [0.2, 0.0]]),
        "mask_ES": torch.tensor([[True, True], [True, False]]),
    }
    plain, white = (
        estimate(gae, **arrays, **PLAIN),
        estimate(gae, **arrays, **PLAIN | {"whiten": True}),
    )
    on_N = white.advantages_ES[arrays["mask_ES"]]
    assert on_N.mean().item() == pytest.approx(0, abs=rounding(8))
    assert on_N.std().item() == pytest.approx(1, abs=rounding(8))
    assert white.returns_ES is not None and plain.returns_ES is not None
    assert torch.equal(white.returns_ES, plain.returns_ES)


def test_whitening_leaves_equal_rewards_at_zero() -> None:
    """The same rewards may sum to −1 or to its neighbours in float32."""
    totals_E = torch.tensor([-1.0, -1.0 + 2**-24, -1.0 - 2**-23])
    assert len(totals_E.unique()) == 3
    at_the_end = {"rewards_ES": torch.zeros(3, 10), "mask_ES": torch.ones(3, 10, dtype=torch.bool)}
    at_the_end["rewards_ES"][:, 9] = totals_E
    assert torch.all(reinforce_pp(**at_the_end, gamma=1.0).advantages_ES == 0)
    exact = {**at_the_end, "values_ES": torch.full((3, 10), -1.0)}
    assert torch.all(estimate(gae, **exact, **PLAIN | {"whiten": True}).advantages_ES == 0)


# Group estimators.


@pytest.mark.parametrize("name", sorted(COMPARE_GROUP - {"gigpo"}))
def test_equal_totals_give_exactly_zero_in_any_order_of_the_rewards(name: str) -> None:
    # Ten actions at −.1 each, split over turns in different ways: the float32 sums are −1 and the
    # number next to it.
    splits = [(5, 5), (3, 3, 4), (1, 1, 2, 4, 2), (1, 1, 3, 3, 2), (2, 2, 2, 2, 2)]
    rewards = [[sum([-0.1] * count) for count in split] for split in splits]
    rewards_ES = torch.zeros(len(rewards), 64)
    for e, turn_rewards in enumerate(rewards):
        for k, reward in enumerate(turn_rewards):
            rewards_ES[e, (k + 1) * 11] = reward
    assert len(set(rewards_ES.sum(dim=1).tolist())) > 1
    credit = estimate(
        ADVANTAGES[name],
        rewards_ES=rewards_ES,
        mask_ES=torch.ones(rewards_ES.shape, dtype=torch.bool),
        group_E=torch.zeros(len(rewards), dtype=torch.long),
        thought_ES=rewards_ES == 0,
    )
    assert torch.all(credit.advantages_ES == 0)


# GiGPO: a success with turns from state a (two tokens) and b; a failure with two turns from a.
GIGPO: dict[str, Any] = {
    "rewards_ES": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    "mask_ES": torch.tensor([[True, True, True], [True, True, False]]),
    "turn_ES": torch.tensor([[0, 0, 1], [0, 1, -1]]),
    "state_ES": torch.tensor([[3, 3, 8], [3, 3, -1]]),
    "group_E": torch.tensor([4, 4]),
}


def test_gigpo_compares_states_within_a_group_only() -> None:
    other = GIGPO | {
        "rewards_ES": torch.tensor([[9.0, 0, 0], [0, -5, 0]]),
        "group_E": torch.tensor([1, 1]),
    }
    both = {k: torch.cat([GIGPO[k], other[k]]) for k in GIGPO}
    parameters = {"gamma": 0.9, "step_weight": 1.0}
    apart = torch.cat([gigpo(**g, **parameters).advantages_ES for g in (GIGPO, other)])
    assert torch.equal(gigpo(**both, **parameters).advantages_ES, apart)
    none, once, twice = (
        gigpo(**GIGPO, gamma=0.9, step_weight=weight).advantages_ES for weight in (0.0, 1.0, 2.0)
    )
    torch.testing.assert_close(twice - once, once - none)


@pytest.mark.parametrize("name", sorted(COMPARE_GROUP))
def test_an_episode_alone_in_its_group_gets_zero(name: str) -> None:
    """The other episodes of its group may have ended before their first turn."""
    lone = GIGPO | {"group_E": torch.tensor([4, 5]), "thought_ES": GIGPO["turn_ES"] == 0}
    assert torch.all(estimate(ADVANTAGES[name], **lone, values_ES=None, **PLAIN).advantages_ES == 0)


@given(groups(min_episodes=2))
def test_group_statistics_count_episodes_not_rows(made: list[Group]) -> None:
    index = episode_index(collate(to_samples(made)[0]))
    rewards_ES = token_rewards(to_samples(made)[1], index, "turn")
    credit = dr_grpo(rewards_ES=rewards_ES, mask_ES=index.mask_ES, group_E=index.group_E)
    at = 0
    for group in made:
        totals = [sum(t.reward + t.penalty for t in e.turns) for e in group.episodes]
        for reward in totals:
            expected = reward - sum(totals) / len(totals)
            assert credit.advantages_ES[at, 0].item() == pytest.approx(expected, abs=rounding(8, 4))
            at += 1
