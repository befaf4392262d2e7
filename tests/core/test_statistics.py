"""Intervals and tests, compared with numbers worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.core.statistics import (
    Interval,
    bootstrap_mean,
    interquartile_mean,
    mcnemar,
    paired_difference,
    pass_at_k,
    smallest_detectable,
    success_rate,
    wilson,
)


def test_wilson_by_hand():
    # p = .5, n = 4, z = 1.96: centre .5 + 3.8416/8 = .9802, spread 1.96·√(.0625 + .0600) = .6860,
    # scale 1 + 3.8416/4 = 1.9604: (.9802 − .6860)/1.9604 = .1500, (.9802 + .6860)/1.9604 = .8500.
    interval = wilson(2, 4)
    assert interval.value == 0.5
    assert interval.low == pytest.approx(0.1500, abs=1e-4)
    assert interval.high == pytest.approx(0.8500, abs=1e-4)


def test_wilson_at_rates_0_and_1():
    # No success: low 0, high z²/(n + z²) = 3.8415/13.8415 = .2775.
    assert wilson(0, 10).low == 0.0
    assert wilson(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert wilson(10, 10).high == 1.0


@given(st.integers(1, 1000), st.floats(0, 1))
def test_wilson_contains_the_rate_and_is_symmetric(trials, share):
    successes = math.floor(share * trials)
    interval, mirrored = wilson(successes, trials), wilson(trials - successes, trials)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert interval.low == pytest.approx(1 - mirrored.high)


def test_copies_of_an_episode_do_not_narrow_the_interval():
    values, levels = [0.0, 1.0, 2.0, 5.0, 7.0], [1, 2, 3, 4, 5]
    copied, once = bootstrap_mean(values * 50, levels * 50), bootstrap_mean(values, levels)
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high))


def test_single_cluster_has_no_spread_and_clusters_are_weighted_by_size():
    assert bootstrap_mean([1.0, 2.0], [7, 7]).low == 1.5
    assert bootstrap_mean([0.0, 0.0, 3.0], [0, 0, 1]).value == 1.0
    with pytest.raises(ValueError, match="expected equally many"):
        bootstrap_mean([1.0], [])


def test_pass_at_k_by_hand():
    # n = 4, k = 2: c = 1 gives 1 − C(3,2)/C(4,2) = 1 − 3/6, c = 3 gives 1 − 0/6, c = 0 gives 0.
    assert pass_at_k([1, 3, 0], 4, 2).value == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert pass_at_k([1, 3, 0], 4, 1).value == pytest.approx((0.25 + 0.75 + 0.0) / 3)
    assert pass_at_k([1, 3, 0], 4, 4) == wilson(2, 3), "the share of levels solved at least once"


def test_pass_at_1_is_the_success_rate():
    for solved in ([1, 3, 0, 4], [0, 0], [4, 4, 4], [2], [1, 1]):
        won = [sample < count for count in solved for sample in range(4)]
        levels = [level for level in range(len(solved)) for _ in range(4)]
        one, rate = pass_at_k(solved, 4, 1), success_rate(won, levels)
        assert (one.value, one.low, one.high) == pytest.approx((rate.value, rate.low, rate.high))
    assert pass_at_k([3, 4], 4, 2) == wilson(2, 2), "no spread is not certainty"


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_pass_at_k_is_unbiased(chance):
    """Over all counts of n = 5 tries, its mean is the true 1 − (1 − p)ᵏ; the plug-in's is not."""
    n, k = 5, 3
    probabilities = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    mean = sum(p * pass_at_k([c], n, k).value for c, p in enumerate(probabilities))
    assert mean == pytest.approx(1 - (1 - chance) ** k)
    plug_in = sum(p * (1 - (1 - c / n) ** k) for c, p in enumerate(probabilities))
    assert plug_in < mean - 0.001


def test_success_rate_treats_levels_as_clusters():
    once = success_rate([True, False, True], [1, 2, 3])
    assert once == wilson(2, 3)
    # Two episodes per level that always agree give no more certainty than one.
    twice = success_rate([True, True, False, False, True, True], [1, 1, 2, 2, 3, 3])
    assert twice.value == pytest.approx(2 / 3)
    # The interval resamples levels, some always solved and some never.
    resampled = bootstrap_mean([1.0, 0.0, 1.0, 0.0, 1.0], range(5))
    assert (twice.low, twice.high) == (resampled.low, resampled.high)
    assert success_rate([False] * 4, [1, 1, 2, 2]) == wilson(0, 2), "no spread is not certainty"
    assert success_rate([True, False] * 2, [1, 1, 2, 2]) == wilson(1, 2), "nor between levels"
    # A single level, p = .25, n = 1: (.25 + 1.9207 ∓ 1.96·√(.1875 + .9604)) / 4.8415.
    single = success_rate([True, False, False, False], [1] * 4)
    assert (single.low, single.high) == pytest.approx((0.0146, 0.8820), abs=1e-4)
    with pytest.raises(ValueError, match="expected equally many"):
        success_rate([], [])


def test_paired_difference_by_hand():
    # 14 levels: 3 are solved by one agent alone, 1 by the other; with the two added levels, 4 and 2
    # of 16: centre 2/16 = .125, variance (6 − 16·.125²)/15 = .38333, of the mean .023958, its root
    # .15478; t(.975; 15) = 2.13145, so .125 ± .32992.
    ones, others = [1.0] * 3 + [0.0] * 11, [0.0] * 3 + [1.0] + [0.0] * 10
    found = paired_difference([ones], [others])
    assert found.value == pytest.approx(2 / 14)
    assert (found.low, found.high) == pytest.approx((-0.20492, 0.45492), abs=1e-5)
    swapped = paired_difference([others], [ones])
    assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low))


def test_equal_results_still_have_a_nonzero_interval():
    # One more success each on two added levels of 66: ± t(.975; 65)·√(2/65/66) = 1.9971·.021592.
    found = paired_difference([[1.0] * 64], [[1.0] * 64])
    assert (found.value, found.low) == (0.0, -found.high)
    assert found.high == pytest.approx(0.04312, abs=1e-5)


def test_seed_variance_widens_the_interval_regardless_of_level_count():
    def width(rates: list[float], num_levels: int) -> float:
        arm = [[rate] * num_levels for rate in rates]
        found = paired_difference(arm, [[0.5] * num_levels] * len(rates))
        return found.high - found.low

    alike, unlike = [0.7, 0.7, 0.7], [0.5, 0.7, 0.9]
    assert width(alike, 400) < 0.01 < 0.5 < width(unlike, 400)
    # Welch's interval: t(.975; 2) = 4.3027 times √(.04/3) = .11547, to both sides.
    assert width(unlike, 4000) == pytest.approx(2 * 4.3027 * 0.11547, rel=1e-3)


def test_level_variance_within_seeds_is_not_counted_twice():
    # Each seed solves a different half of the levels: neither seeds nor levels vary.
    ones = [[1.0, 0.0] * 50, [0.0, 1.0] * 50]
    found = paired_difference(ones, [[0.0, 1.0] * 50, [1.0, 0.0] * 50])
    assert found.high - found.low < 0.04


def test_smallest_detectable_by_hand():
    # 1.96 standard errors are .07: 2.80 of them, (1.96 + .8416)/1.96 · .07, are .1001.
    assert smallest_detectable(Interval(0.02, -0.05, 0.09)) == pytest.approx(0.1001, abs=1e-4)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 40))
def test_mcnemar_equals_the_binomial_test_on_the_levels_that_differ(won, lost, same):
    num = won + lost  # both tails up to the rarer of the two, at probability ½
    expected = min(1.0, 2 * sum(math.comb(num, k) for k in range(min(won, lost) + 1)) / 2**num)
    assert mcnemar([1] * won + [0] * same + [-1] * lost) == pytest.approx(expected)


def test_mcnemar_of_several_samples_by_hand():
    # Gains 2, 1, −1: the sums of ±2 ±1 ±1 are 4, 2, 2, 0 and their negatives; 6 of 8 reach 2.
    assert mcnemar([2, 1, -1]) == 0.75
    assert mcnemar([2, -1, 1]) == mcnemar([-2, 1, -1]) == 0.75
    assert mcnemar([4, 2, 2, 0]) == 0.25, "in steps of two, nothing changes: 2 of 8"
    assert mcnemar([0, 0]) == mcnemar([]) == 1.0


def test_interquartile_mean_by_hand():
    # Eight scores, two dropped at each end: (3 + 4 + 5 + 6)/4; three: none is dropped.
    assert interquartile_mean([[1, 2, 3, 4], [5, 6, 7, 100]]).value == 4.5
    assert interquartile_mean([[0.0, 0.3, 0.9]]).value == pytest.approx(0.4)
    collapsed = interquartile_mean([[0.0, 0.7, 0.71, 0.72, 0.73]])
    assert collapsed.value == pytest.approx(0.71), "one collapsed seed of five does not decide"
    assert 0 <= collapsed.low < 0.7 < collapsed.value < collapsed.high <= 0.73


def test_arguments_without_a_meaning_are_refused():
    for successes, trials in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="are not a rate"):
            wilson(successes, trials)
    for solved, samples, k in (([1], 2, 3), ([1], 2, 0), ([3], 2, 1), ([], 2, 1)):
        with pytest.raises(ValueError, match="expected 1 ≤ k ≤ n, one level"):
            pass_at_k(solved, samples, k)
    for ones, others in (([], []), ([[]], [[]]), ([[1.0]], []), ([[1.0]], [[1.0, 0.0]])):
        with pytest.raises(ValueError, match="same levels"):
            paired_difference(ones, others)
    for strata in ([], [[0.5]], [[0.5, 0.6], [0.5]]):
        with pytest.raises(ValueError, match="two or more"):
            interquartile_mean(strata)
