"""Intervals, against numbers worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.statistics import bootstrap_mean, pass_at_k, success_rate, wilson


def test_wilson_by_hand():
    # p = .5, n = 4, z = 1.96: centre .5 + 3.8416/8 = .9802, spread 1.96·√(.0625 + .0600) = .6860,
    # scale 1 + 3.8416/4 = 1.9604: (.9802 − .6860)/1.9604 = .1500, (.9802 + .6860)/1.9604 = .8500.
    interval = wilson(2, 4)
    assert interval.value == 0.5
    assert interval.low == pytest.approx(0.1500, abs=1e-4)
    assert interval.high == pytest.approx(0.8500, abs=1e-4)


def test_wilson_at_the_ends():
    # No success: low 0, high z²/(n + z²) = 3.8415/13.8415 = .2775.
    assert wilson(0, 10).low == 0.0
    assert wilson(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert wilson(10, 10).high == 1.0


@given(st.integers(1, 1000), st.floats(0, 1))
def test_wilson_holds_the_rate_and_is_symmetric(trials, share):
    successes = math.floor(share * trials)
    interval, mirrored = wilson(successes, trials), wilson(trials - successes, trials)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert interval.low == pytest.approx(1 - mirrored.high)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_no_rate(successes, trials):
    with pytest.raises(ValueError, match="make no rate"):
        wilson(successes, trials)


def test_bootstrap_follows_the_normal_interval_for_single_episodes():
    values = [float(i % 2) for i in range(400)]
    interval = bootstrap_mean(values, range(400))
    # Standard error √(¼/400) = .025; 1.96 of them are .049.
    assert interval.value == 0.5
    assert interval.low == pytest.approx(0.451, abs=0.006)
    assert interval.high == pytest.approx(0.549, abs=0.006)


def test_copies_of_an_episode_do_not_make_it_surer():
    values, levels = [0.0, 1.0, 2.0, 5.0, 7.0], [1, 2, 3, 4, 5]
    copied = bootstrap_mean(values * 50, levels * 50)
    assert copied == bootstrap_mean(values, levels)


def test_one_cluster_has_no_spread_and_unequal_ones_count_by_size():
    assert bootstrap_mean([1.0, 2.0], [7, 7]).low == 1.5
    assert bootstrap_mean([0.0, 0.0, 3.0], [0, 0, 1]).value == 1.0
    with pytest.raises(ValueError, match="need as many"):
        bootstrap_mean([1.0], [])


def test_pass_at_k_by_hand():
    # n = 4, k = 2: c = 1 gives 1 − C(3,2)/C(4,2) = 1 − 3/6, c = 3 gives 1 − 0/6, c = 0 gives 0.
    assert pass_at_k([1, 3, 0], 4, 2).value == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert pass_at_k([1, 3, 0], 4, 1).value == pytest.approx((0.25 + 0.75 + 0.0) / 3)
    assert pass_at_k([1, 3, 0], 4, 4) == wilson(2, 3), "the share of levels that were solved at all"


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_pass_at_k_is_unbiased(chance):
    """Over all counts of n = 5 tries, its mean is the true 1 − (1 − p)ᵏ; the plug-in's is not."""
    n, k = 5, 3
    likely = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    mean = sum(p * pass_at_k([c], n, k).value for c, p in enumerate(likely))
    assert mean == pytest.approx(1 - (1 - chance) ** k)
    plugged = sum(p * (1 - (1 - c / n) ** k) for c, p in enumerate(likely))
    assert plugged < mean - 0.001


@pytest.mark.parametrize(
    ("solved", "samples", "k"), [([1], 2, 3), ([1], 2, 0), ([3], 2, 1), ([], 2, 1)]
)
def test_no_pass_at_k(solved, samples, k):
    with pytest.raises(ValueError, match=r"expected 1 ≤ k ≤ n|need as many"):
        pass_at_k(solved, samples, k)


def test_success_rate_counts_levels():
    once = success_rate([True, False, True], [1, 2, 3])
    assert once == wilson(2, 3)
    # Twice as many episodes on the same levels that always agree are no surer.
    twice = success_rate([True, True, False, False, True, True], [1, 1, 2, 2, 3, 3])
    assert twice.value == pytest.approx(2 / 3)
    assert twice == bootstrap_mean([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], [1, 1, 2, 2, 3, 3])
    assert success_rate([False] * 4, [1, 1, 2, 2]) == wilson(0, 2), "no spread is not certainty"
    with pytest.raises(ValueError, match="need as many"):
        success_rate([], [])
