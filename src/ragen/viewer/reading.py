"""Requests, the run folders below one root, and their databases, which are only read.

Each answer opens its own connection. A permanent reader would keep the run from folding its
write-ahead log back into one file, and opening takes a fraction of a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from numpy.typing import NDArray

from ragen.core.errors import RagenError
from ragen.evaluation.kept_episodes import FOLDER as EVALUATIONS
from ragen.storage.branches import FILE as BRANCHES
from ragen.storage.database import CONFIG, DATABASE, check_schema, connect_to_read
from ragen.storage.reader import Attempt, Counts, Histories, attempts_of, still_counts
from ragen.storage.schema import TURNS_AN_EPISODE, decompress

Answer = dict[str, Any]
"""The answer to a request: JSON values."""

DEEPEST = 5
"""Levels of folders that are searched for runs; the runs of a study are two levels deep, and the
evaluations of a run two more."""

NO_RUNS_INSIDE = ("checkpoints", "__pycache__", "node_modules")
"""Folders that may hold thousands of files, but no run."""

MOST_FOLDERS = 5000
"""Maximum number of folders that are searched; more would be a whole disk."""

FILES = (DATABASE, CONFIG, BRANCHES)
"""The files of a run; the last one exists only if something was branched. None may be a link, which
could lead to anything that the viewer's user can read."""

Signature = tuple[tuple[int, int, int] | None, ...]
"""The identity, size and time of last change of a run's files."""


class Unanswered(RagenError):
    """A request without an answer: one line, and its HTTP status."""

    status = 400


class NotFound(Unanswered):
    """There is no such run, episode or step."""

    status = 404


class Unreadable(Unanswered):
    """The run exists, but its database cannot be read."""

    status = 409


@dataclass(frozen=True)
class Runs:
    """The runs below a folder, which may be one itself; `summaries` caches rows of `run_list`."""

    root: Path
    summaries: dict[Path, tuple[Signature, Answer]] = field(default_factory=dict)

    def ids(self) -> list[str]:
        """The runs' paths below the folder, ``.`` for itself; links are not followed.

        The evaluations of a run are folders in it.
        """
        found, folders = [], [self.root]
        for folder in folders:  # the list grows: level by level
            path = folder.relative_to(self.root)
            if _is_run(folder):
                found.append(path.as_posix())
                folders += [each for each in _folders(folder) if each.name == EVALUATIONS]
            elif len(path.parts) < DEEPEST and len(folders) < MOST_FOLDERS:
                folders += _folders(folder)
        return found

    def folder(self, run: str) -> Path:
        """The folder of a run, by its id."""
        path = PurePosixPath(run)
        # A name that is too long or has a zero byte and a circle of links are errors of the system.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            if str(path) == run and not ({"/", ".."} & {*path.parts}) and "\\" not in run:
                folder = (self.root / path).resolve()
                if folder.is_relative_to(self.root.resolve()) and _is_run(folder):
                    return folder
        raise NotFound(f"there is no run {run!r} here")


@dataclass(frozen=True)
class Question:
    """A request to the API: the runs that it is about, and its parameters as text."""

    runs: Runs
    query: Mapping[str, str]

    def text(self, name: str) -> str:
        """A required parameter."""
        if name not in self.query:
            raise Unanswered(f"the parameter {name!r} is missing")
        return self.query[name]

    def whole_number(self, name: str, default: int | None = None) -> int:
        """A parameter that is a whole number of at most 64 bits."""
        if default is not None and name not in self.query:
            return default
        text = self.text(name)
        with contextlib.suppress(ValueError):
            if -(2**63) <= (number := int(text)) < 2**63:
                return number
        raise Unanswered(f"{name} = {text[:40]!r}: expected a whole number of at most 64 bits")

    def number(self, name: str) -> float:
        """A required parameter that is a finite number."""
        text = self.text(name)
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(text)):
                return number
        raise Unanswered(f"{name} = {text[:40]!r}: expected a number")

    def folder(self, name: str = "run") -> Path:
        """The folder of the run that a parameter names."""
        return self.runs.folder(self.text(name))

    def reading(self, name: str = "run") -> AbstractContextManager[RunReader]:
        """The database of the run that a parameter names; raises as `folder` and `reading`."""
        return reading(self.folder(name))


class RunReader:
    """One of a run's databases during one answer."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self.connection = connection

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a query."""
        return self.connection.execute(query, values).fetchall()

    def value(self, query: str, *values: Any) -> Any:
        """The first column of a query's first row; ``None`` without rows."""
        row = self.connection.execute(query, values).fetchone()
        return None if row is None else row[0]

    def turns(self, columns: str, episode: int) -> list[sqlite3.Row]:
        """Columns of an episode's turns, in order."""
        first = episode * TURNS_AN_EPISODE
        query = f"SELECT {columns} FROM turns WHERE id BETWEEN ? AND ? ORDER BY id"
        return self.rows(query, first, first + TURNS_AN_EPISODE - 1)

    @cached_property
    def counts(self) -> Counts:
        """A test of a step of an attempt: it still counts."""
        return still_counts(self.connection)

    @cached_property
    def metric_names(self) -> list[str]:
        """The names of the recorded metrics."""
        return [name for (name,) in self.rows("SELECT DISTINCT name FROM metrics ORDER BY name")]

    def histories(self, names: Collection[str]) -> Histories:
        """Metrics by attempt and name; values that are not finite are left out.

        The table is ordered by attempt, step and name, so that each value is one lookup, and so is
        the next step: in a long run with a hundred metrics, a few names cost a few hundredths of a
        scan.
        """
        found: dict[Attempt, dict[str, dict[int, float]]] = {}
        for attempt in attempts_of(self.connection):
            rows = self.rows(
                "WITH RECURSIVE steps (step) AS"
                " (SELECT ? UNION ALL SELECT (SELECT min(next.step) FROM metrics AS next"
                " WHERE next.attempt = ? AND next.step > steps.step) FROM steps WHERE step < ?)"
                " SELECT m.step, m.name, m.value FROM steps CROSS JOIN json_each(?) AS wanted"
                " CROSS JOIN metrics AS m ON m.attempt = ? AND m.step = steps.step"
                " AND m.name = wanted.value WHERE abs(m.value) < 9e999",  # finite, and not NULL
                attempt.first,
                attempt.number,
                attempt.last,
                json.dumps(list(names)),
                attempt.number,
            )
            found[attempt] = {}
            for step, name, value in rows:
                found[attempt].setdefault(name, {})[step] = value
        return found


@contextlib.contextmanager
def reading(folder: Path, name: str = DATABASE) -> Iterator[RunReader]:
    """A database of a run; nothing is written, and no file is created."""
    try:
        with contextlib.closing(connect_to_read(folder / name)) as connection:
            check_schema(connection, name)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA query_only = ON")
            yield RunReader(folder, connection)
    except sqlite3.Error as error:
        raise Unreadable(f"{name} cannot be read: {error}") from None


def signature(folder: Path) -> Signature:
    """A value that changes with each commit of a run; it takes microseconds."""
    return tuple(_stamp(folder / name) for name in (DATABASE, f"{DATABASE}-wal", CONFIG))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
                and not entry.name.startswith(".")
                and entry.name not in NO_RUNS_INSIDE
            ]
    except OSError:
        return []  # removed meanwhile, or not readable


def _is_run(folder: Path) -> bool:
    """True if a folder holds a run with its own files, not links."""
    files = [os.path.join(folder, name) for name in FILES]
    # Not Path.is_file, which raises if the folder is not readable.
    return all(map(os.path.isfile, files[:2])) and not any(map(os.path.islink, files))


def loaded(text: str | None) -> Any:
    """The value of JSON in a column; ``None`` for NULL and for numbers that are not finite."""
    try:
        return None if text is None else json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        raise Unreadable(f"{DATABASE} is damaged: {text!r:.40} is not JSON") from None


def array_of(column: str, data: bytes) -> NDArray[Any]:
    """The array in a column."""
    try:
        return decompress(column, data)
    except (ValueError, TypeError, zlib.error) as error:
        raise Unreadable(f"{DATABASE} is damaged: {column} cannot be unpacked: {error}") from None
