"""Print the table of searches of docs/environment-cards.md, at equal frames.

The colour is guessed if the target was not seen closely, and counts as a quarter of a right one.

    python scripts/haystack.py --budget 64
"""

from __future__ import annotations

import argparse
from statistics import fmean

import numpy as np
from rich.console import Console

from ragen.core.seeding import EVAL_LEVELS, derive
from ragen.core.statistics import bootstrap_mean
from ragen.core.tables import Section, show
from ragen.envs.worlds.haystack.film import COLOURS, Film, agreement, generate
from ragen.envs.worlds.haystack.players import Search, oracle, random, tstar, uniform, with_target

SEARCHES = {"random": random, "uniform": uniform, "T*": tstar, "oracle": oracle}
COLUMNS = ("player", "right", "95 %", "precision", "recall", "F1", "95 %", "frames", "return")


def row(name: str, films: list[Film], found: list[Search], cost: float) -> tuple[str, ...]:
    """A player's means over the levels of evaluations."""
    right, agreed, totals = [], [], []
    for film, search in zip(films, found, strict=True):
        is_known = any(film.target in film.seen(frame, True) for frame in search.closely)
        right.append(1.0 if is_known else 1 / len(COLOURS))
        agreed.append(agreement(search.named, film.moment))
        totals.append(right[-1] + agreed[-1][2] - cost * search.num_seen)
    means = [f"{100 * fmean(each):.1f}" for each in (right, *zip(*agreed, strict=True))]
    intervals = (
        bootstrap_mean(each, range(len(films))) for each in (right, [f1 for *_, f1 in agreed])
    )
    spans = [f"{100 * each.low:.1f} – {100 * each.high:.1f}" for each in intervals]
    seen = f"{fmean(search.num_seen for search in found):.1f}"
    return (name, means[0], spans[0], *means[1:], spans[1], seen, f"{fmean(totals):.3f}")


def main() -> None:
    """Play the levels and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--levels", type=int, default=256)
    parser.add_argument("--frames", type=int, default=600, help="length of a film")
    parser.add_argument("--budget", type=int, default=64, help="frames that may be seen")
    parser.add_argument("--keep", type=int, default=8, help="frames that are named at most")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--cost", type=float, default=0.005)
    given = parser.parse_args()
    levels = range(EVAL_LEVELS, EVAL_LEVELS + given.levels)
    films = [generate(level, given.frames, given.noise) for level in levels]
    rows = []
    for name, player in SEARCHES.items():
        seeds = [derive(0, "haystack", name, level) for level in levels]
        found = [
            player(film, given.budget, given.keep, np.random.Generator(np.random.PCG64(seed)))
            for film, seed in zip(films, seeds, strict=True)
        ]
        if name == "T*":
            rows.append(row("T*, frames as drawn", films, found, given.cost))
        found = [with_target(film, each) for film, each in zip(films, found, strict=True)]
        rows.append(row(name, films, found, given.cost))
    title = f"{given.levels} films of {given.frames} frames, at most {given.budget} seen"
    show(Console(), [Section(title, (), COLUMNS, tuple(rows))])


if __name__ == "__main__":
    main()
