"""Run folders and their databases: creation, opening, locking, reading and closing.

``run.sqlite`` is in WAL mode while a process writes it, so that a viewer can read at any time. Once
closed it is a single file. WAL needs shared memory, which some network disks lack. There the
database stays in SQLite's older mode, in which readers wait while a step is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ragen.core.errors import RagenError
from ragen.core.files import OTHER_OUT, cannot, whole_file
from ragen.storage.schema import SCHEMA, SCHEMA_VERSION

DATABASE = "run.sqlite"
CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"

WRITERS_S = 10.0
"""Seconds that a writer waits for another one."""

READERS_S = 0.5
"""Seconds that a closing writer waits for readers; the viewer's queries take a tenth of it."""

UNREAD = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)
"""Codes of operational errors that mean damage, such as a missing table or a cut file; with any
other, the system refuses the file."""
UNSHARED = (
    sqlite3.SQLITE_IOERR_SHMMAP,
    sqlite3.SQLITE_IOERR_SHMLOCK,
    sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_PROTOCOL,
)
"""Codes of SQLite's errors on a file system without the shared memory of WAL."""

CLAIM_S = 0.1
"""Seconds that `claim` waits for the lock, which `is_claimed` holds for some microseconds."""


def new_run_folder(root: Path, name: str, out: Path | None = None) -> Path:
    """Make a run's folder: `out`, or the next number under `root`, as ``runs/paper-bandit-3``."""
    refuse_existing(out)
    try:
        if out is not None:
            out.mkdir(parents=True)
            return out
        root.mkdir(parents=True, exist_ok=True)
        name = name.replace("/", "-")
        numbered = re.compile(re.escape(name) + r"-(\d+)")
        matches = [numbered.fullmatch(entry.name) for entry in root.iterdir()]
        number = 1 + max((int(match[1]) for match in matches if match), default=0)
        while True:
            with contextlib.suppress(FileExistsError):  # Another run may have just taken it.
                (root / f"{name}-{number}").mkdir()
                return root / f"{name}-{number}"
            number += 1
    except OSError as error:
        place = f"the run folder {error.filename}"
        raise cannot("make", place, error, "choose a writable place with --out") from None


def refuse_existing(out: Path | None) -> None:
    """Check that a new run's folder does not exist, before a model is loaded."""
    if out is not None and out.exists():
        run = (out / CONFIG).is_file()
        resume = f", or continue that run: ragen resume {shlex.quote(str(out))}"
        raise RagenError(
            f"{out} exists already and {'a run' if run else 'what is there'} is never overwritten; "
            f"give another --out{resume if run and _can_go_on(out) else ''}"
        )


def _can_go_on(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("step-*/state.json"))


def create_database(folder: Path, config_text: str) -> sqlite3.Connection:
    """Create a run's config and its empty database in `folder`, and open it for writing."""
    database, config = folder / DATABASE, folder / CONFIG
    if database.exists() or config.exists():
        raise RagenError(f"{folder} holds a run already; a run is never overwritten")
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(database)
        fill(connection)
        connection.execute("INSERT INTO settings (text) VALUES (?)", (config_text,))
        with whole_file(config) as temporary:
            temporary.write_text(config_text, encoding="utf-8")
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        with contextlib.suppress(OSError):  # A folder with other files stays.
            for end in ("", "-wal", "-shm", "-journal"):
                (folder / f"{DATABASE}{end}").unlink(missing_ok=True)
            config.unlink(missing_ok=True)
            folder.rmdir()
        raise unusable(database, error) from None
    return connection


def open_database(
    folder: Path, make: bool = False, file: str = DATABASE, schema: str = SCHEMA
) -> sqlite3.Connection:
    """Open a database for writing; the writer of a run's metrics must `claim` it, too.

    With `make`, a missing database is created with the tables of `schema`.
    """
    database = folder / file
    if not make:
        check_run_folder(folder, DATABASE)
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(database)
        if make and _version(connection) == 0:
            fill(connection, schema)
        check_schema(connection, database)
    except (sqlite3.DatabaseError, RagenError) as error:
        if connection is not None:
            close_database(connection)
        raise error if isinstance(error, RagenError) else unusable(database, error) from None
    return connection


def close_database(connection: sqlite3.Connection) -> None:
    """Close a database; it is a single file afterwards, unless other processes have it open."""
    # A reader keeps the log alive and cannot merge it into the database, so the writer waits for
    # readers. Other writers may stay open for long; the last one to close merges the log.
    with contextlib.suppress(sqlite3.DatabaseError):
        _journal(connection, "DELETE", READERS_S)
    connection.close()


def connect(database: Path) -> sqlite3.Connection:
    """A connection for writing, in WAL mode where that is possible, with explicit transactions."""
    # One thread makes the connection, and another one may use it (in a notebook, or the recorder's
    # writer), but never both at once.
    make = partial(
        sqlite3.connect, database, isolation_level=None, timeout=WRITERS_S, check_same_thread=False
    )
    connection = make()
    try:
        try:
            _journal(connection, "WAL", WRITERS_S)
            _version(connection)  # the first read needs the shared memory
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in UNSHARED:
                raise
            connection.close()
            connection = make()
            # A connection with the database for itself needs no shared memory to leave WAL.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            _journal(connection, "DELETE", WRITERS_S)
            database.with_name(f"{database.name}-shm").unlink(missing_ok=True)
            connection.execute("PRAGMA locking_mode = NORMAL")
            _version(connection)  # the next use of the database gives up the lock
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _journal(connection: sqlite3.Connection, mode: str, seconds: float) -> None:
    """Set the journal mode, waiting up to `seconds`, since SQLite's own time-out does not apply."""
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
    """A read-only connection, which can be opened while a run writes the database.

    It leaves no files. The header of a database that nobody writes may still announce a log, as in
    a copy of a run in progress; SQLite would create the log's files only to find it empty.
    """
    if database.with_name(f"{database.name}-journal").exists():
        # The writer was killed in a write, which only a connection that may write can undo.
        with (
            contextlib.suppress(sqlite3.OperationalError),
            contextlib.closing(sqlite3.connect(database, timeout=WRITERS_S)) as writing,
        ):
            _version(writing)  # the first read does it
    announces_log = False
    with contextlib.suppress(OSError), database.open("rb") as file:
        announces_log = file.read(20)[18:] == b"\x02\x02"  # by SQLite's file format
    log = database.with_name(f"{database.name}-wal")
    how = "immutable=1" if announces_log and not log.exists() else "mode=ro"
    return sqlite3.connect(f"{database.absolute().as_uri()}?{how}", uri=True)


def read(folder: Path, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """The rows of a query on a run's database."""
    with reading_database(folder) as connection:
        return connection.execute(query, parameters).fetchall()


@contextlib.contextmanager
def reading_database(folder: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to a run's database."""
    check_run_folder(folder, DATABASE)
    database = folder / DATABASE
    try:
        with contextlib.closing(connect_to_read(database)) as connection:
            check_schema(connection, database)
            yield connection
    except sqlite3.DatabaseError as error:
        raise unusable(database, error) from None


def check_schema(connection: sqlite3.Connection, database: Path | str) -> None:
    """Check that a database has the present schema; `database` is its name in the message."""
    version = _version(connection)
    if version != SCHEMA_VERSION:
        raise RagenError(
            f"{database} has schema {version}, this RAGEN reads {SCHEMA_VERSION}; "
            "use the version that wrote it"
        )


def fill(connection: sqlite3.Connection, schema: str = SCHEMA) -> None:
    """Create the tables, unless another process has just created them."""
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
    """A transaction: everything that the body writes is committed, or nothing."""
    try:
        with connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            yield
    except sqlite3.DatabaseError as error:
        if type(error) not in (sqlite3.OperationalError, sqlite3.DatabaseError):
            raise  # a wrong statement: a bug
        raise unusable(folder / file, error) from None


def claim(folder: Path) -> int | None:
    """Lock a run against other writers until the returned handle is closed or the process ends."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + CLAIM_S
    while not _lock(handle, fcntl.LOCK_EX):
        if time.monotonic() > end:
            os.close(handle)
            raise RagenError(
                f"{folder} is being written by another process; stop that run first, or let it end"
            )
        time.sleep(0.005)
    return handle


def is_claimed(folder: Path) -> bool:
    """True if a process is writing this run.

    The test takes a shared lock, so that two tests at once do not take each other for a writer.
    """
    if fcntl is None:
        return (folder / f"{DATABASE}-wal").exists()
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _lock(handle: int, kind: int) -> bool:
    """Try to lock a folder; a file system without locks refuses nobody."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def free_run(folder: Path) -> str:
    """The remedy if a run's folder cannot be written."""
    run = shlex.quote(str(folder))
    return (
        f"free space there or make {run} writable, or work in a copy on a local disk "
        f"(cp -r {run} COPY; chmod -R u+w COPY)"
    )


def check_run_folder(folder: Path, file: str = CONFIG) -> None:
    """Check that a folder holds a run, by its config or its database."""
    if (folder / file).is_file():
        return
    if file == CONFIG and (folder / DATABASE).is_file() and (folder / CHECKPOINTS).is_dir():
        raise RagenError(
            f"{folder / CONFIG} is missing or no file; to restore it: {restoring_config(folder)}"
        )
    if file == DATABASE and (folder / CHECKPOINTS).is_dir():
        raise RagenError(f"{folder / DATABASE} is missing or no file; {_without_database(folder)}")
    raise RagenError(
        f"{folder} is not a run folder: {file} is missing; name a folder such as runs/bandit-1"
    )


def restoring_config(folder: Path) -> str:
    """The command that writes a run's `config.toml` again from the copy in its database."""
    database, config = (shlex.quote(str(folder / name)) for name in (DATABASE, CONFIG))
    query = "SELECT text FROM settings ORDER BY id DESC LIMIT 1"
    return f'sqlite3 {database} "{query}" > {config}'


def unusable(database: Path, error: sqlite3.Error | OSError) -> RagenError:
    """The error for a database that the system refuses to read or write, or that is damaged."""
    folder, code = database.parent, getattr(error, "sqlite_errorcode", 0)
    has_run = (folder / CHECKPOINTS).is_dir()
    if isinstance(error, OSError | sqlite3.OperationalError) and code not in UNREAD:
        remedy = free_run(folder) if has_run else OTHER_OUT
        if database.name == DATABASE and _can_go_on(folder):
            remedy += f"; then continue with: ragen resume {shlex.quote(str(folder))}"
        return cannot("use", database, error, remedy)
    remedy = ""
    if database.name == DATABASE and has_run:
        remedy = f"; {_without_database(folder)}"
    elif database.name != DATABASE:  # of branches or of a judge's answers
        remedy = "; restore it, or move it away: the run goes on without it"
    return RagenError(f"{database} cannot be read: {error}{remedy}")


def _without_database(folder: Path) -> str:
    """The remedy if a run's database is lost."""
    run = shlex.quote(str(folder))
    return f"restore it, or train the run's policy further: ragen train RECIPE --model {run}"


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)
