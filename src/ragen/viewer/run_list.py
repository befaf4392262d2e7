"""The list of runs: the state of each, its progress and its success.

A summary is cached until the run's files change. Only whether a process writes the run is checked
each time. A run that could not be read is tried again, because a lock or a lost network share
changes no time stamp.
"""

from __future__ import annotations

import sqlite3
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.earlier import present_values
from ragen.config.keys import nest, raw_values
from ragen.core.errors import RagenError
from ragen.core.statistics import Interval, difference
from ragen.evaluation.outcomes import how_sampled
from ragen.reports.facts import ALARM
from ragen.storage.attempts import Counts, attempts_of, still_counts
from ragen.storage.database import CONFIG, is_claimed
from ragen.viewer.reading import (
    Answer,
    Query,
    Signature,
    Unreadable,
    find_runs,
    loaded,
    reading,
    signature,
)
from ragen.viewer.run_metrics import current, histories

SPARK = 40
"""Points of a run's small curve."""

_SUMMARIES: dict[Path, tuple[Signature, Answer]] = {}


def runs(root: Path, query: Query) -> Answer:
    """``/api/runs``: the runs of the folder, latest start first."""
    found = [run_summary(root, run) for run in find_runs(root)]
    found.sort(key=lambda run: (run["started"], run["run"]), reverse=True)
    return {"folder": root.resolve().name, "runs": found}


def run_summary(root: Path, run: str) -> Answer:
    """One run's row in the list; if it cannot be read, ``problem`` says why."""
    folder = (root / run).resolve()
    now = signature(folder)
    before, summary = _SUMMARIES.get(folder, (None, {}))
    if before != now:
        summary = _summarise(folder, now)
        if summary["state"] != "unreadable":
            _SUMMARIES[folder] = now, summary
    if summary["state"] != "unreadable" and is_claimed(folder):
        summary = summary | {"state": "running"}
    return {"run": run, "name": folder.name} | summary


def _summarise(folder: Path, stamps: Signature) -> Answer:
    changed = [stamp[2] / 1e9 for stamp in stamps[:2] if stamp]
    started = stamps[2][2] / 1e9 if stamps[2] else 0.0
    times = {"updated": max(changed, default=None), "started": started}
    try:
        config = read_settings(folder)
        with reading(folder) as connection:
            return _NOTHING | times | config_facts(config) | _facts(connection, config)
    except RagenError as error:
        problem = str(error)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # SQLite checks no types
        problem = f"the run holds a value that RAGEN does not write: {error}"
    return _NOTHING | times | {"state": "unreadable", "problem": problem}


_NOTHING: Answer = {
    **dict.fromkeys(("env", "model", "algorithm", "recipe", "seed", "budget", "steps", "step")),
    **dict.fromkeys(("attempts", "num_episodes", "success", "before", "gain", "random", "optimal")),
    **{"spark": [], "alarms": 0, "last_event": None, "problem": None},
}
"""The values of a run that cannot be read."""


def read_settings(folder: Path) -> dict[str, Any]:
    """The tables of a run's config, as in the file.

    They are not validated, so that an outdated value hides no run.

    Raises:
        Unreadable: There is no such file, or it is not TOML.
    """
    try:
        tree = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return nest(present_values(raw_values(tree)))
    except OSError as error:
        raise Unreadable(f"config.toml cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"config.toml is damaged: {error}") from None


def config_facts(config: Mapping[str, Any]) -> Answer:
    """The settings that a row shows."""
    return {
        "env": _inside(config, "env", "name"),
        "model": _inside(config, "model", "path"),
        **{key: config.get(key) for key in ("algorithm", "recipe", "seed", "budget", "steps")},
    }


def _inside(config: Mapping[str, Any], section: str, key: str) -> Any:
    table = config.get(section)
    return table.get(key) if isinstance(table, Mapping) else None


def _facts(connection: sqlite3.Connection, config: Mapping[str, Any]) -> Answer:
    attempts = attempts_of(connection)
    course = current(
        attempts, histories(connection, attempts, ("success/mean", "progress/updates"))
    )
    # Evaluations by `ragen eval` have no step and may be of any environment: they are left out.
    counting = evaluations(connection, still_counts(connection))
    evaluated = [each for each in counting if each["step"] is not None]
    temperature = _inside(config, "eval", "temperature")
    trained = [each for each in evaluated if each.get("temperature") == temperature]
    step = attempts[-1].last if attempts else 0
    alarms = connection.execute("SELECT count(*) FROM events WHERE kind = ?", (ALARM,)).fetchone()
    last = connection.execute(
        "SELECT step, kind, text, json_extract(data, '$.action') AS action FROM events"
        " ORDER BY id DESC LIMIT 1"
    ).fetchone()
    shown = trained[-1] if trained else evaluated[-1] if evaluated else {}
    return {
        "state": _end(config, step, course.get("progress/updates", {}), trained, last),
        "step": step,
        "attempts": len(attempts),
        "num_episodes": connection.execute("SELECT count(*) FROM episodes").fetchone()[0],
        "success": _success(trained[-1]) if trained else None,
        "before": _success(trained[0]) if trained else None,
        "gain": _gain(trained),
        "random": shown.get("random"),
        "optimal": shown.get("optimal"),
        "spark": thinned(list(course.get("success/mean", {}).values()), SPARK),
        "alarms": alarms[0],
        "last_event": dict(last) if last else None,
    }


def _end(
    config: Mapping[str, Any],
    step: int,
    updates: Mapping[int, float],
    evaluated: list[Answer],
    last: sqlite3.Row | None,
) -> str:
    """The state of a run without a process: finished (and evaluated), stopped or interrupted."""
    spent = updates.get(step, 0.0) if config.get("budget") == "updates" else step
    evaluates = _inside(config, "eval", "episodes") != 0
    complete = not evaluates or any(each["step"] == step for each in evaluated)
    if spent >= config.get("steps", Config.model_fields["steps"].default) and complete:
        return "finished"
    stopped = last is not None and last["kind"] == "guard" and last["action"] == "stop"
    return "stopped" if stopped else "interrupted"


def evaluations(connection: sqlite3.Connection, counts: Counts) -> list[Answer]:
    """The evaluations of a run that still count, in order; those of ``ragen eval`` have no step.

    Each is its record, with time, step and way of sampling, and success as an interval.
    """
    found = []
    for attempt, step, time, record in connection.execute(
        "SELECT attempt, step, time, record FROM evaluations ORDER BY id"
    ):
        if step is not None and not counts(attempt, step):
            continue
        said = loaded(record)
        success = interval(said, "success")
        how = how_sampled(said.get("temperature", 1.0))
        when = {"attempt": attempt, "step": step, "time": time, "how": how}
        found.append(said | when | {"success": success})
    return found


def interval(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A value of an evaluation's record with its confidence interval."""
    low, high = record.get(f"{name}_low"), record.get(f"{name}_high")
    return {"value": record.get(name), "low": low, "high": high}


def _success(evaluation: Answer) -> Answer:
    return {**evaluation["success"], **{name: evaluation[name] for name in ("step", "how")}}


def _gain(evaluated: list[Answer]) -> Answer | None:
    """The latest success less the first, as of two independent rates."""
    if not evaluated or evaluated[0]["step"] == evaluated[-1]["step"]:
        return None
    first, latest = (evaluated[place]["success"] for place in (0, -1))
    if None in (*first.values(), *latest.values()):
        return None
    return asdict(difference(Interval(**latest), Interval(**first)))


def thinned(numbers: list[float], most: int) -> list[float]:
    """At most `most` numbers, each the mean of a range.

    Example:
        >>> thinned([1.0, 3.0, 5.0, 7.0], 2)
        [2.0, 6.0]
    """
    cells = min(most, len(numbers))
    edges = [round(place * len(numbers) / cells) for place in range(cells + 1)] if cells else []
    return [sum(numbers[a:b]) / (b - a) for a, b in pairwise(edges)]
