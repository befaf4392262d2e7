"""A run's folder and the database in it: made, opened, claimed, read and closed.

``run.sqlite`` is in WAL mode while somebody writes it, so that a viewer may read at any time, and a
plain single file once it is closed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ragen.core.errors import RagenError, reason_of
from ragen.storage.schema import SCHEMA, SCHEMA_VERSION
from ragen.storage.upgrade import OLD_VERSION, upgrade

DATABASE = "run.sqlite"
CONFIG = "config.toml"

WRITERS_S = 10.0
"""How long a writer waits for another one."""

READERS_S = 0.5
"""How long a writer that ends waits for readers; an answer of the viewer takes a tenth of it."""

ASKED_S = 0.1
"""How long a claim is tried for: who only asks whether a run is claimed (`is_claimed`) holds the
lock for some microseconds."""


def new_run_folder(root: Path, name: str, out: Path | None = None) -> Path:
    """Make the folder of a new run: `out`, or the next number under `root`.

    Runs lie side by side: the third of ``paper/bandit`` is ``runs/paper-bandit-3``.

    Raises:
        RagenError: `out` exists already, or the folder cannot be made.
    """
    refuse_existing(out)
    try:
        if out is not None:
            out.mkdir(parents=True)
            return out
        root.mkdir(parents=True, exist_ok=True)
        name = name.replace("/", "-")
        numbered = re.compile(re.escape(name) + r"-(\d+)")
        found = [numbered.fullmatch(entry.name) for entry in root.iterdir()]
        number = 1 + max((int(match[1]) for match in found if match), default=0)
        while True:
            with contextlib.suppress(FileExistsError):  # Another run may have just taken it.
                (root / f"{name}-{number}").mkdir()
                return root / f"{name}-{number}"
            number += 1
    except OSError as error:
        raise RagenError(
            f"cannot make the run folder {error.filename}: {reason_of(error)}; "
            "choose a writable place with --out"
        ) from None


def refuse_existing(out: Path | None) -> None:
    """Make sure that a new run's folder is new; worth knowing before a model is loaded for it.

    Raises:
        RagenError: It exists.
    """
    if out is not None and out.exists():
        run = (out / CONFIG).is_file()
        raise RagenError(
            f"{out} exists already and {'a run' if run else 'what is there'} is never overwritten; "
            f"give another --out{f', or go on with that run: ragen resume {out}' if run else ''}"
        )


def create_database(folder: Path, config_text: str) -> sqlite3.Connection:
    """Begin a run in `folder`: its config and an empty database, opened to write.

    Raises:
        RagenError: A run is there already, or the folder cannot be written; nothing is left.
    """
    database, config = folder / DATABASE, folder / CONFIG
    if database.exists() or config.exists():
        raise RagenError(f"{folder} holds a run already; a run is never overwritten")
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(database)
        fill(connection)
        config.write_text(config_text, encoding="utf-8")
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", CONFIG):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # It stays where it holds something else.
            folder.rmdir()
        raise cannot_write(folder, error) from None
    return connection


def open_database(
    folder: Path, make: bool = False, file: str = DATABASE, schema: str = SCHEMA
) -> sqlite3.Connection:
    """Open a database to write it; who writes a run's metrics has to `claim` it, too.

    Args:
        folder: Where it lies.
        make: Make an empty one where there is none.
        file: Its name there.
        schema: What an empty one is filled with.

    Raises:
        RagenError: There is none, it is damaged, of another version, or cannot be made.
    """
    database = folder / file
    if not make:
        must_exist(folder)
    connection: sqlite3.Connection | None = None
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        if database.is_file():
            _bring_up_to_date(database)
        connection = connect(database)
        if make and _version(connection) == 0:
            fill(connection, schema)
        check_schema(connection, database)
    except (sqlite3.DatabaseError, OSError) as error:
        if connection is not None:
            connection.close()
        raise RagenError(f"{database} cannot be read: {error}") from None
    except RagenError:
        if connection is not None:
            close_database(connection)
        raise
    return connection


def close_database(connection: sqlite3.Connection) -> None:
    """Leave one plain file, unless others are still at it."""
    # A reader keeps the log alive and cannot fold it back itself: who writes waits until it has
    # seen what it came for. Another writer may stay for long; the last one to leave folds it.
    with contextlib.suppress(sqlite3.OperationalError):
        _journal(connection, "DELETE", READERS_S)
    connection.close()


def connect(database: Path) -> sqlite3.Connection:
    """A connection that writes, in WAL mode; transactions are begun and ended by hand."""
    # Made in the caller's thread and used in the loop's (a notebook's run has one), never at once.
    connection = sqlite3.connect(
        database, isolation_level=None, timeout=WRITERS_S, check_same_thread=False
    )
    _journal(connection, "WAL", WRITERS_S)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _journal(connection: sqlite3.Connection, mode: str, seconds: float) -> None:
    """Set a database's journal mode, which others that are at it may hold up for some seconds.

    SQLite's own time-out does not cover this: it refuses at once.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {mode}")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > end:
                raise
            time.sleep(0.01)


def connect_to_read(database: Path) -> sqlite3.Connection:
    """A connection that can change nothing, also while a run writes the database.

    It leaves no file behind, either. A database that nobody writes may still announce a log (a copy
    of a living run's does): SQLite would make the log's files only to find it empty.

    Raises:
        sqlite3.OperationalError: There is no such file.
        RagenError: It has the schema before this one and cannot be brought up to date.
    """
    _bring_up_to_date(database)
    return _connect_to_read(database)


def _connect_to_read(database: Path) -> sqlite3.Connection:
    log = database.with_name(f"{database.name}-wal")
    how = "immutable=1" if _announces_log(database) and not log.exists() else "mode=ro"
    return sqlite3.connect(f"{database.absolute().as_uri()}?{how}", uri=True)


def _announces_log(database: Path) -> bool:
    """Whether the header says so: bytes 18 and 19 of SQLite's file format are 2."""
    try:
        with database.open("rb") as file:
            return file.read(20)[18:] == b"\x02\x02"
    except OSError:
        return False


def read(folder: Path, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """The rows of one query.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    with reading_database(folder) as connection:
        return connection.execute(query, parameters).fetchall()


@contextlib.contextmanager
def reading_database(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection that reads a run's database.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    must_exist(folder)
    try:
        with contextlib.closing(connect_to_read(folder / DATABASE)) as connection:
            yield connection
    except sqlite3.DatabaseError as error:
        raise RagenError(f"{folder / DATABASE} cannot be read: {error}") from None


def _bring_up_to_date(database: Path) -> None:
    """Upgrade a database of the schema before this one, which no process may be writing.

    Raises:
        sqlite3.OperationalError: There is no such file.
        RagenError: It is being written, or cannot be.
    """
    with contextlib.closing(_connect_to_read(database)) as connection:
        if _version(connection) != OLD_VERSION:
            return
    if is_claimed(database.parent):
        raise RagenError(
            f"{database} is being written by an earlier version of RAGEN; let that run end first"
        )
    try:
        with contextlib.closing(
            sqlite3.connect(database, isolation_level=None, timeout=WRITERS_S)
        ) as connection:
            upgrade(connection)
    except sqlite3.OperationalError as error:
        raise RagenError(
            f"{database} has schema {OLD_VERSION} and cannot be brought to {SCHEMA_VERSION}: "
            f"{error}; make it writable, or copy the run to where it is"
        ) from None
    except ValueError as error:
        raise RagenError(f"{database} is damaged and cannot be upgraded: {error}") from None


def check_schema(connection: sqlite3.Connection, database: Path | str) -> None:
    """Refuse a database that another version of RAGEN wrote.

    Args:
        connection: To the database.
        database: Its name in the message.

    Raises:
        RagenError: It has another schema.
    """
    version = _version(connection)
    if version != SCHEMA_VERSION:
        raise RagenError(
            f"{database} has schema {version}, this RAGEN reads {SCHEMA_VERSION}; "
            "use the version that wrote it"
        )


def fill(connection: sqlite3.Connection, schema: str = SCHEMA) -> None:
    """Make the tables, unless another process was quicker."""
    try:
        connection.executescript(f"BEGIN IMMEDIATE;{schema}COMMIT;")
    except sqlite3.OperationalError:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if _version(connection) == 0:
            raise


@contextlib.contextmanager
def transaction(
    connection: sqlite3.Connection, folder: Path, file: str = DATABASE
) -> Iterator[None]:
    """All that is written inside, or nothing of it.

    Raises:
        RagenError: The database cannot be written.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            raise cannot_write(folder, error, file) from None
        raise


def claim(folder: Path) -> int | None:
    """Keep other writers away while this handle is open; a process that dies gives it back.

    Raises:
        RagenError: Another process writes this run.
    """
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + ASKED_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(handle)
                raise RagenError(
                    f"{folder} is being written by another process; stop that run first, or let "
                    "it end"
                ) from None
            time.sleep(0.005)
        except OSError:  # a file system without locks
            return handle


def is_claimed(folder: Path) -> bool:
    """Whether a process writes this run; asking takes its claim from nobody.

    The lock that is tried is a shared one, given back at once: two that ask do not take each other
    for a writer.
    """
    if fcntl is None:
        return (folder / f"{DATABASE}-wal").exists()
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def cannot_write(folder: Path, error: sqlite3.Error | OSError, file: str = DATABASE) -> RagenError:
    """What to tell the user of a database that takes no more."""
    reason = reason_of(error) if isinstance(error, OSError) else str(error)
    return RagenError(
        f"cannot write {folder / file}: {reason}; free space there or choose another place "
        "with --out"
    )


def must_exist(folder: Path, file: str = DATABASE) -> None:
    """Make sure that a folder holds a run's file.

    Raises:
        RagenError: It does not.
    """
    if not (folder / file).is_file():
        raise RagenError(f"{folder} is no run folder ({file} is missing)")


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)
