"""Levels: each training group plays one of its own, and no one trains on what is evaluated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
from ragen.finetuning.curriculum import FAMILIES, LEVELS_PER_LESSON


@given(st.integers(1, 512), st.integers(0, 300_000))
def test_ranges_of_levels_do_not_meet(num_prompts: int, step: int) -> None:
    """Up to 300,000 steps of 512 prompts, each replaced three times: 460 million levels."""
    last = EVAL_LEVELS + 9877 - 1
    assert expected("eval.episodes").endswith("≤ 9877")
    assert last < TRAIN_LEVELS <= train_level(step, num_prompts - 1, num_prompts) < REFILL_LEVELS
    most = refill_level(step, MAX_REFILLS * num_prompts - 1, num_prompts)
    assert REFILL_LEVELS <= most < BASE_LEVELS <= BASE_LEVELS


def test_fine_tuning_shows_no_level_of_base_preparation() -> None:
    """Its lessons have a million levels each, numbered from a hundred lessons a stage on."""
    stages = max(len(stages) for stages in FAMILIES.values())
    assert BASE_LEVELS + LEVELS_PER_LESSON * 100 * stages < SFT_LEVELS == SFT_LEVELS


@given(st.integers(1, 5), st.integers(1, 6))
def test_no_level_is_played_twice(num_prompts: int, steps: int) -> None:
    levels = [
        level
        for step in range(steps)
        for level in (
            *(train_level(step, group, num_prompts) for group in range(num_prompts)),
            *(refill_level(step, i, num_prompts) for i in range(MAX_REFILLS * num_prompts)),
        )
    ]
    assert len(set(levels)) == len(levels) == steps * num_prompts * (1 + MAX_REFILLS)


def test_config_allows_as_many_rounds_as_there_are_levels_for() -> None:
    assert expected("rollout.refill").endswith(f"≤ {MAX_REFILLS}")
