"""Rewards land on the tokens that earned them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from made import episode, groups, turn

from ragen.batch import collate, episode_index, to_samples
from ragen.rewards import kl_penalty, token_rewards
from ragen.samples import to_samples as flat_samples
from ragen.samples import trainable
from ragen.types import Group

# Two turns of two and one sampled tokens, in two rows: 1.0 with an invalid reply, then −0.25.
EPISODE = episode(turn(1.0, penalty=-0.1), turn(-0.25, prompt=(3,), sampled=(9,)))


def test_placement_golden() -> None:
    index = episode_index(collate(flat_samples([Group((EPISODE,))])))
    assert token_rewards([EPISODE], index, "turn").tolist() == [pytest.approx([0, 0.9, -0.25])]
    assert token_rewards([EPISODE], index, "episode").tolist() == [pytest.approx([0, 0, 0.65])]
    raw = token_rewards([EPISODE], index, "turn", penalties=False)
    assert raw.tolist() == [[0, 1, -0.25]]


@given(groups())
def test_both_placements_pay_the_same_sum_and_raw_differs_by_the_penalties(
    made: list[Group],
) -> None:
    episodes = [e for _, e in trainable(made)]
    index = episode_index(collate(flat_samples(made)))
    at_turns = token_rewards(episodes, index, "turn").sum(dim=1)
    at_end = token_rewards(episodes, index, "episode").sum(dim=1)
    raw = token_rewards(episodes, index, "episode", penalties=False).sum(dim=1)
    penalty = [sum(t.penalty for t in e.turns) for e in episodes]
    assert at_turns.tolist() == pytest.approx(at_end.tolist())
    assert raw.tolist() == pytest.approx([e.total_reward for e in episodes])
    assert (at_end - raw).tolist() == pytest.approx(penalty)


@given(groups())
def test_turn_rewards_stand_on_turn_ends_only(made: list[Group]) -> None:
    batch = collate(flat_samples(made))
    index = episode_index(batch)
    rewards_ES = token_rewards([e for _, e in trainable(made)], index, "turn")
    rewards_BT = to_samples(rewards_ES, index)
    assert torch.all(rewards_BT[~batch.turn_ends_BT] == 0)


def test_an_episode_that_lost_a_turn_is_a_bug() -> None:
    index = episode_index(collate(flat_samples([Group((EPISODE,))])))
    with pytest.raises(AssertionError, match="every turn"):
        token_rewards([episode(turn(1.0))], index, "turn")


def test_kl_penalty_charges_what_the_policy_likes_more() -> None:
    # −.1 · (−1 − (−2)) = −.1;  −.1 · (−2 − (−1)) = +.1;  equal: 0
    old, reference = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-2.0, -1.0, -1.0])
    assert kl_penalty(old, reference, 0.1).tolist() == pytest.approx([-0.1, 0.1, 0.0])
