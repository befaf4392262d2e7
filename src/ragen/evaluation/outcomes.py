"""What came of each episode of an evaluation, and where that is kept.

Outcomes are written as episodes end, under a key of all that they follow from. So an evaluation
that was killed goes on where it stopped, and one that was finished is read instead of played again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ragen.core.errors import RagenError
from ragen.core.types import Episode, StopReason, Turn, Usage
from ragen.storage.database import DATABASE, cannot_write, close_database, open_database
from ragen.storage.rows import storable


def how_sampled(temperature: float) -> str:
    """How tokens were chosen: ``greedy``, or by sampling at a temperature.

    Example:
        >>> how_sampled(0.0), how_sampled(0.7)
        ('greedy', 'T=0.7')
    """
    return "greedy" if temperature == 0 else f"T={temperature:g}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One episode of an evaluation, in numbers.

    `sample` counts the episodes of a level. Tokens are summed over the turns, those of a server as
    it counted them; `thought_words` are the thoughts' words, which every target has alike.
    `valid_turns` had a valid reply, `effective_actions` changed the environment. `error` is the
    traceback
    of an environment, or the last complaint of a server, that failed: such an episode is no
    success.

    Example:
        >>> lost = Outcome("bandit", 123, 0, False, 0.0, 1, 1, 1, 1, 7, 90, 12, "failed")
        >>> lost.failed, lost.total_reward
        (False, 0.0)
    """

    env: str
    level_seed: int
    sample: int
    success: bool
    total_reward: float
    num_turns: int
    num_actions: int
    effective_actions: int
    valid_turns: int
    thought_words: int
    prompt_tokens: int
    completion_tokens: int
    stop_reason: StopReason
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the environment or the server failed, which says little about the agent."""
        return self.error is not None

    @property
    def reason(self) -> str:
        """The last line of its error: what went wrong, without where."""
        return (self.error or "").strip().rpartition("\n")[2]


def usage_of(turn: Turn) -> Usage:
    """Tokens of a turn: a server's count, or that of the ids that are here (none of a player's)."""
    counted = turn.completion.usage
    ids = turn.prompt.token_ids or (), turn.completion.token_ids or ()
    return counted or Usage(*map(len, ids))


def outcome_of(episode: Episode) -> Outcome:
    """What came of an episode; its member is the sample."""
    turns = episode.turns
    return Outcome(
        env=episode.env,
        level_seed=episode.level_seed,
        sample=episode.member,
        success=episode.success,
        total_reward=episode.total_reward,
        num_turns=len(turns),
        num_actions=sum(len(turn.actions_executed) for turn in turns),
        effective_actions=sum(int(turn.info.get("effective", 0)) for turn in turns),
        valid_turns=sum(turn.well_formed for turn in turns),
        thought_words=sum(len((turn.thought or "").split()) for turn in turns),
        prompt_tokens=sum(usage_of(turn).prompt_tokens for turn in turns),
        completion_tokens=sum(usage_of(turn).completion_tokens for turn in turns),
        stop_reason=episode.stop_reason,
        error=episode.error,
    )


class Store:
    """The outcomes in a folder's database: a run's own, or one that holds nothing else.

    Several processes may write at once, also beside the run itself. A database that it made, and in
    which no episode was played, is gone again when it is closed: what a mistake leaves is nothing.

    Example:
        >>> import tempfile
        >>> lost = Outcome("bandit", 123, 0, False, 0.0, 1, 1, 1, 1, 7, 90, 12, "failed")
        >>> with Store(Path(tempfile.mkdtemp())) as store:
        ...     store.add("a", lost)
        ...     store.outcomes("a") == [lost], store.outcomes("b")
        (True, [])
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder's database, or make one.

        Raises:
            RagenError: It is damaged, of another version, or cannot be written.
        """
        self.folder = folder
        self._made = not (folder / DATABASE).exists()
        self._made_folder = not folder.exists()
        try:
            self._connection = open_database(folder, make=True)
        except RagenError as error:
            raise RagenError(f"{error}; or keep the results elsewhere with --out DIR") from None
        # A process that dies loses nothing by this, and a machine that does loses some episodes.
        self._connection.execute("PRAGMA synchronous = NORMAL")

    def outcomes(self, key: str) -> list[Outcome]:
        """What is known under a key, in the order of (level, sample).

        Raises:
            RagenError: The database cannot be read.
        """
        names = ", ".join(field.name for field in fields(Outcome))
        query = f"SELECT {names} FROM outcomes WHERE key = ? ORDER BY level_seed, sample"
        with self._errors():
            rows = self._connection.execute(query, (key,)).fetchall()
        found = (dict(zip(names.split(", "), row, strict=True)) for row in rows)
        return [Outcome(**{**each, "success": bool(each["success"])}) for each in found]

    def add(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome, in the place of one of the same level and sample.

        Raises:
            RagenError: The database cannot be written.
        """
        error = None if outcome.error is None else storable(outcome.error)
        row = (key, *astuple(replace(outcome, error=error)))
        names = ", ".join(("key", *(field.name for field in fields(Outcome))))
        with self._errors():
            self._connection.execute(
                f"INSERT OR REPLACE INTO outcomes ({names}) VALUES ({','.join('?' * len(row))})",
                row,
            )

    def finish(self, key: str, settings: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Keep a whole evaluation's result, beside those of the run itself.

        Raises:
            RagenError: The database cannot be written.
        """
        columns = ("env", "temperature", "episodes", "success")
        names = ", ".join(("time", *columns, "record", "key", "settings"))
        shown = (record[name] for name in columns)
        row = (time.time(), *shown, json.dumps(record), key, json.dumps(settings, default=repr))
        with self._errors():
            self._connection.execute(
                f"INSERT INTO evaluations ({names}) VALUES (?,?,?,?,?,?,?,?)", row
            )

    def holds(self, key: str, episodes: int, samples: int) -> bool:
        """Whether the result of so many levels and samples was kept under a key.

        Raises:
            RagenError: The database cannot be read.
        """
        query = "SELECT record FROM evaluations WHERE key = ? AND episodes = ?"
        with self._errors():
            rows = self._connection.execute(query, (key, episodes)).fetchall()
        return any(json.loads(record).get("samples", 1) == samples for (record,) in rows)

    def close(self) -> None:
        """Leave one plain file, unless others are still at it."""
        played = "SELECT EXISTS (SELECT 1 FROM outcomes WHERE error IS NULL AND num_turns > 0)"
        useless = self._made and self._connection.execute(played).fetchone() == (0,)
        close_database(self._connection)
        # Another process that is at it keeps the write-ahead log, and needs the file.
        if useless and not (self.folder / f"{DATABASE}-wal").exists():
            (self.folder / DATABASE).unlink(missing_ok=True)
            if self._made_folder and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise cannot_write(self.folder, error) from None


def key_of(settings: Mapping[str, Any]) -> str:
    """The key under which outcomes of these settings are kept.

    Example:
        >>> key_of({"seed": 0, "env": "bandit"}) == key_of({"env": "bandit", "seed": 0})
        True
    """
    text = json.dumps(settings, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
