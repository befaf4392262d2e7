"""The list of episodes: any filter, any order, page by page.

All that a list needs stands in the index `episodes_for_lists`, so that the widest question is one
scan of some megabytes; the table itself is read for the rows of one page. A page goes on after the
last row of the one before (its value and id), not after a count of rows, which would be walked.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sqlite3
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ragen.reports.facts import ALARM
from ragen.storage.attempts import still_counts
from ragen.viewer.reading import Answer, Query, Unanswered, folder_of, reading, whole_number
from ragen.viewer.search import (
    FOUND,
    ONE_WORD,
    found_among,
    found_by,
    is_found,
    match_of,
    snippet,
    spelled_out,
)

SORTS = {
    "step": "step",
    "reward": "reward",
    "length": "num_tokens",
    "entropy": "entropy",
    "turns": "num_turns",
    "score": "group_score",
}
"""What a list may be ordered by, and the column that holds it; rows without a value come last."""

MOST, USUAL = 200, 50
"""Episodes of a page."""

FOLLOWING = 500
"""Rows among which a page of something common is looked for first; to sort more of them out takes
as long as to look through all that is found."""

COLUMNS = (
    *("id", "attempt", "step", "phase", "group", "member", "kept", "group_score", "env"),
    *("level_seed", "noise_seed", "stop_reason", "terminated", "truncated", "success", "reward"),
    *("penalty", "num_turns", "num_tokens", "thought_tokens", "entropy", "error"),
)
"""What is said of an episode in a list."""

STATEMENTS = ("kept", "terminated", "truncated", "success", "well_formed")
"""Columns that are true or false."""

NAMED = ", ".join(f'"{column}"' for column in COLUMNS)

LISTS = "INDEXED BY episodes_for_lists"
"""A list names none but the columns of that index (`schema.LISTED`)."""

FACETS = ("phase", "env", "stop_reason")
"""Columns whose values one may choose from, the first of that index."""

_WHOLE = {
    "step_from": "step >= ?",
    "step_to": "step <= ?",
    "group": '"group" = ?',
    "level_seed": "level_seed = ?",
    "success": "success = ?",
    "kept": "kept = ?",
}
_REAL = {"reward_min": "reward >= ?", "reward_max": "reward <= ?"}


class Place(NamedTuple):
    """Where a page ended: the last row's value and id."""

    value: float | None
    id: int


class Filter(NamedTuple):
    """What the rows of a list have in common, as SQL."""

    where: list[str]
    values: list[Any]

    def also(self, condition: str, value: Any) -> Filter:
        """The same with one condition more."""
        return Filter([*self.where, condition], [*self.values, value])


def episodes(root: Path, query: Query) -> Answer:
    """``/api/episodes``: one page of the list.

    Raises:
        Unanswered: There is no such run, it cannot be read, or a parameter is not what it must be.
    """
    folder = folder_of(root, query)
    sort, order = query.get("sort", "step"), query.get("order", "asc")
    if sort not in SORTS or order not in ("asc", "desc"):
        raise Unanswered(f"sort by {', '.join(SORTS)}, in the order asc or desc")
    limit = min(MOST, max(1, whole_number(query, "limit"))) if "limit" in query else USUAL
    start = _place(query["cursor"]) if query.get("cursor") else None
    wanted, words = filter_of(query), match_of(query.get("q", ""))
    asked = SORTS[sort], order, start, limit + 1
    with reading(folder) as connection:
        search = None if words is None else spelled_out(connection, words)
        hits = None if search is None else found_by(connection, search)
        if search is not None and hits is None:
            page, total = _page_of_many(connection, wanted, search, *asked), None
        else:
            if hits is not None:
                wanted = wanted.also("id IN (SELECT value FROM json_each(?))", json.dumps(hits))
            page, total = list(_page(connection, wanted, *asked)), _total(connection, wanted)
        rows = [as_said(row) for row in rows_of(connection, [place.id for place in page[:limit]])]
        counts = still_counts(connection)
        for row in rows:
            row["still_counts"] = counts(row["attempt"], row["step"])
            row["snippet"] = snippet(connection, row["id"], words)
        found = facets(connection)
    following = _cursor(page[limit - 1]) if len(page) > limit else None
    return {"episodes": rows, "next": following, "total": total, "facets": found}


def filter_of(query: Query) -> Filter:
    """The conditions that a question sets.

    Raises:
        Unanswered: A value is no number.
    """
    found = Filter([], [])
    for name in FACETS:
        if query.get(name):
            found.where.append(f"{name} = ?")
            found.values.append(query[name])
    for name, condition in _WHOLE.items():
        if query.get(name):
            found.where.append(condition)
            found.values.append(whole_number(query, name))
    for name, condition in _REAL.items():
        if query.get(name):
            found.where.append(condition)
            found.values.append(_real(query[name], name))
    if query.get("alarm") == "1":
        found.where.append("(attempt, step) IN (SELECT attempt, step FROM events WHERE kind = ?)")
        found.values.append(ALARM)
    return found


def _real(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Unanswered(f"{name} = {text[:40]!r}: expected a number")
    return number


def _page(
    connection: sqlite3.Connection,
    wanted: Filter,
    column: str,
    order: str,
    start: Place | None,
    count: int,
) -> Iterator[Place]:
    """The next rows in order: those that have a value, then those that have none."""
    beyond = ">" if order == "asc" else "<"
    if start is None or start.value is not None:
        where, values = [*wanted.where, f"{column} IS NOT NULL"], list(wanted.values)
        if start is not None:
            where.append(f"({column}, id) {beyond} (?, ?)")
            values += [start.value, start.id]
        for row in connection.execute(
            f"SELECT {column}, id FROM episodes {LISTS} WHERE {' AND '.join(where)}"
            f" ORDER BY {column} {order}, id {order} LIMIT ?",
            (*values, count),
        ):
            count -= 1
            yield Place(*row)
        start = None
    if count and column in ("num_tokens", "entropy", "group_score"):
        where, values = [*wanted.where, f"{column} IS NULL"], list(wanted.values)
        if start is not None:
            where.append(f"id {beyond} ?")
            values.append(start.id)
        for row in connection.execute(
            f"SELECT NULL, id FROM episodes {LISTS} WHERE {' AND '.join(where)}"
            f" ORDER BY id {order} LIMIT ?",
            (*values, count),
        ):
            yield Place(*row)


def _page_of_many(
    connection: sqlite3.Connection,
    wanted: Filter,
    words: str,
    column: str,
    order: str,
    start: Place | None,
    count: int,
) -> list[Place]:
    """The same of a search that finds much: those of the next rows that are found.

    To look through all that is found takes longer than a list may. The next rows hold a page of it,
    unless the filters leave out what the search finds; only then are all looked through.
    """
    following = list(_page(connection, wanted, column, order, start, FOLLOWING))
    if ONE_WORD.fullmatch(words):
        found = (place for place in following if is_found(connection, words, place.id))
    else:
        among = found_among(connection, words, [place.id for place in following])
        found = (place for place in following if place.id in among)
    page = list(islice(found, count))
    if len(page) < count and len(following) == FOLLOWING:
        return list(_page(connection, wanted.also(FOUND, words), column, order, start, count))
    return page


def _cursor(place: Place) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def _place(cursor: str) -> Place:
    try:
        value, number = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        value = None if value is None else float(value)
    except (ValueError, TypeError, OverflowError, RecursionError, binascii.Error):
        raise Unanswered("this cursor is none of this list") from None
    if not (isinstance(number, int) and 0 <= number < 2**63):
        raise Unanswered("this cursor is none of this list")
    return Place(value, number)


def _total(connection: sqlite3.Connection, wanted: Filter) -> int:
    condition = f" WHERE {' AND '.join(wanted.where)}" if wanted.where else ""
    query = f"SELECT count(*) FROM episodes {LISTS}{condition}"
    return int(connection.execute(query, wanted.values).fetchone()[0])


def rows_of(connection: sqlite3.Connection, ids: list[int]) -> list[sqlite3.Row]:
    """Episodes by their ids, in that order."""
    rows = connection.execute(
        f"SELECT {NAMED} FROM episodes WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(ids),),
    )
    found = {row["id"]: row for row in rows}
    return [found[number] for number in ids if number in found]


def as_said(row: sqlite3.Row) -> Answer:
    """A row as a page can read it: with true and false, and a seed of 64 bits as text.

    JavaScript's numbers are exact up to 53 bits.
    """
    said = {name: bool(value) if name in STATEMENTS else value for name, value in dict(row).items()}
    return said | ({"noise_seed": str(said["noise_seed"])} if "noise_seed" in said else {})


def facets(connection: sqlite3.Connection) -> Answer:
    """What there is to choose from, by a descent for each combination instead of a scan."""
    found = list(_combinations(connection))
    steps: list[int] = []
    for each in found:
        for bound in ("min", "max"):
            same = " AND ".join(f"{name} = ?" for name in FACETS)
            steps += connection.execute(
                f"SELECT {bound}(step) FROM episodes WHERE {same}", each
            ).fetchone()
    return {
        "phases": sorted({phase for phase, _, _ in found}),
        "envs": sorted({env for _, env, _ in found}),
        "stop_reasons": sorted({reason for _, _, reason in found}),
        "steps": [min(steps), max(steps)] if steps else None,
    }


def _combinations(
    connection: sqlite3.Connection, before: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The combinations of values in the columns of `FACETS`.

    Column by column: a comparison of all three at once would seek by the first alone, and scan.
    """
    if len(before) == len(FACETS):
        yield before
        return
    column = FACETS[len(before)]
    same = "".join(f"{name} = ? AND " for name in FACETS[: len(before)])
    query = f"SELECT min({column}) FROM episodes WHERE {same}{column} > ?"
    last = ""
    while (following := connection.execute(query, (*before, last)).fetchone()[0]) is not None:
        last = following
        yield from _combinations(connection, (*before, last))
