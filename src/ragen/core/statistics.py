"""How sure a number is: intervals for rates, means and differences, and tests of two agents.

Each docstring says from which size on its interval holds the truth in 95 ± 1.5 of 100 samples, and
what it does below; `tests/core/test_coverage.py` measures that. Letters: **L** levels, **K**
episodes of a level, **S** training seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit

Floats = NDArray[np.float64]

TRIMMED = 0.25
"""Share of the scores that an interquartile mean leaves out at each end."""

POWER = 0.8
"""Chance of showing the smallest detectable effect, as is usual."""


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

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n), z the normal quantile (Wilson 1927). Coverage
    93.5–96.5 % for every rate from 1 to 99 % from 128 trials on; 92–99 % with 16.

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
    return _wilson(successes / trials, trials, confidence)


def _wilson(rate: float, trials: int, confidence: float) -> Interval:
    z = float(ndtri((1 + confidence) / 2))
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
    same levels, whose outcomes go together, it is wider than it need be: `paired_difference` is for
    them. Coverage 93.5–96.5 % from 32 trials each on, where about five of each succeed and fail;
    with rarer outcomes it holds the truth more often than it says, with 8 trials each 92–99 %.

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
    """Mean with a bootstrap interval that draws whole clusters.

    Episodes of one level are alike; drawing levels instead of episodes keeps the interval from
    being too narrow (Efron and Tibshirani 1993, chapter 8). So does the expanded percentile
    (Hesterberg 2015, doi:10.1080/00031305.2015.1089789): with n clusters the bounds are the
    quantiles Φ(∓t·√(n/(n−1))) of the drawn means, t Student's with n−1 degrees of freedom.
    The plain percentile covers 89 % with 8 normal values, where this one covers 94–95 %.

    Coverage 93.5–96.5 % from 8 clusters on for values without a long tail, from 32 on for returns
    of which a fifth or more are of the rarer kind, from 64 on where a tenth are; where an eighth
    are, 87 % with 16 and 92 % with 32.

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
    times = _times_drawn(len(totals), draws, seed)
    tail = _expanded_tail(confidence, len(totals), len(totals) - 1)
    low, high = np.quantile(times @ totals / (times @ counts), [tail, 1 - tail])
    return Interval(float(totals.sum() / counts.sum()), float(low), float(high))


@lru_cache(maxsize=4)
def _times_drawn(num_clusters: int, draws: int, seed: int) -> Floats:
    """How often each cluster is in each bootstrap sample, (draws, clusters)."""
    generator = np.random.Generator(np.random.PCG64(seed))
    even = np.full(num_clusters, 1 / num_clusters)
    return generator.multinomial(num_clusters, even, size=draws).astype(np.float64)


def _expanded_tail(confidence: float, size: int, freedom: int) -> float:
    """The quantile at which an expanded percentile interval begins.

    A bootstrap's spread falls short by √((n−1)/n), and it knows nothing of Student's t.
    """
    if size < 2:
        return 0.5  # one value has no spread to draw from
    quantile = float(stdtrit(freedom, (1 + confidence) / 2))
    return float(ndtr(-quantile * math.sqrt(size / (size - 1))))


def paired_difference(
    ones: Sequence[Sequence[float]],
    others: Sequence[Sequence[float]],
    samples: int = 1,
    confidence: float = 0.95,
) -> Interval:
    """Difference of two arms' success on the same levels, ``ones`` − ``others``.

    An arm is S_a training seeds, or one agent as it is. With d_l the difference of the arms' means
    on level l, the variance of the mean difference has two parts: that of the seeds, Σ_a s²_a/S_a
    (s²_a that of the arm's S_a rates; none where S_a = 1), and that of the levels, s²_d/L less what
    of it is the seeds' own disagreement about single levels, Σ_a m_a/(S_a·L), which is in the first
    part already (m_a the residual mean square of arm a's seeds × levels). The interval is
    Student's, with Satterthwaite's degrees of freedom. It speaks of other levels and, with several
    seeds, of other seeds.

    Two levels are added, on which one episode more succeeds in the one arm and in the other, so
    that agents that differ nowhere are not taken for equal; with S = K = 1 this is the interval of
    Bonett and Price 2012 (doi:10.3102/1076998611411915) but for t in place of z.

    Coverage 93.5–96.5 %, with one agent an arm from 64 levels on if they disagree on ten or more
    (with less disagreement it holds the truth more often than it says: 97–99 %), and with 3 seeds
    an arm and 64 levels. With 8 episodes of each of 16 levels it may be 92 %. Where three of ten
    seeds of the one method collapse, which few seeds may not show: 68 % with 3, 83 % with 5, 93 %
    with 8. A bootstrap over 3 seeds covers 71–89 % also where none does.

    Args:
        ones: Share of the K episodes that succeeded, for each seed (rows) and level (columns).
        others: The same of the other arm; as many levels, in the same order.
        samples: K, the episodes behind each share.
        confidence: Share of such intervals that hold the true difference.

    Raises:
        ValueError: Rows of different lengths, or none.

    Example:
        >>> alone, both = [0.0, 1.0, 1.0, 0.0] * 8, [0.0, 1.0, 1.0, 1.0] * 8
        >>> paired_difference([both], [alone])  # doctest: +ELLIPSIS
        Interval(value=0.25, low=0.062..., high=0.408...)
    """
    widths = {len(row) for arm in (ones, others) for row in arm}
    if len(widths) != 1 or 0 in (*widths, len(ones), len(others)):
        raise ValueError("two arms need seeds that played the same levels, at least one of each")
    arms = [np.asarray(arm, dtype=np.float64) for arm in (ones, others)]
    one_episode = 1 / (samples * max(len(arm) for arm in arms))
    on_level = arms[0].mean(0) - arms[1].mean(0)
    smoothed = np.append(on_level, [one_episode, -one_episode])
    parts, freedoms, disagreed = list[float](), list[int](), 0.0
    for arm in arms:
        if len(arm) > 1:
            own = _disagreement(arm)
            parts.append(float(arm.mean(1).var(ddof=1)) / len(arm))
            freedoms.append(len(arm) - 1)
            disagreed += own / len(arm)
    freedoms.append(len(smoothed) - 1)
    least = 2 * one_episode**2 / freedoms[-1]
    parts.append(max(least, float(smoothed.var(ddof=1)) - disagreed) / len(smoothed))
    variance = sum(parts)
    freedom = variance**2 / sum(p**2 / f for p, f in zip(parts, freedoms, strict=True))
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)
    value, centre = float(on_level.mean()), float(smoothed.mean())
    return Interval(value, max(-1.0, centre - half), min(1.0, centre + half))


def _disagreement(arm: Floats) -> float:
    """Residual mean square of seeds × levels: what neither the seed nor the level explains."""
    residual = arm - arm.mean(1, keepdims=True) - arm.mean(0) + arm.mean()
    num_seeds, num_levels = arm.shape
    return float((residual**2).sum() / ((num_seeds - 1) * max(1, num_levels - 1)))


def smallest_detectable(
    interval: Interval, confidence: float = 0.95, power: float = POWER
) -> float:
    """The true difference that a sample of this size would show with the given power.

    (1 + z_power / z_confidence) times half the interval's width, which is z_confidence standard
    errors: 2.80 standard errors for 80 % and 5 % two-sided (Bloom 1995,
    doi:10.1177/0193841X9501900504). Shown means that the interval leaves out 0. With few seeds,
    where t stands in the interval for z, it is up to a seventh larger than need be.

    Args:
        interval: Of a difference, as of `paired_difference`.
        confidence: The interval's.
        power: The chance of showing a difference of the size that is returned.

    Example:
        >>> smallest_detectable(Interval(0.0, -0.07, 0.07))  # doctest: +ELLIPSIS
        0.100...
    """
    half = (interval.high - interval.low) / 2
    return half * float(1 + ndtri(power) / ndtri((1 + confidence) / 2))


def mcnemar(gains: Sequence[int]) -> float:
    """Exact two-sided p-value of two agents being the same on every level.

    If they are, a level's gain g_l (successes of the one less those of the other) is as likely
    −g_l. p is the chance that |Σ ±g_l| reaches |Σ g_l|, over all signs. With one episode a level
    this is McNemar's exact test (McNemar 1947): a two-sided binomial test of the levels that only
    the one solved against those that only the other did. Equal agents get 0.05 or less in 5 % of
    samples at most, with few differing levels in far fewer.

    Args:
        gains: Of each level, in episodes.

    Example:
        >>> mcnemar([1, 1, 1, 1, 1, 0, 0])  # 2 · ½⁵
        0.0625
    """
    chances = np.ones(1)  # of the sums −Σ|g| … Σ|g|, in steps of 1
    for gain in gains:
        if gain:
            either_sign = np.zeros(2 * abs(gain) + 1)
            either_sign[[0, -1]] = 0.5
            chances = np.convolve(chances, either_sign)
    sums = np.abs(np.arange(len(chances)) - len(chances) // 2)
    return min(1.0, float(chances[sums >= abs(sum(gains))].sum()))


def interquartile_mean(
    strata: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of the middle half of all scores, with a stratified bootstrap interval.

    A quarter of the scores, rounded down, is left out at each end, so that one lucky or collapsed
    training seed does not decide; the bootstrap draws seeds within each environment (Agarwal et
    al. 2021,
    arXiv:2108.13264). A score is a seed's success over levels: of single episodes, zeros and ones,
    a middle half means nothing. The interval speaks of other seeds on the same levels. Its bounds
    are expanded as those of `bootstrap_mean`, n the seeds of the smallest stratum.

    Coverage with normal scores, in per cent by seeds a stratum: one stratum 75 (3 seeds), 88 (4),
    93 (5), 95 (6), 97 (8 to 12), 96 (16, 20); three strata 90–94 (3), 94–95 (5 to 10). No draw
    leaves the range of the scores, and of one stratum the range itself holds the median in 1 − 2¹⁻ⁿ
    of samples only: 75 % of 3 seeds, whatever the bootstrap. Plain percentiles cover 75, 89, 89, 91
    with 3 to 6 seeds. Where three of ten seeds collapse, 63 (3), 83 (5), 93 (8), 96 (10).

    Args:
        strata: Scores of each environment's seeds.
        confidence: Share of such intervals that hold the true interquartile mean.
        draws: Bootstrap samples.
        seed: Of the draws.

    Raises:
        ValueError: A stratum of fewer than two scores, or none.

    Example:
        >>> interquartile_mean([[0.0, 0.5, 0.6, 0.7, 1.0]]).value  # (0.5 + 0.6 + 0.7) / 3
        0.6
    """
    scores = [np.asarray(stratum, dtype=np.float64) for stratum in strata]
    smallest = min((len(stratum) for stratum in scores), default=0)
    if smallest < 2:
        raise ValueError("an interquartile mean over seeds needs two or more of each stratum")
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = [s[generator.integers(len(s), size=(draws, len(s)))] for s in scores]
    freedom = sum(len(stratum) - 1 for stratum in scores)
    tail = _expanded_tail(confidence, smallest, freedom)
    low, high = np.quantile(_middle_mean(np.concatenate(drawn, 1)), [tail, 1 - tail])
    value = _middle_mean(np.concatenate(scores))
    return Interval(float(value), float(low), float(high))


def _middle_mean(scores: Floats) -> Floats:
    """Mean of the middle half along the last axis."""
    count = scores.shape[-1]
    cut = int(TRIMMED * count)
    middle: Floats = np.sort(scores, -1)[..., cut : count - cut].mean(-1)
    return middle


def success_rate(
    successes: Sequence[bool], levels: Sequence[int], confidence: float = 0.95
) -> Interval:
    """A success rate with the interval that its levels allow.

    Wilson's, where each level was played once; else levels are drawn (`bootstrap_mean`), two more
    among them: one that is always solved and one that never is. Without these a sample that shows
    no hard level would rule out that there are any. Where all levels agree (a single one does),
    each counts as one trial, in Wilson's.

    Coverage with several episodes a level 93.5–97 % from 128 levels on, at any rate; with fewer it
    holds the truth more often than it says, 94–99.5 %. Without the two levels 80–96 % with 32.

    Raises:
        ValueError: No episodes, or lengths that differ.

    Example:
        >>> success_rate([True, True, True, True], [1, 1, 2, 2]) == wilson(2, 2)
        True
        >>> success_rate([True, False, False, False], [1] * 4)  # doctest: +ELLIPSIS
        Interval(value=0.25, low=0.019..., high=0.852...)
    """
    if len(successes) == 0 or len(successes) != len(levels):
        raise ValueError(
            f"{len(successes)} successes and {len(levels)} levels: need as many, not 0"
        )
    _, index = np.unique(np.asarray(levels), return_inverse=True)
    won, played = np.bincount(index, weights=successes), np.bincount(index)
    rate = sum(successes) / len(successes)
    if len(won) == len(successes) or len(set(won / played)) == 1:
        return _wilson(rate, len(won), confidence)
    most = int(played.max())
    drawn = bootstrap_mean(
        [*map(float, successes), *[0.0] * most, *[1.0] * most],
        [*index, *[len(won)] * most, *[len(won) + 1] * most],
        confidence=confidence,
    )
    return Interval(rate, min(drawn.low, rate), max(drawn.high, rate))


def pass_at_k(solved: Sequence[int], samples: int, k: int, confidence: float = 0.95) -> Interval:
    """Chance that at least one of k samples of a level succeeds, over levels.

    1 − C(n−c, k) / C(n, k) of a level with c successes in n samples, averaged: unbiased, where
    1 − (1 − c/n)ᵏ is not (Chen et al. 2021, arXiv:2107.03374, eq. 1). With k = 1 it is the success
    rate. With k = n it is the share of levels that were solved at all, a rate of one trial a level,
    and has Wilson's interval; else levels are drawn, with the two more of `success_rate`, whose
    coverage it has. Without these, 66–96 % with 32 levels: near 1 too few of them show a spread.

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
    if not solved or not 1 <= k <= samples or not all(0 <= c <= samples for c in solved):
        raise ValueError(
            f"pass@{k} of {samples} samples of {len(solved)} levels: expected 1 ≤ k ≤ n, one level "
            "or more, and 0 ≤ c ≤ n"
        )
    chances = [1 - math.comb(samples - c, k) / math.comb(samples, k) for c in solved]
    mean = math.fsum(chances) / len(chances)
    if k == samples or len(set(chances)) == 1:
        return _wilson(mean, len(chances), confidence)
    drawn = bootstrap_mean([*chances, 0.0, 1.0], range(len(chances) + 2), confidence=confidence)
    return Interval(mean, min(drawn.low, mean), max(drawn.high, mean))


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


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by rounding alone.

    Example:
        >>> all_equal([-0.3 - 0.3 - 0.4, -0.5 - 0.5, sum([-0.1] * 10)])
        True
    """
    low, high = min(rewards), max(rewards)
    return high - low <= ROUNDING * max(1.0, -low, high)


ROUNDING = 1e-6
"""Rewards that differ by less, measured by 1 or by their size, are equal. Ten actions at −0.1 sum
to −1 or to its neighbours, depending on how turns and tokens share them out; without this, a group
in which all lost alike would have a spread, and dividing by it would make a signal of rounding."""
