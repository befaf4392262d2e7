"""Numbers that sum up a finished run, by name: what studies compare between arms.

=================================  ==============================================================
name                               what it is
=================================  ==============================================================
``before``, ``final``, ``peak``    success of the sampled policy on held-out levels: untrained, at
                                   the end, highest
``fall``                           ``peak`` − ``final``
``random``                         success of uniformly random play on the same levels and budgets
``seconds``                        what the steps took
``first:METRIC``, ``last:METRIC``  mean of a metric over its first or last five recorded steps
``change:METRIC``                  the last less the first
``onset:METRIC``                   the first step from which the trailing mean of five stays below
                                   half of the beginning's; where none is, one after the last
=================================  ==============================================================

Two of them with `` - `` between is their difference: ``onset:success/mean - onset:entropy/mean``.
A run that lacks what a measure needs has NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from ragen.core.errors import RagenError
from ragen.diagnostics.collapse import WINDOW
from ragen.evaluation.results import load_evaluations
from ragen.storage.reader import read_metrics

Series = Mapping[int, float]

ONSET_SHARE = 0.5
"""Of a metric's beginning: below it, for good, is the onset of its loss."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What measures read of a run: success of the sampled policy by step, metrics by name and step.

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


def read_run(folder: Path, temperature: float) -> RunFacts:
    """What the measures need of a run; evaluations of `temperature`.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    metrics = read_metrics(folder)
    found = [e for e in load_evaluations(folder) if e.evaluation.temperature == temperature]
    success = {each.step: each.evaluation.success for each in found}
    seconds = sum(metrics.get("time/step_s", {}).values())
    return RunFacts(success, metrics, seconds, found[-1].evaluation.random if found else math.nan)


def first(series: Series) -> float:
    """Mean of the first five values; NaN of none."""
    return fmean(list(series.values())[:WINDOW]) if series else math.nan


def final(series: Series) -> float:
    """Mean of the last five values; NaN of none."""
    return fmean(list(series.values())[-WINDOW:]) if series else math.nan


def onset(series: Series) -> float:
    """The first step from which the trailing mean stays below half of the beginning.

    Example:
        >>> onset({step: 1.0 if step <= 10 else 0.0 for step in range(1, 21)})
        13.0
        >>> onset(dict.fromkeys(range(1, 21), 1.0))
        21.0
    """
    if not series:
        return math.nan
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
"""Measures of a run as a whole."""

OF_METRICS: Mapping[str, Callable[[Series], float]] = MappingProxyType(
    {
        "first": first,
        "last": final,
        "change": lambda series: final(series) - first(series),
        "onset": onset,
    }
)
"""Measures of one metric, named after the colon."""


def measure_of(name: str) -> Callable[[RunFacts], float]:
    """The measure of a name.

    Raises:
        RagenError: There is none.

    Example:
        >>> run = RunFacts({}, {"a": dict.fromkeys(range(1, 6), 1.0) | {6: 3.0}})
        >>> measure_of("last:a - first:a")(run) == measure_of("change:a")(run)
        True
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
    measure = OF_METRICS[kind]
    return lambda run: measure(run.metrics.get(metric, {}))
