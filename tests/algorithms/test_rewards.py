"""Rewards: placement on tokens, normalisation, and the KL penalty."""

from __future__ import annotations

import statistics
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import episode, groups, turn

from ragen.algorithms.batch import collate, episode_index, scatter_to_rows
from ragen.algorithms.rewards import (
    Normalise,
    Over,
    Placement,
    compare_within,
    comparison_classes,
    kl_penalty,
    normalise,
    token_rewards,
)
from ragen.algorithms.samples import to_samples
from ragen.config.sections import RewardConfig
from ragen.core.types import Group
from tests.tolerance import rounding

# Two turns of two and one sampled tokens, in two rows: 1.0 with an invalid reply, then −0.25.
EPISODE = episode(turn(1.0, penalty=-0.1), turn(-0.25, prompt=(3,), sampled=(9,)))


def test_placement_golden() -> None:
    index = episode_index(collate(to_samples([Group((EPISODE,))])[0]))
    assert token_rewards([EPISODE], index, "turn").tolist() == [pytest.approx([0, 0.9, -0.25])]
    assert token_rewards([EPISODE], index, "episode").tolist() == [pytest.approx([0, 0, 0.65])]
    raw = token_rewards([EPISODE], index, "turn", penalties=False)
    assert raw.tolist() == [[0, 1, -0.25]]


@given(groups())
def test_both_placements_have_the_same_sum_and_raw_differs_by_the_penalties(
    made: list[Group],
) -> None:
    episodes = to_samples(made)[1]
    index = episode_index(collate(to_samples(made)[0]))
    at_turns = token_rewards(episodes, index, "turn").sum(dim=1)
    at_end = token_rewards(episodes, index, "episode").sum(dim=1)
    raw = token_rewards(episodes, index, "episode", penalties=False).sum(dim=1)
    penalty = [sum(t.penalty for t in e.turns) for e in episodes]
    assert at_turns.tolist() == pytest.approx(at_end.tolist())
    assert raw.tolist() == pytest.approx([e.total_reward for e in episodes])
    assert (at_end - raw).tolist() == pytest.approx(penalty)


@given(groups())
def test_turn_rewards_are_on_turn_ends_only(made: list[Group]) -> None:
    batch = collate(to_samples(made)[0])
    index = episode_index(batch)
    rewards_ES = token_rewards(to_samples(made)[1], index, "turn")
    rewards_BT = scatter_to_rows(rewards_ES, index)
    assert torch.all(rewards_BT[~batch.turn_ends_BT] == 0)


def test_an_episode_that_lost_a_turn_is_a_bug() -> None:
    index = episode_index(collate(to_samples([Group((EPISODE,))])[0]))
    with pytest.raises(AssertionError, match="every turn"):
        token_rewards([episode(turn(1.0))], index, "turn")


def test_kl_penalty_is_negative_on_tokens_that_the_policy_prefers() -> None:
    # −.1 · (−1 − (−2)) = −.1;  −.1 · (−2 − (−1)) = +.1;  equal: 0
    old, reference = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-2.0, -1.0, -1.0])
    assert kl_penalty(old, reference, 0.1).tolist() == pytest.approx([-0.1, 0.1, 0.0])


# Normalisation.

# Totals 0 1 5 (mean 2, std √7 = 2.6458) and, in another class, 3 3. Two turns of one token.
PAID_ES = torch.tensor([[1.0, -1.0], [0.0, 1.0], [2.0, 3.0], [3.0, 0.0], [0.0, 3.0]])
CLASS_E = torch.tensor([0, 0, 0, 1, 1])
ON_ES = torch.ones(5, 2, dtype=torch.bool)


def test_config_names_the_methods_the_classes_and_the_placements() -> None:
    fields = RewardConfig.model_fields
    assert get_args(fields["normalise"].annotation) == get_args(Normalise)
    assert get_args(fields["over"].annotation) == get_args(Over)
    assert get_args(fields["placement"].annotation) == get_args(Placement)


def test_normalised_rewards_golden() -> None:
    def rows(method: Normalise) -> list[list[float]]:
        return normalise(PAID_ES, ON_ES, CLASS_E, method).tolist()

    assert rows("identity") == PAID_ES.tolist()
    # The mean is subtracted from the last token's reward.
    assert rows("mean") == [[1, -3], [0, -1], [2, 1], [3, -3], [0, 0]]
    # Divided by 2.6458: totals −.7559 −.3780 1.1339. Equal totals leave their rewards unscaled.
    found = rows("mean_std")
    assert found[0] == pytest.approx([0.3780, -1.1339], abs=1e-4)
    assert found[1] == pytest.approx([0.0, -0.3780], abs=1e-4)
    assert found[2] == pytest.approx([0.7559, 0.3780], abs=1e-4)
    assert found[3:] == [[3, -3], [0, 0]]


def test_asymmetric_clip_golden() -> None:
    # Totals of 12 episodes: ten 0, one 10, one −10: mean 0, std √(200/11) = 4.2640 → ±2.3452.
    paid_ES = torch.tensor([[0.0]] * 10 + [[10.0], [-10.0]])
    one = torch.zeros(12, dtype=torch.long)
    found = normalise(paid_ES, paid_ES > -99, one, "asym_clip")[:, 0].tolist()
    assert found == pytest.approx([0.0] * 10 + [2.3452, -1.0], abs=1e-4)
    # One success in 16: mean 1/16, std 1/4 → 15/16 ÷ 1/4 = 3.75, clipped to 3; failures get −.25.
    paid_ES = torch.tensor([[0.0]] * 15 + [[1.0]])
    one = torch.zeros(16, dtype=torch.long)
    found = normalise(paid_ES, paid_ES > -99, one, "asym_clip")[:, 0].tolist()
    assert found == pytest.approx([-0.25] * 15 + [3.0], abs=1e-4)


@given(groups(), st.sampled_from(get_args(Normalise)), st.sampled_from(get_args(Over)))
def test_an_episodes_rewards_sum_to_its_normalised_total_in_both_placements(
    made: list[Group], method: Normalise, over: Over
) -> None:
    episodes = to_samples(made)[1]
    index = episode_index(collate(to_samples(made)[0]))
    classes = comparison_classes(index, over)
    sums = []
    for placement in get_args(Placement):
        paid_ES = token_rewards(episodes, index, placement)
        rewards_ES = normalise(paid_ES, index.mask_ES, classes, method)
        assert torch.all(rewards_ES[~index.turn_ends_ES] == 0)
        sums.append(rewards_ES.sum(dim=1))
    assert sums[0].tolist() == pytest.approx(sums[1].tolist(), abs=rounding(16, 4))

    penalised_E = token_rewards(episodes, index, "episode").sum(dim=1)
    for e, number in enumerate(classes.tolist()):
        same = [
            r for r, c in zip(penalised_E.tolist(), classes.tolist(), strict=True) if c == number
        ]
        assert sums[0][e].item() == pytest.approx(
            _by_hand(penalised_E[e].item(), same, method), abs=1e-4
        )


def _by_hand(total: float, same: list[float], method: Normalise) -> float:
    if method == "identity":
        return total
    if max(same) == min(same):
        return 0.0
    centred = total - statistics.fmean(same)
    if method == "mean":
        return centred
    score = centred / (statistics.stdev(same) + 1e-6)
    return min(max(score, -1.0), 3.0) if method == "asym_clip" else score


def test_comparison_classes() -> None:
    one = episode(turn(1.0))
    index = episode_index(collate(to_samples([Group((one, one)), Group((one,))])[0]))
    classes = {over: comparison_classes(index, over).tolist() for over in get_args(Over)}
    assert classes == {"group": [0, 0, 1], "batch": [0, 0, 0]}


def test_statistics_count_episodes_not_turns_or_rows() -> None:
    # Totals 1 (four turns, four rows) and 0: centred ±.5, not weighted by turns.
    long = episode(*(turn(0.25, prompt=(k,)) for k in range(1, 5)))
    made = [Group((long, episode(turn(0.0))))]
    index = episode_index(collate(to_samples(made)[0]))
    paid_ES = token_rewards([long, made[0].episodes[1]], index, "turn")
    rewards_ES = normalise(paid_ES, index.mask_ES, index.group_E, "mean")
    assert rewards_ES.sum(dim=1).tolist() == [0.5, -0.5]


def test_a_class_of_one_or_of_equal_totals_gives_zero() -> None:
    centred_N, std_N = compare_within(torch.tensor([5.0, 0.1, 0.1]), torch.tensor([0, 1, 1]))
    assert centred_N.tolist() == std_N.tolist() == [0, 0, 0]
