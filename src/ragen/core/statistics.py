"""Confidence intervals for rates, means and differences, and tests of two agents.

Each docstring states the share of samples in which the interval covers the true value, and from
which sample size on it is 93.5–96.5 %; `tests/core/test_coverage.py` measures both. Letters:
**L** levels, **K** episodes of a level, **S** training seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import scipy  # loads `special` on first use
from numpy.typing import NDArray

Floats = NDArray[np.float64]
L = TypeVar("L")

TRIMMED = 0.25
"""Share of the scores that an interquartile mean omits at each end."""

TAIL = 0.975
"""The quantile at which an interval ends on each side: its confidence is 95 %."""

POWER = 0.8
"""The usual power: the probability of detecting the smallest detectable effect."""

DRAWS = 2000
"""Number of bootstrap samples, which are the same in every call."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's score interval of a rate of independent trials, valid near 0 and 1 as well.

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n), z the normal quantile (Wilson 1927). Coverage
    depends on the rate. Its exact extremes, in per cent, are for rates from 10 to 90 %: 92.2–98.3
    (16 trials), 92.0–97.6 (32), 93.5–96.4 (128), 93.9–96.1 (256), 94.2–95.8 (512); and for rates
    from 1 to 99 %: 83.6–98.7, 89.4–98.3, 92.5–98.0, 92.9–97.8, 93.4–97.3.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes of {trials} trials are not a rate")
    return _wilson(successes / trials, trials)


def _wilson(rate: float, trials: int) -> Interval:
    z = float(scipy.special.ndtri(TAIL))
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    # Rounding may push the bounds of a rate of 0 or 1 past the rate.
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return Interval(rate, min(max(low, 0.0), rate), max(min(high, 1.0), rate))


def binomial_variance(rate: float, trials: int) -> float:
    """The variance of a rate over independent trials, above 0 also for a rate of 0 or 1.

    p(1−p)/(n + z²) with p = (successes + z²/2)/(n + z²), z the normal quantile: the square of the
    standard error of Agresti and Coull 1998 (doi:10.1080/00031305.1998.10480550).
    """
    size = trials + float(scipy.special.ndtri(TAIL)) ** 2
    centre = (rate * trials + (size - trials) / 2) / size
    return centre * (1 - centre) / size


def difference(one: Interval, other: Interval) -> Interval:
    """Interval of the difference of two independent rates, ``one`` − ``other``.

    With rates p₁, p₂ and their Wilson bounds l, u: (p₁ − p₂) − √((p₁ − l₁)² + (u₂ − p₂)²) to
    (p₁ − p₂) + √((u₁ − p₁)² + (p₂ − l₂)²) (Newcombe 1998, method 10). Two evaluations on the
    same levels have correlated outcomes; use `paired_difference` for them, which is narrower.
    Coverage is 93.5–96.5 % from 32 trials each on, if about five of each succeed and fail. It is
    higher with rarer outcomes, and 92–99 % with 8 trials each.
    """
    value = one.value - other.value
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return Interval(value, value - below, value + above)


def bootstrap_mean(values: Sequence[float], clusters: Sequence[int]) -> Interval:
    """Mean with a bootstrap interval that resamples whole clusters: the levels of episodes.

    Episodes of one level are correlated: resampling episodes would make the interval too narrow
    (Efron and Tibshirani 1993, chapter 8). So would the plain percentile; it is expanded
    (Hesterberg 2015, doi:10.1080/00031305.2015.1089789). With n clusters the bounds are the
    quantiles Φ(∓t·√(n/(n−1))) of the resampled means, t Student's with n−1 degrees of freedom.
    With 8 normal values the plain percentile covers 89 %, the expanded one 94–95 %.

    Coverage is 93.5–96.5 % from 8 clusters on for values without a long tail. For returns of two
    kinds it needs 32 clusters if the rarer kind is a fifth or more, and 64 if it is a tenth; if it
    is an eighth, coverage is 87 % with 16 clusters and 92 % with 32. Values that are all equal have
    no width: they do not show which others there are.
    """
    return _resampled(*_by_cluster(values, clusters))


def _by_cluster(values: Sequence[float], clusters: Sequence[int]) -> tuple[Floats, Floats]:
    if len(values) == 0 or len(values) != len(clusters):
        raise ValueError(
            f"{len(values)} values and {len(clusters)} clusters: expected equally many, ≥ 1"
        )
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    totals = np.bincount(index, np.asarray(values, dtype=np.float64))
    return totals.astype(np.float64), np.bincount(index).astype(np.float64)


def _resampled(totals: Floats, counts: Floats) -> Interval:
    times = _times_drawn(len(totals))
    tail = _expanded_tail(len(totals), len(totals) - 1)
    low, high = np.quantile(times @ totals / (times @ counts), [tail, 1 - tail])
    return Interval(float(totals.sum() / counts.sum()), float(low), float(high))


@lru_cache(maxsize=4)
def _times_drawn(num_clusters: int) -> Floats:
    """The count of each cluster in each bootstrap sample, (draws, clusters)."""
    generator = np.random.Generator(np.random.PCG64(0))
    even = np.full(num_clusters, 1 / num_clusters)
    return generator.multinomial(num_clusters, even, size=DRAWS).astype(np.float64)


def _expanded_tail(size: int, freedom: int) -> float:
    """Where an expanded interval begins; a bootstrap's spread is too small by √((n−1)/n)."""
    if size < 2:
        return 0.5  # one value has no spread
    quantile = float(scipy.special.stdtrit(freedom, TAIL))
    return float(scipy.special.ndtr(-quantile * math.sqrt(size / (size - 1))))


def paired_difference(
    ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]], samples: int = 1
) -> Interval:
    """Difference of two arms' success on the same levels, ``ones`` − ``others``.

    An arm is S_a training seeds, or a single agent. With d_l the difference of the arms' means on
    level l, the variance of the mean difference has two parts. That of the seeds is Σ_a s²_a/S_a
    (s²_a the variance of the arm's S_a rates; 0 if S_a = 1). That of the levels is s²_d/L minus
    Σ_a m_a/(S_a·L), the interaction of seeds and levels, which the first part already contains
    (m_a the residual mean square of arm a's seeds × levels). The interval is Student's, with
    Satterthwaite's degrees of freedom. It generalizes to other levels and, with several seeds, to
    other seeds.

    Two levels are added: on each, one arm succeeds in one episode more. So the interval of agents
    that differ nowhere has a width. With S = K = 1 this is the interval of Bonett and Price 2012
    (doi:10.3102/1076998611411915) with t instead of z.

    Coverage is 93.5–96.5 % with 3 seeds per arm and 64 levels, and with one agent per arm from 64
    levels on if they disagree on ten or more (97–99 % with less disagreement). With 8 episodes of
    each of 16 levels it may be 92 %. If three of ten seeds of one method collapse, which few seeds
    may not show, it is 68 % with 3 seeds, 83 % with 5 and 93 % with 8. A bootstrap over 3 seeds
    covers 71–89 % even if no seed collapses.

    Args:
        ones: Success rate of the K episodes for each seed (rows) and level (columns).
        others: The same for the other arm, with the same levels in the same order.
        samples: K, the number of episodes behind each rate.
    """
    widths = {len(row) for arm in (ones, others) for row in arm}
    if len(widths) != 1 or 0 in (*widths, len(ones), len(others)):
        raise ValueError("two arms need seeds that played the same levels, at least one of each")
    arms = [np.asarray(arm, dtype=np.float64) for arm in (ones, others)]
    one_episode = 1 / (samples * max(len(arm) for arm in arms))
    on_level = arms[0].mean(0) - arms[1].mean(0)
    smoothed = np.append(on_level, [one_episode, -one_episode])
    parts, disagreed = list[_Part](), 0.0
    for arm in arms:
        if len(arm) > 1:
            parts.append((arm.mean(1).var(ddof=1) / len(arm), len(arm) - 1))
            disagreed += _disagreement(arm) / len(arm)
    freedom = len(smoothed) - 1
    of_levels = max(2 * one_episode**2 / freedom, smoothed.var(ddof=1) - disagreed)
    found = _student(float(smoothed.mean()), *parts, (of_levels / len(smoothed), freedom))
    return Interval(float(on_level.mean()), max(-1.0, found.low), min(1.0, found.high))


def gain(
    before: Interval,
    after: Interval,
    solved_before: Mapping[L, float],
    solved_after: Mapping[L, float],
) -> tuple[Interval, bool]:
    """An agent's success after training − before it, and True if it is compared level by level.

    `solved_before` and `solved_after` are success on each level. If their levels differ or are
    unknown, the two rates count as independent, and the difference is less certain.
    """
    if not solved_before or solved_before.keys() != solved_after.keys():
        return difference(after, before), False
    rates = [[solved[level] for level in solved_before] for solved in (solved_after, solved_before)]
    return paired_difference(rates[:1], rates[1:]), True


def _disagreement(arm: Floats) -> float:
    """Residual mean square of seeds × levels: the interaction of seed and level."""
    residual = arm - arm.mean(1, keepdims=True) - arm.mean(0) + arm.mean()
    num_seeds, num_levels = arm.shape
    return float((residual**2).sum() / ((num_seeds - 1) * max(1, num_levels - 1)))


def smallest_detectable(interval: Interval) -> float:
    """The smallest true difference that a sample of this size detects in 80 % of cases (`POWER`).

    (1 + z_power / z_confidence) times half the interval's width, which is z_confidence standard
    errors: 2.80 standard errors for 80 % and 5 % two-sided (Bloom 1995,
    doi:10.1177/0193841X9501900504). Detected means that the interval excludes 0. With few seeds the
    interval uses t instead of z, and the result is too large by up to a seventh.
    """
    half = (interval.high - interval.low) / 2
    return half * float(1 + scipy.special.ndtri(POWER) / scipy.special.ndtri(TAIL))


def mcnemar(gains: Sequence[int]) -> float:
    """Exact two-sided p-value for two agents that are equal on every level, from their gains there.

    If they are equal, a level's gain g_l (successes of one minus those of the other) and −g_l are
    equally likely. p is the probability, over all signs, that |Σ ±g_l| reaches |Σ g_l|. With one
    episode per level this is McNemar's exact test (McNemar 1947): a two-sided binomial test of the
    levels that only one agent solved. Equal agents get p ≤ 0.05 in at most 5 % of samples, and in
    far fewer if few levels differ.
    """
    chances = np.ones(1)  # of the sums −Σ|g| … Σ|g|, in steps of 1
    for gain in gains:
        if gain:
            either_sign = np.zeros(2 * abs(gain) + 1)
            either_sign[[0, -1]] = 0.5
            chances = np.convolve(chances, either_sign)
    sums = np.abs(np.arange(len(chances)) - len(chances) // 2)
    return min(1.0, float(chances[sums >= abs(sum(gains))].sum()))


def interquartile_mean(strata: Sequence[Sequence[float]], noise: float = 0.0) -> Interval:
    """Mean of the middle half of all scores, with a bootstrap interval; a stratum per environment.

    A quarter of the scores, rounded down, is omitted at each end, so that one lucky or collapsed
    training seed does not decide. The bootstrap resamples seeds within each environment (Agarwal et
    al. 2021, arXiv:2108.13264). A score is a seed's success rate over levels; single episodes,
    which are 0 or 1, have no useful middle half. The interval generalizes to other seeds on the
    same levels. Its bounds are expanded as in `bootstrap_mean`, n the seeds of the smallest
    stratum. `noise` is the variance that a single score has by its own measurement, on average
    (`binomial_variance` for a rate): the interval contains Student's with it, so seeds that agree
    have a width, too.

    Coverage with normal scores, in per cent by seeds per stratum: one stratum 75 (3 seeds), 88 (4),
    93 (5), 95 (6), 97 (8 to 12), 96 (16, 20); three strata 90–94 (3), 94–95 (5 to 10). Bootstrap
    means stay within the range of the scores, and the range of n scores contains the median in only
    1 − 2¹⁻ⁿ of samples: 75 % with 3 seeds, for any bootstrap. Plain percentiles cover 75, 89, 89,
    91 with 3 to 6 seeds. If three of ten seeds collapse: 63 (3), 83 (5), 93 (8), 96 (10).
    """
    scores = [np.asarray(stratum, dtype=np.float64) for stratum in strata]
    smallest = min((len(stratum) for stratum in scores), default=0)
    if smallest < 2:
        raise ValueError("an interquartile mean needs two or more seeds in each stratum")
    generator = np.random.Generator(np.random.PCG64(0))
    drawn = [s[generator.integers(len(s), size=(DRAWS, len(s)))] for s in scores]
    tail = _expanded_tail(smallest, sum(len(stratum) - 1 for stratum in scores))
    low, high = np.quantile(_middle_mean(np.concatenate(drawn, 1)), [tail, 1 - tail])
    every = np.concatenate(scores)
    value, freedom = float(_middle_mean(every)), len(every) - len(scores)
    alone = _student(value, (noise / len(every), freedom))
    return Interval(value, min(float(low), alone.low), max(float(high), alone.high))


def _middle_mean(scores: Floats) -> Floats:
    """Mean of the middle half along the last axis."""
    count = scores.shape[-1]
    cut = int(TRIMMED * count)
    middle: Floats = np.sort(scores, -1)[..., cut : count - cut].mean(-1)
    return middle


def success_rate(successes: Sequence[bool], levels: Sequence[int]) -> Interval:
    """A success rate with its interval over levels.

    If each level was played once, the interval is Wilson's. Otherwise levels are resampled
    (`bootstrap_mean`) together with two more: one that is always solved and one that never is.
    Without these, a sample without a hard level would imply that there are none. If all levels have
    the same rate (or there is only one level), each level is one trial of Wilson's interval.

    With several episodes per level, coverage is 93.5–97 % from 128 levels on, at any rate, and
    94–99.5 % with fewer. Without the two levels it is 80–96 % with 32.
    """
    return _over_levels(*_by_cluster(successes, levels), once=len(set(levels)) == len(levels))


def _over_levels(totals: Floats, counts: Floats, once: bool) -> Interval:
    """The interval of a rate; `once` if each level is a single trial."""
    rate = math.fsum(totals) / math.fsum(counts)
    if once or len(set(totals / counts)) == 1:
        return _wilson(rate, len(totals))
    most = counts.max()
    drawn = _resampled(np.append(totals, [0.0, most]), np.append(counts, [most, most]))
    return Interval(rate, min(drawn.low, rate), max(drawn.high, rate))


def pass_at_k(solved: Sequence[int], samples: int, k: int) -> Interval:
    """Probability that at least one of k samples of a level succeeds, averaged over levels.

    1 − C(n−c, k) / C(n, k) for a level with c (`solved`) successes in n `samples`, unbiased;
    1 − (1 − c/n)ᵏ is not (Chen et al. 2021, arXiv:2107.03374, eq. 1). With k = 1 it is the success
    rate. With k = n it is the share of levels with a success, a rate of one trial per level, and
    the interval is Wilson's. Otherwise levels are resampled with the two additional levels of
    `success_rate`, and coverage is the same. Without these it is 66–96 % with 32 levels, because
    near 1 too few levels show a spread.
    """
    if not solved or not 1 <= k <= samples or not all(0 <= c <= samples for c in solved):
        raise ValueError(
            f"pass@{k} of {samples} samples of {len(solved)} levels: expected 1 ≤ k ≤ n, one level "
            "or more, and 0 ≤ c ≤ n"
        )
    chances = [1 - math.comb(samples - c, k) / math.comb(samples, k) for c in solved]
    return _over_levels(np.asarray(chances), np.ones(len(chances)), once=k == samples)


_Part = tuple[float, float]
"""A part of an estimate's variance, and its degrees of freedom."""


def _student(estimate: float, *parts: _Part) -> Interval:
    """Student's interval, with Welch's and Satterthwaite's degrees of freedom (Σ v)² / Σ (v²/f)."""
    total = sum(part for part, _ in parts)
    if total == 0:
        return Interval(estimate, estimate, estimate)
    freedom = total**2 / sum(part**2 / degrees for part, degrees in parts)
    half = float(scipy.special.stdtrit(freedom, TAIL)) * math.sqrt(total)
    return Interval(estimate, estimate - half, estimate + half)


def all_equal(rewards: Sequence[float]) -> bool:
    """True if rewards differ by no more than rounding (`ROUNDING`).

    Example:
        >>> all_equal([-0.3 - 0.3 - 0.4, -0.5 - 0.5, sum([-0.1] * 10)])
        True
    """
    low, high = min(rewards), max(rewards)
    return high - low <= ROUNDING * max(1.0, -low, high)


ROUNDING = 1e-6
"""Tolerance, relative to 1 or to the largest reward, within which rewards are equal. Ten actions at
−0.1 sum to −1 or to its neighbours, depending on the order of the sums. Without a tolerance, equal
failures would have a standard deviation, and dividing by it would amplify rounding."""
