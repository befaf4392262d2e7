"""Reading a run's metrics, evaluations and events, and which of its steps still count.

The guard rolls a run back by starting a new attempt at an earlier step. Rows of older attempts
from that step on stay in the database and no longer count.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError
from ragen.core.files import parse_json
from ragen.core.metrics import Series
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


Histories = Mapping[Attempt, Mapping[str, Series]]
"""The metrics of every attempt by name, including the steps that were rolled back later."""

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


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """A run's evaluation records in order, each with its ``step`` and ``attempt``."""
    rows = read(folder, "SELECT attempt, step, record FROM evaluations ORDER BY id")
    return [
        {**parse_column(folder, record), "attempt": attempt, "step": step}
        for attempt, step, record in rows
    ]


def read_successes(folder: Path) -> dict[tuple[str, int], dict[tuple[str, int], float]]:
    """Success (1.0 or 0.0) in a run's recorded evaluations that still count.

    By phase (``eval`` or ``eval greedy``) and step, then by environment and level.
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


def read_attempts(folder: Path) -> Histories:
    """A run's metrics by attempt, in the order of the steps, with those that were rolled back."""
    query = "SELECT attempt, step, name, value FROM metrics WHERE value IS NOT NULL"
    with reading_database(folder) as connection:
        connection.execute("BEGIN")  # so that both queries see the same state of a run in progress
        attempts = {each.number: each for each in attempts_of(connection)}
        found: dict[Attempt, dict[str, dict[int, float]]] = {each: {} for each in attempts.values()}
        for attempt, step, name, value in connection.execute(f"{query} ORDER BY attempt, step"):
            found[attempts[attempt]].setdefault(name, {})[step] = value
    return found


def current(histories: Histories) -> dict[str, dict[int, float]]:
    """The metrics that still count, by name: each attempt replaces earlier ones from its start."""
    course: dict[str, dict[int, float]] = {}
    for attempt, history in histories.items():
        for name, series in history.items():
            kept = {step: value for step, value in series.items() if attempt.counts(step)}
            course.setdefault(name, {}).update(kept)
    return {name: series for name, series in course.items() if series}


def read_metrics(folder: Path) -> dict[str, dict[int, float]]:
    """A run's metrics that still count: name, then step, to value, in the order of the steps."""
    return current(read_attempts(folder))


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
