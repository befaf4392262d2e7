"""Metrics know their name and how they add up.

A metric is a path (``reward/mean``, ``time/rollout_s``) and a `Metric` that carries its own rule of
combination, so the parts of a step (microbatches, minibatches, learners) merge into one number
without a table of special cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "sum", "max", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number with its weight and its rule: weighted mean, sum, maximum, or last written.

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
    """A mean over `weight` items."""
    return Metric(float(value), float(weight), "mean")


def total(value: float) -> Metric:
    """A sum: tokens, seconds, counts."""
    return Metric(float(value), 1.0, "sum")


def largest(value: float) -> Metric:
    """A maximum."""
    return Metric(float(value), 1.0, "max")


def last(value: float) -> Metric:
    """A state: of several, the last one counts."""
    return Metric(float(value), 1.0, "last")


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Combine metrics of the same names by their own rules.

    Raises:
        ValueError: A name comes with two different kinds.
    """
    merged: Metrics = {}
    for part in parts:
        for name, new in part.items():
            merged[name] = _combine(name, merged[name], new) if name in merged else new
    return merged


def _combine(name: str, a: Metric, b: Metric) -> Metric:
    if a.kind != b.kind:
        raise ValueError(f"metric {name} is a {a.kind} here and a {b.kind} there")
    if a.kind == "mean":
        weight = a.weight + b.weight
        value = (a.value * a.weight + b.value * b.weight) / weight if weight else a.value
        return Metric(value, weight, "mean")
    if a.kind == "sum":
        return Metric(a.value + b.value, 1.0, "sum")
    return Metric(max(a.value, b.value) if a.kind == "max" else b.value, 1.0, a.kind)


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The plain numbers."""
    return {name: metric.value for name, metric in metrics.items()}
