"""The search in thoughts, with SQLite's FTS5."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Sequence

from ragen.storage.schema import TURNS_AN_EPISODE

COMMON = 5000
"""Number of hits from which on they are no longer counted."""

FOUND = f"id IN (SELECT rowid / {TURNS_AN_EPISODE} FROM thoughts_fts WHERE thoughts_fts MATCH ?)"
"""The condition that an episode is a hit, which goes through all hits."""

PREFIX = 3
"""Shortest last word of a search that may be a prefix."""

MOST_ENDINGS = 50
"""Up to this number of words with a prefix, each is searched by itself."""

ONE_WORD = re.compile(r'"[^\W_]+"( OR "[^\W_]+")*')
"""A search that is fast for a single episode, because it intersects nothing."""

SNIPPET = 160
"""Characters of a thought in a list."""


def match_of(text: str) -> str | None:
    """A search in the syntax of FTS5: words, and phrases in quotation marks; ``None`` if empty.

    Each word is quoted, so that no character is an operator; the last word may be a prefix.

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


def spelled_out(connection: sqlite3.Connection, words: str) -> str:
    """A search for a prefix as a search for all words of the index with that prefix.

    For a prefix, FTS5 collects all hits before it returns the first one. For whole words it returns
    them one by one, and a single episode is one index lookup (`is_found`). If there are many words,
    or the prefix has other characters than letters and digits, the search stays as it is.
    """
    last = re.fullmatch(r'"([A-Za-z0-9]+)"\*', words)
    if last is None:
        return words
    # The table is temporary and belongs to the connection; the database is not written.
    connection.execute("PRAGMA query_only = OFF")
    connection.execute(
        "CREATE VIRTUAL TABLE IF NOT EXISTS temp.vocabulary"
        " USING fts5vocab('main', 'thoughts_fts', 'row')"
    )
    connection.execute("PRAGMA query_only = ON")
    stem = last[1].lower()
    endings = connection.execute(
        "SELECT term FROM temp.vocabulary WHERE term >= ? AND term < ? LIMIT ?",
        (stem, stem + chr(sys.maxunicode), MOST_ENDINGS + 1),
    ).fetchall()
    if not 0 < len(endings) <= MOST_ENDINGS:
        return words
    return " OR ".join(f'"{term}"' for (term,) in endings)


def found_by(connection: sqlite3.Connection, words: str) -> list[int] | None:
    """The episodes that match; ``None`` if they are too many to be listed."""
    rows = connection.execute(
        f"SELECT DISTINCT rowid / {TURNS_AN_EPISODE} FROM thoughts_fts WHERE thoughts_fts MATCH ?"
        " LIMIT ?",
        (words, COMMON),
    )
    found = [number for (number,) in rows]
    return found if len(found) < COMMON else None


def is_found(connection: sqlite3.Connection, words: str, episode: int) -> bool:
    """Whether one episode matches; fast for a search of `ONE_WORD`."""
    first = episode * TURNS_AN_EPISODE
    row = connection.execute(
        "SELECT 1 FROM thoughts_fts WHERE thoughts_fts MATCH ? AND rowid BETWEEN ? AND ? LIMIT 1",
        (words, first, first + TURNS_AN_EPISODE - 1),
    ).fetchone()
    return row is not None


def found_among(connection: sqlite3.Connection, words: str, episodes: Sequence[int]) -> set[int]:
    """Which of the given episodes match; the closer their ids, the faster."""
    if not episodes:
        return set()
    rows = connection.execute(
        f"SELECT DISTINCT rowid / {TURNS_AN_EPISODE} FROM thoughts_fts WHERE thoughts_fts MATCH ?"
        f" AND rowid BETWEEN ? AND ? AND rowid / {TURNS_AN_EPISODE} IN"
        " (SELECT value FROM json_each(?))",
        (
            words,
            min(episodes) * TURNS_AN_EPISODE,
            (max(episodes) + 1) * TURNS_AN_EPISODE - 1,
            json.dumps(episodes),
        ),
    )
    return {number for (number,) in rows}


def snippet(connection: sqlite3.Connection, episode: int, words: str | None) -> str | None:
    """A piece of the first thought with one of the words, or else of the first thought."""
    thoughts = connection.execute(
        "SELECT thought FROM turns WHERE id BETWEEN ? AND ? AND thought IS NOT NULL ORDER BY id",
        (episode * TURNS_AN_EPISODE, (episode + 1) * TURNS_AN_EPISODE - 1),
    )
    wanted = re.findall(r'"([^"]*)"', words or "")
    first = None
    for (thought,) in thoughts:
        first = thought if first is None else first
        for word in wanted:
            # The index ignores accents; this does not, and then the first thought is shown.
            at = thought.casefold().find(word.casefold())
            if at >= 0:
                return _cut(thought, max(0, at - SNIPPET // 3))
        if not wanted:
            break
    return None if first is None else _cut(first, 0)


def _cut(text: str, start: int) -> str:
    """At most `SNIPPET` characters from `start` on, with an ellipsis for what is left out."""
    before = "…" if start else ""
    piece = before + " ".join(text[start : start + 2 * SNIPPET].split())
    return piece if len(piece) <= SNIPPET else piece[: SNIPPET - 1] + "…"
