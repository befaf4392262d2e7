"""The rule: which verdict an interval gives, and that intervals miss as rarely as they say."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from ragen.core.statistics import Interval
from ragen.studies.rule import (
    Outcome,
    Verdict,
    clopper_pearson,
    median_after,
    median_interval,
    outcome_of,
    rank_of_bound,
    seeds_to_decide,
    sentence,
    share_interval,
    verdict_of,
)


@pytest.mark.parametrize(
    ("low", "high", "effect", "expected"),
    [
        (0.1, 0.3, 0.2, "holds"),
        (0.1, 0.3, 0.8, "smaller than claimed"),  # below .4 as well
        (0.01, 0.5, 0.2, "holds"),
        (-0.1, 0.09, 0.2, "fails"),
        (-0.1, 0.11, 0.2, "undecided"),
        (-0.3, -0.1, 0.2, "reversed"),
        (-0.04, 0.04, 0.0, "equal"),
        (-0.04, 0.06, 0.0, "undecided"),
        (0.06, 0.3, 0.0, "fails"),
        (-0.3, -0.06, 0.0, "fails"),
        (-math.inf, math.inf, 0.2, "undecided"),
    ],
)
def test_outcome_follows_from_the_interval(
    low: float, high: float, effect: float, expected: Outcome
) -> None:
    assert outcome_of(Interval((low + high) / 2, low, high), effect) == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["holds", "equal"], "supports"),
        (["fails", "reversed"], "contradicts"),
        (["holds", "fails"], "by environment"),
        (["holds", "undecided"], "by environment"),
        (["smaller than claimed"], "smaller"),
        ([], "not judged"),
    ],
)
def test_verdict_follows_from_the_outcomes(outcomes: list[Outcome], expected: Verdict) -> None:
    assert verdict_of(outcomes) == expected


def test_the_sentence_names_every_environment() -> None:
    found = sentence({"a": "holds", "b": "smaller than claimed", "c": "holds", "d": "untestable"})
    assert found == (
        "The claim holds on a and c; holds, but with less than half of its size, on b; "
        "was declared untestable on d."
    )


@pytest.mark.parametrize("error", [0.05, 0.05 / 3])
@pytest.mark.parametrize("count", range(5, 25))
def test_the_median_is_missed_as_rarely_as_asked_for(count: int, error: float) -> None:
    """A bound at rank k is beyond the median if fewer than k of the numbers are below it."""
    rank = rank_of_bound(count, error)
    missed = [2 * sum(math.comb(count, k) for k in range(r)) / 2**count for r in (rank, rank + 1)]
    assert missed[0] <= error < missed[1]


def test_the_median_interval_is_between_two_of_the_numbers() -> None:
    numbers = [0.1 * each for each in range(10)]
    assert median_interval(numbers) == Interval(0.45, numbers[1], numbers[8])
    assert median_interval(numbers[:5]) == Interval(0.2, -math.inf, math.inf)
    with pytest.raises(ValueError, match="no numbers"):
        median_interval([])


@pytest.mark.parametrize("seeds", [6, 12])
def test_shares_are_missed_as_rarely_as_asked_for(seeds: int) -> None:
    """Exactly, over all counts, of arms that are independent."""
    for one, other in product((0.0, 0.1, 0.5, 0.9), repeat=2):
        missed = 0.0
        for a, b in product(range(seeds + 1), repeat=2):
            chance = math.comb(seeds, a) * one**a * (1 - one) ** (seeds - a)
            chance *= math.comb(seeds, b) * other**b * (1 - other) ** (seeds - b)
            found = share_interval(a / seeds, b / seeds, seeds)
            missed += chance * (not found.low <= one - other <= found.high)
        assert missed <= 0.05


def test_a_share_of_all_or_none_keeps_a_width() -> None:
    """0 of n: the upper bound u has (1 − u)ⁿ = .025."""
    assert clopper_pearson(0, 12, 0.05).high == pytest.approx(1 - 0.025 ** (1 / 12))
    assert clopper_pearson(12, 12, 0.05) == Interval(1.0, pytest.approx(0.025 ** (1 / 12)), 1.0)
    with pytest.raises(ValueError, match="no runs"):
        clopper_pearson(0, 0, 0.05)


def test_more_runs_like_these_decide_at_the_number_that_is_named() -> None:
    """Of draws with the quantiles of ten, most are decided after twice as many runs."""
    ten = np.linspace(-0.06, 0.14, 10).tolist()  # the median is .04, D/2 is .1
    enough = seeds_to_decide(10, 0.2, lambda runs: median_after(ten, runs, 0.05))
    assert enough is not None and 10 < enough < 60
    generator = np.random.default_rng(0)
    more = generator.uniform(-0.08, 0.16, (500, 2 * enough))
    decided = [outcome_of(median_interval(row.tolist()), 0.2) != "undecided" for row in more]
    assert np.mean(decided) > 0.8
    around_0 = [-0.1, 0.1] * 5
    assert seeds_to_decide(10, 0.001, lambda runs: median_after(around_0, runs, 0.05)) is None
