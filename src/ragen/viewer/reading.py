"""Access to the run folders below one root and to their databases, read-only.

Each answer opens its own connection. A permanent reader would keep the run from folding its
write-ahead log back into one file, and opening takes a fraction of a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ragen.core.errors import RagenError
from ragen.storage.branches import FILE as BRANCHES
from ragen.storage.database import CONFIG, DATABASE, check_schema, connect_to_read
from ragen.storage.schema import decompress

Query = Mapping[str, str]
"""The parameters of a request, as text."""

Answer = dict[str, Any]
"""The answer to a request: JSON values."""

DEEPEST = 4
"""Levels of folders that are searched for runs; those of a study are two levels deep."""

NO_RUNS_INSIDE = ("checkpoints", "__pycache__", "node_modules")
"""Folders that may hold thousands of files, but no run."""

MOST_FOLDERS = 5000
"""Folders that are searched at most; more would be a whole disk."""

FILES = (DATABASE, CONFIG, BRANCHES)
"""The files of a run; the last one exists only if something was branched. None may be a link, which
could lead to anything that the viewer's user can read."""

LONGEST_S = 30.0
"""Time limit of one answer, a hundred times what the slowest one needs. It bounds the cost of a
database that was made to keep readers busy."""

BETWEEN_LOOKS = 100_000
"""Steps of SQLite's virtual machine between two checks of the clock: about a millisecond."""


class Unanswered(RagenError):
    """A request without an answer: one line, and its HTTP status."""

    status = 400


class NotFound(Unanswered):
    """There is no such run, episode or step."""

    status = 404


class Unreadable(Unanswered):
    """The run exists, but its database cannot be read."""

    status = 409


Signature = tuple[tuple[int, int, int] | None, ...]
"""The identity, size and time of last change of a run's files."""


def signature(folder: Path) -> Signature:
    """A value that changes with each commit of a run; it takes microseconds."""
    return tuple(_stamp(folder / name) for name in (DATABASE, f"{DATABASE}-wal", CONFIG))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def find_runs(root: Path) -> list[str]:
    """The runs below a folder by their ids, ``.`` if it is one itself; links are not followed."""
    found: list[str] = []
    if _is_run(root):
        return ["."]
    level, left = [root], MOST_FOLDERS
    for _ in range(DEEPEST):
        inside = [path for folder in level[:left] for path in _folders(folder)]
        left = max(0, left - len(level))
        found += [path.relative_to(root).as_posix() for path in inside if _is_run(path)]
        level = [path for path in inside if not _is_run(path)]
    return found


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
        return []  # removed meanwhile, or not readable for us


def _is_run(folder: Path) -> bool:
    """Whether a folder holds a run with its own files, not links."""
    files = [os.path.join(folder, name) for name in FILES]
    # Not Path.is_file, which raises if the folder is not readable.
    return all(map(os.path.isfile, files[:2])) and not any(map(os.path.islink, files))


def run_folder(root: Path, run: str) -> Path:
    """The folder of a run, by its id.

    Raises:
        NotFound: There is no such run, or it lies outside the root.
    """
    absent = NotFound(f"there is no run {run!r} here")
    parts = run.split("/")
    if run != "." and any(part in ("", ".", "..") for part in parts):
        raise absent
    if "\0" in run or "\\" in run:
        raise absent
    try:
        folder, home = (root / run).resolve(), root.resolve()
        if not folder.is_relative_to(home) or not _is_run(folder):
            raise absent
    except (OSError, RuntimeError, ValueError):  # too long a name, links in a circle
        raise absent from None
    return folder


@contextlib.contextmanager
def reading(folder: Path, name: str = DATABASE) -> Iterator[sqlite3.Connection]:
    """A connection that can only read and creates no file.

    Args:
        folder: The run.
        name: Which of its databases.

    Raises:
        Unreadable: It is damaged, locked, gone, of another schema, or takes too long.
    """
    path = folder / name
    try:
        with contextlib.closing(_connect(path)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA query_only = ON")
            end = time.monotonic() + LONGEST_S
            connection.set_progress_handler(lambda: time.monotonic() > end, BETWEEN_LOOKS)
            yield connection
    except sqlite3.Error as error:
        late = str(error) == "interrupted"
        reason = f"it takes longer than {LONGEST_S:g} s" if late else error
        raise Unreadable(f"{name} cannot be read: {reason}") from None


def _connect(path: Path) -> sqlite3.Connection:
    try:
        connection = connect_to_read(path)
        check_schema(connection, path.name)
    except RagenError as error:
        raise Unreadable(str(error)) from None
    return connection


def loaded(text: str | None) -> Any:
    """The value of JSON in a column; ``None`` for NULL and for numbers that are not finite.

    Raises:
        Unreadable: It is not JSON.
    """
    try:
        return None if text is None else json.loads(text, parse_constant=lambda _: None)
    except ValueError:
        raise Unreadable(f"{DATABASE} is damaged: {text!r:.40} is not JSON") from None


def array_of(column: str, data: bytes) -> NDArray[Any]:
    """The array in a column.

    Raises:
        Unreadable: The data are not an array.
    """
    try:
        return decompress(column, data)
    except (ValueError, TypeError, zlib.error) as error:
        raise Unreadable(f"{DATABASE} is damaged: {column} cannot be unpacked: {error}") from None


def text_of(query: Query, name: str) -> str:
    """A required parameter.

    Raises:
        Unanswered: It is missing.
    """
    if name not in query:
        raise Unanswered(f"the parameter {name!r} is missing")
    return query[name]


def whole_number(query: Query, name: str) -> int:
    """A required parameter that is a whole number of at most 64 bits.

    Raises:
        Unanswered: It is missing or invalid.
    """
    text = text_of(query, name)
    try:
        number = int(text)
    except ValueError:
        raise Unanswered(f"{name} = {text[:40]!r}: expected a whole number") from None
    if not -(2**63) <= number < 2**63:
        raise Unanswered(f"{name} = {text[:40]!r}: too large")
    return number


def folder_of(root: Path, query: Query) -> Path:
    """The folder of the run that a request names.

    Raises:
        Unanswered: It names none.
        NotFound: There is no such run.
    """
    return run_folder(root, text_of(query, "run"))
