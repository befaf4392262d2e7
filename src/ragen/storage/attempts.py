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


def attempts_of(connection: sqlite3.Connection) -> list[Attempt]:
    """A run's attempts in order; each query is one descent into the table's index."""
    bounds: list[tuple[int, int, int]] = []
    number = -1
    while True:
        (following,) = connection.execute(
            "SELECT min(attempt) FROM metrics WHERE attempt > ?", (number,)
        ).fetchone()
        if following is None:
            break
        number = following
        first, last = (
            connection.execute(
                f"SELECT {bound}(step) FROM metrics WHERE attempt = ?", (number,)
            ).fetchone()[0]
            for bound in ("min", "max")
        )
        bounds.append((number, first, last))
    firsts = [first for _, first, _ in bounds]
    return [
        Attempt(number, first, last, min(firsts[place + 1 :], default=math.inf))
        for place, (number, first, last) in enumerate(bounds)
    ]


def still_counts(connection: sqlite3.Connection) -> Counts:
    """Whether a step still counts: it precedes the first step of every later attempt."""
    firsts = [(attempt.number, attempt.first) for attempt in attempts_of(connection)]
    return lambda attempt, step: all(step < first for number, first in firsts if number > attempt)
