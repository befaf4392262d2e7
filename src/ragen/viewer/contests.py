"""Two runs against each other, on what they have played already: nothing is played for it.

Where both played the same levels of the same game they are compared level by level, which tells
smaller differences than two rates side by side.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict
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
from ragen.evaluation.compare import AS_SHOWN
from ragen.evaluation.outcomes import how_sampled
from ragen.viewer.course import Stands, standing_in
from ragen.viewer.reading import Answer, Query, folder_of, loaded, reading, run_folder, text_of
from ragen.viewer.run_page import flat_settings
from ragen.viewer.runs import evaluations

Levels = Mapping[int, float]
"""Share of successes by level."""

Shares = tuple[Levels, int]
"""The same, and how many episodes each level was played."""

PHASES = {"eval": "sampled", "eval greedy": "greedy"}
"""The phases of a run's own evaluations, and how tokens were chosen in them."""


def compare(root: Path, query: Query) -> Answer:
    """``/api/compare``: the difference of two runs in each place where both were evaluated.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    folders = folder_of(root, query), run_folder(root, text_of(query, "other"))
    one, other = (_Side(folder) for folder in folders)
    found = [*_stored(one, other)]
    differing = _differing(one.game, other.game)
    for phase, how in PHASES.items():
        a, b = one.played[phase], other.played[phase]
        alike = differing is None and one.how(phase) == other.how(phase)
        if alike and a is not None and b is not None and a[1] == b[1]:
            note = f"last evaluation of each, {how}, level by level"
            found += _paired(one.env, one.how(phase), a[0], b[0], a[1], note)
    seen = {(each["env"], each["how"]) for each in found}
    for key in one.evaluated.keys() & other.evaluated.keys():
        if key not in seen:
            found.append(_unpaired(one.evaluated[key], other.evaluated[key], differing))
    return {"contests": sorted(found, key=lambda each: (each["env"], each["how"]))}


class _Side:
    """What one run has played that can be compared."""

    def __init__(self, folder: Path) -> None:
        settings = flat_settings(folder)
        self.game = {
            key: value
            for key, value in settings.items()
            if key.startswith("env.") and key not in AS_SHOWN
        }
        self.env = str(settings.get("env.name"))
        self.temperature = settings.get("eval.temperature", 1.0)
        with reading(folder) as connection:
            stands = standing_in(connection)
            made = (each for each in evaluations(connection, stands) if _measured(each))
            self.evaluated = {(str(each["env"]), str(each["how"])): each for each in made}
            self.played = {phase: _last_played(connection, phase, stands) for phase in PHASES}
            self.stored = dict(_outcomes(connection))  # of several agents in one game the last

    def how(self, phase: str) -> str:
        """As an evaluation says it."""
        return how_sampled(0.0 if phase == "eval greedy" else self.temperature)


def _measured(evaluation: Answer) -> bool:
    """Whether its interval and its levels are known; a record of another version may lack them."""
    said = (*evaluation["success"].values(), evaluation.get("episodes"))
    return all(isinstance(each, int | float) for each in said)


def _last_played(connection: sqlite3.Connection, phase: str, stands: Stands) -> Shares | None:
    """Success by level in the last evaluation that stands and whose episodes are recorded."""
    rows = connection.execute(
        "SELECT DISTINCT attempt, step FROM episodes WHERE phase = ?", (phase,)
    )
    last = max((tuple(row) for row in rows if stands(*row)), default=None)
    if last is None:
        return None
    return _shares(
        connection.execute(
            "SELECT level_seed, avg(success), count(*) FROM episodes WHERE phase = ?"
            " AND attempt = ? AND step = ? GROUP BY level_seed",
            (phase, *last),
        ).fetchall()
    )


def _shares(rows: list[sqlite3.Row]) -> Shares | None:
    """None where levels were not played equally often, or none was."""
    samples = {count for _, _, count in rows}
    if len(samples) != 1:
        return None
    return {level: share for level, share, _ in rows}, samples.pop()


def _outcomes(
    connection: sqlite3.Connection,
) -> Iterator[tuple[tuple[str, int], tuple[str, str, Levels]]]:
    """Evaluations asked for by hand, in order: environment, samples a level, sampling, levels.

    The game is all of the settings that is not the agent's.
    """
    for key, env, settings in connection.execute(
        "SELECT key, env, settings FROM evaluations WHERE key IS NOT NULL"
        " AND id IN (SELECT max(id) FROM evaluations GROUP BY key) ORDER BY id"
    ):
        game = {
            name: value
            for name, value in loaded(settings).items()
            if name in ("seed", "temperature", "sources")
            or (name.startswith("env.") and name not in AS_SHOWN)
        }
        shares = _shares(
            connection.execute(
                "SELECT level_seed, avg(success), count(*) FROM outcomes WHERE key = ?"
                " GROUP BY level_seed",
                (key,),
            ).fetchall()
        )
        if shares is not None:
            levels, samples = shares
            how = how_sampled(game.get("temperature", 1.0))
            yield (json.dumps(game, sort_keys=True), samples), (env, how, levels)


def _stored(one: _Side, other: _Side) -> Iterator[Answer]:
    for (game, samples), (env, how, a) in one.stored.items():
        if (game, samples) in other.stored:
            _, _, b = other.stored[game, samples]
            note = "outcomes that ragen eval stored last, level by level"
            yield from _paired(env, how, a, b, samples, note)


def _paired(env: str, how: str, a: Levels, b: Levels, samples: int, note: str) -> Iterator[Answer]:
    """The contest on the levels that both played, if there are any."""
    levels = sorted(a.keys() & b.keys())
    if not levels:
        return
    ones, others = [a[level] for level in levels], [b[level] for level in levels]
    found = paired_difference([ones], [others], samples)
    gains = [round((x - y) * samples) for x, y in zip(ones, others, strict=True)]
    yield {
        "env": env,
        "how": how,
        "a": asdict(_rate(ones, samples)),
        "b": asdict(_rate(others, samples)),
        "difference": asdict(found),
        "mcnemar_p": mcnemar(gains),
        "smallest_detectable": smallest_detectable(found),
        "levels": len(levels),
        "note": note,
    }


def _rate(shares: list[float], samples: int) -> Interval:
    successes, levels = list[bool](), list[int]()
    for level, share in enumerate(shares):
        won = round(share * samples)
        successes += [True] * won + [False] * (samples - won)
        levels += [level] * samples
    return success_rate(successes, levels)


def _unpaired(a: Answer, b: Answer, differing: str | None) -> Answer:
    one, other = (Interval(**each["success"]) for each in (a, b))
    found = difference(one, other)
    unpaired = "no levels that both played are recorded"
    why = f"the games differ in {differing}" if differing else unpaired
    return {
        "env": a["env"],
        "how": a["how"],
        "a": a["success"],
        "b": b["success"],
        "difference": asdict(found),
        "mcnemar_p": None,
        "smallest_detectable": smallest_detectable(found),
        "levels": min(a["episodes"], b["episodes"]),
        "note": f"two rates, not level by level: {why}",
    }


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first key in which two games differ."""
    keys = sorted(one.keys() | other.keys(), key=lambda key: (key != "env.name", key))
    return next((key for key in keys if one.get(key) != other.get(key)), None)
