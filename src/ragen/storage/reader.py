"""Reading a run's metrics, evaluations and events, and which of its steps still count.

The guard rolls a run back by starting a new attempt at an earlier step. Rows of older attempts
from that step on stay in the database and no longer count.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError
from ragen.core.files import parse_json
from ragen.storage.database import DATABASE, read, reading_database

Counts = Callable[[int, int], bool]
"""A function of an attempt and a step: whether the step still counts."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt's steps from `first` to `last`; those before `end` still count.

    `end` is the earliest first step of later attempts, or infinity.
    """

    number: int
    first: int
    last: int
    end: float

    def counts(self, step: int) -> bool:
        """True if a step of this attempt still counts."""
        return step < self.end


_BOUNDS = """
WITH RECURSIVE attempts(number) AS (
    SELECT min(attempt) FROM metrics UNION ALL
    SELECT (SELECT min(attempt) FROM metrics WHERE attempt > number) FROM attempts WHERE number >= 0
)
SELECT number, (SELECT min(step) FROM metrics WHERE attempt = number),
    (SELECT max(step) FROM metrics WHERE attempt = number)
FROM attempts WHERE number >= 0
"""
"""Each attempt with its first and last step; each part is one descent into the table's index."""


def attempts_of(connection: sqlite3.Connection) -> list[Attempt]:
    """A run's attempts in order."""
    bounds = [tuple(row) for row in connection.execute(_BOUNDS)]
    firsts = [first for _, first, _ in bounds]
    return [
        Attempt(number, first, last, min(firsts[place + 1 :], default=math.inf))
        for place, (number, first, last) in enumerate(bounds)
    ]


def still_counts(connection: sqlite3.Connection) -> Counts:
    """A test of a step: it counts if it precedes the first step of every later attempt."""
    firsts = [(attempt.number, attempt.first) for attempt in attempts_of(connection)]
    return lambda attempt, step: all(step < first for number, first in firsts if number > attempt)


_METRICS = (
    "SELECT attempt, step, name, value FROM metrics WHERE value IS NOT NULL AND {}"
    " ORDER BY attempt, step"
)


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """A run's own evaluation records in order, each with its ``step`` and ``attempt``.

    Evaluations of ``ragen eval`` belong to no step; `ragen.evaluation.outcomes` stores them.
    """
    query = "SELECT attempt, step, record FROM evaluations WHERE step IS NOT NULL ORDER BY id"
    rows = read(folder, query)
    return [
        {**parse_column(folder, record), "attempt": attempt, "step": step}
        for attempt, step, record in rows
    ]


def read_successes(folder: Path) -> dict[tuple[str, int], dict[tuple[str, int], float]]:
    """Success by level in a run's own evaluations that still count, if episodes are recorded.

    Returns:
        By phase (``eval`` or ``eval greedy``) and step: by environment and level, 1.0 or 0.0.
    """
    query = (
        "SELECT attempt, step, phase, env, level_seed, success FROM episodes"
        " WHERE phase != 'train' ORDER BY id"
    )
    counts, found = standing(folder), dict[tuple[str, int], dict[tuple[str, int], float]]()
    for attempt, step, phase, env, level, success in read(folder, query):
        if counts(attempt, step):
            found.setdefault((phase, step), {})[env, level] = float(success)
    return found


def read_metrics(folder: Path, names: Collection[str] | None = None) -> dict[str, dict[int, float]]:
    """A run's metrics: name, then step, to value, in the order of the steps.

    Each attempt replaces earlier ones from its first step on. `names` selects some; ``None`` means
    all.
    """
    condition = "true" if names is None else f"name IN ({','.join('?' * len(names))})"
    metrics: dict[str, dict[int, float]] = {}
    counts = standing(folder)
    for attempt, step, name, value in read(folder, _METRICS.format(condition), [*(names or ())]):
        if counts(attempt, step):
            metrics.setdefault(name, {})[step] = value
    return metrics


def standing(folder: Path) -> Counts:
    """A test of a step of an attempt: it counts if no later attempt began at or before it."""
    with reading_database(folder) as connection:
        return still_counts(connection)


def read_events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """A run's events in order: ``attempt``, ``step``, ``time``, ``kind``, ``text`` and ``data``."""
    columns = ("attempt", "step", "time", "kind", "text", "data")
    query = f"SELECT {', '.join(columns)} FROM events WHERE kind = ? OR ? IS NULL ORDER BY id"
    events = [dict(zip(columns, row, strict=True)) for row in read(folder, query, (kind, kind))]
    return [
        {**event, "data": event["data"] and parse_column(folder, event["data"])} for event in events
    ]


def parse_column(folder: Path, text: str) -> dict[str, Any]:
    """The object in a column of JSON."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise RagenError(f"{folder / DATABASE} is damaged: JSON in a column: {error}") from None
    if not isinstance(value, dict):
        raise RagenError(f"{folder / DATABASE} is damaged: a column of JSON holds no object")
    return value


def read_attempts(folder: Path) -> dict[int, dict[str, dict[int, float]]]:
    """A run's metrics including rolled-back steps: attempt, then name, then step, to value."""
    metrics: dict[int, dict[str, dict[int, float]]] = {}
    for attempt, step, name, value in read(folder, _METRICS.format("true")):
        metrics.setdefault(attempt, {}).setdefault(name, {})[step] = value
    return metrics
