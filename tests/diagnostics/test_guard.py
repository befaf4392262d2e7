"""Detectors on constructed histories, their alarms, and the remedies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.config.config import Config
from ragen.config.extensions import DETECTOR
from ragen.config.reading import changed, merge
from ragen.config.sections import RESPONSES, GuardConfig, LossConfig, Response
from ragen.core.errors import RagenError
from ragen.diagnostics.collapse import WINDOW
from ragen.diagnostics.detectors import (
    DEGENERATE,
    DETECTORS,
    ENTROPY,
    EVALUATED,
    GRADIENT,
    KEPT,
    LEVELS,
    MI,
    PROMPTS,
    REWARD_STD,
    SKIPPED,
    SUCCESS,
    VALID,
    active_detectors,
)
from ragen.diagnostics.guard import (
    MESSAGES,
    REARM_STEPS,
    GuardState,
    change_seed,
    lower_learning_rate,
    raise_alarms,
    raise_kl,
    remedy,
    tighten_filter,
)
from ragen.training.recovery import GRACE_STEPS
from tests.diagnostics.replay import replay

Curve = Callable[[int], float]


def series(curve: Curve, steps: int = 100, every: int = 1) -> dict[int, float]:
    return {step: curve(step) for step in range(every, steps + 1, every)}


def fired(history: dict[str, dict[int, float]]) -> list[tuple[str, int, int]]:
    return [(alarm.detector, alarm.step, alarm.onset) for alarm in replay(history)]


def wave(step: int) -> float:
    """Deterministic noise of ±10 %."""
    return 1 + 0.1 * ((step * 7) % 11 - 5) / 5


HEALTHY: dict[str, dict[int, float]] = {
    # Success rises; failures, entropy and reward std shrink together.
    SUCCESS: series(lambda s: min(0.95, (0.3 + 0.01 * s) * wave(s))),
    REWARD_STD: series(lambda s: max(0.1, 0.45 - 0.004 * s) * wave(s)),
    ENTROPY: series(lambda s: max(0.05, 0.25 - 0.003 * s) * wave(s)),
    GRADIENT: series(lambda s: wave(s) * (1 + s % 3)),
    VALID: series(lambda s: min(1.0, 0.9 + 0.001 * s)),
    DEGENERATE: series(lambda s: 0.0),
    KEPT: series(lambda s: 0.25),
    EVALUATED: {0: 0.3} | series(lambda s: 0.3 + 0.006 * s, every=10),
    LEVELS: {0: 256} | series(lambda s: 256, every=10),
    MI: series(lambda s: 2 * wave(s), every=5),
    PROMPTS: series(lambda s: 8, every=5),
}


def test_a_healthy_run_raises_no_alarm() -> None:
    assert fired(HEALTHY) == []


def test_names_of_detectors_equal_those_of_the_config() -> None:
    assert {*DETECTORS, "stalled"} == set(DETECTOR.names) == set(RESPONSES)
    assert set(MESSAGES) == {*RESPONSES, "failed_episodes"}
    assert {GuardConfig().response(name) for name in RESPONSES} <= set(get_args(Response))


# The published signs, and the delay until each is detected.


def test_reward_std_cliff_comes_before_the_reward_falls() -> None:
    """FrozenLake-PPO (arXiv:2504.20073): std falls at step 40, reward only at 90."""
    trap = {
        SUCCESS: series(lambda s: 0.2 if s < 90 else 0.05),
        REWARD_STD: series(lambda s: 0.4 * wave(s) if s < 40 else 0.02),
    }
    # Trailing mean of five, from .4: at step 42 three of them are .02, (2 × .4 + 3 × .02)/5 = .172.
    assert fired(trap) == [("reward_std_cliff", 42, 38)]


def test_a_fall_explained_by_fewer_failures_is_no_cliff() -> None:
    # Both fall to a tenth: failures .5 → .05, std .4 → .04; a cliff is only below half of that.
    solved = {
        SUCCESS: series(lambda s: 0.5 if s < 40 else 0.95),
        REWARD_STD: series(lambda s: 0.4 if s < 40 else 0.04),
    }
    assert fired(solved) == []
    flat = solved | {REWARD_STD: series(lambda s: 0.4 if s < 40 else 0.01)}
    assert [name for name, *_ in fired(flat)] == ["reward_std_cliff"]


def test_entropy_cliff_and_blowup() -> None:
    falls = {ENTROPY: series(lambda s: 0.4 if s < 50 else 0.01)}
    # (1 × .4 + 4 × .01)/5 = .088 < .1 at step 53.
    assert fired(falls) == [("entropy_cliff", 53, 49)]
    rises = {ENTROPY: series(lambda s: 0.2 if s < 50 else 4.0)}
    # (4 × .2 + 4)/5 = .96 < 1 nat at step 50, 1.72 at 51.
    assert fired(rises) == [("entropy_blowup", 51, 47)]
    assert fired({ENTROPY: series(lambda s: 0.02 if s < 50 else 0.9)}) == [], (
        "entropy stays below one nat"
    )


@pytest.mark.parametrize("at", [90, 11])
def test_grad_spike_fires_at_its_step(at: int) -> None:
    """Published at steps 90 to 170; two windows of steps must come first."""
    history = {GRADIENT: series(lambda s: 12.0 if s == at else wave(s))}
    assert fired(history) == [("grad_spike", at, at)]


def test_a_norm_that_is_not_finite_is_no_spike() -> None:
    """Its update is skipped, and ``non_finite`` fires instead; JSON has no infinity."""
    history = {
        GRADIENT: series(lambda s: math.inf if s == 40 else wave(s)),
        SKIPPED[0]: series(lambda s: float(s == 40)),
    }
    assert fired(history) == [("non_finite", 40, 40)]


def test_widely_spread_norms_are_no_spike() -> None:
    history = {GRADIENT: series(lambda s: (0.1, 0.3, 1.0, 3.0, 9.0)[s * 3 % 5])}
    assert fired(history) == []


def test_reward_drop_needs_two_evaluations_below_the_mark() -> None:
    success = [0.3, 0.5, 0.6, 0.7, 0.8, 0.6, 0.55, 0.5]
    history = {
        EVALUATED: {10 * i: share for i, share in enumerate(success)},
        LEVELS: dict.fromkeys(range(0, 80, 10), 256.0),
    }
    # Mark at step 60: the median of .6, .7, .8. It exceeds .6 by .1, with an interval of the
    # difference up to −.018, and .55 by more. At step 50 only one evaluation is low.
    (alarm,) = replay(history)
    assert (alarm.detector, alarm.step, alarm.onset) == ("reward_drop", 60, 41)
    assert (alarm.value, alarm.baseline) == (0.55, 0.7)
    few = history | {LEVELS: dict.fromkeys(range(0, 80, 10), 32.0)}
    assert [a.step for a in replay(few)] == [], "32 levels are too few"
    once = {10 * i: share for i, share in enumerate([0.6, 0.7, 0.8, 0.4, 0.8, 0.4, 0.8])}
    assert replay(history | {EVALUATED: once}) == []


def test_mi_drop_has_its_onset_after_the_last_high_value() -> None:
    drop = {MI: {5: 1.0, 10: 4.0, 15: 3.0, 20: 1.9, 25: 1.0}}
    assert fired(drop | {PROMPTS: dict.fromkeys(drop[MI], 8)}) == [("mi_drop", 20, 16)]
    assert fired(drop | {PROMPTS: dict.fromkeys(drop[MI], 2)}) == [], "two prompts are too few"
    few = {MI: {5: 0.8, 10: 0.1}, PROMPTS: {5: 8, 10: 8}}
    assert fired(few) == [], "the highest value is too low for a drop"


def test_format_loss_is_measured_from_the_best() -> None:
    # From .3 up to .9, then .5: (2 × .9 + 3 × .5)/5 = .66 < .7.
    history = {VALID: series(lambda s: 0.3 if s < 20 else 0.9 if s < 60 else 0.5)}
    assert fired(history) == [("format_loss", 62, 58)]


def test_degenerate_text_needs_more_than_half_of_a_window() -> None:
    # From step 30 on nine of ten: (2 × 0 + 3 × .9)/5 = .54 > ½ at 32.
    broken = {DEGENERATE: series(lambda s: 0.9 if s >= 30 else 0.0)}
    assert fired(broken) == [("degenerate_text", 32, 28)]
    assert fired({DEGENERATE: series(lambda s: 0.9, 5)}) == [("degenerate_text", 5, 1)]
    assert fired({DEGENERATE: series(lambda s: 0.9 if s in (30, 31) else 0.0)}) == []


def test_non_finite_fires_on_a_skipped_update() -> None:
    for name in SKIPPED:
        skips = HEALTHY | {name: series(lambda s: 2.0 if s == 7 else 0.0)}
        assert fired(skips) == [("non_finite", 7, 7)]


def test_empty_filter_counts_steps_in_a_row() -> None:
    history = {KEPT: series(lambda s: 0.0 if s in (3, 4, 5, 6) or s >= 20 else 0.25)}
    assert fired(history) == [("empty_filter", 24, 20)]


# One alarm per lasting condition, the grace period after a rollback, and the saved state.


def test_a_lasting_condition_raises_one_alarm_and_a_returning_one_another() -> None:
    often = {
        GRADIENT: series(lambda s: 30.0 if s in (20, 22, 20 + 2 + REARM_STEPS, 60) else wave(s))
    }
    assert [step for _, step, _ in fired(often)] == [20, 60]


def test_a_lasting_condition_raises_an_alarm_only_after_the_grace_period() -> None:
    norms = series(lambda s: 0.4 if s < 20 else 0.01)
    state = GuardState(grace=30)
    steps = [
        step
        for step in range(1, 60)
        for _ in raise_alarms({ENTROPY: {s: v for s, v in norms.items() if s <= step}}, step, state)
    ]
    assert steps == [31] and GRACE_STEPS >= 2 * WINDOW


def test_a_detector_that_is_off_is_not_called() -> None:
    history, state = {DEGENERATE: series(lambda s: 1.0, 5)}, GuardState()
    active = active_detectors(GuardConfig(responses={"degenerate_text": "off"}))
    assert raise_alarms(history, 5, state, active) == []
    assert state == GuardState(checked_step=5)


@given(st.integers(1, 39), st.sampled_from([ENTROPY, REWARD_STD, GRADIENT, VALID]))
def test_saving_and_loading_the_state_changes_no_alarm(cut: int, name: str) -> None:
    """Alarms with the state saved and loaded equal those of an uninterrupted history."""
    curve = series(lambda s: 1.0 if s % 16 < 8 else 0.001, 40)
    alarms, state = [], GuardState()
    for step in curve:
        if step == cut:
            state = GuardState(**json.loads(json.dumps(asdict(state))))
        seen = {name: {s: v for s, v in curve.items() if s <= step}}
        alarms += raise_alarms(seen, step, state)
    assert alarms == replay({name: curve})


# Settings.


def test_responses_override_the_defaults() -> None:
    config = merge("bandit", {"guard.responses.grad_spike": "rollback", "eval.every": 5})
    assert config.guard.response("grad_spike") == "rollback"
    assert config.guard.response("empty_filter") == "stop"
    assert Config().guard.response("reward_std_cliff") == "log"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"guard.responses.grad_spik": "log"}, "no such detector; did you mean 'grad_spike'?"),
        ({"guard.responses.grad_spike": "halt"}, '= "halt": expected off, log, stop or rollback'),
        ({"guard.responses.reward_drop": "log"}, "compares evaluations: set eval.every"),
        ({"guard.responses.mi_drop": "stop", "prompt.think": False}, "and prompt.think = true"),
        ({"guard.responses.empty_filter": "log", "budget": "updates"}, "has no end"),
        ({"guard.responses.stalled": "rollback"}, "cannot go back by itself"),
        ({"guard.remedy": "filter", "rollout.group_size": 1}, "compares the episodes"),
    ],
)
def test_impossible_responses_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(RagenError) as caught:
        merge(None, overrides)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_kl_remedy_needs_a_kind_of_kl_that_fits_the_estimator() -> None:
    given = {
        "algorithm": "starpo-s/ppo",
        "advantage.name": "grpo",
        "guard.remedy": "kl",
        "guard.responses.grad_spike": "rollback",
    }
    with pytest.raises(RagenError, match="divides by a std of rewards"):
        merge(None, given)
    config = merge(None, given | {"loss.kl_kind": "k3"})
    assert changed(config, remedy(config, 1)).loss.kl == 0.01


def test_each_remedy_changes_its_settings() -> None:
    plain = Config()
    slow = changed(plain, lower_learning_rate(plain.update))
    assert slow.update.lr == pytest.approx(1e-6 / 3)
    assert slow.update.critic_lr == pytest.approx(1e-5 / 3)
    once = changed(plain, tighten_filter(plain.filter, plain.rollout))
    twice = changed(once, tighten_filter(once.filter, once.rollout))
    assert (once.filter.rule, once.filter.value, twice.filter.value) == ("top_k", 0.25, 0.125)
    losses = [LossConfig(kl=weight) for weight in (0.0, 0.001, 0.1)]
    assert [raise_kl(loss)["loss.kl"] for loss in losses] == [0.01, 0.01, 1.0]
    seeds = {change_seed(plain.seed, attempt)["seed"] for attempt in (1, 2)}
    assert len(seeds | {plain.seed}) == 3
    for name in get_args(GuardConfig.model_fields["remedy"].annotation):
        config = Config(guard=GuardConfig(remedy=name))
        assert changed(config, remedy(config, 1)) != config


@pytest.mark.parametrize(
    ("rule", "value", "tighter"),
    [
        ("top_k", 0.5, 0.25),
        ("top_k", 5.0, 2.0),
        ("top_k", 3.0, 1 / 8),  # one of the eight groups; 1.0 would be all of them
        ("top_k", 1.0, 0.5),
    ],
)
def test_the_filter_remedy_keeps_fewer_groups(rule: str, value: float, tighter: float) -> None:
    config = merge(None, {"filter.rule": rule, "filter.value": value})
    assert changed(config, tighten_filter(config.filter, config.rollout)).filter.value == tighter
    reweighted = merge(None, {"filter.rule": "reweight"})
    assert tighten_filter(reweighted.filter, config.rollout)["filter.rule"] == "top_k"
