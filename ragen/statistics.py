"""How sure a number is: intervals for rates and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri


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


def success_rate(
    successes: Sequence[bool], levels: Sequence[int], confidence: float = 0.95
) -> Interval:
    """A success rate with the interval that its levels allow.

    Wilson's, where each level was played once; else levels are drawn (`bootstrap_mean`). Where all
    episodes agree, drawing shows no spread: then each level counts as one trial.

    Raises:
        ValueError: No episodes, or lengths that differ.

    Example:
        >>> success_rate([True, True, True, True], [1, 1, 2, 2]) == wilson(2, 2)
        True
    """
    if len(successes) == 0 or len(successes) != len(levels):
        raise ValueError(
            f"{len(successes)} successes and {len(levels)} levels: need as many, not 0"
        )
    trials, won = len(set(levels)), sum(successes)
    if trials == len(successes):
        return wilson(won, trials, confidence)
    if won in (0, len(successes)):
        return wilson(trials if won else 0, trials, confidence)
    return bootstrap_mean([float(s) for s in successes], levels, confidence=confidence)


def pass_at_k(solved: Sequence[int], samples: int, k: int, confidence: float = 0.95) -> Interval:
    """Chance that at least one of k samples of a level succeeds, over levels.

    1 − C(n−c, k) / C(n, k) of a level with c successes in n samples, averaged: unbiased, where
    1 − (1 − c/n)ᵏ is not (Chen et al. 2021, arXiv:2107.03374, eq. 1). With k = n it is the share of
    levels that were solved at all, and has `success_rate`'s interval; else levels are drawn.

    Args:
        solved: Successes of each level, c.
        samples: Episodes of each level, n.
        k: How many of them count, at most n.
        confidence: Share of such intervals that hold the true chance.

    Raises:
        ValueError: No level, not 1 ≤ k ≤ n, or not 0 ≤ c ≤ n.

    Example:
        >>> pass_at_k([1, 0], samples=4, k=2).value  # (1 − C(3, 2) / C(4, 2) + 0) / 2
        0.25
    """
    if not 1 <= k <= samples or not all(0 <= count <= samples for count in solved):
        raise ValueError(f"pass@{k} of {samples} samples: expected 1 ≤ k ≤ n and 0 ≤ c ≤ n")
    if k == samples:
        return success_rate([count > 0 for count in solved], range(len(solved)), confidence)
    chances = [1 - math.comb(samples - c, k) / math.comb(samples, k) for c in solved]
    return bootstrap_mean(chances, range(len(chances)), confidence=confidence)
