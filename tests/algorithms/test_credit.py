"""Credit: placement of rewards on tokens, normalisation, KL penalty, and token advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import episode, groups, turn

from ragen.algorithms.advantages import ADVANTAGES
from ragen.algorithms.batch import Batch, collate, episode_index
from ragen.algorithms.credit import credit, kl_penalty, normalise, token_rewards
from ragen.algorithms.estimator import needs_values
from ragen.algorithms.samples import to_samples
from ragen.config.sections import AdvantageConfig, LossConfig, RewardConfig
from ragen.core.types import Group
from tests.tolerance import rounding

NO_KL = LossConfig(kl=0.0)

# Two turns of two tokens with rewards 1 (for an invalid reply) and 2; one turn with reward 0.
GROUP = Group(
    (
        episode(
            turn(1.0, penalty=-0.5, state="a", thought="t", value=1.0),
            turn(2.0, prompt=(3,), sampled=(9, 9), state="b", value=0.5),
            success=True,
        ),
        episode(turn(0.0, state="a", thought="t", value=0.5)),
    )
)


def apply_credit(
    made: list[Group],
    reward: RewardConfig,
    loss: LossConfig = NO_KL,
    group_weights: list[float] | None = None,
    **advantage: Any,
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
    return credit(batch, episodes, reward, AdvantageConfig(**advantage), loss, group_weights)


def token_advantages(batch: Batch) -> list[float]:
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
        # The first tokens of the turns in a are thoughts: weights .1 1 1 1 | .1 1, mean .7.
        ("act_focus", [0.1010] + [1.0102] * 3 + [-0.1010, -1.0102]),
        # Six tokens, four of which are of the success.
        ("raft", [1.5] * 4 + [0.0] * 2),
        # State a: turn returns .5 + .5 · 2 = 1.5 and 0 → ±.7071; b has one turn.
        ("gigpo", [1.4142, 1.4142, 0.7071, 0.7071, -1.4142, -1.4142]),
        # V = 1 .5 | .5, γ = .5: .5 + .25 − 1 = −.25, 2 − .5 = 1.5, −.5; mean .25, std .9747.
        ("vine", [-0.5130, -0.5130, 1.2825, 1.2825, -0.7695, -0.7695]),
        # Mean 1.5, squares 1 1 .25 .25 2.25 2.25, std 1.1832.
        ("reinforce_pp", [0.8452, 0.8452, 0.4226, 0.4226, -1.2677, -1.2677]),
        # ±1.25 minus 5/12, std 1.2910.
        ("reinforce_pp_baseline", [0.6455] * 4 + [-1.2910] * 2),
    ],
)
def test_each_estimator_golden(name: str, expected: list[float]) -> None:
    by_turn = {"gamma": 0.5} if name in ("bi_level_gae", "gigpo", "vine") else {}
    batch = apply_credit([GROUP], RewardConfig(placement="turn"), name=name, **by_turn)
    assert token_advantages(batch) == pytest.approx(expected, abs=1e-4)
    assert (batch.returns_BT is None) == (not needs_values(ADVANTAGES[name]))


def test_every_estimator_has_a_golden() -> None:
    (mark,) = test_each_estimator_golden.pytestmark  # type: ignore[attr-defined]
    assert {name for name, _ in mark.args[1]} == set(ADVANTAGES)


def test_the_kl_penalty_is_added_after_normalisation() -> None:
    # Totals 2.5 and 0, centred ±1.25. KL: β · (−2) on each of four and of two tokens, β = .25.
    reward = RewardConfig(normalise="mean")
    batch = apply_credit([GROUP], reward, LossConfig(kl=0.25), name="gae")
    assert batch.rewards_BT is not None
    assert batch.rewards_BT[batch.mask_BT].tolist() == [-0.5, -0.5, -0.5, 0.75, -0.5, -1.75]


def test_group_weights_multiply_the_advantages() -> None:
    # Rewards 0 and 2 in both groups: advantages ∓1 on two sampled tokens each.
    pair = Group((episode(turn(0.0)), episode(turn(2.0))))
    batch = apply_credit([pair, pair], RewardConfig(), group_weights=[0.5, 2.0], name="dr_grpo")
    assert batch.advantages_BT is not None
    assert batch.advantages_BT.sum(dim=1).tolist() == [-1, 1, -4, 4]


# Placement.

# Two turns of two and one sampled tokens, in two rows: 1.0 with an invalid reply, then −0.25.
EPISODE = episode(turn(1.0, penalty=-0.1), turn(-0.25, prompt=(3,), sampled=(9,)))


def test_placement_golden() -> None:
    index = episode_index(collate(to_samples([Group((EPISODE,))])[0]))
    assert token_rewards([EPISODE], index, "turn").tolist() == [pytest.approx([0, 0.9, -0.25])]
    assert token_rewards([EPISODE], index, "episode").tolist() == [pytest.approx([0, 0, 0.65])]


def test_kl_penalty_is_negative_on_tokens_that_the_policy_prefers() -> None:
    # −.1 · (−1 − (−2)) = −.1;  −.1 · (−2 − (−1)) = +.1;  equal: 0
    old, reference = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-2.0, -1.0, -1.0])
    assert kl_penalty(old, reference, 0.1).tolist() == pytest.approx([-0.1, 0.1, 0.0])


# Normalisation.


def accepted_values(key: str) -> tuple[str, ...]:
    """The values that the config accepts for a key of its section `reward`."""
    return get_args(RewardConfig.model_fields[key].annotation)


# Totals 0 1 5 (mean 2, std √7 = 2.6458) in one class, 3 3 in another. Two turns of one token.
REWARDS_ES = torch.tensor([[1.0, -1.0], [0.0, 1.0], [2.0, 3.0], [3.0, 0.0], [0.0, 3.0]])
CLASS_E = torch.tensor([0, 0, 0, 1, 1])
ON_ES = torch.ones(5, 2, dtype=torch.bool)


def test_normalised_rewards_golden() -> None:
    def rows(method: str) -> list[list[float]]:
        return normalise(REWARDS_ES, ON_ES, CLASS_E, method).tolist()

    assert rows("identity") == REWARDS_ES.tolist()
    # The mean is subtracted from the last token's reward.
    assert rows("mean") == [[1, -3], [0, -1], [2, 1], [3, -3], [0, 0]]
    # Divided by 2.6458: totals −.7559 −.3780 1.1339. Equal totals leave their rewards unscaled.
    rewards = rows("mean_std")
    assert rewards[0] == pytest.approx([0.3780, -1.1339], abs=1e-4)
    assert rewards[1] == pytest.approx([0.0, -0.3780], abs=1e-4)
    assert rewards[2] == pytest.approx([0.7559, 0.3780], abs=1e-4)
    assert rewards[3:] == [[3, -3], [0, 0]]


def test_asymmetric_clip_golden() -> None:
    # Totals of 12 episodes: ten 0, one 10, one −10: mean 0, std √(200/11) = 4.2640 → ±2.3452.
    rewards_ES = torch.tensor([[0.0]] * 10 + [[10.0], [-10.0]])
    one = torch.zeros(12, dtype=torch.long)
    rewards = normalise(rewards_ES, rewards_ES > -99, one, "asym_clip")[:, 0].tolist()
    assert rewards == pytest.approx([0.0] * 10 + [2.3452, -1.0], abs=1e-4)
    # One success in 16: mean 1/16, std 1/4 → 15/16 ÷ 1/4 = 3.75, clipped to 3; failures get −.25.
    rewards_ES = torch.tensor([[0.0]] * 15 + [[1.0]])
    one = torch.zeros(16, dtype=torch.long)
    rewards = normalise(rewards_ES, rewards_ES > -99, one, "asym_clip")[:, 0].tolist()
    assert rewards == pytest.approx([-0.25] * 15 + [3.0], abs=1e-4)


@given(groups(), st.sampled_from(accepted_values("normalise")), st.booleans())
def test_an_episodes_rewards_sum_to_its_normalised_total_in_both_placements(
    made: list[Group], method: str, in_groups: bool
) -> None:
    episodes = to_samples(made)[1]
    index = episode_index(collate(to_samples(made)[0]))
    classes = index.group_E if in_groups else torch.zeros_like(index.group_E)
    sums = []
    for placement in accepted_values("placement"):
        rewards_ES = token_rewards(episodes, index, placement)
        totals = [e.reward + sum(t.penalty for t in e.turns) for e in episodes]
        assert rewards_ES.sum(dim=1).tolist() == pytest.approx(totals)
        rewards_ES = normalise(rewards_ES, index.mask_ES, classes, method)
        assert torch.all(rewards_ES[~index.turn_ends_ES] == 0)
        sums.append(rewards_ES.sum(dim=1))
    assert sums[0].tolist() == pytest.approx(sums[1].tolist(), abs=rounding(16, 4))


def test_rewards_are_normalised_over_the_batch_or_each_group() -> None:
    # Totals 0 2 | 4 8. Means 1 and 6 of the groups, 3.5 of the batch.
    made = [Group(tuple(episode(turn(r)) for r in pair)) for pair in ((0.0, 2.0), (4.0, 8.0))]
    for over, expected in (("group", [-1, 1, -2, 2]), ("batch", [-3.5, -1.5, 0.5, 4.5])):
        batch = apply_credit(made, RewardConfig(normalise="mean", over=over), name="gae")
        assert batch.rewards_BT is not None
        assert batch.rewards_BT.sum(dim=1).tolist() == expected
