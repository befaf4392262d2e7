"""Measures: the numbers of a finished run, by name, that studies compare between arms.

=================================  ==============================================================
name                               meaning
=================================  ==============================================================
``before``, ``final``, ``peak``    success of the sampled policy on held-out levels: untrained, at
                                   the end, highest
``fall``                           ``peak`` − ``final``
``random``                         success of uniformly random play on the same levels and budgets
``seconds``                        duration of the steps
``first:METRIC``, ``last:METRIC``  mean of a metric over its first or last five recorded steps
``onset:METRIC``                   the first step from which the trailing mean of five stays below
                                   half of ``first``; the step after the last one if none does
=================================  ==============================================================

The difference of two measures is written with `` - `` between them:
``onset:success/mean - onset:entropy/mean``. A measure is NaN where the run lacks what it needs.
Evaluations and metrics that a rollback undid do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from types import MappingProxyType

from ragen.core.errors import RagenError
from ragen.core.metrics import Series
from ragen.core.statistics import binomial_variance
from ragen.diagnostics.collapse import WINDOW
from ragen.evaluation.results import load_evaluations
from ragen.storage.reader import read_metrics

ONSET_SHARE = 0.5
"""Share of a metric's first values; the step at which it falls below that for good is the onset."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The data of a run that measures need: success by step, metrics by name and step.

    Example:
        >>> success, entropy = {0: 0.5, 5: 0.9, 10: 0.75}, {1: 2.0, 2: 1.0}
        >>> run = RunFacts(success, {"entropy/mean": entropy}, seconds=12.5, random=0.5)
        >>> MEASURES["peak"](run), measure_of("last:entropy/mean")(run)
        (0.9, 1.5)
    """

    success: Series
    metrics: Mapping[str, Series]
    seconds: float = 0.0
    random: float = math.nan
    episodes: int = 0
    """Behind each value of `success`."""


def read_run(folder: Path, temperature: float) -> RunFacts:
    """Read the data that measures need, with the evaluations at `temperature`.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    metrics = read_metrics(folder)
    evaluated = [e for e in load_evaluations(folder) if e.evaluation.temperature == temperature]
    success = {each.step: each.evaluation.success for each in evaluated}
    seconds = sum(metrics.get("time/step_s", {}).values())
    random = evaluated[-1].evaluation.random if evaluated else math.nan
    episodes = evaluated[-1].evaluation.episodes if evaluated else 0
    return RunFacts(success, metrics, seconds, random, episodes)


def first(series: Series) -> float:
    """Mean of the first five values."""
    return fmean(list(series.values())[:WINDOW])


def last(series: Series) -> float:
    """Mean of the last five values."""
    return fmean(list(series.values())[-WINDOW:])


def onset(series: Series) -> float:
    """The first step from which the trailing mean stays below half of the first.

    Example:
        >>> onset({step: 1.0 if step <= 10 else 0.0 for step in range(1, 21)})
        13.0
        >>> onset(dict.fromkeys(range(1, 21), 1.0))
        21.0
    """
    steps, values = list(series), list(series.values())
    limit = ONSET_SHARE * first(series)
    since = steps[-1] + 1
    for end in range(len(values), 0, -1):
        if fmean(values[max(0, end - WINDOW) : end]) >= limit:
            break
        since = steps[end - 1]
    return float(since)


def _by_level(pick: Callable[[Series], float]) -> Callable[[RunFacts], float]:
    return lambda run: pick(run.success) if run.success else math.nan


MEASURES: Mapping[str, Callable[[RunFacts], float]] = MappingProxyType(
    {
        "before": _by_level(lambda success: success[min(success)]),
        "final": _by_level(lambda success: success[max(success)]),
        "peak": _by_level(lambda success: max(success.values())),
        "fall": _by_level(lambda success: max(success.values()) - success[max(success)]),
        "random": lambda run: run.random,
        "seconds": lambda run: run.seconds,
    }
)
"""Measures of a whole run."""

OF_METRICS: Mapping[str, Callable[[Series], float]] = MappingProxyType(
    {
        "first": first,
        "last": last,
        "change": lambda series: last(series) - first(series),
        "onset": onset,
    }
)
"""Measures of the metric that is named after the colon."""


def measure_of(name: str) -> Callable[[RunFacts], float]:
    """The measure of this name.

    Raises:
        RagenError: No measure has this name.

    Example:
        >>> run = RunFacts({}, {"a": dict.fromkeys(range(1, 6), 1.0) | {6: 6.0}})
        >>> measure_of("last:a")(run), measure_of("last:a - first:a")(run)
        (2.0, 1.0)
    """
    if " - " in name:
        one, other = (measure_of(part) for part in name.split(" - ", 1))
        return lambda run: one(run) - other(run)
    if name in MEASURES:
        return MEASURES[name]
    kind, _, metric = name.partition(":")
    if kind not in OF_METRICS or not metric:
        raise RagenError(
            f"there is no measure {name!r}: {', '.join(MEASURES)}, or one of "
            f"{', '.join(OF_METRICS)} with a metric, such as last:entropy/mean"
        )

    def measure(run: RunFacts) -> float:
        series = run.metrics.get(metric)
        return OF_METRICS[kind](series) if series else math.nan

    return measure


def noise_of(name: str, run: RunFacts) -> float:
    """The variance that a measure of one run has by its own measurement, at least.

    That of a success rate is binomial, that of a mean over five steps their variance ÷ 5, that of a
    step 1/12, since it is a whole number; a difference has the sum. 0 where nothing is known.

    Example:
        >>> run = RunFacts({0: 1.0}, {"a": dict.fromkeys(range(20), 1.0)}, episodes=256)
        >>> noise_of("final", run) > 0, noise_of("onset:a - last:a", run)
        (True, 0.08333333333333333)
    """
    if " - " in name:
        return sum(noise_of(part, run) for part in name.split(" - ", 1))
    if name == "fall":
        return noise_of("peak - final", run)
    if name in ("before", "final", "peak", "random"):
        return binomial_variance(MEASURES[name](run), run.episodes) if run.episodes else 0.0
    kind, _, metric = name.partition(":")
    numbers = list(run.metrics.get(metric, {}).values())
    if kind == "onset":
        return 1 / 12
    windows = {"first": [numbers[:WINDOW]], "last": [numbers[-WINDOW:]]}
    windows["change"] = windows["first"] + windows["last"]
    return sum(variance(each) / len(each) for each in windows.get(kind, []) if len(each) > 1)
