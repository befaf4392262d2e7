"""The filter keeps the groups whose outcome is uncertain."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import episode, group, turn

from ragen.config import FilterConfig
from ragen.filters import FILTERS, SCORES, reward_std, select
from ragen.types import Group

SURE, UNSURE, FLAT = group(0.0, 0.5), group(0.0, 1.0), group(0.1, 0.1)


def test_config_names_scores_and_rules() -> None:
    keys = FilterConfig.model_fields
    assert set(get_args(keys["score"].annotation)) == set(SCORES)
    assert set(get_args(keys["rule"].annotation)) == set(FILTERS)


def test_reward_std_golden() -> None:
    # 0 1 2: mean 1, (1 + 0 + 1) / (3 − 1) = 1
    assert reward_std(group(0.0, 1.0, 2.0)) == 1
    assert reward_std(group(0.1, 0.1, 0.1)) == 0  # exactly, whatever rounding says


def test_reward_std_reads_raw_rewards_of_episodes_that_did_not_fail() -> None:
    penalised = episode(turn(1.0, penalty=-9.0))
    broken = episode(turn(50.0), stop="error")
    assert reward_std(Group((episode(turn(0.0)), penalised, broken))) == pytest.approx(0.5**0.5)
    assert reward_std(Group((penalised, broken))) == 0


def test_top_k_keeps_a_share_in_the_order_of_the_groups() -> None:
    groups = [SURE, FLAT, UNSURE, UNSURE]
    assert select(groups) == [0, 1, 2, 3]
    assert select(groups, rule="top_k", value=0.25) == [2]
    assert select(groups, rule="top_k", value=0.75) == [0, 2, 3]
    assert select(groups, rule="top_k", value=0.5, keep="smallest") == [0, 1]
    assert select([FLAT], rule="top_k", value=0.01) == [0]


def test_flat_groups_may_be_left_out() -> None:
    assert select([FLAT, SURE], include_zero=False) == [1]
    assert select([FLAT, FLAT], rule="top_k", value=1.0, include_zero=False) == []


def test_groups_with_too_few_played_episodes_are_never_kept() -> None:
    broken = episode(stop="error")
    one_left, none_left = Group((episode(turn(1.0)), broken)), Group((broken, broken))
    assert select([one_left, none_left, SURE]) == [0, 2]
    assert select([one_left, none_left, SURE], min_played=2) == [2]
    assert select([]) == []


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), min_size=1, max_size=6),
    st.floats(0.01, 1),
    st.sampled_from(["largest", "smallest"]),
)
def test_no_group_left_out_scores_better_than_one_kept(
    rewards: list[list[int]], share: float, keep: str
) -> None:
    groups = [group(*map(float, members)) for members in rewards]
    kept = select(groups, rule="top_k", value=share, keep=keep)  # type: ignore[arg-type]
    assert len(kept) == max(1, round(share * len(groups))) and kept == sorted(set(kept))
    sign = 1 if keep == "largest" else -1
    left = [sign * reward_std(g) for i, g in enumerate(groups) if i not in kept]
    assert min(sign * reward_std(groups[i]) for i in kept) >= max(left, default=-9)
