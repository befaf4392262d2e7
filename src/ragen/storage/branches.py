"""Storage of branches, in `branches.sqlite`.

A branch starts at a turn of a recorded episode and is played to its end by a checkpoint of the run.
The branches of one request are a group: one prompt, several episodes. They have a database of their
own with the same tables, so that only the run itself writes the run's database.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

from ragen.core.types import Episode
from ragen.storage.database import close_database, connect_to_read, open_database, transaction
from ragen.storage.schema import PLAYED, SCHEMA_VERSION, insert
from ragen.storage.stored_episodes import (
    delete_episodes,
    episode_rows,
    write_episodes,
    write_tokens,
)

FILE = "branches.sqlite"

PHASE = "branch"
"""The phase of branches. Their ``group`` is the request's `number`, their ``step`` the
checkpoint's."""

MOST = 64
"""Maximum number of branches of a request. They fit on a screen, and a small model plays them in a
minute."""

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
    """A request for `n` branches of an episode from a turn on, played by a checkpoint.

    `checkpoint` is a step; 0 may be the model that the run started from. The fields and the run's
    seed determine the branches.
    """

    episode: int
    turn: int
    checkpoint: int
    n: int
    temperature: float
    seed: int

    @property
    def id(self) -> str:
        """A hash of the fields; a repeated request replaces the branches of the first."""
        numbers = astuple(replace(self, temperature=float(self.temperature)))
        return hashlib.blake2b(repr(numbers).encode(), digest_size=6).hexdigest()

    @property
    def path(self) -> tuple[int | str, ...]:
        """The path from which, with the run's seed, the branches' sampling seeds are derived."""
        return ("branch", self.seed, self.episode, self.turn, self.checkpoint)


def has_branches(run: Path) -> bool:
    """True if there is a database of branches; one that is being created does not count."""
    if not (run / FILE).exists():
        return False
    with suppress(sqlite3.Error), closing(connect_to_read(run / FILE)) as connection:
        return bool(connection.execute("PRAGMA user_version").fetchone() != (0,))
    return True  # reading it reports what is wrong


def write_branches(
    run: Path,
    request: Request,
    episodes: Sequence[Episode],
    exact: bool,
    text_of: Callable[[int], str],
) -> None:
    """Store branches in one transaction; earlier branches of the same request are replaced.

    `exact` says that the prompts have the original's tokens. `text_of` is the text of a token.
    """
    same = "FROM branches WHERE id = ?"
    connection = open_database(run, make=True, file=FILE, schema=_SCHEMA)
    try:
        with transaction(connection, run, FILE):
            for known in connection.execute(f"SELECT number {same}", (request.id,)).fetchall():
                delete_episodes(connection, '"group" = ?', known)
            connection.execute(f"DELETE {same}", (request.id,))
            row = {"id": request.id, **asdict(request), "time": time.time(), "exact": exact}
            insert(connection, "branches", [row])
            (number,) = connection.execute("SELECT last_insert_rowid()").fetchone()
            rows = [
                episode_rows(replace(episode, group=number, member=member), PHASE)
                for member, episode in enumerate(episodes)
            ]
            write_episodes(connection, 0, request.checkpoint, rows)
            write_tokens(connection, frozenset().union(*(e.token_ids for e in rows)), text_of)
    finally:
        close_database(connection)
