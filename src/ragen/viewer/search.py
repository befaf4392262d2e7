"""The search in thoughts, with SQLite's FTS5."""

from __future__ import annotations

import re

from ragen.storage.schema import TURNS_AN_EPISODE
from ragen.viewer.reading import RunReader

HITS = f"rowid / {TURNS_AN_EPISODE} FROM thoughts_fts WHERE thoughts_fts MATCH ?"
"""The episode of each turn that matches, as the rest of a SELECT."""

PREFIX = 3
"""Shortest last word of a search that may be a prefix."""

SNIPPET = 160


def match_of(text: str) -> str | None:
    """A search in the syntax of FTS5: words, and phrases in quotation marks; ``None`` if empty.

    Each word is quoted, so that no character is an operator; the last word may be a prefix.
    """
    clean = text.encode("utf-8", "replace").decode().replace("\0", " ")
    parts = [phrase or word for phrase, word in re.findall(r'"([^"]*)"|([^\s"]+)', clean)]
    parts = [part for part in parts if re.search(r"\w", part)]
    if not parts:
        return None
    goes_on = len(parts[-1]) >= PREFIX and clean[-1] not in ' "'
    return " ".join(f'"{part}"' for part in parts) + ("*" if goes_on else "")


def snippet(run: RunReader, episode: int, words: str | None) -> str | None:
    """A piece of the first thought with one of the words, or else of the first thought or reply."""
    turns = run.turns("thought, reply", episode)
    thoughts = [thought for thought, _ in turns if thought is not None]
    wanted = re.findall(r'"([^"]*)"', words or "")
    for thought in thoughts:
        for word in wanted:
            # The index ignores accents; this does not, and then the first thought is shown.
            at = thought.casefold().find(word.casefold())
            if at >= 0:
                return _cut(thought, max(0, at - SNIPPET // 3))
    first = next(iter(thoughts or [reply for _, reply in turns]), None)
    return None if first is None else _cut(first, 0)


def _cut(text: str, start: int) -> str:
    """At most `SNIPPET` characters from `start` on, with an ellipsis for omitted text."""
    start = max(0, text.rfind(" ", 0, start))  # not inside a word
    before = "…" if start else ""
    piece = before + " ".join(text[start : start + 2 * SNIPPET].split())
    return piece if len(piece) <= SNIPPET else piece[: SNIPPET - 1] + "…"
