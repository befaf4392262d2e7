"""Storage of a judge's answers, in `judgements.sqlite`: the same question is asked once in a run.

Each answer is written when it arrives, beside the run's own database, which has the rows of
finished steps. So a run that was killed in the middle of a step gets the same answers again.
"""

from __future__ import annotations

import sqlite3
from dataclasses import astuple, dataclass
from pathlib import Path

from ragen.storage.database import close_database, connect, unusable

FILE = "judgements.sqlite"

_TABLE = """
CREATE TABLE IF NOT EXISTS judgements (
    question TEXT PRIMARY KEY, step INTEGER NOT NULL, text TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    attempt INTEGER NOT NULL
)
"""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judge's answer: who asked first, its text, and the tokens that it took."""

    attempt: int
    step: int
    text: str
    prompt_tokens: int
    completion_tokens: int


class Judgements:
    """Answers by question, in a run's folder; every method may raise `RagenError`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        try:
            self._connection = connect(self._file)
            self._connection.execute(_TABLE)
        except sqlite3.DatabaseError as error:
            raise unusable(self._file, error) from None

    def find(self, question: str) -> Judgement | None:
        """The answer to a question, if it is known."""
        rows = self._execute(
            "SELECT attempt, step, text, prompt_tokens, completion_tokens FROM judgements"
            " WHERE question = ?",
            question,
        )
        return Judgement(*rows[0]) if rows else None

    def add(self, question: str, judgement: Judgement) -> None:
        """Keep an answer."""
        self._execute(
            "INSERT OR REPLACE INTO judgements"
            " (question, attempt, step, text, prompt_tokens, completion_tokens)"
            " VALUES (?,?,?,?,?,?)",
            question,
            *astuple(judgement),
        )

    def _execute(self, query: str, *values: object) -> list[tuple[int, int, str, int, int]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise unusable(self._file, error) from None

    def close(self) -> None:
        """Leave one plain file."""
        close_database(self._connection)
