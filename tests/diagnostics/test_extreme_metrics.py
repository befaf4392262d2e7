"""Metrics, detectors and signs of collapse on extreme episodes and histories.

Nothing raises, a number that is defined is finite, and nothing extreme but healthy raises an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from records import episode, group, turn

from ragen.algorithms.batch import Batch, collate
from ragen.algorithms.losses import mismatch_kl
from ragen.algorithms.samples import to_samples
from ragen.core.metrics import Metrics, largest, mean, merge, values
from ragen.core.types import Group
from ragen.diagnostics.collapse import echo_trap_signs
from ragen.diagnostics.detectors import (
    ENTROPY,
    GRADIENT,
)
from ragen.diagnostics.information import measure
from ragen.diagnostics.step_metrics import (
    batch_metrics,
    explained_variance,
    smooth,
    summarize,
)
from tests.diagnostics.replay import replay

FAILED = episode(stop="error")
NO_TURNS = episode(stop="context")
HUGE, TINY = 1e30, 5e-324

STEPS: dict[str, list[Group]] = {
    "no group": [],
    "empty group": [Group(())],
    "no turn": [Group((NO_TURNS, NO_TURNS))],
    "all failed": [Group((FAILED, FAILED))],
    "one episode": [group(1.0)],
    "one trainable episode": [Group((episode(turn(1.0)), FAILED)), Group((FAILED, NO_TURNS))],
    "all equal": [group(-0.1, -0.1, -0.1), group(-0.1, -0.1)],
    "equal but for rounding": [group(sum([-0.1] * 10), -1.0, -0.3 - 0.3 - 0.4)],
    "no token": [Group((episode(turn(sampled=()), turn(sampled=())),) * 2)],
    "one token": [Group((episode(turn(1.0, sampled=(3,))), episode(turn(sampled=(3,)))))],
    "token 0": [Group((episode(turn(1.0, sampled=(0,) * 7)), episode(turn(sampled=(0,)))))],
    "huge rewards": [group(HUGE, -HUGE, 0.0), group(HUGE, HUGE)],
    "tiny rewards": [group(TINY, -TINY, 0.0)],
    "empty thoughts": [Group((episode(turn(thought="")), episode(turn(1.0, thought="  "))))],
    "nothing executed": [Group((episode(turn(info={"effective": 0})),) * 2)],
}


def finite(metrics: Metrics) -> bool:
    return all(math.isfinite(m.value) and 0 < m.weight < math.inf for m in metrics.values())


@pytest.mark.parametrize("groups", STEPS.values(), ids=STEPS)
def test_metrics_of_extreme_episodes_are_finite_and_raise_no_alarm(groups: list[Group]) -> None:
    metrics = summarize(groups, kept=range(len(groups)))
    assert finite(metrics) and finite(merge([metrics, metrics]))
    shares = [m.value for name, m in metrics.items() if name.endswith(("fraction", "success/mean"))]
    assert all(0 <= share <= 1 for share in shares)
    assert values(merge([metrics])) == values(metrics)
    averages: dict[str, float] = {}
    for _ in range(3):
        averages = smooth(averages, metrics)
    assert averages.items() <= {n: pytest.approx(v) for n, v in values(metrics).items()}.items()
    history = {name: dict.fromkeys(range(1, 41), m.value) for name, m in metrics.items()}
    assert replay(history) == [] and echo_trap_signs(history) == []


def batch_of(rewards: Sequence[float], sampled: Sequence[int] = (7, 8)) -> Batch:
    turns = [turn(reward, sampled=sampled) for reward in rewards]
    return collate(to_samples([Group(tuple(episode(each) for each in turns))])[0])


@pytest.mark.parametrize("value", [0.0, -1.0, HUGE, -HUGE, 1e38, TINY])
def test_metrics_of_an_extreme_batch_are_finite(value: float) -> None:
    batch = batch_of([0.0, 1.0])
    shape = batch.sampled_logprobs_BT
    for values_BT, returns_BT in (
        (torch.zeros_like(shape), torch.full_like(shape, value)),
        (torch.full_like(shape, value), torch.arange(shape.numel()).reshape(shape.shape) * value),
        (torch.full_like(shape, -value), torch.full_like(shape, value)),
    ):
        extreme = replace(
            batch,
            values_BT=values_BT,
            returns_BT=returns_BT,
            old_logprobs_BT=torch.full_like(shape, -abs(value)),
            reference_logprobs_BT=shape,
        )
        assert finite(batch_metrics(extreme))
        untrained = replace(extreme, mask_BT=torch.zeros_like(batch.mask_BT))
        assert batch_metrics(untrained) == {}


def test_returns_that_differ_by_rounding_alone_have_no_explained_variance() -> None:
    returns_N = torch.tensor([-1.0, -1.0 + 6e-8, -1.0])
    assert explained_variance(torch.tensor([0.3, -0.7, 0.1]), returns_N) == {}


def test_a_gap_that_is_not_a_number_is_the_largest() -> None:
    parts = [{"gap": largest(gap)} for gap in (1.0, math.nan, 2.0)]
    assert math.isnan(merge(parts)["gap"].value)
    assert math.isnan(merge(reversed(parts))["gap"].value)
    found = mismatch_kl(torch.tensor([-1.0, -1.0]), torch.tensor([-1e30, -1.0]))
    assert finite(found)


def test_a_mean_of_nothing_changes_no_other() -> None:
    assert merge([{"x": mean(1.0, 2)}, {"x": mean(0.0, 0)}])["x"] == mean(1.0, 2)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_information_of_extreme_scores_is_finite(
    num_thoughts: int, num_prompts: int, data: st.DataObject
) -> None:
    num_prompts = min(num_thoughts, num_prompts)
    own = [index % num_prompts for index in range(num_thoughts)]
    score = st.sampled_from([-1e6, -1e3, -1.0, 0.0, -math.inf])
    rows = [[data.draw(score) for _ in range(num_prompts)] for _ in own]
    for row, prompt in zip(rows, own, strict=True):
        row[prompt] = max(row[prompt], -1e6)  # what was sampled has a probability
    found = measure(torch.tensor(rows), own, [1] * num_thoughts)
    assert finite(found.metrics("information"))


READ = sorted(
    {
        "reward/mean",
        "reward/std_in_group",
        "thought/unique_fraction",
        "success/mean",
        "format/valid_fraction",
        "text/degenerate_fraction",
        ENTROPY,
        GRADIENT,
    }
)
FLAT = st.sampled_from([0.0, TINY, 1e-30, 0.5, 1.0, HUGE])
ANY = st.floats(-HUGE, HUGE) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.sampled_from(READ), FLAT, st.integers(1, 40))
@example("gradient/policy_norm", HUGE, 40)
def test_a_metric_that_never_changes_raises_no_alarm(name: str, value: float, steps: int) -> None:
    history = {name: dict.fromkeys(range(1, steps + 1), value)}
    if name != "text/degenerate_fraction":
        assert replay(history) == []
    assert echo_trap_signs(history) == []


@given(st.dictionaries(st.sampled_from(READ), st.lists(ANY, max_size=30)))
@example({GRADIENT: [TINY, HUGE] * 6 + [1.0]})
@example({GRADIENT: [1e-300, 1e300] * 6 + [1e308]})
def test_no_history_is_too_extreme_for_a_detector(columns: dict[str, list[float]]) -> None:
    history = {name: dict(enumerate(column, 1)) for name, column in columns.items() if column}
    for alarm in replay(history):
        assert math.isfinite(alarm.value) and math.isfinite(alarm.baseline)
        assert str(alarm).startswith(f"step {alarm.step}, {alarm.detector}: ")
        assert alarm.onset <= alarm.step
    for sign in echo_trap_signs(history):
        assert math.isfinite(sign.value) and math.isfinite(sign.baseline)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_counts_for_no_trailing_mean(odd: float) -> None:
    healthy = dict.fromkeys(range(1, 41), 0.4)
    for name, at in product(READ, (1, 20, 40)):
        assert replay({name: healthy | {at: odd}}) == []
        assert echo_trap_signs({name: healthy | {at: odd}}) == []
