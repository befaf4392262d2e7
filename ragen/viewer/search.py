"""The search in thoughts: what is typed as FTS5 reads it, and what is found."""

from __future__ import annotations

import json
import re
import sqlite3

from ragen.schema import TURNS_AN_EPISODE

COMMON = 5000
"""Episodes found by a search from which on they are not counted to the last one."""

PREFIX = 3
"""Letters from which on the last word of a search may still go on."""

SNIPPET = 160
"""Characters of a thought in a list."""


def match_of(text: str) -> str | None:
    """A search as FTS5 reads it: every word, and phrases in quotation marks; none where none is.

    Each word is quoted, so that no sign in it means anything; the last may go on.

    Example:
        >>> print(match_of('the "red box" OR wal'))
        "the" "red box" "OR" "wal"*
    """
    clean = text.encode("utf-8", "replace").decode().replace("\0", " ")
    parts = [phrase or word for phrase, word in re.findall(r'"([^"]*)"|([^\s"]+)', clean)]
    parts = [part for part in parts if re.search(r"\w", part)]
    if not parts:
        return None
    goes_on = len(parts[-1]) >= PREFIX and clean[-1] not in ' "'
    return " ".join(f'"{part}"' for part in parts) + ("*" if goes_on else "")


def found_by(connection: sqlite3.Connection, words: str) -> tuple[str, str, bool]:
    """The episodes with a thought that is found.

    Returns:
        A query for their ids, its parameter, and whether they are few enough to be counted. Few are
        looked for once, however often the query is used.
    """
    hits = (
        f"SELECT DISTINCT rowid / {TURNS_AN_EPISODE} FROM thoughts_fts WHERE thoughts_fts MATCH ?"
    )
    found = connection.execute(f"{hits} LIMIT {COMMON}", (words,)).fetchall()
    rare = len(found) < COMMON
    if rare:
        hits, words = "SELECT value FROM json_each(?)", json.dumps([number for (number,) in found])
    return hits, words, rare


def snippet(connection: sqlite3.Connection, episode: int, words: str | None) -> str | None:
    """A piece of the first thought that has one of the words searched for, or of the first one."""
    thoughts = connection.execute(
        "SELECT thought FROM turns WHERE id BETWEEN ? AND ? AND thought IS NOT NULL ORDER BY id",
        (episode * TURNS_AN_EPISODE, (episode + 1) * TURNS_AN_EPISODE - 1),
    )
    wanted = re.findall(r'"([^"]*)"', words or "")
    first = None
    for (thought,) in thoughts:
        first = thought if first is None else first
        for word in wanted:
            # Where the index folds an accent, this finds nothing, and the first thought is shown.
            at = thought.casefold().find(word.casefold())
            if at >= 0:
                return _cut(thought, max(0, at - SNIPPET // 3))
        if not wanted:
            break
    return None if first is None else _cut(first, 0)


def _cut(text: str, start: int) -> str:
    """At most `SNIPPET` characters from there on, with an ellipsis where something is left out."""
    before = "…" if start else ""
    piece = before + " ".join(text[start : start + 2 * SNIPPET].split())
    return piece if len(piece) <= SNIPPET else piece[: SNIPPET - 1] + "…"
