"""The list of episodes, with filters, sorting and paging.

The index `episodes_for_lists` holds all columns that a list needs, so that the widest request is
one scan of a few megabytes. The table itself is read only for the rows of one page. A page begins
after the last row of the previous one (its value and id): an offset would walk all rows before it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ragen.reports.facts import ALARM
from ragen.viewer.reading import Answer, Question, RunReader, Unanswered
from ragen.viewer.search import HITS, match_of, snippet

SORTS = {
    "step": "step",
    "reward": "reward",
    "length": "num_tokens",
    "entropy": "entropy",
    "turns": "num_turns",
    "score": "group_score",
}
"""The orders of a list, and their columns; rows without a value come last."""

MOST, USUAL = 200, 50
"""Episodes on a page: at most, and by default."""

COLUMNS = (
    "id",
    "attempt",
    "step",
    "phase",
    "group",
    "member",
    "kept",
    "group_score",
    "env",
    "level_seed",
    "noise_seed",
    "stop_reason",
    "terminated",
    "truncated",
    "success",
    "reward",
    "penalty",
    "num_turns",
    "num_tokens",
    "thought_tokens",
    "entropy",
    "error",
)

BOOLEANS = ("kept", "terminated", "truncated", "success", "valid")

NAMED = ", ".join(f'"{column}"' for column in COLUMNS)

FROM = "FROM episodes INDEXED BY episodes_for_lists"
"""A list uses only the columns of this index (`schema.LISTED`)."""

FACETS = ("phase", "env", "stop_reason")
"""Columns with a choice of values; they are the first ones of the index."""

FILTERS: Mapping[str, tuple[str, Callable[[Question, str], Any]]] = {
    **{name: (f"{name} = ?", Question.text) for name in FACETS},
    "step_from": ("step >= ?", Question.whole_number),
    "step_to": ("step <= ?", Question.whole_number),
    "group": ('"group" = ?', Question.whole_number),
    "level_seed": ("level_seed = ?", Question.whole_number),
    "success": ("success = ?", Question.whole_number),
    "kept": ("kept = ?", Question.whole_number),
    "reward_min": ("reward >= ?", Question.number),
    "reward_max": ("reward <= ?", Question.number),
}
"""By parameter, a condition on the rows of a list and how its value is read."""


class RowPosition(NamedTuple):
    """The position of a row in an order: its value (infinite if it has none) and id."""

    value: float
    id: int


class Selection(NamedTuple):
    """Rows of a list in an order, as SQL."""

    conditions: list[str]
    values: list[Any]
    column: str = "step"
    order: str = "asc"

    def also(self, condition: str, *values: Any) -> Selection:
        """The selection with one more condition."""
        return self._replace(
            conditions=[*self.conditions, condition], values=[*self.values, *values]
        )

    def page(self, run: RunReader, start: RowPosition | None, count: int) -> list[RowPosition]:
        """The next rows; those without a value come last."""
        last, beyond = ("9e999", ">") if self.order == "asc" else ("-9e999", "<")
        key = f"coalesce({self.column}, {last})"
        rest = self if start is None else self.also(f"({key}, id) {beyond} (?, ?)", *start)
        rows = run.rows(
            f"SELECT {key}, id {rest.source} ORDER BY {key} {self.order}, id {self.order} LIMIT ?",
            *rest.values,
            count,
        )
        return [RowPosition(*row) for row in rows]

    @property
    def source(self) -> str:
        """The index with the conditions."""
        where = " AND ".join(self.conditions)
        return f"{FROM} WHERE {where}" if where else FROM


def episodes(asked: Question) -> Answer:
    """``/api/episodes``: one page of the list."""
    limit = min(MOST, max(1, asked.whole_number("limit", USUAL)))
    start = _position(asked.query["cursor"]) if asked.query.get("cursor") else None
    wanted, words = selection_of(asked), match_of(asked.query.get("q", ""))
    if words is not None:
        wanted = wanted.also(f"id IN (SELECT {HITS})", words)
    with asked.reading() as run:
        page = wanted.page(run, start, limit + 1)
        total = len(page) if start is None and len(page) <= limit else None
        if words is None:  # counting the episodes of a search takes as long as the search
            total = run.value(f"SELECT count(*) {wanted.source}", *wanted.values)
        rows = _rows_of(run, [position.id for position in page[:limit]])
        for row in rows:
            row["still_counts"] = run.counts(row["attempt"], row["step"])
            row["snippet"] = snippet(run, row["id"], words)
        choices = facets(run)
    following = "{!r} {}".format(*page[limit - 1]) if len(page) > limit else None
    return {"episodes": rows, "next": following, "total": total, "facets": choices}


def selection_of(asked: Question) -> Selection:
    """The conditions and the order in a request."""
    sort, order = asked.query.get("sort", "step"), asked.query.get("order", "asc")
    if sort not in SORTS or order not in ("asc", "desc"):
        raise Unanswered(f"sort by {', '.join(SORTS)}, in the order asc or desc")
    found = Selection([], [], SORTS[sort], order)
    for name, (condition, read) in FILTERS.items():
        if asked.query.get(name):
            found = found.also(condition, read(asked, name))
    if asked.query.get("alarm") == "1":
        alarms = "(attempt, step) IN (SELECT attempt, step FROM events WHERE kind = ?)"
        found = found.also(alarms, ALARM)
    return found


def _position(cursor: str) -> RowPosition:
    """The row that a cursor names: its value and id, separated by a blank."""
    value, _, number = cursor.partition(" ")
    with suppress(ValueError):
        if 0 <= int(number) < 2**63:
            return RowPosition(float(value), int(number))
    raise Unanswered("the cursor is not valid for this list")


def _rows_of(run: RunReader, ids: list[int]) -> list[Answer]:
    query = f"SELECT {NAMED} FROM episodes WHERE id IN (SELECT value FROM json_each(?))"
    found = {row["id"]: as_json(row) for row in run.rows(query, json.dumps(ids))}
    return [found[number] for number in ids if number in found]


def as_json(row: sqlite3.Row) -> Answer:
    """A row as JSON values; a seed of 64 bits is text, as numbers in JavaScript have 53 bits."""
    found = {name: bool(value) if name in BOOLEANS else value for name, value in dict(row).items()}
    return found | ({"noise_seed": str(found["noise_seed"])} if "noise_seed" in found else {})


def facets(run: RunReader) -> Answer:
    """The values of the filters with a choice, and the first and the last step."""
    rows = run.rows(
        f"SELECT {', '.join(FACETS)}, min(step) AS first, max(step) AS last {FROM}"
        f" GROUP BY {', '.join(FACETS)}"
    )
    choices: Answer = {f"{name}s": sorted({row[name] for row in rows}) for name in FACETS}
    first = min((row["first"] for row in rows), default=None)
    last = max((row["last"] for row in rows), default=None)
    return choices | {"steps": [first, last] if rows else None}
