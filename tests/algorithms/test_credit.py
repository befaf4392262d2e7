"""Credit: from a batch and its episodes to the advantages of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import episode, groups, turn

from ragen.algorithms.advantages import ADVANTAGES
from ragen.algorithms.batch import Batch, collate, episode_index
from ragen.algorithms.credit import credit, state_numbers
from ragen.algorithms.estimator import needs_values
from ragen.algorithms.samples import to_samples
from ragen.config.sections import AdvantageConfig, LossConfig, RewardConfig
from ragen.core.types import Group

NO_KL = LossConfig(kl=0.0)

# Two turns of two tokens with rewards 1 (for an invalid reply) and 2; one turn with reward 0.
GROUP = Group(
    (
        episode(
            turn(1.0, penalty=-0.5, state="a"), turn(2.0, prompt=(3,), sampled=(9, 9), state="b")
        ),
        episode(turn(0.0, state="a")),
    )
)


def credited(
    made: list[Group],
    reward: RewardConfig,
    loss: LossConfig = NO_KL,
    group_weights: list[float] | None = None,
    **how: Any,
) -> Batch:
    samples, episodes = to_samples(made)
    batch = collate(samples)
    zeros_BT = torch.zeros(batch.mask_BT.shape)
    batch = replace(
        batch,
        values_BT=zeros_BT,
        old_logprobs_BT=zeros_BT,
        reference_logprobs_BT=zeros_BT - 2.0 * batch.mask_BT,
    )
    return credit(batch, episodes, reward, AdvantageConfig(**how), loss, group_weights)


def on_tokens(batch: Batch) -> list[float]:
    assert batch.advantages_BT is not None
    return batch.advantages_BT[batch.mask_BT].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Returns 2.5 2.5 2 2 | 0 0 by turns, with a critic of 0: mean 1.5, std 1.1832.
        ("gae", [0.8452, 0.8452, 0.4226, 0.4226, -1.2677, -1.2677]),
        # γ = .5 per turn: 1.5 1.5 2 2 | 0 0, mean 1.1667, std 0.9309.
        ("bi_level_gae", [0.3581, 0.3581, 0.8951, 0.8951, -1.2532, -1.2532]),
        ("dr_grpo", [1.25] * 4 + [-1.25] * 2),
        ("rloo", [2.5] * 4 + [-2.5] * 2),
        ("grpo", [0.7071] * 4 + [-0.7071] * 2),
        # State a: turn returns .5 + .5 · 2 = 1.5 and 0 → ±.7071; b has one turn.
        ("gigpo", [1.4142, 1.4142, 0.7071, 0.7071, -1.4142, -1.4142]),
        # Mean 1.5, squares 1 1 .25 .25 2.25 2.25, std 1.1832.
        ("reinforce_pp", [0.8452, 0.8452, 0.4226, 0.4226, -1.2677, -1.2677]),
        # ±1.25 minus 5/12, std 1.2910.
        ("reinforce_pp_baseline", [0.6455] * 4 + [-1.2910] * 2),
    ],
)
def test_each_estimator_on_a_batch_by_hand(name: str, expected: list[float]) -> None:
    batch = credited([GROUP], RewardConfig(placement="turn"), name=name, turn_gamma=0.5)
    assert on_tokens(batch) == pytest.approx(expected, abs=1e-4)
    assert (batch.returns_BT is None) == (not needs_values(ADVANTAGES[name]))


def test_every_estimator_is_in_the_list_above() -> None:
    (mark,) = test_each_estimator_on_a_batch_by_hand.pytestmark  # type: ignore[attr-defined]
    assert {name for name, _ in mark.args[1]} == set(ADVANTAGES)


def test_the_kl_penalty_is_added_after_normalisation() -> None:
    # Totals 2.5 and 0, centred ±1.25. KL: β · (−2) on each of four and of two tokens, β = .25.
    reward = RewardConfig(normalise="mean")
    batch = credited([GROUP], reward, LossConfig(kl=0.25), name="gae")
    assert batch.rewards_BT is not None
    assert batch.rewards_BT[batch.mask_BT].tolist() == [-0.5, -0.5, -0.5, 0.75, -0.5, -1.75]


def test_the_weight_of_a_group_multiplies_its_advantages() -> None:
    # Rewards 0 and 2 in both groups: advantages ∓1 on two sampled tokens each.
    pair = Group((episode(turn(0.0)), episode(turn(2.0))))
    batch = credited([pair, pair], RewardConfig(), group_weights=[0.5, 2.0], name="dr_grpo")
    assert batch.advantages_BT is not None
    assert batch.advantages_BT.sum(dim=1).tolist() == [-1, 1, -4, 4]


@given(groups(), st.integers(1, 4))
def test_state_numbers_are_equal_where_states_are(made: list[Group], num_states: int) -> None:
    episodes = [
        replace(
            e, turns=tuple(replace(t, state_key=f"{(i + j) % num_states}") for j, t in numbered)
        )
        for i, e in enumerate(to_samples(made)[1])
        for numbered in [list(enumerate(e.turns))]
    ]
    index = episode_index(collate(to_samples(made)[0]))
    state_ES = state_numbers(episodes, index)
    assert torch.equal(state_ES >= 0, index.mask_ES)
    pairs = {
        (one.turns[k].state_key, number)
        for one, turns, numbers in zip(
            episodes, index.turn_ES.tolist(), state_ES.tolist(), strict=True
        )
        for k, number in zip(turns, numbers, strict=True)
        if k >= 0
    }
    keys, numbers = zip(*pairs, strict=True)
    assert len(set(keys)) == len(set(numbers)) == len(pairs)
