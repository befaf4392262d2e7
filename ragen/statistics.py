"""How sure a number is: intervals for rates and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval.

    Example:
        >>> Interval(0.5, 0.4, 0.6).low
        0.4
    """

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a success rate; honest near 0 and 1, where ±1.96·σ is not.

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n), z the normal quantile (Wilson 1927).

    Args:
        successes: How many of the trials succeeded.
        trials: Independent trials; one episode a level, or nearly so.
        confidence: Share of such intervals that hold the true rate.

    Raises:
        ValueError: Not 0 ≤ successes ≤ trials, or no trial.

    Example:
        >>> wilson(8, 10)  # doctest: +ELLIPSIS
        Interval(value=0.8, low=0.490..., high=0.943...)
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes of {trials} trials make no rate")
    rate, z = successes / trials, float(ndtri((1 + confidence) / 2))
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    # Rounding may push the bounds of 0 and of n successes past the rate itself.
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return Interval(rate, min(max(low, 0.0), rate), max(min(high, 1.0), rate))


def difference(one: Interval, other: Interval) -> Interval:
    """Interval of the difference of two independent rates, ``one`` − ``other``.

    With rates p₁, p₂ and their Wilson bounds l, u: (p₁ − p₂) − √((p₁ − l₁)² + (u₂ − p₂)²) to
    (p₁ − p₂) + √((u₁ − p₁)² + (p₂ − l₂)²) (Newcombe 1998, method 10). For two evaluations on the
    same levels, whose outcomes go together, it is wider than it need be.

    Example:
        >>> difference(wilson(30, 100), wilson(60, 100))  # doctest: +ELLIPSIS
        Interval(value=-0.3, low=-0.421..., high=-0.162...)
    """
    value = one.value - other.value
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return Interval(value, value - below, value + above)


def bootstrap_mean(
    values: Sequence[float],
    clusters: Sequence[int],
    *,
    confidence: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean with a percentile bootstrap interval that draws whole clusters.

    Episodes of one level are alike; drawing levels instead of episodes keeps the interval from
    being too narrow (Efron and Tibshirani 1993, chapter 8).

    Args:
        values: One number an episode.
        clusters: The level each belongs to, same length.
        confidence: Share of such intervals that hold the true mean.
        draws: Bootstrap samples.
        seed: Of the draws; the interval is a function of its arguments.

    Raises:
        ValueError: No values, or lengths that differ.

    Example:
        >>> bootstrap_mean([1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1])
        Interval(value=2.0, low=1.0, high=3.0)
    """
    if len(values) == 0 or len(values) != len(clusters):
        raise ValueError(f"{len(values)} values and {len(clusters)} clusters: need as many, not 0")
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    totals = np.bincount(index, weights=np.asarray(values, dtype=np.float64))
    counts = np.bincount(index)
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.integers(len(totals), size=(draws, len(totals)))
    means = totals[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(totals.sum() / counts.sum()), float(low), float(high))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of independent numbers, such as one a training seed, with Student's t interval.

    mean ± t(n − 1) · s/√n, s with n − 1. One value has no interval: it reaches from −∞ to ∞.

    Raises:
        ValueError: No values.

    Example:
        >>> mean_interval([0.0, 1.0, 2.0])  # doctest: +ELLIPSIS
        Interval(value=1.0, low=-1.484..., high=3.484...)
    """
    return _t_interval(*_mean_and_error(values), len(values) - 1, confidence)


def mean_difference(
    one: Sequence[float], other: Sequence[float], confidence: float = 0.95
) -> Interval:
    """Interval of the difference of two means, ``one`` − ``other``, of unequal spread.

    With standard errors a, b the degrees of freedom are
    (a² + b²)² / (a⁴/(n₁ − 1) + b⁴/(n₂ − 1)) (Welch 1947).

    Raises:
        ValueError: No values on a side.

    Example:
        >>> mean_difference([0.0, 1.0, 2.0], [2.0, 3.0, 4.0])  # doctest: +ELLIPSIS
        Interval(value=-2.0, low=-4.266..., high=0.266...)
    """
    (mean_1, a), (mean_2, b) = _mean_and_error(one), _mean_and_error(other)
    error, degrees = math.hypot(a, b), 1.0
    if 0 < error < math.inf:
        degrees = error**4 / (a**4 / (len(one) - 1) + b**4 / (len(other) - 1))
    return _t_interval(mean_1 - mean_2, error, degrees, confidence)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, which one value leaves unbounded."""
    if len(values) == 0:
        raise ValueError("no values have no mean")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.inf
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def _t_interval(mean: float, error: float, degrees: float, confidence: float) -> Interval:
    if math.isinf(error):
        return Interval(mean, -math.inf, math.inf)
    half = float(stdtrit(degrees, (1 + confidence) / 2)) * error
    return Interval(mean, mean - half, mean + half)
