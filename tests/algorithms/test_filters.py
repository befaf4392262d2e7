"""Filters: scores of groups, rules that select groups by score, and group weights."""

from __future__ import annotations

from statistics import fmean
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import episode, group, turn

from ragen.algorithms.filters import (
    FILTERS,
    SCORES,
    group_weights,
    keep_top_k,
    keep_top_p,
    reward_std,
    select,
)
from ragen.config.extensions import SCORE
from ragen.config.sections import FilterConfig
from ragen.core.types import Episode, Group

LOW, HIGH, FLAT = group(0.0, 0.5), group(0.0, 1.0), group(0.1, 0.1)
BROKEN = Group((episode(stop="error"), episode(stop="timeout")))


def test_config_names_the_scores_and_the_rules() -> None:
    assert SCORE in FilterConfig.model_fields["score"].metadata
    assert set(SCORE.names) == set(SCORES)
    assert set(get_args(FilterConfig.model_fields["rule"].annotation)) == set(FILTERS)


# Scores.


def test_reward_scores_golden() -> None:
    # 0 1 2: mean 1, (1 + 0 + 1) / (3 − 1) = 1;  0 3: mean 1.5, 2 · 1.5² / 1 = 4.5
    assert reward_std(group(0.0, 1.0, 2.0)) == 1
    assert reward_std(group(0.1, 0.1, 0.1)) == 0  # exactly, in spite of rounding
    assert reward_std(group(sum([-0.1] * 10), -0.3 - 0.3 - 0.4)) == 0  # equal but for rounding
    assert reward_std(group(0.0, 3.0)) == pytest.approx(4.5**0.5)
    assert SCORES["variance"](group(0.0, 3.0)) == pytest.approx(4.5)


@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_ignore_failed_episodes_rows_and_penalties(name: str) -> None:
    def episodes(penalty: float) -> tuple[Episode, ...]:
        """Two episodes. The second makes two samples: its last prompt does not extend the first."""
        first, second = turn(1.0, penalty=penalty), turn(0.5, prompt=(9, 9), sampled=(4, 5, 6))
        return episode(turn(0.25, penalty=penalty)), episode(first, second)

    plain, broken = Group(episodes(0.0)), episode(turn(50.0, sampled=range(9)), stop="error")
    assert SCORES[name](Group((*episodes(-1.0), broken))) == SCORES[name](plain) > 0
    assert SCORES[name](BROKEN) == 0


# Rules.


def test_top_k_accepts_a_share_or_a_count() -> None:
    scores = [0.1, 0.5, 0.0, 0.5]
    assert keep_top_k(scores, 0.01, 4) == [1]  # at least one
    assert keep_top_k(scores, 1.0, 4) == [1, 3, 0, 2]  # 1 is a share: all groups
    assert keep_top_k(scores, 2, 4) == [1, 3]
    assert keep_top_k(scores, 9, 4) == [1, 3, 0, 2]


def test_top_p_golden() -> None:
    # Shares .5 .3 .2: one group holds .5, two hold .51, three hold .81.
    scores = [0.2, 0.5, 0.3]
    for value, kept in ((0.01, [1]), (0.5, [1]), (0.51, [1, 2]), (0.8, [1, 2]), (0.81, [1, 2, 0])):
        assert keep_top_p(scores, value, 3) == kept
    assert keep_top_p([0.0] * 4, 0.5, 4) == keep_top_k([0.0] * 4, 0.5, 4) == [0, 1]
    assert keep_top_p([0.1] * 10, 0.3, 10) == [0, 1, 2]  # although .1 + .1 + .1 ≠ .3 in floats


def test_shares_of_negative_scores_are_refused() -> None:
    with pytest.raises(ValueError, match=r'use filter\.rule = "top_k"'):
        keep_top_p([-1.0, 2.0], 0.5, 2)


# Scores and rules together.


def test_groups_of_equal_rewards_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select([FLAT, LOW], include_zero=False) == [1]
    assert select([FLAT, FLAT], rule="top_k", value=1.0, include_zero=False) == []
    # Under any score: a group of equal high rewards is still left out.
    monkeypatch.setitem(SCORES, "mean", lambda group: fmean(e.reward for e in group.episodes))
    groups = [group(9.0, 9.0), LOW, HIGH]
    assert select(groups, score="mean", rule="top_k", value=1 / 3) == [0]
    assert select(groups, score="mean", rule="top_k", value=1 / 3, include_zero=False) == [2]


def test_groups_with_too_few_played_episodes_are_never_kept() -> None:
    broken = episode(stop="error")
    one_left, none_left = Group((episode(turn(1.0)), broken)), Group((broken, broken))
    assert select([one_left, none_left, LOW]) == [0, 2]
    assert select([one_left, none_left, LOW], min_played=2) == [2]
    assert select([]) == []


@pytest.mark.parametrize("rule", sorted(FILTERS))
def test_groups_that_cannot_be_kept_are_not_ranked(rule: str) -> None:
    """Groups of failed episodes or of equal rewards do not count as candidates."""
    for excluded, options in ((BROKEN, {}), (FLAT, {"include_zero": False})):
        kept = select([excluded, LOW, excluded, HIGH], rule=rule, value=0.25, **options)  # type: ignore[arg-type]
        assert kept and set(kept) <= {1, 3}
        if rule == "top_k":
            assert kept == [3]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), min_size=1, max_size=6),
    st.floats(0.01, 1),
    st.sampled_from(["top_k", "top_p"]),
)
def test_no_discarded_group_scores_higher_than_a_kept_one(
    rewards: list[list[int]], share: float, rule: str
) -> None:
    groups = [group(*map(float, row)) for row in rewards]
    kept = select(groups, rule=rule, value=share)
    assert kept and kept == sorted(set(kept))
    if rule == "top_k":
        assert len(kept) == max(1, round(share * len(groups)))
    discarded = [reward_std(g) for i, g in enumerate(groups) if i not in kept]
    assert min(reward_std(groups[i]) for i in kept) >= max(discarded, default=-9)


# Group weights.


def test_reweighting_golden() -> None:
    # Stds .5/√2, 1/√2 and 0, divided by the largest.
    assert group_weights([LOW, HIGH, FLAT], "reweight") == pytest.approx([0.5, 1, 0])
    assert group_weights([FLAT, FLAT], "reweight") == [0, 0]
    assert select([LOW, HIGH, FLAT], rule="reweight") == [0, 1, 2]
    assert group_weights([LOW, HIGH], "top_k") is None
