"""The page of one run: its settings, events, evaluations and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from ragen.config.reading import flatten, merge
from ragen.core.errors import RagenError
from ragen.core.metrics import Series
from ragen.reports.facts import EXACT, SIGNALS, TERMS, rolled_back, seconds_by_phase
from ragen.settings.saved import run_config
from ragen.storage.reader import current
from ragen.viewer.reading import Answer, Question, RunReader, Unreadable, loaded
from ragen.viewer.run_list import evaluations, read_settings, run_summary, with_parts

COUNTED = {
    "updates": "progress/updates",
    "episodes": "progress/episodes",
    "tokens": "progress/tokens",
}
"""The horizontal axes besides the step, and their metrics."""

ENGINE = "engine/"
"""Prefix of the engine's metrics, which are shown among the signals: queue, staleness, idle."""


def about(asked: Question) -> Answer:
    """``/api/run``: one run, without its curves and episodes."""
    folder = asked.folder()
    summary = run_summary(asked.runs, asked.text("run"))
    if summary["state"] == "unreadable":
        raise Unreadable(summary["problem"])
    with asked.reading() as run:
        names = run.metric_names
        found = run.histories([name for name in names if name.startswith(("time/", *EXACT))])
        evaluated = evaluations(run)
        steps = run.rows("SELECT DISTINCT attempt, step FROM episodes")
        happened = events(run)
    evaluating = math.fsum(each.get("seconds", 0) for each in evaluated)
    return summary | {
        "config": read_settings(folder),
        "differences": _differences(folder),
        "events": happened,
        "evaluations": with_parts(evaluated),
        "names": names,
        "labels": SIGNALS | {name: name for name in names if name.startswith((TERMS, ENGINE))},
        "phases": seconds_by_phase(found, evaluating),
        "exactness": [
            {
                "name": name,
                "last": list(series.values())[-1],
                "largest": max(series.values()),
                "total": math.fsum(series.values()),
            }
            for name, series in sorted(current(found).items())
            if name.startswith(EXACT)
        ],
        "episode_steps": sorted({step for _, step in steps}),
    }


def events(run: RunReader, after: int = 0) -> list[Answer]:
    """A run's events after the one with id `after`, in order."""
    columns = "id, attempt, step, time, kind, text, data"
    rows = run.rows(f"SELECT {columns} FROM events WHERE id > ? ORDER BY id", after)
    return [dict(row) | {"data": loaded(row["data"])} for row in rows]


def _differences(folder: Path) -> list[Answer] | None:
    """The settings in which a run differs from its recipe, or from its preset without that recipe.

    ``None`` if the config is of another version, which cannot be compared. A run with another
    algorithm is compared with its recipe under that algorithm, which so counts as one change.
    """
    try:
        config = run_config(folder)
    except RagenError:
        return None
    source = f"recipe {config.recipe}"
    try:
        algorithm = merge(config.recipe, {}).algorithm
        base = merge(config.recipe, {"algorithm": config.algorithm})
    except RagenError:  # the recipe was a file that is not here
        source, algorithm = f"preset {config.algorithm}", config.algorithm
        base = merge(None, {"algorithm": config.algorithm})
    standard = {**flatten(base), "algorithm": algorithm}
    return [
        {"key": key, "value": value, "base": standard.get(key), "source": source}
        for key, value in flatten(config).items()
        if key != "recipe" and standard.get(key) != value
    ]


def metrics(asked: Question) -> Answer:
    """``/api/metrics``: curves over any axis, with the rolled-back parts."""
    names = [name for name in asked.text("names").split(",") if name]
    with asked.reading() as run:
        found = run.histories({*names, *COUNTED.values(), "time/step_s"})
    course = current(found)
    axes = _axes(course)
    place = {step: index for index, step in enumerate(axes["step"])}
    return {
        "run": asked.text("run"),
        "axes": axes,
        "names": {
            name: {
                "at": [place[step] for step in course.get(name, {})],
                "values": list(course.get(name, {}).values()),
                "left": [
                    {"attempt": each.number, "steps": list(part), "values": list(part.values())}
                    for each, part in rolled_back(found, name).items()
                ],
            }
            for name in names
        },
    }


def _axes(course: Mapping[str, Series]) -> dict[str, list[Any]]:
    steps = sorted({step for series in course.values() for step in series})
    axes: dict[str, list[Any]] = {"step": steps}
    for axis, name in COUNTED.items():
        # Counts never fall: a step without a count has the count of the previous step.
        axes[axis] = list(accumulate((course.get(name, {}).get(step, 0.0) for step in steps), max))
    seconds = course.get("time/step_s", {})
    axes["seconds"] = list(accumulate(seconds.get(step, 0.0) for step in steps))
    return axes
