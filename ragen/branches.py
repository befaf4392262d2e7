"""What is branched from a run's episodes: the originals read back, and `branches.sqlite`.

A branch begins where a recorded episode stood at one of its turns and is played to its end by a
checkpoint of the run. Those of one request are a group: the same prompt, several members. They lie
in a database of their own beside the run's, in the same tables, so that a run that still trains is
never written to by anybody else.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragen.database import close_database, connect_to_read, open_database, read, transaction
from ragen.errors import RagenError
from ragen.rows import episode_rows, write_episodes, write_tokens
from ragen.schema import PLAYED, SCHEMA_VERSION, decompress
from ragen.types import Completion, Episode, Prompt, Turn

FILE = "branches.sqlite"
"""The branches' database in a run's folder."""

PHASE = "branch"
"""The phase of their episodes, whose ``group`` is the request's `number` and ``step`` the
checkpoint's."""

MOST = 64
"""Branches of one request: what one screen can show, and a small model plays in a minute."""

_SCHEMA = f"""
{PLAYED}
CREATE TABLE branches (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, episode INTEGER NOT NULL,
    turn INTEGER NOT NULL, checkpoint INTEGER NOT NULL, n INTEGER NOT NULL,
    temperature REAL NOT NULL, seed INTEGER NOT NULL, time REAL NOT NULL, exact INTEGER NOT NULL
);
CREATE INDEX branches_by_episode ON branches (episode);
PRAGMA user_version = {SCHEMA_VERSION};
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What is branched: an episode of a run's database from a turn on, by a checkpoint, `n` times.

    `checkpoint` is a step; 0 may stand for the model that the run began with. Everything about the
    branches follows from these and from the run's seed.

    Example:
        >>> Request(7, turn=1, checkpoint=40, n=4, temperature=1.0, seed=0).id
        '2eaa3dc5b2b5'
    """

    episode: int
    turn: int
    checkpoint: int
    n: int
    temperature: float
    seed: int

    @property
    def id(self) -> str:
        """The same for the same request, so that what is asked again is not kept twice."""
        asked = (self.episode, self.turn, self.checkpoint, self.n, float(self.temperature))
        return hashlib.blake2b(repr((*asked, self.seed)).encode(), digest_size=6).hexdigest()

    @property
    def path(self) -> tuple[int | str, ...]:
        """What the branches' sampling seeds are derived from, behind the run's seed."""
        return ("branch", self.seed, self.episode, self.turn, self.checkpoint)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An episode as a run's database keeps it, and what it was played for.

    Of its prompts only the ids are known, and where a policy gives no ids not even those.
    """

    id: int
    attempt: int
    step: int
    phase: str
    episode: Episode

    @property
    def path(self) -> tuple[int | str, ...]:
        """What its own sampling seeds were derived from, behind the run's seed."""
        # A training episode is recorded when its step is finished, and played before.
        return ("train", self.step - 1) if self.phase == "train" else ("eval",)

    def exact(self, turn: int) -> bool:
        """Whether the tokens of its prompts up to a turn are known."""
        return all(each.prompt.token_ids is not None for each in self.episode.turns[: turn + 1])


def read_episode(run: Path, episode: int) -> Recorded:
    """An episode of a run's database, which is opened to read alone.

    Raises:
        RagenError: There is no run or no such episode, or the database cannot be read.
    """
    names = ("attempt", "step", "phase", *_EPISODE)
    quoted = ", ".join(f'"{name}"' for name in names)
    rows = read(run, f"SELECT {quoted} FROM episodes WHERE id = ?", (episode,))
    if not rows:
        ((most,),) = read(run, "SELECT coalesce(max(id), 0) FROM episodes")
        known = f"its last one is {most}" if most else "it recorded none"
        raise RagenError(f"{run} has no episode {episode}; {known}")
    attempt, step, phase, *values = rows[0]
    turns = read(
        run, f"SELECT {', '.join(_TURN)} FROM turns WHERE episode_id = ? ORDER BY turn", (episode,)
    )
    found = dict(zip(_EPISODE, values, strict=True))
    for name in ("terminated", "truncated", "bootstrap", "success"):
        found[name] = bool(found[name])
    found["final_picture"] = _rows_of(found["final_picture"])
    return Recorded(episode, attempt, step, phase, Episode(turns=_turns(turns), **found))


_EPISODE = (
    *("group", "member", "world", "level_seed", "noise_seed", "stop_reason"),
    *("terminated", "truncated", "bootstrap", "success", "error"),
    *("final_observation", "final_picture"),
)
_TURN = (
    *("observation", "picture", "reply", "thought", "actions_asked", "actions_executed"),
    *("reward", "penalty", "well_formed", "finish_reason", "policy_version", "state_key"),
    *("snapshot", "prompt_ids", "prompt_joins", "completion_ids", "logprobs"),
    *("thought_start", "thought_end"),
)


def _turns(rows: Sequence[tuple[Any, ...]]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    before: tuple[int, ...] = ()
    for values in rows:
        row = dict(zip(_TURN, values, strict=True))
        prompt_ids, ids = _ids("prompt_ids", row), _ids("completion_ids", row)
        if prompt_ids is not None:
            prompt_ids = (*before, *prompt_ids) if row["prompt_joins"] else prompt_ids
            before = (*prompt_ids, *(ids or ()))
        logprobs = None
        if row["logprobs"] is not None:
            logprobs = tuple(decompress("logprobs", row["logprobs"]).tolist())
        start, end = row["thought_start"], row["thought_end"]
        turns.append(
            Turn(
                observation=row["observation"],
                prompt=Prompt((), prompt_ids, 0, 0, 0.0, 0),
                completion=Completion(
                    ids, logprobs, row["reply"], row["finish_reason"], row["policy_version"]
                ),
                thought=row["thought"],
                thought_span=None if start is None else (start, end),
                actions_asked=tuple(json.loads(row["actions_asked"])),
                actions_executed=tuple(json.loads(row["actions_executed"])),
                reward=row["reward"],
                penalty=row["penalty"],
                well_formed=bool(row["well_formed"]),
                state_key=row["state_key"],
                snapshot=None if row["snapshot"] is None else json.loads(row["snapshot"]),
                picture=_rows_of(row["picture"]),
            )
        )
    return tuple(turns)


def _rows_of(picture: str | None) -> tuple[str, ...] | None:
    return None if picture is None else tuple(json.loads(picture))


def _ids(name: str, row: dict[str, Any]) -> tuple[int, ...] | None:
    return None if row[name] is None else tuple(decompress(name, row[name]).tolist())


def has_branches(run: Path) -> bool:
    """Whether there is a database of branches to read; one that is just being made is none yet."""
    if not (run / FILE).exists():
        return False
    with suppress(sqlite3.Error), closing(connect_to_read(run / FILE)) as connection:
        return bool(connection.execute("PRAGMA user_version").fetchone() != (0,))
    return True  # who reads it will say what is wrong with it


def write_branches(
    run: Path,
    request: Request,
    episodes: Sequence[Episode],
    exact: bool,
    text_of: Callable[[int], str],
) -> None:
    """Keep what was branched, in the place of what the same request gave before.

    Several processes may write at once; each of them all of its own or nothing.

    Args:
        run: The run's folder.
        request: What was asked.
        episodes: The branches in their order.
        exact: Whether the model saw the very tokens that it saw in the original.
        text_of: The text of one token.

    Raises:
        RagenError: The database cannot be written, or is of another version.
    """
    connection = open_database(run, make=True, file=FILE, schema=_SCHEMA)
    try:
        with transaction(connection, run, FILE):
            _insert(connection, request, episodes, exact, text_of)
    finally:
        close_database(connection)


def _insert(
    connection: sqlite3.Connection,
    request: Request,
    episodes: Sequence[Episode],
    exact: bool,
    text_of: Callable[[int], str],
) -> None:
    _forget(connection, request.id)
    asked = (request.episode, request.turn, request.checkpoint, request.n)
    row = (request.id, *asked, request.temperature, request.seed, time.time(), exact)
    number = connection.execute(
        "INSERT INTO branches VALUES (NULL,?,?,?,?,?,?,?,?,?)", row
    ).lastrowid
    assert number is not None
    rows = [
        episode_rows(replace(episode, group=number, member=member), PHASE)
        for member, episode in enumerate(episodes)
    ]
    write_episodes(connection, 0, request.checkpoint, rows)
    write_tokens(connection, sorted(frozenset().union(*(e.token_ids for e in rows))), text_of)


def _forget(connection: sqlite3.Connection, request: str) -> None:
    """Delete what an earlier request of this id left."""
    known = connection.execute("SELECT number FROM branches WHERE id = ?", (request,)).fetchone()
    if known is None:
        return
    of_it = 'SELECT id FROM episodes WHERE "group" = ?'
    for statement in (
        "INSERT INTO thoughts_fts (thoughts_fts, rowid, thought) SELECT 'delete', id, thought"
        f" FROM turns WHERE thought IS NOT NULL AND episode_id IN ({of_it})",
        f"DELETE FROM turns WHERE episode_id IN ({of_it})",
        'DELETE FROM episodes WHERE "group" = ?',
        "DELETE FROM branches WHERE number = ?",
    ):
        connection.execute(statement, known)
