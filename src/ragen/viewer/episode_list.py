"""The list of episodes, with filters, sorting and paging.

The index `episodes_for_lists` holds all columns that a list needs, so that the widest request is
one scan of a few megabytes. The table itself is read only for the rows of one page. A page begins
after the last row of the previous one (its value and id): an offset would walk all rows before it.
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
"""The orders of a list, and their columns; rows without a value come last."""

MOST, USUAL = 200, 50
"""Episodes on a page: at most, and by default."""

FOLLOWING = 500
"""Rows in which a page of a common search is looked for first; filtering more of them takes as long
as going through all hits."""

COLUMNS = (
    *("id", "attempt", "step", "phase", "group", "member", "kept", "group_score", "env"),
    *("level_seed", "noise_seed", "stop_reason", "terminated", "truncated", "success", "reward"),
    *("penalty", "num_turns", "num_tokens", "thought_tokens", "entropy", "error"),
)
"""The columns of an episode in a list."""

BOOLEANS = ("kept", "terminated", "truncated", "success", "well_formed")
"""Boolean columns."""

NAMED = ", ".join(f'"{column}"' for column in COLUMNS)

LISTS = "INDEXED BY episodes_for_lists"
"""A list uses only the columns of this index (`schema.LISTED`)."""

FACETS = ("phase", "env", "stop_reason")
"""Columns with a choice of values; they are the first ones of the index."""

_WHOLE = {
    "step_from": "step >= ?",
    "step_to": "step <= ?",
    "group": '"group" = ?',
    "level_seed": "level_seed = ?",
    "success": "success = ?",
    "kept": "kept = ?",
}
_REAL = {"reward_min": "reward >= ?", "reward_max": "reward <= ?"}


class RowPosition(NamedTuple):
    """The position of a row in an order: its value and id."""

    value: float | None
    id: int


class Filter(NamedTuple):
    """Conditions on the rows of a list, as SQL."""

    where: list[str]
    values: list[Any]

    def also(self, condition: str, value: Any) -> Filter:
        """The filter with one more condition."""
        return Filter([*self.where, condition], [*self.values, value])


def episodes(root: Path, query: Query) -> Answer:
    """``/api/episodes``: one page of the list.

    Raises:
        Unanswered: There is no such run, it cannot be read, or a parameter is invalid.
    """
    folder = folder_of(root, query)
    sort, order = query.get("sort", "step"), query.get("order", "asc")
    if sort not in SORTS or order not in ("asc", "desc"):
        raise Unanswered(f"sort by {', '.join(SORTS)}, in the order asc or desc")
    limit = min(MOST, max(1, whole_number(query, "limit"))) if "limit" in query else USUAL
    start = _position(query["cursor"]) if query.get("cursor") else None
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
        rows = [
            as_json(row) for row in rows_of(connection, [position.id for position in page[:limit]])
        ]
        counts = still_counts(connection)
        for row in rows:
            row["still_counts"] = counts(row["attempt"], row["step"])
            row["snippet"] = snippet(connection, row["id"], words)
        found = facets(connection)
    following = _cursor(page[limit - 1]) if len(page) > limit else None
    return {"episodes": rows, "next": following, "total": total, "facets": found}


def filter_of(query: Query) -> Filter:
    """The conditions in a request.

    Raises:
        Unanswered: A value is not a number.
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
    start: RowPosition | None,
    count: int,
) -> Iterator[RowPosition]:
    """The next rows in order: those with a value, then those without."""
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
            yield RowPosition(*row)
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
            yield RowPosition(*row)


def _page_of_many(
    connection: sqlite3.Connection,
    wanted: Filter,
    words: str,
    column: str,
    order: str,
    start: RowPosition | None,
    count: int,
) -> list[RowPosition]:
    """A page for a search with many hits: those among the next rows.

    Going through all hits takes too long. Usually the next rows contain enough of them. They do not
    if the filters exclude most hits; only then are all hits used.
    """
    following = list(_page(connection, wanted, column, order, start, FOLLOWING))
    if ONE_WORD.fullmatch(words):
        found = (position for position in following if is_found(connection, words, position.id))
    else:
        among = found_among(connection, words, [position.id for position in following])
        found = (position for position in following if position.id in among)
    page = list(islice(found, count))
    if len(page) < count and len(following) == FOLLOWING:
        return list(_page(connection, wanted.also(FOUND, words), column, order, start, count))
    return page


def _cursor(position: RowPosition) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def _position(cursor: str) -> RowPosition:
    try:
        value, number = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        value = None if value is None else float(value)
    except (ValueError, TypeError, OverflowError, RecursionError, binascii.Error):
        raise Unanswered("the cursor is not valid for this list") from None
    if not (isinstance(number, int) and 0 <= number < 2**63):
        raise Unanswered("the cursor is not valid for this list")
    return RowPosition(value, number)


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


def as_json(row: sqlite3.Row) -> Answer:
    """A row as JSON values: booleans, and a seed of 64 bits as text.

    Numbers in JavaScript are exact up to 53 bits.
    """
    found = {name: bool(value) if name in BOOLEANS else value for name, value in dict(row).items()}
    return found | ({"noise_seed": str(found["noise_seed"])} if "noise_seed" in found else {})


def facets(connection: sqlite3.Connection) -> Answer:
    """The values of the filters, by one index lookup for each combination instead of a scan."""
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

    They are found column by column, because a comparison of all three at once would use the index
    only for the first and scan the rest.
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
