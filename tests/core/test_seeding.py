"""Level seeds: every training group has its own level, and no evaluation level is trained on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragen.bases.curriculum import FAMILIES, LEVELS_PER_LESSON
from ragen.config.keys import expected
from ragen.core.seeding import (
    BASE_LEVELS,
    EVAL_LEVELS,
    MAX_REFILLS,
    REFILL_LEVELS,
    SFT_LEVELS,
    TRAIN_LEVELS,
    refill_level,
    train_level,
)


@given(st.integers(1, 512), st.integers(0, 300_000))
def test_level_ranges_do_not_overlap(num_groups: int, step: int) -> None:
    """Up to 300,000 steps of 512 groups, each replaced three times: 460 million levels."""
    last = EVAL_LEVELS + 9877 - 1
    assert expected("eval.episodes").endswith("≤ 9877")
    assert last < TRAIN_LEVELS <= train_level(step * num_groups + num_groups - 1) < REFILL_LEVELS
    most = refill_level(step, MAX_REFILLS * num_groups - 1, num_groups)
    assert REFILL_LEVELS <= most < BASE_LEVELS


def test_fine_tuning_and_base_preparation_share_no_level() -> None:
    """Each lesson of base preparation has a million levels; each stage, room for 100 lessons."""
    stages = max(len(stages) for stages in FAMILIES.values())
    assert BASE_LEVELS + LEVELS_PER_LESSON * 100 * stages < SFT_LEVELS


@given(st.integers(1, 5), st.integers(1, 6))
def test_no_training_level_is_repeated(num_groups: int, steps: int) -> None:
    levels = [
        level
        for step in range(steps)
        for level in (
            *(train_level(step * num_groups + group) for group in range(num_groups)),
            *(refill_level(step, i, num_groups) for i in range(MAX_REFILLS * num_groups)),
        )
    ]
    assert len(set(levels)) == len(levels) == steps * num_groups * (1 + MAX_REFILLS)


@given(st.integers(1, 40), st.integers(0, 100))
def test_groups_take_turns_on_a_pool_of_levels(num_levels: int, first: int) -> None:
    turn = [train_level(first + number, num_levels) for number in range(num_levels)]
    assert sorted(turn) == list(range(TRAIN_LEVELS, TRAIN_LEVELS + num_levels))


def test_largest_refill_setting_matches_the_reserved_levels() -> None:
    assert expected("rollout.refill").endswith(f"≤ {MAX_REFILLS}")
