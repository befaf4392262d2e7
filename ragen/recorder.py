"""The run folder and its database: everything a run did, in one SQLite file.

``run.sqlite`` is in WAL mode while the run goes on, so that a viewer may read at any time, and a
plain single file once it is closed. A step is gathered in memory and written in one transaction: a
run that is killed, or whose disk is full, leaves whole steps behind and never half of one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ragen.errors import RagenError
from ragen.metrics import Metric, merge
from ragen.types import Episode, Group

SCHEMA_VERSION = 2
"""`PRAGMA user_version` of the database; a reader refuses versions it does not know."""

DATABASE = "run.sqlite"
CONFIG = "config.toml"

SAMPLE_ARRAYS: Mapping[str, str] = MappingProxyType(
    {
        "token_ids": "<i4",
        "loss_mask": "|b1",
        "turn_index": "<i2",
        "sampled_logprobs": "<f4",
        "old_logprobs": "<f4",
        "entropies": "<f4",
        "values": "<f4",
        "advantages": "<f4",
        "returns": "<f4",
        "ratios": "<f4",
    }
)
"""The arrays of a recorded sample and their types. All have the sample's length; a column is
the zlib-compressed little-endian bytes, or NULL where a run has no such array (without a critic no
values)."""

_SCHEMA = f"""
CREATE TABLE metrics (
    attempt INTEGER NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
    PRIMARY KEY (attempt, step, name)
) WITHOUT ROWID;
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL, phase TEXT NOT NULL,
    "group" INTEGER NOT NULL, member INTEGER NOT NULL, kept INTEGER NOT NULL,
    world TEXT NOT NULL, level_seed INTEGER NOT NULL, noise_seed INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, terminated INTEGER NOT NULL, truncated INTEGER NOT NULL,
    bootstrap INTEGER NOT NULL, success INTEGER NOT NULL,
    reward REAL NOT NULL, penalty REAL NOT NULL, num_turns INTEGER NOT NULL, error TEXT
);
CREATE INDEX episodes_by_step ON episodes (attempt, step);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, episode_id INTEGER NOT NULL, turn INTEGER NOT NULL,
    observation TEXT NOT NULL, reply TEXT NOT NULL, thought TEXT,
    actions_asked TEXT NOT NULL, actions_executed TEXT NOT NULL,
    reward REAL NOT NULL, penalty REAL NOT NULL, well_formed INTEGER NOT NULL,
    num_tokens INTEGER, finish_reason TEXT NOT NULL, policy_version INTEGER NOT NULL,
    state_key TEXT NOT NULL, snapshot TEXT
);
CREATE INDEX turns_by_episode ON turns (episode_id);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
    "group" INTEGER NOT NULL, member INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    {", ".join(f'"{name}" BLOB' for name in SAMPLE_ARRAYS)}
);
CREATE INDEX samples_by_step ON samples (attempt, step);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
    time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT
);
CREATE TRIGGER events_are_kept BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END;
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, attempt INTEGER, step INTEGER, time REAL NOT NULL,
    world TEXT, temperature REAL, episodes INTEGER, success REAL, record TEXT NOT NULL,
    key TEXT, settings TEXT
);
CREATE TABLE outcomes (
    key TEXT NOT NULL, world TEXT NOT NULL, level_seed INTEGER NOT NULL, sample INTEGER NOT NULL,
    success INTEGER NOT NULL, total_reward REAL NOT NULL, num_turns INTEGER NOT NULL,
    num_actions INTEGER NOT NULL, effective_actions INTEGER NOT NULL,
    valid_turns INTEGER NOT NULL, thought_words INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, error TEXT,
    PRIMARY KEY (key, level_seed, sample)
) WITHOUT ROWID;
CREATE VIRTUAL TABLE thoughts_fts USING fts5 (thought, content='turns', content_rowid='id');
PRAGMA user_version = {SCHEMA_VERSION};
"""


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
            f"cannot make the run folder {error.filename}: {_reason(error)}; "
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


class Recorder:
    """Writes one run's database.

    What is logged belongs to `attempt`, which the guard raises when it rolls back. Rows of a step
    are gathered until `commit`, until the first row of another step, or until `close`; `discard`
    drops them. Events alone are written at once and stay.

    Example:
        >>> import tempfile
        >>> from ragen.metrics import mean
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Recorder.create(folder, "seed = 0") as recorder:
        ...     recorder.log(0, {"loss": mean(1.0, 2)})
        ...     recorder.log(0, {"loss": mean(4.0, 1)})
        >>> sqlite3.connect(folder / "run.sqlite").execute("SELECT * FROM metrics").fetchall()
        [(0, 0, 'loss', 2.0)]
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection, attempt: int = 0) -> None:
        self.folder = folder
        self.attempt = attempt
        self._connection = connection
        try:
            self._claim = _claim(folder)
        except RagenError:
            connection.close()
            raise
        self._pending = _Step(attempt, 0)

    @classmethod
    def create(cls, folder: Path, config_text: str) -> Self:
        """Begin a run in `folder` (made by `new_run_folder`): its config and an empty database.

        Raises:
            RagenError: A run is there already, or the folder cannot be written; nothing is left.
        """
        database, config = folder / DATABASE, folder / CONFIG
        if database.exists() or config.exists():
            raise RagenError(f"{folder} holds a run already; a run is never overwritten")
        connection: sqlite3.Connection | None = None
        try:
            connection = _connect(database)
            _fill(connection)
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
        return cls(folder, connection)

    @classmethod
    def open(cls, folder: Path, attempt: int | None = None) -> Self:
        """Go on writing the run in `folder`, by default in its latest attempt.

        Raises:
            RagenError: There is no run, its database is damaged or of another version, or another
                process writes it.
        """
        connection = open_database(folder)
        try:
            ((latest,),) = _read(folder, "SELECT max(attempt) FROM metrics")
        except RagenError:
            connection.close()
            raise
        return cls(folder, connection, (latest or 0) if attempt is None else attempt)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Metrics of a step; those of the same name are combined by their own rule."""
        self._step(step).metrics.append(metrics)

    def event(self, step: int, kind: str, text: str, data: Mapping[str, Any] | None = None) -> None:
        """Something worth a sentence, written at once: an alarm, a guard's action, a resume.

        Raises:
            RagenError: The database cannot be written.
        """
        row = (self.attempt, step, time.time(), kind, text, None if data is None else _json(data))
        with self._transaction():
            _insert_event(self._connection, row)

    def episodes(
        self,
        step: int,
        groups: Sequence[Group],
        kept: Sequence[bool] | None = None,
        phase: str = "train",
    ) -> None:
        """All episodes of a step with their turns.

        Args:
            step: The step they were collected in.
            groups: The groups; their episodes carry group and member.
            kept: For each group, whether the filter kept it; None means all.
            phase: ``train``, ``eval`` or ``eval greedy``.
        """
        flags = [True] * len(groups) if kept is None else kept
        for group, keep in zip(groups, flags, strict=True):
            for episode in group.episodes:
                self._step(step).episodes.append(
                    (_episode_row(episode, keep, phase), _turn_rows(episode))
                )

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Token sequences with what the learner made of them.

        Args:
            step: The step they were trained in.
            samples: For each sample its ``group`` and ``member`` and any of `SAMPLE_ARRAYS`.

        Raises:
            ValueError: An array has an unknown name or not the sample's length.
        """
        for sample in samples:
            unknown = sample.keys() - SAMPLE_ARRAYS.keys() - {"group", "member"}
            if unknown:
                raise ValueError(f"unknown sample arrays: {', '.join(sorted(unknown))}")
            length = len(sample["token_ids"])
            row: list[Any] = [sample["group"], sample["member"], length]
            for name in SAMPLE_ARRAYS:
                array = sample.get(name)
                if array is not None and np.shape(array) != (length,):
                    raise ValueError(f"{name} has shape {np.shape(array)}, not ({length},)")
                row.append(None if array is None else compress(name, array))
            self._step(step).samples.append(tuple(row))

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """The result of an evaluation: what ``ragen eval --json`` prints."""
        columns = (record.get(name) for name in ("world", "temperature", "episodes", "success"))
        self._step(step).evaluations.append((time.time(), *columns, _json(record)))

    def commit(self) -> None:
        """Write the gathered step in one transaction; a checkpoint belongs after this, not before.

        Raises:
            RagenError: The disk is full or read-only; nothing of the step is written.
        """
        pending, self._pending = self._pending, _Step(self.attempt, self._pending.step)
        if not pending.empty:
            with self._transaction():
                pending.write(self._connection)

    def discard(self) -> None:
        """Drop what was gathered since the last commit: a step that was not finished."""
        self._pending = _Step(self.attempt, self._pending.step)

    def forget_after(self, attempt: int, step: int) -> None:
        """Delete what a killed run did after its checkpoint: the attempt's rows later than `step`.

        Rows of later attempts go too: they began after it.

        Raises:
            RagenError: The database cannot be written; nothing is deleted.
        """
        self.discard()
        later = "(attempt, step) > (?, ?)"
        of_later = f"SELECT id FROM episodes WHERE {later}"
        with self._transaction():
            for statement in (
                # The index keeps no copy of the text: it must be told what it is to forget.
                "INSERT INTO thoughts_fts (thoughts_fts, rowid, thought)"
                " SELECT 'delete', id, thought FROM turns"
                f" WHERE thought IS NOT NULL AND episode_id IN ({of_later})",
                f"DELETE FROM turns WHERE episode_id IN ({of_later})",
                *(
                    f"DELETE FROM {table} WHERE {later}"
                    for table in ("episodes", "metrics", "samples", "evaluations")
                ),
            ):
                self._connection.execute(statement, (attempt, step))

    def close(self) -> None:
        """Write what is gathered and leave one plain file.

        Raises:
            RagenError: The last step could not be written.
        """
        try:
            self.commit()
        finally:
            close_database(self._connection)
            if self._claim is not None:
                os.close(self._claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; a step that an exception interrupted is dropped."""
        if kind is not None:
            self.discard()
        self.close()

    def _step(self, step: int) -> _Step:
        if (self.attempt, step) != (self._pending.attempt, self._pending.step):
            self.commit()
            self._pending = _Step(self.attempt, step)
        return self._pending

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise cannot_write(self.folder, error) from None
            raise


class _Step:
    """What is known of a step that is not written yet, as rows."""

    def __init__(self, attempt: int, step: int) -> None:
        self.attempt = attempt
        self.step = step
        self.metrics: list[Mapping[str, Metric]] = []
        self.episodes: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]] = []
        self.samples: list[tuple[Any, ...]] = []
        self.evaluations: list[tuple[Any, ...]] = []

    @property
    def empty(self) -> bool:
        return not (self.metrics or self.episodes or self.samples or self.evaluations)

    def write(self, connection: sqlite3.Connection) -> None:
        when = (self.attempt, self.step)
        connection.executemany(
            "INSERT OR REPLACE INTO metrics VALUES (?,?,?,?)",
            # SQLite has no NaN: a number that is not one is stored as NULL.
            [(*when, name, _number(m.value)) for name, m in merge(self.metrics).items()],
        )
        (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM episodes").fetchone()
        rows = list(enumerate(self.episodes, last + 1))
        _insert(connection, "episodes", [(key, *when, *row) for key, (row, _) in rows])
        turns = [(None, key, *turn) for key, (_, turns) in rows for turn in turns]
        _insert(connection, "turns", turns)
        connection.execute(
            "INSERT INTO thoughts_fts (rowid, thought) SELECT id, thought FROM turns"
            " WHERE episode_id > ? AND thought IS NOT NULL",
            (last,),
        )
        _insert(connection, "samples", [(None, *when, *row) for row in self.samples])
        rows_of_run = [(None, *when, *row, None, None) for row in self.evaluations]
        _insert(connection, "evaluations", rows_of_run)


def compress(name: str, array: npt.ArrayLike) -> bytes:
    """One of a sample's arrays as bytes of the type that `SAMPLE_ARRAYS` states.

    Example:
        >>> decompress("token_ids", compress("token_ids", [3, 10, 11])).tolist()
        [3, 10, 11]
    """
    return zlib.compress(np.ascontiguousarray(array, SAMPLE_ARRAYS[name]).tobytes(), 1)


def decompress(name: str, data: bytes) -> npt.NDArray[Any]:
    """The array that `compress` stored."""
    return np.frombuffer(zlib.decompress(data), SAMPLE_ARRAYS[name])


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """A run's own evaluation records in order, each with its ``step`` and ``attempt``.

    Those that somebody asked for (``ragen eval``) belong to no step: `ragen.outcomes` keeps them.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    query = "SELECT attempt, step, record FROM evaluations WHERE step IS NOT NULL ORDER BY id"
    rows = _read(folder, query)
    return [{**json.loads(record), "attempt": a, "step": step} for a, step, record in rows]


def read_metrics(
    folder: Path, names: Collection[str] | None = None, after: tuple[int, int] | None = None
) -> dict[str, dict[int, float]]:
    """A run's metrics: name, then step, to value, in the order of the steps.

    Each attempt replaces what the ones before it did from its first step on.

    Args:
        folder: The run.
        names: The metrics that are wanted; ``None`` means all.
        after: An attempt and a step of it, after which rows are wanted; ``None`` means all.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    first = (-1, 0) if after is None else after
    query, wanted = "SELECT attempt, step, name, value FROM metrics", tuple(names or ())
    query += " WHERE (attempt, step) > (?, ?)"
    if names is not None:
        query += f" AND name IN ({','.join('?' * len(wanted))})"
    found: dict[str, dict[int, float]] = {}
    stands = standing(folder, after)
    rows = _read(folder, f"{query} ORDER BY attempt, step", (*first, *wanted))
    for attempt, step, name, value in rows:
        if value is not None and stands(attempt, step):
            found.setdefault(name, {})[step] = value
    return found


def standing(folder: Path, after: tuple[int, int] | None = None) -> Callable[[int, int], bool]:
    """Whether what an attempt did at a step still counts: no later attempt began at or before it.

    Args:
        folder: The run.
        after: A step of the last attempt: then whether it counts and came later.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    if after is not None:
        return lambda attempt, step: (attempt, step) > after
    first = dict(_read(folder, "SELECT attempt, min(step) FROM metrics GROUP BY attempt"))
    return lambda attempt, step: all(step < first[later] for later in first if later > attempt)


def read_events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """A run's events in order: ``attempt``, ``step``, ``time``, ``kind``, ``text`` and ``data``.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    columns = ("attempt", "step", "time", "kind", "text", "data")
    rows = _read(folder, f"SELECT {', '.join(columns)} FROM events ORDER BY id")
    events = [dict(zip(columns, row, strict=True)) for row in rows]
    return [
        {**event, "data": event["data"] and json.loads(event["data"])}
        for event in events
        if kind in (None, event["kind"])
    ]


def read_attempts(folder: Path) -> dict[int, dict[str, dict[int, float]]]:
    """A run's metrics with what it rolled back: attempt, then name, then step, to value.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    found: dict[int, dict[str, dict[int, float]]] = {}
    for attempt, step, name, value in _read(
        folder, "SELECT attempt, step, name, value FROM metrics ORDER BY attempt, step"
    ):
        if value is not None:
            found.setdefault(attempt, {}).setdefault(name, {})[step] = value
    return found


def append_event(
    folder: Path, attempt: int, step: int, kind: str, text: str, data: Mapping[str, Any]
) -> None:
    """An event written past the run's recorder: by the watchdog, when the run itself hangs.

    Raises:
        RagenError: The database cannot be written, or the run hangs while it writes there.
    """
    try:
        with contextlib.closing(sqlite3.connect(folder / DATABASE, timeout=2.0)) as connection:
            _insert_event(connection, (attempt, step, time.time(), kind, text, _json(data)))
            connection.commit()
    except sqlite3.Error as error:
        raise cannot_write(folder, error) from None


def _insert_event(connection: sqlite3.Connection, row: tuple[Any, ...]) -> None:
    connection.execute(
        "INSERT INTO events (attempt, step, time, kind, text, data) VALUES (?,?,?,?,?,?)", row
    )


def _must_exist(folder: Path) -> None:
    if not (folder / DATABASE).is_file():
        raise RagenError(f"{folder} is no run folder ({DATABASE} is missing)")


def _read(folder: Path, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    _must_exist(folder)
    try:
        with contextlib.closing(sqlite3.connect(folder / DATABASE)) as connection:
            return connection.execute(query, parameters).fetchall()
    except sqlite3.DatabaseError as error:
        raise RagenError(f"{folder / DATABASE} cannot be read: {error}") from None


def _claim(folder: Path) -> int | None:
    """Keep other writers away while this handle is open; a process that dies gives it back.

    Raises:
        RagenError: Another process writes this run.
    """
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RagenError(
            f"{folder} is being written by another process; stop that run first, or let it end"
        ) from None
    except OSError:  # a file system without locks
        pass
    return handle


def open_database(folder: Path, make: bool = False) -> sqlite3.Connection:
    """Open a database to write it; who writes a run's metrics has to claim it, too (`Recorder`).

    Args:
        folder: Where it lies.
        make: Make an empty one where there is none.

    Raises:
        RagenError: There is none, it is damaged, of another version, or cannot be made.
    """
    database = folder / DATABASE
    if not make:
        _must_exist(folder)
    connection: sqlite3.Connection | None = None
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        connection = _connect(database)
        if make and _version(connection) == 0:
            _fill(connection)
        version = _version(connection)
    except (sqlite3.DatabaseError, OSError) as error:
        if connection is not None:
            connection.close()
        raise RagenError(f"{database} cannot be read: {error}") from None
    if version != SCHEMA_VERSION:
        close_database(connection)
        raise RagenError(
            f"{database} has schema {version}, this RAGEN reads {SCHEMA_VERSION}; "
            "use the version that wrote it"
        )
    return connection


def close_database(connection: sqlite3.Connection) -> None:
    """Leave one plain file, unless others are still at it."""
    # A reader that is still looking keeps the WAL alive; the last one to leave removes it.
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _fill(connection: sqlite3.Connection) -> None:
    try:
        connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
    except sqlite3.OperationalError:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if _version(connection) == 0:  # else another process was quicker
            raise


def _connect(database: Path) -> sqlite3.Connection:
    # Made in the caller's thread and used in the loop's (a notebook's run has one), never at once.
    connection = sqlite3.connect(
        database, isolation_level=None, timeout=10.0, check_same_thread=False
    )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _insert(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    if rows:
        marks = ",".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


def _episode_row(episode: Episode, kept: bool, phase: str) -> tuple[Any, ...]:
    return (
        phase,
        episode.group,
        episode.member,
        kept,
        episode.world,
        episode.level_seed,
        episode.noise_seed,
        episode.stop_reason,
        episode.terminated,
        episode.truncated,
        episode.bootstrap,
        episode.success,
        float(episode.total_reward),
        float(sum(turn.penalty for turn in episode.turns)),
        len(episode.turns),
        None if episode.error is None else storable(episode.error),
    )


def _turn_rows(episode: Episode) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for index, turn in enumerate(episode.turns):
        completion = turn.completion
        rows.append(
            (
                index,
                storable(turn.observation),
                storable(completion.text),
                None if turn.thought is None else storable(turn.thought),
                _json(turn.actions_asked),
                _json(turn.actions_executed),
                float(turn.reward),
                float(turn.penalty),
                turn.well_formed,
                None if completion.token_ids is None else len(completion.token_ids),
                completion.finish_reason,
                completion.policy_version,
                storable(turn.state_key),
                None if turn.snapshot is None else _json(turn.snapshot),
            )
        )
    return rows


def _json(value: Any) -> str:
    """ASCII with escapes, so that half a surrogate pair in a world's snapshot comes back whole."""
    return json.dumps(value, separators=(",", ":"))


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def storable(text: str) -> str:
    """The text as UTF-8 can hold it; a world may send half a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cannot_write(folder: Path, error: sqlite3.Error | OSError) -> RagenError:
    """What to tell the user of a database that takes no more."""
    reason = _reason(error) if isinstance(error, OSError) else str(error)
    return RagenError(
        f"cannot write {folder / DATABASE}: {reason}; free space there or choose another place "
        "with --out"
    )


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else str(error)
