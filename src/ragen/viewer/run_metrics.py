"""A run's metrics: the curves that still count after rollbacks, and what was rolled back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from ragen.storage.attempts import Attempt, attempts_of
from ragen.viewer.reading import Answer, Query, folder_of, reading, text_of

Series = dict[int, float]
"""Step to value."""

COUNTED = {"updates": "progress/updates", "episodes": "progress/episodes"}
COUNTED |= {"tokens": "progress/tokens"}
"""The horizontal axes besides the step, and their metrics."""


def histories(
    connection: sqlite3.Connection, attempts: Collection[Attempt], names: Collection[str]
) -> dict[int, dict[str, Series]]:
    """Metrics by attempt, name and step.

    The table is ordered by attempt, step and name, so that each value is one lookup: in a long run
    with a hundred metrics, a few names cost a few hundredths of a scan.
    """
    found: dict[int, dict[str, Series]] = {}
    for attempt in attempts:
        rows = connection.execute(
            "WITH RECURSIVE steps (step) AS"
            " (SELECT ? UNION ALL SELECT step + 1 FROM steps WHERE step < ?)"
            " SELECT m.step, m.name, m.value FROM steps CROSS JOIN json_each(?) AS wanted"
            " CROSS JOIN metrics AS m ON m.attempt = ? AND m.step = steps.step"
            " AND m.name = wanted.value WHERE abs(m.value) < 9e999",  # finite, and not NULL
            (attempt.first, attempt.last, json.dumps(list(names)), attempt.number),
        )
        of_attempt = found.setdefault(attempt.number, {})
        for step, name, value in rows:
            of_attempt.setdefault(name, {})[step] = value
    return found


def current(
    attempts: Collection[Attempt], found: Mapping[int, Mapping[str, Series]]
) -> dict[str, Series]:
    """The metrics that still count, by name and step."""
    course: dict[str, Series] = {}
    for attempt in attempts:
        for name, series in found.get(attempt.number, {}).items():
            kept = {step: value for step, value in series.items() if attempt.counts(step)}
            course.setdefault(name, {}).update(kept)
    return course


def metrics(root: Path, query: Query) -> Answer:
    """``/api/metrics``: curves over any axis, with the rolled-back parts.

    Raises:
        Unanswered: No run or no names are given, or the run cannot be read.
    """
    folder = folder_of(root, query)
    names = [name for name in text_of(query, "names").split(",") if name]
    with reading(folder) as connection:
        attempts = attempts_of(connection)
        found = histories(connection, attempts, {*names, *COUNTED.values(), "time/step_s"})
    course = current(attempts, found)
    axes = _axes(course)
    place = {step: index for index, step in enumerate(axes["step"])}
    return {
        "run": query["run"],
        "axes": axes,
        "names": {
            name: {
                "at": [place[step] for step in course.get(name, {})],
                "values": list(course.get(name, {}).values()),
                "left": _left(name, attempts, found),
            }
            for name in names
        },
    }


def _axes(course: Mapping[str, Series]) -> dict[str, list[Any]]:
    """The value of each axis at each step."""
    steps = sorted({step for series in course.values() for step in series})
    axes: dict[str, list[Any]] = {"step": steps}
    for axis, name in COUNTED.items():
        # Counts never fall: a step without one has that of the previous step.
        axes[axis] = list(accumulate((course.get(name, {}).get(step, 0.0) for step in steps), max))
    seconds = course.get("time/step_s", {})
    axes["seconds"] = list(accumulate(seconds.get(step, 0.0) for step in steps))
    return axes


def _left(
    name: str, attempts: Collection[Attempt], found: Mapping[int, Mapping[str, Series]]
) -> list[dict[str, Any]]:
    """The rolled-back parts of a curve, each from the last point that still counts on."""
    stretches = []
    for attempt in attempts:
        series = found.get(attempt.number, {}).get(name, {})
        steps = [step for step in series if step >= attempt.end - 1]
        if len(steps) > 1:
            values = [series[step] for step in steps]
            stretches.append({"attempt": attempt.number, "steps": steps, "values": values})
    return stretches
