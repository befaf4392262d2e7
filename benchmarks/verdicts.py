"""How often the studies' rule gives a false verdict, and which effects it finds.

    python benchmarks/verdicts.py            # the tables of docs/studies/index.md; minutes
    python benchmarks/verdicts.py --quick    # of fewer studies and seeds, seconds

Runs are drawn, not trained. A run has a success rate that varies from seed to seed, and is measured
on 512 episodes. `SHAPES` says how the rate varies: a little or much, near the ceiling, or with
collapses to almost 0. Two arms of equally many seeds are compared as in a study, with a claimed
effect D, at the error of one environment of three (5 % ÷ 3) or of a study with a single one.

*False* is any verdict that the truth excludes: "holds" where the true difference is ≤ 0, "fails"
where it is ≥ D/2, "equal" where it is beyond ±.05, and so on. The truth is that of the interval's
own quantity: the median difference of a pair (sign test), its pseudomedian (Wilcoxon), or the
difference of means (all others). Each line of the first table is the worst over shapes, `CLAIMS`
and true differences, among them the hardest ones: 0, and D/2 as exactly as it can be.

The intervals of shares need no draws: all pairs of counts are summed with their probabilities.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import product

import numpy as np
import scipy.special
from numpy.typing import NDArray

from ragen.core.statistics import Interval
from ragen.studies.rule import ERROR, MARGIN, Outcome, outcome_of, rank_of_bound, share_interval

Floats = NDArray[np.float64]

EPISODES = 512
SEEDS = (5, 8, 10, 12, 16, 20, 24)
CLAIMS = (0.0, 0.08, 0.19, 0.5)
"""Claimed effects D; 0 claims equality."""
ENVIRONMENTS = 3

Shape = Callable[[np.random.Generator, tuple[int, int], float, bool], Floats]
"""Success rates of runs, (studies, seeds), around a centre; the first arm or the other."""


def spread(sigma: float) -> Shape:
    """Normal rates."""
    return lambda g, size, centre, _: g.normal(centre, sigma, size)


def ceiling(g: np.random.Generator, size: tuple[int, int], centre: float, _: bool) -> Floats:
    """Rates with a tail to the left, whose median is the centre."""
    return centre + 0.03 * (np.log(2) - g.exponential(1.0, size))


def collapses(first: float, other: float) -> Shape:
    """Normal rates, of which these shares fall to about .01, by arm."""

    def draw(g: np.random.Generator, size: tuple[int, int], centre: float, one: bool) -> Floats:
        fell = g.random(size) < (first if one else other)
        return np.where(fell, 0.01, g.normal(centre, 0.02, size))

    return draw


SHAPES: dict[str, Shape] = {
    "σ = .02": spread(0.02),
    "σ = .06": spread(0.06),
    "near the ceiling": ceiling,
    "1 in 10 collapses": collapses(0.1, 0.0),
    "3 in 10 collapse": collapses(0.3, 0.0),
    "3 in 10 of both": collapses(0.3, 0.3),
    "7 in 10 collapse": collapses(0.7, 0.0),
}
KINDS = {"no collapses": list(SHAPES)[:3], "collapses": list(SHAPES)[3:]}
DIFFERENT = ("1 in 10 collapses", "3 in 10 collapse", "7 in 10 collapse")
"""Shapes whose arms differ even with the same centre."""


def measured(g: np.random.Generator, shape: Shape, size: tuple[int, int], shift: float) -> Floats:
    """Differences of pairs, the first arm's centre `shift` above the other's."""
    top = 0.94 if shape is ceiling else 0.6
    arms = [
        g.binomial(EPISODES, np.clip(shape(g, size, centre, one), 0, 1)) / EPISODES
        for one, centre in ((True, min(top, top + shift)), (False, min(top, top - shift)))
    ]
    return arms[0] - arms[1]


# Intervals: bounds over the last axis.

Bounds = tuple[Floats, Floats]


def student(pairs: Floats, error: float) -> Bounds:
    """Student's, of the mean difference, cut at ±1."""
    count = pairs.shape[-1]
    half = scipy.special.stdtrit(count - 1, 1 - error / 2) * pairs.std(-1, ddof=1) / count**0.5
    mean = pairs.mean(-1)
    return np.maximum(mean - half, -1), np.minimum(mean + half, 1)


def bootstrap(pairs: Floats, error: float) -> Bounds:
    """The expanded percentile of the mean difference (`statistics.bootstrap_mean`)."""
    count = pairs.shape[-1]
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=500)
    quantile = scipy.special.stdtrit(count - 1, 1 - error / 2)
    tail = scipy.special.ndtr(-quantile * (count / (count - 1)) ** 0.5)
    low, high = np.quantile(times @ pairs.T / count, [tail, 1 - tail], axis=0)
    return low, high


def bounded(pairs: Floats, error: float) -> Bounds:
    """A mean's interval that holds for any numbers in [−1, 1] (Gaffke 2005).

    Weights are Dirichlet's, over the values and one more at the end of what is possible.
    """
    weights = np.random.default_rng(0).dirichlet(np.ones(pairs.shape[-1] + 1), size=500)
    ordered = np.sort(pairs, -1)
    edge = np.ones((len(pairs), 1))
    low = np.quantile(weights @ np.append(-edge, ordered, 1).T, error / 2, axis=0)
    high = np.quantile(weights @ np.append(ordered, edge, 1).T, 1 - error / 2, axis=0)
    return low, high


def wilcoxon(pairs: Floats, error: float) -> Bounds:
    """The signed-rank test's, between two of the means of two differences (Walsh averages)."""
    count = pairs.shape[-1]
    one, other = np.triu_indices(count)
    walsh = np.sort((pairs[..., one] + pairs[..., other]) / 2, -1)
    chances = np.ones(1)  # of each sum of positive ranks
    for rank in range(1, count + 1):
        step = np.zeros(rank + 1)
        step[[0, -1]] = 0.5
        chances = np.convolve(chances, step)
    place = int((np.cumsum(chances) <= error / 2).sum())
    return _between(walsh, place)


def sign(pairs: Floats, error: float) -> Bounds:
    """The rule's (`rule.median_interval`)."""
    return _between(np.sort(pairs, -1), rank_of_bound(pairs.shape[-1], error))


def _between(ordered: Floats, place: int) -> Bounds:
    if place == 0:
        endless = np.full(len(ordered), np.inf)
        return -endless, endless
    return ordered[..., place - 1], ordered[..., -place]


METHODS: dict[str, tuple[Callable[[Floats, float], Bounds], Callable[[Floats], float]]] = {
    "sign test: median": (sign, lambda pairs: float(np.median(pairs))),
    "Wilcoxon: pseudomedian": (wilcoxon, lambda pairs: float(np.median(_means_of_two(pairs)))),
    "Student: mean": (student, lambda pairs: float(pairs.mean())),
    "bootstrap: mean": (bootstrap, lambda pairs: float(pairs.mean())),
    "Gaffke: mean": (bounded, lambda pairs: float(pairs.mean())),
}
"""An interval, and what it is one of."""


def _means_of_two(pairs: Floats) -> Floats:
    return (pairs + np.roll(pairs, 1)) / 2


def is_false(outcome: Outcome, truth: float, effect: float) -> bool:
    """Whether a verdict says what is not true."""
    if effect == 0:
        right = {"equal": abs(truth) < MARGIN, "fails": abs(truth) > MARGIN, "undecided": True}
    else:
        right = {
            "holds": truth > 0,
            "smaller than claimed": 0 < truth < effect / 2,
            "fails": truth < effect / 2,
            "reversed": truth < 0,
            "undecided": True,
        }
    return not right[outcome]


@cache
def drawn(shape: str, shift: float, seeds: int, studies: int) -> Floats:
    """Differences of (studies, seeds), which all methods see."""
    key = [list(SHAPES).index(shape), round(1000 * (shift + 1)), seeds]
    return measured(np.random.default_rng(key), SHAPES[shape], (studies, seeds), shift)


@cache
def truth_of(method: str, shape: str, shift: float) -> float:
    """What a method's interval is to contain."""
    if shift == 0 and shape not in DIFFERENT:
        return 0.0  # the arms are alike
    return METHODS[method][1](drawn(shape, shift, 1, 400_000)[:, 0])


@lru_cache(maxsize=1)  # of several claims in turn
def intervals(
    method: str, shape: str, shift: float, seeds: int, error: float, studies: int
) -> list[Interval]:
    """The intervals of many studies."""
    low, high = METHODS[method][0](drawn(shape, shift, seeds, studies), error)
    pairs = zip(low.tolist(), high.tolist(), strict=True)
    return [Interval((a + b) / 2, a, b) for a, b in pairs]


def outcomes(
    method: str, shape: str, shift: float, seeds: int, effect: float, error: float, studies: int
) -> list[Outcome]:
    """Their verdicts on a claim."""
    found = intervals(method, shape, shift, seeds, error, studies)
    return [outcome_of(each, effect) for each in found]


def worst_false(method: str, shape: str, seeds: int, error: float, studies: int) -> float:
    """The largest share of false verdicts, over claims and true differences."""
    worst = 0.0
    for shift in (0.0, 0.04, -0.04, 0.06, 0.1, 0.2):
        truth = truth_of(method, shape, shift)
        # Beside the usual claims one whose half is the truth itself: "fails" is then just false.
        for effect in (*CLAIMS, 2 * truth) if truth > 0 else CLAIMS:
            found = outcomes(method, shape, shift, seeds, effect, error, studies)
            worst = max(worst, sum(is_false(each, truth, effect) for each in found) / studies)
    return worst


def false_table(seeds: Sequence[int], studies: int, error: float) -> Iterator[str]:
    """Per cent of false verdicts at worst, by interval, shape and seeds."""
    yield header(seeds, "interval", "runs")
    for method, kind in product(METHODS, KINDS):
        worst = [
            max(worst_false(method, shape, n, error, studies) for shape in KINDS[kind])
            for n in seeds
        ]
        yield f"| {method} | {kind} | {' | '.join(f'{100 * share:.1f}' for share in worst)} |"


def header(seeds: Sequence[int], *names: str) -> str:
    """The head of a table with a column for each number of seeds."""
    columns = [*names, *(f"{count} seeds" for count in seeds)]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def power_table(seeds: Sequence[int], studies: int, error: float) -> Iterator[str]:
    """Per cent of verdicts that are right, by what is true: the claimed effect, or none."""
    yield header(seeds, "claim", "seeds differ by", "the truth is", "verdict")
    against: set[Outcome] = {"fails", "reversed", "smaller than claimed"}
    for effect, shape in product((0.08, 0.19, 0.5), ("σ = .02", "σ = .06")):
        for name, shift, wanted in (("D", effect, {"holds"}), ("0", 0.0, against)):
            said = "holds" if name == "D" else "fails"
            row = [f"D = {effect:g}", shape, name, said]
            for n in seeds:
                found = outcomes("sign test: median", shape, shift, n, effect, error, studies)
                row.append(f"{100 * sum(each in wanted for each in found) / studies:.0f}")
            yield f"| {' | '.join(row)} |"
    for shape in ("σ = .02", "σ = .06"):
        row = ["equal (±.05)", shape, "0", "equal"]
        for n in seeds:
            found = outcomes("sign test: median", shape, 0.0, n, 0.0, error, studies)
            row.append(f"{100 * found.count('equal') / studies:.0f}")
        yield f"| {' | '.join(row)} |"


def share_chances(seeds: int, one: float, other: float, error: float) -> tuple[float, float]:
    """The probabilities of "holds" and of a false verdict on two shares of runs, D = 1."""
    counts = np.arange(seeds + 1)
    chances = [
        scipy.special.comb(seeds, counts) * p**counts * (1 - p) ** (seeds - counts)
        for p in (one, other)
    ]
    holds = false = 0.0
    for a, b in product(counts.tolist(), repeat=2):
        chance = float(chances[0][a] * chances[1][b])
        outcome = outcome_of(share_interval(a / seeds, b / seeds, seeds, error), 1.0)
        holds += chance * (outcome == "holds")
        false += chance * is_false(outcome, one - other, 1.0)
    return holds, false


def share_table(seeds: Sequence[int], error: float) -> Iterator[str]:
    """Per cent of "holds" where more runs of one arm collapse, and of false verdicts at worst."""
    yield header(seeds, "collapses of the arms", "verdict")
    for one in (1.0, 0.9, 0.75, 0.5):
        cells = [f"{100 * share_chances(n, one, 0.0, error)[0]:.0f}" for n in seeds]
        yield f"| {one:.0%}, 0 % | holds | {' | '.join(cells)} |"
    hardest = [(share, share) for share in (0.1, 0.3, 0.5)] + [(0.75, 0.25), (0.5, 0.0)]
    worst = [max(share_chances(n, *each, error)[1] for each in hardest) for n in seeds]
    yield f"| equal, or apart by half | false | {' | '.join(f'{100 * x:.1f}' for x in worst)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--studies", type=int, default=2000, help="simulated for each number")
    parser.add_argument("--quick", action="store_true", help="200 studies, for a test")
    args = parser.parse_args()
    studies, seeds = (200, (5, 10)) if args.quick else (args.studies, SEEDS)
    print("Per cent of false verdicts at worst, in a study of one environment:\n")
    print("\n".join(false_table(seeds, studies, ERROR)), flush=True)
    for environments in (1, ENVIRONMENTS):
        print(f"\nPer cent of right verdicts, in one environment of {environments}:\n")
        print("\n".join(power_table(seeds, studies, ERROR / environments)))
        print("\nThe same of shares of runs, and of false verdicts:\n")
        print("\n".join(share_table(seeds, ERROR / environments)))


if __name__ == "__main__":
    main()
