"""Attempts of a run, and which of their steps still count.

The guard rolls a run back by starting a new attempt at an earlier step. Rows of older attempts
from that step on stay in the database and no longer count.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

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
        """Whether a step of this attempt still counts."""
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
    """Whether a step still counts: it precedes the first step of every later attempt."""
    firsts = [(attempt.number, attempt.first) for attempt in attempts_of(connection)]
    return lambda attempt, step: all(step < first for number, first in firsts if number > attempt)
