"""Writing a run's database.

The rows of a step are collected in memory and written in one transaction, so a database never holds
half a step, even if the run is killed or the disk is full.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ragen.core.errors import RagenError
from ragen.core.metrics import Metric, merge
from ragen.core.types import Group
from ragen.storage.checkpoint import hash_text
from ragen.storage.database import (
    DATABASE,
    cannot_write,
    claim,
    close_database,
    create_database,
    open_database,
    transaction,
)
from ragen.storage.schema import SAMPLE_ARRAYS, SETTINGS, Row, as_json, compress, insert
from ragen.storage.stored_episodes import (
    EpisodeRows,
    delete_episodes,
    episode_rows,
    write_episodes,
    write_tokens,
)


class Recorder:
    """Writes one run's database.

    Rows belong to `attempt`, which the guard increases when it rolls back. Rows of a step are
    collected until `commit`, until the first row of another step, or until `close`; `discard` drops
    them. Only events are written at once, and they are never deleted.

    Args:
        folder: The run's folder.
        connection: Its database, opened for writing.
        attempt: The first attempt.
        text_of: The text of one token, for readers without a tokenizer; ``None`` writes none.

    Attributes:
        settings_hash: Of the text of `config.toml`, for the state of checkpoints.

    Example:
        >>> import tempfile
        >>> from ragen.core.metrics import mean
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Recorder.create(folder, "seed = 0") as recorder:
        ...     recorder.log(0, {"loss": mean(1.0, 2)})
        ...     recorder.log(0, {"loss": mean(4.0, 1)})
        >>> sqlite3.connect(folder / "run.sqlite").execute("SELECT * FROM metrics").fetchall()
        [(0, 0, 'loss', 2.0)]
    """

    def __init__(
        self,
        folder: Path,
        connection: sqlite3.Connection,
        attempt: int = 0,
        text_of: Callable[[int], str] | None = None,
    ) -> None:
        self.folder = folder
        self.attempt = attempt
        self._connection = connection
        self._text_of = text_of
        try:
            self._claim = claim(folder)
        except RagenError:
            connection.close()
            raise
        self.settings_hash = ""
        self._known_tokens = {token for (token,) in connection.execute("SELECT id FROM tokens")}
        self._pending = _Step(attempt, 0)

    @classmethod
    def create(
        cls, folder: Path, config_text: str, text_of: Callable[[int], str] | None = None
    ) -> Self:
        """Start a run in `folder` (from `new_run_folder`) with its config and an empty database.

        Raises:
            RagenError: The folder holds a run, or cannot be written; nothing is left.
        """
        recorder = cls(folder, create_database(folder, config_text), text_of=text_of)
        recorder.settings_hash = hash_text(config_text)
        return recorder

    @classmethod
    def open(
        cls, folder: Path, attempt: int = 0, text_of: Callable[[int], str] | None = None
    ) -> Self:
        """Continue to write the run in `folder`.

        Raises:
            RagenError: There is no run, its database is damaged or has another schema, or another
                process is writing it.
        """
        return cls(folder, open_database(folder), attempt, text_of)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record metrics of a step; those of the same name are combined by their rule."""
        self._step(step).metrics.append(metrics)

    def event(self, step: int, kind: str, text: str, data: Mapping[str, Any] | None = None) -> None:
        """Write an event at once: an alarm, an action of the guard, a resume.

        Raises:
            RagenError: The database cannot be written.
        """
        with transaction(self._connection, self.folder):
            insert(self._connection, "events", [_event(self.attempt, step, kind, text, data)])

    def keep_settings(self, text: str) -> None:
        """Keep a text of `config.toml`, which holds from now on.

        Raises:
            RagenError: The database cannot be written.
        """
        with transaction(self._connection, self.folder):
            self._connection.execute(SETTINGS)
            self._connection.execute("INSERT INTO settings (text) VALUES (?)", (text,))

    def episodes(
        self,
        step: int,
        groups: Sequence[Group],
        kept: Sequence[bool] | None = None,
        phase: str = "train",
        scores: Sequence[float | None] | None = None,
    ) -> None:
        """Record episodes of a step with their turns.

        For each group, `kept` is whether the filter kept it (``None``: all were), and `scores` its
        score, if there is one. The phase is ``train``, ``eval`` or ``eval greedy``.
        """
        pending = self._step(step)
        flags = [True] * len(groups) if kept is None else kept
        scores = [None] * len(groups) if scores is None else scores
        for group, keep, score in zip(groups, flags, scores, strict=True):
            for episode in group.episodes:
                rows = episode_rows(episode, phase, keep, score)
                pending.episodes.append(rows)
                pending.token_ids |= rows.token_ids

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record training samples: their ``group`` and ``member``, and any of `SAMPLE_ARRAYS`.

        Raises:
            ValueError: An array has an unknown name or another length than the sample.
        """
        for sample in samples:
            unknown = sample.keys() - SAMPLE_ARRAYS.keys() - {"group", "member"}
            if unknown:
                raise ValueError(f"unknown sample arrays: {', '.join(sorted(unknown))}")
            length = len(sample["token_ids"])
            row = {name: sample[name] for name in ("group", "member")} | {"num_tokens": length}
            for name in SAMPLE_ARRAYS:
                array = sample.get(name)
                if array is not None and np.shape(array) != (length,):
                    raise ValueError(f"{name} has shape {np.shape(array)}, not ({length},)")
                row[name] = None if array is None else compress(name, array)
            pending = self._step(step)
            pending.rows["samples"].append(row)
            pending.token_ids.update(map(int, sample["token_ids"]))

    def cross_scores(
        self,
        step: int,
        path: str,
        scores: npt.ArrayLike,
        own: Sequence[int],
        thoughts: Sequence[str],
        prompts: Sequence[str],
    ) -> None:
        """Record log-probabilities of thoughts, from which metrics of information are computed.

        Args:
            step: The step.
            path: The metrics' path: ``first`` or ``any``.
            scores: log p(thought i | prompt j), (N, M).
            own: The index of each thought's own prompt, (N,).
            thoughts: The N thoughts as text.
            prompts: The observations in the last messages of the M prompts.
        """
        assert np.shape(scores) == (len(thoughts), len(prompts)), "a score for each pair"
        row = {
            "path": path,
            "scores": compress("scores", scores),
            "own": compress("own", own),
            "num_thoughts": len(thoughts),
            "num_prompts": len(prompts),
            "thoughts": as_json(thoughts),
            "prompts": as_json(prompts),
        }
        self._step(step).rows["cross_scores"].append(row)

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Record an evaluation, as ``ragen eval --json`` prints it."""
        row = {name: record.get(name) for name in ("env", "temperature", "episodes", "success")}
        row |= {"time": time.time(), "record": as_json(record)}
        self._step(step).rows["evaluations"].append(row)

    def commit(self) -> None:
        """Write the collected step in one transaction; a checkpoint must follow, not precede it.

        Raises:
            RagenError: The disk is full or read-only; nothing of the step is written.
        """
        pending = self._pending
        self.discard()
        if pending.empty:
            return
        new = pending.token_ids - self._known_tokens
        with transaction(self._connection, self.folder):
            pending.write(self._connection)
            if self._text_of is not None:
                write_tokens(self._connection, new, self._text_of)
        self._known_tokens |= new

    def discard(self) -> None:
        """Drop the rows since the last commit: an unfinished step."""
        self._pending = _Step(self.attempt, self._pending.step)

    def forget_after(self, attempt: int, step: int) -> None:
        """Delete rows later than a checkpoint: those of `attempt` after `step`.

        Rows of later attempts are deleted, too. Events stay.

        Raises:
            RagenError: The database cannot be written; nothing is deleted.
        """
        self.discard()
        later = "(attempt, step) > (?, ?)"
        with transaction(self._connection, self.folder):
            delete_episodes(self._connection, later, (attempt, step))
            for table in ("metrics", "samples", "cross_scores", "evaluations"):
                self._connection.execute(f"DELETE FROM {table} WHERE {later}", (attempt, step))

    def close(self) -> None:
        """Write the collected rows and close the database.

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; if an exception is raised, the unfinished step is dropped."""
        if kind is not None:
            self.discard()
        self.close()

    def _step(self, step: int) -> _Step:
        if (self.attempt, step) != (self._pending.attempt, self._pending.step):
            self.commit()
            self._pending = _Step(self.attempt, step)
        return self._pending


class _Step:
    """The collected rows of a step."""

    def __init__(self, attempt: int, step: int) -> None:
        self.attempt = attempt
        self.step = step
        self.metrics: list[Mapping[str, Metric]] = []
        self.episodes: list[EpisodeRows] = []
        self.rows: dict[str, list[Row]] = {"samples": [], "cross_scores": [], "evaluations": []}
        self.token_ids: set[int] = set()

    @property
    def empty(self) -> bool:
        return not any((self.metrics, self.episodes, *self.rows.values()))

    def write(self, connection: sqlite3.Connection) -> None:
        when = {"attempt": self.attempt, "step": self.step}
        # SQLite has no NaN and stores it as NULL.
        metrics = [
            {**when, "name": name, "value": metric.value}
            for name, metric in merge(self.metrics).items()
        ]
        insert(connection, "metrics", metrics, "INSERT OR REPLACE")
        write_episodes(connection, self.attempt, self.step, self.episodes)
        for table, rows in self.rows.items():
            insert(connection, table, [when | row for row in rows])


def append_event(
    folder: Path, attempt: int, step: int, kind: str, text: str, data: Mapping[str, Any]
) -> None:
    """Write an event without the run's recorder: for the watchdog, when the run hangs.

    Raises:
        RagenError: The database cannot be written, or the run hangs during a write.
    """
    try:
        with contextlib.closing(sqlite3.connect(folder / DATABASE, timeout=2.0)) as connection:
            insert(connection, "events", [_event(attempt, step, kind, text, data)])
            connection.commit()
    except sqlite3.Error as error:
        raise cannot_write(folder, error) from None


def _event(attempt: int, step: int, kind: str, text: str, data: Mapping[str, Any] | None) -> Row:
    row = {"attempt": attempt, "step": step, "time": time.time(), "kind": kind, "text": text}
    return row | {"data": None if data is None else as_json(data)}
