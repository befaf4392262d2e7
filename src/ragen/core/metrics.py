"""Metrics, and how the parts of a step (microbatches, minibatches, learners) merge into one number.

The name of a metric is a path (``reward/mean``, ``time/rollout_s``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "sum", "max", "last"]

IGNORED = "agent/ignored/"
"""Prefix of the numbers of an agent's calls that set a parameter without effect, by its name."""
OF_ENV = {
    "success/mean": "success",
    "reward/mean": "reward",
    "reward/std_in_group": "reward_std",
    "filter/kept_fraction": "kept_fraction",
    "format/valid_fraction": "valid_fraction",
}
"""The metrics that each environment of a mixture has for itself, and their names there."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with its weight and its rule: weighted mean, sum, maximum, or last value.

    Example:
        >>> merge([{"loss": mean(1.0, 2)}, {"loss": mean(4.0, 1)}])["loss"].value
        2.0
    """

    value: float
    weight: float = 1.0
    kind: Kind = "mean"


Metrics = dict[str, Metric]

Series = Mapping[int, float]
"""One metric of a run: step to value, in the order of the steps."""


def mean(value: float, weight: float = 1.0) -> Metric:
    """A mean over `weight` items, at least one."""
    return Metric(float(value), float(weight), "mean")


def total(value: float) -> Metric:
    """A sum, such as of tokens or seconds."""
    return Metric(float(value), 1.0, "sum")


def largest(value: float) -> Metric:
    """A maximum."""
    return Metric(float(value), 1.0, "max")


def last(value: float) -> Metric:
    """A state, of which the last value counts."""
    return Metric(float(value), 1.0, "last")


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Combine metrics of the same name by their rules."""
    merged: Metrics = {}
    for part in parts:
        for name, new in part.items():
            merged[name] = _combine(name, merged[name], new) if name in merged else new
    return merged


def _combine(name: str, a: Metric, b: Metric) -> Metric:
    if a.kind != b.kind:
        raise ValueError(f"metric {name} has two kinds: {a.kind} and {b.kind}")
    match a.kind:
        case "mean":
            weight = a.weight + b.weight
            return mean((a.value * a.weight + b.value * b.weight) / weight, weight) if weight else a
        case "sum":
            return total(a.value + b.value)
        case "max":
            # What is not a number is not hidden by one.
            return largest(max(a.value, b.value, key=lambda value: (math.isnan(value), value)))
    return b


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values by name, as plain numbers."""
    return {name: metric.value for name, metric in metrics.items()}
