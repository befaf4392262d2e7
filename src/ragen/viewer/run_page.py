"""The page of one run: its settings, events, evaluations and recorded metrics."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

from ragen.config.reading import flatten, read_config, resolve
from ragen.core.errors import RagenError
from ragen.reports.facts import EXACT, SIGNALS, TERMS, seconds_by_phase
from ragen.storage.attempts import attempts_of, still_counts
from ragen.storage.database import CONFIG
from ragen.viewer.reading import (
    Answer,
    Query,
    Unreadable,
    folder_of,
    loaded,
    reading,
    run_folder,
    text_of,
)
from ragen.viewer.run_list import evaluations, read_settings, run_summary
from ragen.viewer.run_metrics import current, histories


def run(root: Path, query: Query) -> Answer:
    """``/api/run``: one run, without its curves and episodes.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    folder = folder_of(root, query)
    summary = run_summary(root, query["run"])
    if summary["state"] == "unreadable":
        raise Unreadable(summary["problem"])
    with reading(folder) as connection:
        attempts = attempts_of(connection)
        names = [name for (name,) in connection.execute("SELECT DISTINCT name FROM metrics")]
        measured = [name for name in names if name.startswith(("time/", *EXACT))]
        found = histories(connection, attempts, measured)
        course = current(attempts, found)
        evaluated = evaluations(connection, still_counts(connection))
        evaluating = math.fsum(
            each.get("seconds", 0) for each in evaluated if each["step"] is not None
        )
        episode_steps = steps_of_episodes(connection)
        found_events = events(connection)
    return summary | {
        "config": flat_settings(folder),
        "differences": differences(folder),
        "events": found_events,
        "evaluations": evaluated,
        "names": sorted(names),
        "labels": {**SIGNALS, **{name: name for name in sorted(names) if name.startswith(TERMS)}},
        "phases": seconds_by_phase(found, evaluating),
        "exactness": [
            {
                "name": name,
                "last": list(series.values())[-1],
                "largest": max(series.values()),
                "total": math.fsum(series.values()),
            }
            for name, series in sorted(course.items())
            if name.startswith(EXACT) and series
        ],
        "episode_steps": episode_steps,
    }


def events(connection: sqlite3.Connection, after: int = 0) -> list[Answer]:
    """A run's events after the one with id `after`, in order."""
    rows = connection.execute(
        "SELECT id, attempt, step, time, kind, text, data FROM events WHERE id > ? ORDER BY id",
        (after,),
    )
    return [dict(row) | {"data": loaded(row["data"])} for row in rows]


def steps_of_episodes(connection: sqlite3.Connection) -> list[int]:
    """The steps with recorded episodes, by one index lookup each; DISTINCT would scan the index."""
    found: set[int] = set()
    attempt = -1
    while True:
        (following,) = connection.execute(
            "SELECT min(attempt) FROM episodes WHERE attempt > ?", (attempt,)
        ).fetchone()
        if following is None:
            return sorted(found)
        attempt = following
        rows = connection.execute(
            "WITH RECURSIVE steps (step) AS ("
            "SELECT min(step) FROM episodes WHERE attempt = ?1 UNION ALL"
            " SELECT (SELECT min(step) FROM episodes WHERE attempt = ?1 AND step > steps.step)"
            " FROM steps WHERE step IS NOT NULL) SELECT step FROM steps WHERE step IS NOT NULL",
            (attempt,),
        )
        found.update(step for (step,) in rows)


def flat_settings(folder: Path) -> dict[str, Any]:
    """A run's config by dotted key, as in the file."""
    flat: dict[str, Any] = {}

    def flatten_into(table: dict[str, Any], prefix: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                flatten_into(value, f"{prefix}{name}.")
            else:
                flat[f"{prefix}{name}"] = value

    flatten_into(read_settings(folder), "")
    return flat


def differences(folder: Path) -> list[Answer] | None:
    """The settings in which a run differs from its recipe, or from its preset without that recipe.

    ``None`` if the config is of another version, which cannot be compared. If the run has another
    algorithm than the recipe, the preset of that algorithm is the standard: one change, not many.
    """
    try:
        config = read_config(folder / CONFIG)
    except RagenError:
        return None
    source = f"recipe {config.recipe}"
    try:
        algorithm = resolve(config.recipe, {}).algorithm
        base = resolve(config.recipe, {"algorithm": config.algorithm})
    except RagenError:  # the recipe was a file that is not here
        source, algorithm = f"preset {config.algorithm}", config.algorithm
        base = resolve(None, {"algorithm": config.algorithm})
    standard = {**flatten(base), "algorithm": algorithm}
    return [
        {"key": key, "value": value, "base": standard.get(key), "source": source}
        for key, value in flatten(config).items()
        if key != "recipe" and standard.get(key) != value
    ]


def difference(root: Path, query: Query) -> Answer:
    """``/api/difference``: the keys in which two runs' configs differ.

    Raises:
        Unanswered: There is no such run, or its config cannot be read.
    """
    a = flat_settings(folder_of(root, query))
    b = flat_settings(run_folder(root, text_of(query, "other")))
    keys = [*a, *(key for key in b if key not in a)]
    return {
        "differences": [
            {"key": key, "a": a.get(key), "b": b.get(key)}
            for key in keys
            if a.get(key) != b.get(key)
        ]
    }
