"""Per-episode outcomes of evaluations and their storage.

Outcomes are written as episodes end, under a key of everything that determines them. So a killed
evaluation resumes where it stopped, and a finished one is read instead of played again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from ragen.config.rules import TEMPERATURES, vllm_refuses
from ragen.core.errors import RagenError, UnplayableError, last_line
from ragen.core.types import Episode, StopReason, Turn, Usage
from ragen.storage.database import DATABASE, cannot_write, close_database, open_database
from ragen.storage.schema import storable


def how_sampled(temperature: float) -> str:
    """How tokens were chosen: ``greedy``, or by sampling at a temperature, such as ``T=0.7``."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def phase_of(temperature: float) -> str:
    """The phase of the episodes that a run's own evaluations record."""
    return "eval" if temperature else "eval greedy"


def check_sampling(seed: int, temperature: float, sampler: str) -> None:
    """Refuse a seed or a temperature with which nothing can be sampled."""
    low, high = TEMPERATURES
    if temperature != 0 and not low <= temperature <= high:
        raise RagenError(
            f"temperature = {temperature:g}: expected {low:g} to {high:g}, or 0 for greedy play"
        )
    if seed < 0:
        raise RagenError(f"seed = {seed}: expected a whole number ≥ 0")
    if sampler == "vllm" and (reason := vllm_refuses(temperature)):
        raise RagenError(f"temperature = {temperature:g}: {reason}, or greedily at 0")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One evaluated episode in numbers.

    `sample` numbers the episodes of a level. Token counts are sums over turns, by the server's own
    counts if it gives them. `thought_words` counts words, so that targets with different tokenizers
    compare. `valid_turns` counts turns with a valid reply, `effective_actions` actions that changed
    the environment. `error` is the traceback of a failed environment or the last error of a failed
    server; such an episode counts as no success.

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
        """True if the environment or the server failed."""
        return self.error is not None

    @property
    def reason(self) -> str:
        """The last line of the error, or an empty string."""
        return last_line(self.error)


COLUMNS = ", ".join(field.name for field in fields(Outcome))
"""The columns of the table of outcomes, after the key."""


def _usage_of(turn: Turn) -> Usage:
    """Tokens of a turn: the server's count, or the number of ids; players have none."""
    ids = turn.prompt.token_ids or (), turn.completion.token_ids or ()
    return turn.completion.usage or Usage(*map(len, ids))


def outcome_of(episode: Episode) -> Outcome:
    """The outcome of an episode; its member is the sample."""
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
        prompt_tokens=sum(_usage_of(turn).prompt_tokens for turn in turns),
        completion_tokens=sum(_usage_of(turn).completion_tokens for turn in turns),
        stop_reason=episode.stop_reason,
        error=episode.error,
    )


def refuse_unplayable(outcomes: Sequence[Outcome]) -> None:
    """Refuse an environment that fails, or leaves no room for a reply, in every episode.

    Raises:
        UnplayableError: All episodes failed, or none had room for its first prompt.
    """
    if outcomes and all(outcome.failed for outcome in outcomes):
        first = outcomes[0]
        if first.stop_reason == "request":
            raise UnplayableError(f"a request failed in every episode: {first.reason}")
        raise UnplayableError(
            f"playing {first.env!r} failed in every episode: {first.reason}; "
            "run `ragen check` on the environment or the function"
        )
    if outcomes and all(o.stop_reason == "context" and not o.num_turns for o in outcomes):
        raise UnplayableError(
            f"no first prompt of the environment {outcomes[0].env!r} leaves room for a reply; "
            "raise model.max_length, or lower rollout.max_tokens"
        )


def describe_failures(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for server failures and one for environment failures, with the commonest reason."""
    lines = []
    for where, at_server, advice in (
        ("at the server", True, "; the same command plays them again"),
        ("in the environment", False, ""),
    ):
        failed = [o for o in outcomes if o.failed and (o.stop_reason == "request") == at_server]
        if failed:
            ((reason, _),) = Counter(outcome.reason for outcome in failed).most_common(1)
            verb = "counts" if len(failed) == 1 else "count"
            lines.append(
                f"{len(failed)} of {len(outcomes)} episodes failed {where} and {verb} as no "
                f"success: {reason}{advice}"
            )
    return lines


class OutcomeStore:
    """Stores the outcomes of an evaluation in a folder's database: a run's, or one of its own.

    They are found by a key of the evaluation's settings. Several processes may write at once,
    including the run itself. On closing, the store deletes a database that it created if no episode
    was played, so that a mistake leaves no file behind. Every method raises a `RagenError` if the
    database is damaged, has another version, or cannot be read or written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open the folder's database, or create one."""
        self.folder = folder
        canonical = json.dumps(settings, sort_keys=True, default=repr)
        self.key = hashlib.sha256(canonical.encode()).hexdigest()[:32]
        self._settings = json.dumps(settings, default=repr)
        self._made = not (folder / DATABASE).exists()
        self._made_folder = not folder.exists()
        try:
            self._connection = open_database(folder, make=True)
        except RagenError as error:
            has_remedy = "--out" in str(error)
            remedy = "" if has_remedy else "; or keep the results elsewhere with --out DIR"
            raise RagenError(f"{error}{remedy}") from None
        # A killed process loses nothing with this setting; a crashed machine loses some episodes.
        self._connection.execute("PRAGMA synchronous = NORMAL")

    def _execute(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise cannot_write(self.folder, error) from None

    def outcomes(self) -> list[Outcome]:
        """The outcomes in the order of (level, sample)."""
        query = f"SELECT {COLUMNS} FROM outcomes WHERE key = ? ORDER BY level_seed, sample"
        found = [Outcome(*row) for row in self._execute(query, self.key)]
        return [replace(outcome, success=bool(outcome.success)) for outcome in found]

    def add(self, outcome: Outcome) -> None:
        """Store an outcome; it replaces one of the same level and sample."""
        error = None if outcome.error is None else storable(outcome.error)
        row = (self.key, *astuple(replace(outcome, error=error)))
        values = ",".join("?" * len(row))
        self._execute(f"INSERT OR REPLACE INTO outcomes (key, {COLUMNS}) VALUES ({values})", *row)

    def finish(self, record: Mapping[str, Any], again: bool = True) -> None:
        """Store the result of a whole evaluation; unless `again`, only if it is not stored yet.

        A process that is killed after its last episode leaves outcomes without a result.
        """
        size = record["episodes"], record.get("samples", 1)
        stored = [(each["episodes"], each.get("samples", 1)) for each in self._records()]
        if not again and size in stored:
            return
        shown = [record[name] for name in ("env", "temperature", "episodes", "success")]
        self._execute(
            "INSERT INTO evaluations (time, env, temperature, episodes, success, record, key, "
            "settings) VALUES (?,?,?,?,?,?,?,?)",
            *(time.time(), *shown, json.dumps(record), self.key, self._settings),
        )

    def _records(self) -> list[dict[str, Any]]:
        query = "SELECT record FROM evaluations WHERE key = ?"
        return [json.loads(record) for (record,) in self._execute(query, self.key)]

    def close(self) -> None:
        """Leave one plain file, unless another process still uses it."""
        played = "SELECT EXISTS (SELECT 1 FROM outcomes WHERE error IS NULL AND num_turns > 0)"
        try:
            is_empty = self._made and self._execute(played) == [(0,)]
        finally:
            close_database(self._connection)
        # The write-ahead log remains while another process uses the database.
        if is_empty and not (self.folder / f"{DATABASE}-wal").exists():
            (self.folder / DATABASE).unlink(missing_ok=True)
            if self._made_folder and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
