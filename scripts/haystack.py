"""Print the table of searches of docs/environment-cards.md, at equal frames.

The colour is guessed if the target was not seen closely, and counts as a quarter of a right one.
`--played` adds evaluations of one episode a level on such films, by the folders that `ragen eval`
names.

    python scripts/haystack.py --budget 64
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from rich.console import Console

from ragen.core.seeding import EVAL_LEVELS, derive
from ragen.core.statistics import bootstrap_mean
from ragen.core.tables import Section, show
from ragen.core.types import Episode
from ragen.envs.worlds.haystack.film import COLOURS, Film, agreement, generate
from ragen.envs.worlds.haystack.players import Search, oracle, random, tstar, uniform, with_target
from ragen.storage.stored_episodes import read_episodes

SEARCHES = {"random": random, "uniform": uniform, "T*": tstar, "oracle": oracle}
COLUMNS = ("player", "right", "95 %", "precision", "recall", "F1", "95 %", "frames", "return")


class Measured(NamedTuple):
    """The measures of one search; the first four are shares."""

    right: float
    precision: float
    recall: float
    f1: float
    frames: float
    total: float


def measure(film: Film, search: Search, cost: float) -> Measured:
    """The measures of a reference search."""
    is_known = any(film.target in film.seen(frame, True) for frame in search.closely)
    right, agreed = 1.0 if is_known else 1 / len(COLOURS), agreement(search.named, film.moment)
    return Measured(right, *agreed, search.num_seen, right + agreed[2] - cost * search.num_seen)


def measure_played(film: Film, episode: Episode, cost: float) -> Measured:
    """The measures of an evaluated episode; one without an answer is wrong."""
    colour, *named = " ".join(episode.turns[-1].actions_executed).split() or [""]
    is_answered = episode.terminated and colour in COLOURS
    agreed = agreement([*map(int, named)], film.moment) if is_answered else (0.0, 0.0, 0.0)
    frames = (episode.success + agreed[2] - episode.reward) / cost
    return Measured(float(episode.success), *agreed, frames, episode.reward)


def row(name: str, measured: Sequence[Measured]) -> tuple[str, ...]:
    """The means over levels, and intervals of two of them."""
    means = Measured(*map(fmean, zip(*measured, strict=True)))
    spans = []
    for place in (0, 3):
        found = bootstrap_mean([each[place] for each in measured], range(len(measured)))
        spans.append(f"{100 * found.low:.1f} – {100 * found.high:.1f}")
    shares = [f"{100 * share:.1f}" for share in means[:4]]
    rest = f"{means.frames:.1f}", f"{means.total:.3f}"
    return name, shares[0], spans[0], *shares[1:], spans[1], *rest


def main() -> None:
    """Play the levels and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--levels", type=int, default=256)
    parser.add_argument("--frames", type=int, default=600, help="length of a film")
    parser.add_argument("--budget", type=int, default=64, help="frames that may be seen")
    parser.add_argument("--keep", type=int, default=8, help="frames that are named at most")
    parser.add_argument("--grid", type=int, default=4, help="T* looks at grid² frames at once")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--cost", type=float, default=0.005, help="price of a frame, not 0")
    parser.add_argument("--played", type=Path, nargs="*", default=[], metavar="DIR")
    given = parser.parse_args()
    levels = range(EVAL_LEVELS, EVAL_LEVELS + given.levels)
    films = [generate(level, given.frames, given.noise) for level in levels]
    rows = []
    for name, player in {**SEARCHES, "T*": partial(tstar, grid=given.grid)}.items():
        seeds = [derive(0, "haystack", name, level) for level in levels]
        found = [
            player(film, given.budget, given.keep, np.random.Generator(np.random.PCG64(seed)))
            for film, seed in zip(films, seeds, strict=True)
        ]
        pairs = [*zip(films, found, strict=True)]
        if name == "T*":
            measured = [measure(film, search, given.cost) for film, search in pairs]
            rows.append(row("T*, frames as drawn", measured))
        named = [(film, with_target(film, search)) for film, search in pairs]
        rows.append(row(name, [measure(film, search, given.cost) for film, search in named]))
    for folder in given.played:
        episodes = [recorded.episode for recorded in read_episodes(folder)]
        by_level = [(films[episode.level_seed - EVAL_LEVELS], episode) for episode in episodes]
        measured = [measure_played(film, episode, given.cost) for film, episode in by_level]
        rows.append(row(folder.name, measured))
    title = f"{given.levels} films of {given.frames} frames, at most {given.budget} seen"
    show(Console(), [Section(title, (), COLUMNS, tuple(rows))])


if __name__ == "__main__":
    main()
