"""The rule of the studies: from the numbers of runs to a verdict in one environment, and overall.

A study has one primary contrast in each environment: a measure of an arm minus that of another
arm, or minus a number, with the published effect D. Two runs of one seed are a pair. Both intervals
are exact: their error is at most what was asked for, whatever the distribution, with any number of
seeds.

- **Numbers** (success, its area, steps): the interval of the median difference of a pair, between
  two order statistics of the differences. It inverts the sign test, a binomial test over runs.
- **Shares** (runs that collapsed): Clopper and Pearson's interval of a binomial share, and for two
  arms the difference of their bounds, each with half of the error.

The mean has no such interval that also decides. If a run in ten collapses, ten seeds show none in
35 % of samples: an interval that is right nevertheless has to allow for it, and Student's and the
bootstrap's are wrong. The median pair is what someone sees who repeats the study with one seed.
`docs/studies/index.md` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Literal

import numpy as np
import scipy  # loads `special` on first use

from ragen.core.statistics import Interval

Outcome = Literal["holds", "smaller than claimed", "fails", "equal", "reversed", "undecided"]
Verdict = Literal["supports", "smaller", "contradicts", "by environment", "not judged"]

ERROR = 0.05
"""The largest probability of a false verdict in a study, over all its environments."""

MARGIN = 0.05
"""Arms whose difference is within ± this are equal, where the claim is equality."""

MOST_SEEDS = 1000
"""The largest number of seeds that `seeds_to_decide` looks at."""


def median_interval(differences: Sequence[float], error: float = ERROR) -> Interval:
    """The median of independent numbers, and an interval that misses it with at most `error`.

    With x₁ ≤ … ≤ xₙ it is [x_k, x_(n+1−k)], k the largest with P(Bin(n, ½) < k) ≤ error ÷ 2
    (Conover 1999, Practical Nonparametric Statistics, 3.2). With too few numbers, fewer than 6 for
    an error of 5 %, there is no such k, and it is −∞ to ∞.

    Raises:
        ValueError: There are no numbers.
    """
    if not differences:
        raise ValueError("there are no numbers to take the median of")
    ordered = sorted(differences)
    rank = rank_of_bound(len(ordered), error)
    if rank == 0:
        return Interval(median(ordered), -math.inf, math.inf)
    return Interval(median(ordered), ordered[rank - 1], ordered[-rank])


def rank_of_bound(count: int, error: float) -> int:
    """K of `median_interval`: the lower bound is the k-th smallest number; 0 if there is none.

    Example:
        >>> [rank_of_bound(count, 0.05) for count in (5, 6, 10, 24)]
        [0, 1, 2, 7]
    """
    below = scipy.special.bdtr(range(count), count, 0.5)  # P(Bin ≤ 0), P(Bin ≤ 1), …
    return int((below <= error / 2).sum())


def share_interval(share: float, other: float | None, runs: int, error: float = ERROR) -> Interval:
    """The share of an arm's runs with an interval, or its difference from an `other` arm's share.

    One arm's interval is Clopper and Pearson's (1934). The interval of a difference goes from the
    lower bound of one arm minus the upper bound of the other to the opposite, each with half of the
    error; it holds for pairs, too.

    Raises:
        ValueError: There are no runs.
    """
    if other is None:
        return clopper_pearson(round(share * runs), runs, error)
    one = clopper_pearson(round(share * runs), runs, error / 2)
    two = clopper_pearson(round(other * runs), runs, error / 2)
    return Interval(one.value - two.value, one.low - two.high, one.high - two.low)


def clopper_pearson(successes: int, trials: int, error: float) -> Interval:
    """The rate of independent trials, with an interval that misses it with at most `error`.

    Raises:
        ValueError: There are no trials.
    """
    if trials == 0:
        raise ValueError("a share of no runs")
    low = scipy.special.betaincinv(successes, trials - successes + 1, error / 2)
    high = scipy.special.betaincinv(successes + 1, trials - successes, 1 - error / 2)
    return Interval(
        successes / trials,
        float(low) if successes else 0.0,
        float(high) if successes < trials else 1.0,
    )


def outcome_of(interval: Interval, effect: float) -> Outcome:
    """The verdict in one environment, where the claim is an `effect`; equality if that is 0."""
    low, high = interval.low, interval.high
    if effect == 0:
        if low > -MARGIN and high < MARGIN:
            return "equal"
        return "fails" if low > MARGIN or high < -MARGIN else "undecided"
    if high < 0:
        return "reversed"
    if high < effect / 2:
        return "smaller than claimed" if low > 0 else "fails"
    return "holds" if low > 0 else "undecided"


VERDICTS: Mapping[Verdict, frozenset[str]] = {
    "supports": frozenset({"holds", "equal"}),
    "smaller": frozenset({"smaller than claimed"}),
    "contradicts": frozenset({"fails", "reversed"}),
}
"""The outcomes in all environments that make a verdict."""


def verdict_of(outcomes: Sequence[Outcome]) -> Verdict:
    """The verdict over all environments that are judged.

    It supports the claim if that holds (or the arms are equal, as claimed) everywhere, or finds it
    smaller than claimed everywhere. It contradicts the claim if that fails or is reversed
    everywhere, and goes by environment otherwise.
    """
    if not outcomes:
        return "not judged"
    for verdict, wanted in VERDICTS.items():
        if set(outcomes) <= wanted:
            return verdict
    return "by environment"


def seeds_to_decide(runs: int, effect: float, after: Callable[[int], Interval]) -> int | None:
    """The number of seeds above `runs` whose interval, `after` so many, decides; None if > 1,000.

    Example:
        >>> seeds_to_decide(10, 0.5, lambda runs: share_interval(0.4, 0.0, runs))
        22
    """
    for count in range(runs + 1, MOST_SEEDS + 1):
        if outcome_of(after(count), effect) != "undecided":
            return count
    return None


def median_after(differences: Sequence[float], runs: int, error: float) -> Interval:
    """`median_interval` after so many runs, if their differences are distributed as these.

    Its bounds are the quantiles k ÷ (runs + 1) and 1 − k ÷ (runs + 1) of these.

    Example:
        >>> median_after([0.0, 0.1, 0.2], 1000, 0.05).low  # doctest: +ELLIPSIS
        0.08...
    """
    ordered, rank = sorted(differences), rank_of_bound(runs, error)
    if rank == 0:
        return Interval(median(ordered), -math.inf, math.inf)
    shares = np.arange(1, len(ordered) + 1) / (len(ordered) + 1)
    low, high = np.interp([rank / (runs + 1), 1 - rank / (runs + 1)], shares, ordered)
    return Interval(median(ordered), float(low), float(high))


def sentence(outcomes: Mapping[str, str]) -> str:
    """The outcome of each environment as one sentence."""
    places: dict[str, list[str]] = {}
    for place, outcome in outcomes.items():
        places.setdefault(outcome, []).append(place)
    parts = [f"{OUTCOME_WORDS[outcome]} {_listed(where)}" for outcome, where in places.items()]
    return f"The claim {'; '.join(parts)}."


OUTCOME_WORDS: Mapping[str, str] = {
    "holds": "holds on",
    "smaller than claimed": "holds, but with less than half of its size, on",
    "fails": "fails on",
    "equal": "holds (the arms are equal) on",
    "reversed": "is reversed on",
    "undecided": "is undecided on",
    "not exercised": "was not exercised on",
    "untestable": "was declared untestable on",
    "withdrawn": "was withdrawn by the authors on",
    "not run": "was not tested yet on",
}


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
