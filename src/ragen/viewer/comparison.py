"""Comparison of two sets of episodes: a run at two steps, or two runs.

Only recorded evaluations are compared; nothing is played. Where both sets hold the same levels of
the same game, success is compared level by level: a paired comparison shows smaller differences
than two separate rates do. `level` gives the episodes of one level, so that their texts can be read
side by side.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragen.core.statistics import (
    Interval,
    difference,
    mcnemar,
    paired_difference,
    smallest_detectable,
    success_rate,
)
from ragen.evaluation.outcomes import how_sampled
from ragen.evaluation.targets import DISPLAY_KEYS
from ragen.storage.attempts import Counts, still_counts
from ragen.viewer.episode_page import detail, episode_row
from ragen.viewer.reading import (
    Answer,
    Query,
    folder_of,
    loaded,
    reading,
    run_folder,
    text_of,
    whole_number,
)
from ragen.viewer.run_list import evaluations
from ragen.viewer.run_page import flat_settings

PHASES = ("eval", "eval greedy")
"""The phases of a run's own evaluations, which play the same levels each time."""

MOST_OF_LEVEL = 400
"""Episodes of one level that are sent at once: more than a run evaluates it."""


@dataclass(frozen=True, slots=True)
class EpisodeSet:
    """The recorded episodes of one evaluation.

    Attributes:
        env: The environment's name.
        step: The training step; ``None`` for an evaluation by ``ragen eval``.
        levels: By level seed, the share of successes and the number of episodes.
    """

    env: str
    step: int | None
    levels: Mapping[int, tuple[float, int]]


Recorded = Mapping[tuple[str, str], Mapping[int, EpisodeSet]]
"""A run's own evaluations that count, by phase and environment, then by step."""


def compare(root: Path, query: Query) -> Answer:
    """``/api/compare``: how much better the second of two sets of episodes does than the first.

    Without ``other``, these are the first and the last evaluation of a run. With it, they are the
    last evaluations of the run and of the other one, in each environment and way of sampling.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    run = _Evaluated(folder_of(root, query))
    if "other" not in query:
        found = list(_first_and_last(run))
    else:
        found = list(_two_runs(run, _Evaluated(run_folder(root, query["other"]))))
        found.sort(key=lambda each: (each["env"], each["how"]))
    return {"comparisons": [each | run.baselines(each) for each in found]}


def levels(root: Path, query: Query) -> Answer:
    """``/api/levels``: the levels that were evaluated at more than one step.

    ``successes`` are the shares of the episodes of each step that succeeded.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    with reading(folder_of(root, query)) as connection:
        recorded = _recorded(connection, still_counts(connection))
    found: list[Answer] = []
    for (phase, env), by_step in recorded.items():
        for seed in sorted({seed for each in by_step.values() for seed in each.levels}):
            steps = [step for step, each in by_step.items() if seed in each.levels]
            if len(steps) > 1:
                successes = [by_step[step].levels[seed][0] for step in steps]
                known = {"phase": phase, "env": env, "level_seed": seed}
                found.append(known | {"steps": steps, "successes": successes})
    return {"levels": found}


def level(root: Path, query: Query) -> Answer:
    """``/api/level``: the episodes of one level that count, by step.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    with reading(folder_of(root, query)) as connection:
        counts = still_counts(connection)
        rows = connection.execute(
            "SELECT id, attempt, step FROM episodes WHERE phase = ? AND level_seed = ?"
            " ORDER BY step, id",
            (text_of(query, "phase"), whole_number(query, "level_seed")),
        ).fetchall()
        ids = [number for number, attempt, step in rows if counts(attempt, step)][:MOST_OF_LEVEL]
        return {"episodes": [detail(connection, episode_row(connection, each)) for each in ids]}


class _Evaluated:
    """What one run has evaluated.

    Attributes:
        game: Settings that decide what is played: levels, events, budgets.
        rates: The last evaluation by environment and way of sampling, with its interval.
        recorded: The run's own evaluations whose episodes are recorded.
        stored: Evaluations by ``ragen eval``, by game and way of sampling. Of several agents in one
            game, the last counts.
    """

    def __init__(self, folder: Path) -> None:
        settings = flat_settings(folder)
        self.game = _game(settings)
        self._temperature = settings.get("eval.temperature", 1.0)
        with reading(folder) as connection:
            counts = still_counts(connection)
            made = (each for each in evaluations(connection, counts) if _has_interval(each))
            self.rates = {(str(each["env"]), str(each["how"])): each for each in made}
            self.recorded = _recorded(connection, counts)
            self.stored = dict(_stored(connection))

    def baselines(self, comparison: Answer) -> Answer:
        """Success of random and optimal play where a comparison was made on the same levels."""
        rate = self.rates.get((comparison["env"], comparison["how"]), {})
        paired = comparison["won"] is not None
        return {name: rate.get(name) if paired else None for name in ("random", "optimal")}

    def how(self, phase: str) -> str:
        """How an evaluation of this phase chose its tokens."""
        return how_sampled(0.0 if phase == "eval greedy" else self._temperature)


def _game(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in settings.items()
        if key.startswith("env.") and key not in DISPLAY_KEYS
    }


def _has_interval(evaluation: Answer) -> bool:
    """Whether its interval and its levels are known; a record of another version may lack them."""
    known = (*evaluation["success"].values(), evaluation.get("episodes"))
    return all(isinstance(each, int | float) for each in known)


def _recorded(connection: sqlite3.Connection, counts: Counts) -> Recorded:
    found: dict[tuple[str, str], dict[int, dict[int, tuple[float, int]]]] = {}
    rows = connection.execute(
        "SELECT phase, env, step, attempt, level_seed, avg(success), count(*) FROM episodes"
        f" WHERE phase IN ({','.join('?' * len(PHASES))})"
        " GROUP BY phase, env, step, attempt, level_seed ORDER BY phase, env, step",
        PHASES,
    )
    for phase, env, step, attempt, seed, share, count in rows:
        if counts(attempt, step):
            by_step = found.setdefault((phase, env), {})
            by_step.setdefault(step, {})[seed] = (share, count)
    return {
        key: {step: EpisodeSet(key[1], step, played) for step, played in by_step.items()}
        for key, by_step in found.items()
    }


def _stored(connection: sqlite3.Connection) -> Iterator[tuple[tuple[str, str], EpisodeSet]]:
    """Evaluations by ``ragen eval`` in order, by game and way of sampling."""
    for key, env, settings in connection.execute(
        "SELECT key, env, settings FROM evaluations WHERE key IS NOT NULL"
        " AND id IN (SELECT max(id) FROM evaluations GROUP BY key) ORDER BY id"
    ):
        every = loaded(settings)
        game = _game(every) | {
            name: every[name] for name in ("seed", "temperature", "sources") if name in every
        }
        rows = connection.execute(
            "SELECT level_seed, avg(success), count(*) FROM outcomes WHERE key = ?"
            " GROUP BY level_seed",
            (key,),
        ).fetchall()
        played = {seed: (share, count) for seed, share, count in rows}
        how = how_sampled(game.get("temperature", 1.0))
        yield (json.dumps(game, sort_keys=True), how), EpisodeSet(env, None, played)


def _first_and_last(run: _Evaluated) -> Iterator[Answer]:
    for (phase, _), by_step in run.recorded.items():
        sets = list(by_step.values())
        if len(sets) > 1:
            yield from _paired(sets[0], sets[-1], run.how(phase), "first and last evaluation")


def _two_runs(run: _Evaluated, other: _Evaluated) -> Iterator[Answer]:
    compared = set()
    for found in _two_runs_paired(run, other):
        compared.add((found["env"], found["how"]))
        yield found
    keys = sorted(run.game.keys() | other.game.keys(), key=lambda key: (key != "env.name", key))
    differing = next((key for key in keys if run.game.get(key) != other.game.get(key)), None)
    why = "no levels that both played are recorded"
    if differing is not None:
        why = f"the games differ in {differing}"
    for key in run.rates.keys() & other.rates.keys() - compared:
        yield _unpaired(run.rates[key], other.rates[key], why)


def _two_runs_paired(run: _Evaluated, other: _Evaluated) -> Iterator[Answer]:
    for key in run.stored.keys() & other.stored.keys():
        note = "last evaluations by ragen eval"
        yield from _paired(run.stored[key], other.stored[key], key[1], note)
    if run.game != other.game:
        return
    for key in run.recorded.keys() & other.recorded.keys():
        phase, _ = key
        if run.how(phase) == other.how(phase):
            last, others = (list(each.recorded[key].values())[-1] for each in (run, other))
            yield from _paired(last, others, run.how(phase), "last evaluation of each")


def _paired(one: EpisodeSet, other: EpisodeSet, how: str, note: str) -> Iterator[Answer]:
    """The comparison on the levels of both sets, if all of these were played equally often."""
    both = sorted(one.levels.keys() & other.levels.keys())
    counts = {each.levels[seed][1] for each in (one, other) for seed in both}
    if len(counts) != 1:
        return
    (samples,) = counts
    before, after = ([each.levels[seed][0] for seed in both] for each in (one, other))
    found = paired_difference([after], [before], samples)
    gains = [round((y - x) * samples) for x, y in zip(before, after, strict=True)]
    yield {
        "env": one.env,
        "how": how,
        "a": asdict(_rate(before, samples)) | {"step": one.step},
        "b": asdict(_rate(after, samples)) | {"step": other.step},
        "difference": asdict(found),
        "levels": len(both),
        "won": sum(gain > 0 for gain in gains),
        "lost": sum(gain < 0 for gain in gains),
        "mcnemar_p": mcnemar(gains),
        "smallest_detectable": smallest_detectable(found),
        "note": f"{note}, level by level",
    }


def _rate(shares: list[float], samples: int) -> Interval:
    successes, seeds = list[bool](), list[int]()
    for seed, share in enumerate(shares):
        won = round(share * samples)
        successes += [True] * won + [False] * (samples - won)
        seeds += [seed] * samples
    return success_rate(successes, seeds)


def _unpaired(one: Answer, other: Answer, why: str) -> Answer:
    found = difference(Interval(**other["success"]), Interval(**one["success"]))
    return {
        "env": one["env"],
        "how": one["how"],
        "a": one["success"] | {"step": one["step"]},
        "b": other["success"] | {"step": other["step"]},
        "difference": asdict(found),
        "levels": min(one["episodes"], other["episodes"]),
        "won": None,
        "lost": None,
        "mcnemar_p": None,
        "smallest_detectable": smallest_detectable(found),
        "note": f"two rates, not level by level: {why}",
    }
