"""Reading episodes from the database of a finished or unfinished run.

Prompts that extend the previous turn are stored without that part, arrays as blobs and lists as
JSON; reading restores all of them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Prompt, Turn
from ragen.storage.database import DATABASE, check_schema, reading_database
from ragen.storage.rows import storable
from ragen.storage.schema import decompress

Record = dict[str, Any]
"""A row: column name to Python value."""

_STATEMENTS = ("kept", "terminated", "truncated", "success", "well_formed")
_LISTS = ("picture", "actions_asked", "actions_executed", "final_picture")
_ARRAYS = ("prompt_ids", "completion_ids", "logprobs")


@dataclass(frozen=True, slots=True)
class Recorded:
    """An episode from a run's database, with its attempt, step and phase.

    Its prompts have only token ids, and none if the policy gave no ids.
    """

    id: int
    attempt: int
    step: int
    phase: str
    episode: Episode

    @property
    def path(self) -> tuple[int | str, ...]:
        """The path from which, with the run's seed, its sampling seeds were derived."""
        # A training episode's `step` counts finished steps; it was played one step earlier.
        return ("train", self.step - 1) if self.phase == "train" else ("eval",)

    def exact(self, turn: int) -> bool:
        """Whether the token ids of its prompts up to a turn are known."""
        return all(each.prompt.token_ids is not None for each in self.episode.turns[: turn + 1])


def read_episode(run: Path, episode: int) -> Recorded:
    """Read one episode.

    Raises:
        RagenError: There is no run or no such episode, or the database cannot be read.
    """
    recorded = next((_recorded(record) for record in records(run, episode)), None)
    if recorded is None:
        raise RagenError(f"{run} has no episode {episode} in its {DATABASE}")
    return recorded


def read_episodes(run: Path) -> Iterator[Recorded]:
    """Read all episodes in order, one at a time.

    Raises:
        RagenError: There is no run, or the database cannot be read.
    """
    return map(_recorded, records(run))


def _recorded(record: Record) -> Recorded:
    names = ("group", "member", "env", "level_seed", "noise_seed", "stop_reason", "error")
    ends = ("terminated", "truncated", "success", "final_observation")
    picture = record["final_picture"]
    return Recorded(
        **{name: record[name] for name in ("id", "attempt", "step", "phase")},
        episode=Episode(
            **{name: record[name] for name in names + ends},
            turns=tuple(_turn(each) for each in record["turns"]),
            final_picture=None if picture is None else tuple(picture),
        ),
    )


def records(run: Path, episode: int | None = None) -> Iterator[Record]:
    """Read the rows of a run's episodes, each with its ``turns``, one at a time.

    Episodes that are written meanwhile are left out.

    Args:
        run: The run's folder.
        episode: The id of a single episode; ``None`` reads all.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    with reading_database(run) as connection:
        connection.row_factory = sqlite3.Row
        check_schema(connection, run / DATABASE)
        chosen = "" if episode is None else f" WHERE id = {episode:d}"
        for row in connection.execute(f"SELECT * FROM episodes{chosen} ORDER BY id"):
            yield _values(row) | {"turns": _turns(connection, row["id"])}


def _turns(connection: sqlite3.Connection, episode: int) -> list[Record]:
    turns: list[Record] = []
    before: list[int] = []
    query = "SELECT * FROM turns WHERE episode_id = ? ORDER BY turn"
    for row in connection.execute(query, (episode,)):
        turn = _values(row)
        del turn["id"], turn["episode_id"]
        if turn.pop("prompt_joins"):
            turn["prompt_ids"] = before + turn["prompt_ids"]
        before = (turn["prompt_ids"] or []) + (turn["completion_ids"] or [])
        turns.append(turn)
    return turns


def _values(row: sqlite3.Row) -> Record:
    record = dict(row)
    for name, value in record.items():
        if value is None:
            continue
        if name in _STATEMENTS:
            record[name] = bool(value)
        elif name in _LISTS:
            record[name] = [storable(each) for each in json.loads(value)]
        elif name in _ARRAYS:
            record[name] = decompress(name, value).tolist()
    return record


def _turn(record: Record) -> Turn:
    fields = {**record, **{n: _tuple(record[n]) for n in (*_LISTS, *_ARRAYS) if n in record}}
    start, end, snapshot = fields["thought_start"], fields["thought_end"], fields["snapshot"]
    names = ("observation", "thought", "actions_asked", "actions_executed", "reward", "penalty")
    others = ("well_formed", "state_key", "picture")
    return Turn(
        **{name: fields[name] for name in names + others},
        prompt=Prompt((), fields["prompt_ids"], 0, 0, 0.0, 0),
        completion=Completion(
            fields["completion_ids"],
            fields["logprobs"],
            fields["reply"],
            fields["finish_reason"],
            fields["policy_version"],
        ),
        thought_span=None if start is None else (start, end),
        snapshot=None if snapshot is None else json.loads(snapshot),
    )


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
