"""Measures: the numbers of a finished run, by name, that studies compare between arms.

=================================  ==============================================================
name                               meaning
=================================  ==============================================================
``before``, ``final``, ``peak``    success of the sampled policy on held-out levels: untrained, at
                                   the end, highest
``area``                           its mean over the run: the area under its curve
``collapsed``                      1 if ``final`` is below half of ``peak``, else 0
``until_80``                       share of the run until success is 80 %; 1 if it never is
``survived``                       share of the steps before ``onset:success/mean``; 1 without one
``transfer:NAME``                  success of the trained policy in another evaluation of the study
``random``                         success of uniformly random play on the same levels and budgets
``seconds``                        duration of the steps
``first:METRIC``, ``last:METRIC``  mean of a metric over its first or last five recorded steps
``mean:METRIC``                    its mean over all steps
``onset:METRIC``                   the first step from which the trailing mean of five stays more
                                   than half of the size of ``first`` below it; the step after the
                                   last one if none does
``lead:METRIC``                    1 − ``onset:METRIC`` ÷ ``onset:success/mean``: by what share of
                                   the time earlier it falls; NaN if success does not fall
``warned``                         the same of the first alarm of the guard
``rank:METRIC``                    Spearman's correlation of a metric with ``success/mean``, over
                                   the steps that have both; ``strength:METRIC`` is its size
=================================  ==============================================================

In a mixture, success in an evaluation is that in the environment of the study's row, and metrics
are of all environments. The difference of measures is written with `` - `` between them:
``onset:success/mean - onset:entropy/mean``. A measure is NaN where the run lacks what it needs.
Evaluations and metrics that a rollback undid do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import scipy  # loads `stats` on first use

from ragen.core.errors import RagenError
from ragen.core.metrics import Series
from ragen.diagnostics.collapse import WINDOW
from ragen.diagnostics.guard import read_alarms
from ragen.evaluation.results import Evaluation, load_evaluations
from ragen.storage.reader import read_metrics

ONSET_SHARE = 0.5
"""Share of a metric's first values; the step at which it falls below that for good is the onset.
Negative values fall by as much."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The data of a run that measures need; `alarms` are the steps of the guard's alarms."""

    success: Series
    metrics: Mapping[str, Series]
    seconds: float = 0.0
    random: float = math.nan
    transfer: Mapping[str, float] = field(default_factory=dict)
    alarms: Sequence[int] = ()


def read_run(
    folder: Path,
    temperature: float,
    transfer: Mapping[str, float] | None = None,
    env: str = "",
) -> RunFacts:
    """Read the data that measures need: evaluations at `temperature`, in `env` if it is a mixture.

    `transfer` are the results of the study's other evaluations, by name.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    metrics = read_metrics(folder)
    stored = [e for e in load_evaluations(folder) if e.evaluation.temperature == temperature]
    evaluated = {each.step: _in_env(each.evaluation, env) for each in stored}
    success = {step: each.success for step, each in evaluated.items()}
    seconds = sum(metrics.get("time/step_s", {}).values())
    random = evaluated[max(evaluated)].random if evaluated else math.nan
    alarms = [alarm.step for alarm in read_alarms(folder)]
    return RunFacts(success, metrics, seconds, random, transfer or {}, alarms)


def _in_env(evaluation: Evaluation, env: str) -> Evaluation:
    parts = (part for part in evaluation.parts if part.env == env)
    return next(parts) if evaluation.parts else evaluation


def first(series: Series) -> float:
    """Mean of the first five values."""
    return fmean(list(series.values())[:WINDOW])


def last(series: Series) -> float:
    """Mean of the last five values."""
    return fmean(list(series.values())[-WINDOW:])


def onset(series: Series) -> float:
    """The first step from which the trailing mean stays below the first by half of its size.

    Example:
        >>> onset({step: 1.0 if step <= 10 else 0.0 for step in range(1, 21)})
        13.0
        >>> onset(dict.fromkeys(range(1, 21), 1.0))
        21.0
        >>> onset({step: -1.0 if step <= 10 else -2.0 for step in range(1, 21)})
        13.0
    """
    steps, values = list(series), list(series.values())
    limit = first(series) - (1 - ONSET_SHARE) * abs(first(series))
    since = steps[-1] + 1
    for end in range(len(values), 0, -1):
        if fmean(values[max(0, end - WINDOW) : end]) >= limit:
            break
        since = steps[end - 1]
    return float(since)


def area(series: Series) -> float:
    """The mean of the curve through the values, by step (trapezoids).

    Example:
        >>> area({0: 0.0, 10: 1.0, 40: 1.0})  # (½ · 10 + 1 · 30) / 40
        0.875
    """
    steps = list(series)
    if len(steps) == 1:
        return series[steps[0]]
    parts = [(b - a) * (series[a] + series[b]) / 2 for a, b in pairwise(steps)]
    return math.fsum(parts) / (steps[-1] - steps[0])


def until(series: Series, level: float) -> float:
    """The share of the steps until the curve through the values reaches a level; 1 if never.

    Example:
        >>> until({0: 0.4, 10: 0.6, 20: 1.0}, 0.8), until({0: 0.4, 10: 0.6}, 0.8)
        (0.75, 1.0)
    """
    steps = list(series)
    if series[steps[0]] >= level:
        return 0.0
    for before, after in pairwise(steps):
        if series[after] >= level:
            part = (level - series[before]) / (series[after] - series[before])
            return (before + part * (after - before) - steps[0]) / (steps[-1] - steps[0])
    return 1.0


def collapsed(success: Series) -> float:
    """1 if success ends below half of its peak, else 0.

    Example:
        >>> collapsed({0: 0.5, 5: 0.9, 10: 0.4}), collapsed({0: 0.5, 5: 0.9, 10: 0.5})
        (1.0, 0.0)
    """
    return float(success[max(success)] < max(success.values()) / 2)


def _by_level(pick: Callable[[Series], float]) -> Callable[[RunFacts], float]:
    return lambda run: pick(run.success) if run.success else math.nan


def _survived(success: Series) -> float:
    return (onset(success) - 1) / max(success) if success else math.nan


def warned(run: RunFacts) -> float:
    """By what share of the time until success falls the first alarm comes earlier.

    Without an alarm, it is as late as the run can be.

    Example:
        >>> fall = {step: float(step <= 16) for step in range(1, 31)}
        >>> warned(RunFacts({}, {"success/mean": fall}, alarms=[12, 25]))  # 1 − 12 / 19
        0.368...
    """
    success = run.metrics.get("success/mean")
    if not success or onset(success) > max(success):
        return math.nan
    return 1 - min(run.alarms, default=max(success) + 1) / onset(success)


MEASURES: Mapping[str, Callable[[RunFacts], float]] = MappingProxyType(
    {
        "before": _by_level(lambda success: success[min(success)]),
        "final": _by_level(lambda success: success[max(success)]),
        "peak": _by_level(lambda success: max(success.values())),
        "area": _by_level(area),
        "collapsed": _by_level(collapsed),
        "until_80": _by_level(lambda success: until(success, 0.8)),
        "survived": lambda run: _survived(run.metrics.get("success/mean", {})),
        "warned": warned,
        "random": lambda run: run.random,
        "seconds": lambda run: run.seconds,
    }
)

TRANSFER = "transfer"
"""The kind of measure that is another evaluation's success."""

SHARES = frozenset({"collapsed"})
"""Measures that are 0 or 1, so that a study compares shares of runs."""


def lead(run: RunFacts, metric: str) -> float:
    """By what share of the time until success falls a metric falls earlier.

    Example:
        >>> fall = [{step: float(step <= end) for step in range(1, 31)} for end in (16, 6)]
        >>> lead(RunFacts({}, dict(zip(("success/mean", "a"), fall))), "a")  # 1 − 9 / 19
        0.526...
    """
    success, other = run.metrics.get("success/mean"), run.metrics.get(metric)
    if not success or not other or onset(success) > max(success):
        return math.nan
    return 1 - onset(other) / onset(success)


def rank(run: RunFacts, metric: str) -> float:
    """Spearman's correlation of a metric with success in training, over the steps with both.

    NaN where one of them does not vary, or fewer than five steps have both.

    Example:
        >>> curves = {"success/mean": {1: 0.1, 2: 0.2, 3: 0.4, 4: 0.3, 5: 0.5}, "a": {}}
        >>> curves["a"] = {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 5.0}
        >>> round(rank(RunFacts({}, curves), "a"), 6)  # 1 − 6 · (16 + 4 + 1 + 1 + 16) / (5 · 24)
        -0.9
    """
    success, other = run.metrics.get("success/mean", {}), run.metrics.get(metric, {})
    both = [(success[step], value) for step, value in other.items() if step in success]
    if len(both) < WINDOW or any(len(set(values)) == 1 for values in zip(*both, strict=True)):
        return math.nan
    return float(scipy.stats.spearmanr(both).statistic)


def _of_metric(pick: Callable[[Series], float]) -> Callable[[RunFacts, str], float]:
    return lambda run, metric: pick(run.metrics[metric]) if run.metrics.get(metric) else math.nan


NAMED: Mapping[str, Callable[[RunFacts, str], float]] = MappingProxyType(
    {
        "first": _of_metric(first),
        "last": _of_metric(last),
        "mean": _of_metric(lambda series: fmean(series.values())),
        "onset": _of_metric(onset),
        "lead": lead,
        "rank": rank,
        "strength": lambda run, metric: abs(rank(run, metric)),
        TRANSFER: lambda run, name: run.transfer.get(name, math.nan),
    }
)
"""Measures of the metric, or of the study's evaluation, that is named after the colon."""


def measure_of(name: str) -> Callable[[RunFacts], float]:
    """The measure of this name.

    Example:
        >>> run = RunFacts({}, {"a": dict.fromkeys(range(1, 6), 1.0) | {6: 6.0}})
        >>> measure_of("last:a")(run), measure_of("last:a - first:a")(run)
        (2.0, 1.0)
        >>> measure_of("last:a - first:a - first:a")(run)  # the first two, and then the third
        0.0
    """
    if " - " in name:
        one, other = (measure_of(part) for part in name.rsplit(" - ", 1))
        return lambda run: one(run) - other(run)
    if name in MEASURES:
        return MEASURES[name]
    kind, _, of = name.partition(":")
    if kind not in NAMED or not of:
        raise RagenError(
            f"there is no measure {name!r}: {', '.join(MEASURES)}, or one of {', '.join(NAMED)} "
            "with a metric, such as last:entropy/mean (transfer: with an evaluation of the study)"
        )
    return lambda run: NAMED[kind](run, of)
