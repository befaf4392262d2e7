"""Writing a run's database.

The rows of a step are collected in memory and written in one transaction, so a database never holds
half a step, even if the run is killed or the disk is full. A thread makes and writes them while the
next step is played: the episodes and arrays that it is given must not change.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ragen.core.metrics import Metric, merge
from ragen.core.types import Episode, Group
from ragen.storage.database import (
    DATABASE,
    claim,
    close_database,
    create_database,
    open_database,
    transaction,
    unusable,
)
from ragen.storage.schema import ARRAYS, SAMPLE_ARRAYS, Row, as_json, compress, insert, storable
from ragen.storage.stored_episodes import (
    delete_episodes,
    episode_rows,
    write_episodes,
    write_tokens,
)


class Recorder:
    """Writes one run's database.

    Rows belong to `attempt`, which the guard increases when it rolls back. Rows of a step are
    collected until `commit`, until the first row of another step, or until `close`; `discard` drops
    them. With `commit_later`, at most one step is being written while the next one is collected.
    Only events are written at once, after what was committed, and they are never deleted.

    `text_of` is the text of one token, for readers without a tokenizer; ``None`` writes none.
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
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            self._claim = claim(folder)
            if self._claim is not None:
                stack.callback(os.close, self._claim)
            try:
                rows = connection.execute("SELECT id FROM tokens").fetchall()
            except sqlite3.DatabaseError as error:
                raise unusable(folder / DATABASE, error) from None
            stack.pop_all()
        self._known_tokens = {token for (token,) in rows}
        self._pending = _Step(attempt, 0)
        self._writer = ThreadPoolExecutor(1, "recorder")
        self._written: Future[None] | None = None

    @classmethod
    def create(
        cls, folder: Path, config_text: str, text_of: Callable[[int], str] | None = None
    ) -> Self:
        """Start a run in `folder` (from `new_run_folder`) with its config and an empty database."""
        return cls(folder, create_database(folder, config_text), text_of=text_of)

    @classmethod
    def open(
        cls, folder: Path, attempt: int = 0, text_of: Callable[[int], str] | None = None
    ) -> Self:
        """Continue to write the run in `folder`."""
        return cls(folder, open_database(folder), attempt, text_of)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record metrics of a step; metrics of the same name are combined by their rule."""
        self._step(step).metrics.append(metrics)

    def event(
        self,
        step: int,
        kind: str,
        text: str,
        data: Mapping[str, Any] | None = None,
        once: bool = False,
    ) -> None:
        """Write an event at once: an alarm, an action of the guard, a resume.

        With `once`, an event that is recorded already is not repeated, as by a resumed run.
        """
        where = "(attempt, step, kind, text) = (?, ?, ?, ?)"
        with self._transaction():
            if (
                once
                and self._connection.execute(
                    f"SELECT 1 FROM events WHERE {where}", (self.attempt, step, kind, text)
                ).fetchone()
            ):
                return
            insert(self._connection, "events", [_event(self.attempt, step, kind, text, data)])

    def keep_settings(self, text: str) -> None:
        """Store a new text of `config.toml`, which is valid from now on."""
        with self._transaction():
            self._connection.execute("INSERT INTO settings (text) VALUES (?)", (text,))

    def episodes(
        self,
        step: int,
        groups: Sequence[Group],
        kept: Sequence[bool] | None = None,
        phase: str = "train",
        scores: Sequence[float | None] | None = None,
        timed: bool = False,
    ) -> None:
        """Record episodes of a step with their turns.

        For each group, `kept` is whether the filter kept it (``None``: all were), and `scores` its
        score, if there is one. The phase is ``train``, ``eval`` or ``eval greedy``. With `timed`
        the seconds of completions are recorded too; a run leaves them out, so that its rows repeat.
        """
        flags = [True] * len(groups) if kept is None else kept
        scores = [None] * len(groups) if scores is None else scores
        for group, keep, score in zip(groups, flags, scores, strict=True):
            self._step(step).episodes += [
                (each, phase, keep, score, timed) for each in group.episodes
            ]

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record training samples: their ``group`` and ``member``, and any of `SAMPLE_ARRAYS`."""
        for sample in samples:
            assert sample.keys() <= {"group", "member", *SAMPLE_ARRAYS}
            length = len(sample["token_ids"])
            row = {name: sample[name] for name in ("group", "member")} | {"num_tokens": length}
            for name in SAMPLE_ARRAYS:
                array = sample.get(name)
                assert array is None or np.shape(array) == (length,), f"one {name} a token"
                row[name] = array
            self._step(step).rows["samples"].append(row)

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

        `path` is the path of the metrics: ``first`` or ``any``. `scores` are log p(thought i |
        prompt j), (N, M), and `own` the index of each thought's own prompt, (N,). `prompts` are the
        observations in the last messages of the M prompts.
        """
        assert np.shape(scores) == (len(thoughts), len(prompts)), "a score for each pair"
        row = {
            "path": path,
            "scores": scores,
            "own": own,
            "num_thoughts": len(thoughts),
            "num_prompts": len(prompts),
            "thoughts": thoughts,
            "prompts": prompts,
        }
        self._step(step).rows["cross_scores"].append(row)

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Record an evaluation, as ``ragen eval --json`` prints it."""
        row = {"time": time.time(), "record": record}
        self._step(step).rows["evaluations"].append(row)

    def outcome(self, row: Row) -> None:
        """Store an outcome of ``ragen eval``; it replaces one of the same level and sample."""
        row = {k: storable(v) if isinstance(v, str) else v for k, v in row.items()}
        with self._transaction():
            insert(self._connection, "outcomes", [row], "INSERT OR REPLACE")

    def commit(self) -> None:
        """Write the collected step in one transaction, before any checkpoint of this step."""
        self.commit_later()
        self._drain()

    def commit_later(self) -> None:
        """Commit in the writer's thread, once it has written the step before this one."""
        pending = self._pending
        self.discard()
        self._drain()
        if not pending.is_empty:
            self._written = self._writer.submit(self._write, pending)

    def _drain(self) -> None:
        """Wait for the writer, whose errors are raised here."""
        failure = self._written and self._written.exception()
        self._written = None
        if failure:
            raise failure

    def _transaction(self) -> contextlib.AbstractContextManager[None]:
        self._drain()
        return transaction(self._connection, self.folder)

    def _write(self, step: _Step) -> None:
        when = {"attempt": step.attempt, "step": step.step}
        # SQLite has no NaN and stores it as NULL.
        metrics = [
            {**when, "name": name, "value": metric.value}
            for name, metric in merge(step.metrics).items()
        ]
        episodes = [episode_rows(*each) for each in step.episodes]
        tables = {name: [when | _encoded(row) for row in rows] for name, rows in step.rows.items()}
        ids = [each.token_ids for each in episodes]
        rows = step.rows["samples"]
        ids += [frozenset(int(each) for each in row["token_ids"] if each >= 0) for row in rows]
        new = frozenset().union(*ids) - self._known_tokens
        with transaction(self._connection, self.folder):
            insert(self._connection, "metrics", metrics, "INSERT OR REPLACE")
            write_episodes(self._connection, step.attempt, step.step, episodes)
            for name, rows in tables.items():
                insert(self._connection, name, rows)
            if self._text_of is not None:
                write_tokens(self._connection, new, self._text_of)
        self._known_tokens |= new

    def discard(self) -> None:
        """Drop the rows since the last commit: an unfinished step."""
        self._pending = _Step(self.attempt, self._pending.step)

    def forget_after(self, attempt: int, step: int) -> None:
        """Delete the rows of `attempt` after `step` and of later attempts; events stay."""
        self.discard()
        later = "(attempt, step) > (?, ?)"
        with self._transaction():
            delete_episodes(self._connection, later, (attempt, step))
            for table in ("metrics", "samples", "cross_scores", "evaluations"):
                self._connection.execute(f"DELETE FROM {table} WHERE {later}", (attempt, step))

    def forget_episode(self, level_seed: int, member: int) -> None:
        """Delete the evaluated episodes of a level and member."""
        where = "phase = 'eval' AND level_seed = ? AND member = ?"
        with self._transaction():
            delete_episodes(self._connection, where, (level_seed, member))

    def close(self) -> None:
        """Write the collected rows and close the database."""
        try:
            self.commit()
        finally:
            self._writer.shutdown()
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
            if not self._pending.is_empty:
                self.commit()
            self._pending = _Step(self.attempt, step)
        return self._pending


class _Step:
    """The collected rows of a step."""

    def __init__(self, attempt: int, step: int) -> None:
        self.attempt = attempt
        self.step = step
        self.metrics: list[Mapping[str, Metric]] = []
        self.episodes: list[tuple[Episode, str, bool, float | None, bool]] = []
        self.rows: dict[str, list[Row]] = {"samples": [], "cross_scores": [], "evaluations": []}

    @property
    def is_empty(self) -> bool:
        return not any((self.metrics, self.episodes, *self.rows.values()))


def _encoded(row: Row) -> Row:
    """A row whose arrays, lists and objects are as SQLite stores them."""
    return {
        name: compress(name, value)
        if name in ARRAYS and value is not None
        else as_json(value)
        if isinstance(value, Mapping | Sequence) and not isinstance(value, str)
        else value
        for name, value in row.items()
    }


def append_event(
    folder: Path, attempt: int, step: int, kind: str, text: str, data: Mapping[str, Any]
) -> None:
    """Write an event without the run's recorder: for the watchdog, when the run hangs."""
    try:
        with contextlib.closing(sqlite3.connect(folder / DATABASE, timeout=2.0)) as connection:
            insert(connection, "events", [_event(attempt, step, kind, text, data)])
            connection.commit()
    except sqlite3.Error as error:
        raise unusable(folder / DATABASE, error) from None


def _event(attempt: int, step: int, kind: str, text: str, data: Mapping[str, Any] | None) -> Row:
    row = {"attempt": attempt, "step": step, "time": time.time(), "kind": kind, "text": text}
    return row | {"data": None if data is None else as_json(data)}
