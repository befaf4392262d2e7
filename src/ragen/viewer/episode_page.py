"""Whole episodes: one with all its turns, and the episodes of a group side by side."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from statistics import stdev
from typing import Any

from ragen.core.types import FAILED
from ragen.storage.attempts import still_counts
from ragen.storage.schema import TURNS_AN_EPISODE
from ragen.viewer.episode_list import NAMED, as_json
from ragen.viewer.reading import (
    Answer,
    NotFound,
    Query,
    folder_of,
    loaded,
    reading,
    text_of,
    whole_number,
)
from ragen.viewer.run_list import read_settings

_FULL = f"{NAMED}, final_observation, final_picture"


def episode(root: Path, query: Query) -> Answer:
    """``/api/episode``: one episode, turn by turn.

    Raises:
        Unanswered: There is no such run or episode, or the run cannot be read.
    """
    folder, number = folder_of(root, query), whole_number(query, "episode")
    with reading(folder) as connection:
        row = episode_row(connection, number)
        return detail(connection, row) | {"still_counts": _still_counts(connection, row)}


def episode_row(connection: sqlite3.Connection, number: int) -> sqlite3.Row:
    """An episode's row.

    Raises:
        NotFound: There is no episode of that id.
    """
    row = connection.execute(f"SELECT {_FULL} FROM episodes WHERE id = ?", (number,)).fetchone()
    if row is None:
        raise NotFound(f"there is no episode {number} in this run")
    assert isinstance(row, sqlite3.Row)
    return row


def detail(connection: sqlite3.Connection, row: sqlite3.Row) -> Answer:
    """An episode with its turns, its neighbours, and whether its tokens are recorded."""
    found = as_json(row)
    number = found["id"]
    around = [
        connection.execute(f"SELECT {which}(id) FROM episodes WHERE id {sign} ?", (number,))
        for which, sign in (("max", "<"), ("min", ">"))
    ]
    turns = [as_json(turn) for turn in turn_rows(connection, number)]
    return found | {
        "final_picture": loaded(found["final_picture"]),
        "turns": [_turn(turn) for turn in turns],
        "previous": around[0].fetchone()[0],
        "next": around[1].fetchone()[0],
        "has_tokens": has_samples(connection, row) or any(turn["has_ids"] for turn in turns),
    }


def turn_rows(connection: sqlite3.Connection, episode: int) -> list[sqlite3.Row]:
    """An episode's turns in order, without their tokens."""
    return connection.execute(
        "SELECT turn, observation, picture, reply, thought, actions_asked, actions_executed,"
        " reward, penalty, well_formed, num_tokens, finish_reason, policy_version, state_key,"
        " completion_ids IS NOT NULL AS has_ids FROM turns WHERE id BETWEEN ? AND ? ORDER BY id",
        (episode * TURNS_AN_EPISODE, (episode + 1) * TURNS_AN_EPISODE - 1),
    ).fetchall()


def has_samples(connection: sqlite3.Connection, row: sqlite3.Row) -> bool:
    """Whether the trained tokens of an episode are recorded."""
    if row["phase"] != "train":
        return False
    (found,) = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM samples WHERE attempt = ? AND step = ?"
        ' AND "group" = ? AND member = ?)',
        [row[name] for name in ("attempt", "step", "group", "member")],
    ).fetchone()
    return bool(found)


def _still_counts(connection: sqlite3.Connection, row: sqlite3.Row) -> bool:
    """Whether an episode still counts, or was rolled back."""
    return still_counts(connection)(row["attempt"], row["step"])


def _turn(turn: dict[str, Any]) -> Answer:
    return {
        **{name: value for name, value in turn.items() if name != "has_ids"},
        "picture": loaded(turn["picture"]),
        "actions_asked": loaded(turn["actions_asked"]),
        "actions_executed": loaded(turn["actions_executed"]),
    }


def group(root: Path, query: Query) -> Answer:
    """``/api/group``: the episodes of one prompt, and how the filter treated them.

    Raises:
        Unanswered: There is no such run or group, or the run cannot be read.
    """
    folder = folder_of(root, query)
    where = [whole_number(query, name) for name in ("attempt", "step")]
    phase, number = text_of(query, "phase"), whole_number(query, "group")
    with reading(folder) as connection:
        rows = connection.execute(
            f"SELECT {_FULL} FROM episodes WHERE attempt = ? AND step = ? AND phase = ?"
            ' AND "group" = ? ORDER BY member, id',
            (*where, phase, number),
        ).fetchall()
        if not rows:
            raise NotFound("there is no such group in this run")
        around = [
            connection.execute(
                f'SELECT {which}("group") FROM episodes WHERE attempt = ? AND step = ?'
                f' AND phase = ? AND "group" {sign} ?',
                (*where, phase, number),
            ).fetchone()[0]
            for which, sign in (("max", "<"), ("min", ">"))
        ]
        episodes = [detail(connection, row) for row in rows]
        counts = _still_counts(connection, rows[0])
        chosen = read_settings(folder).get("filter", {}) | _filter_changes(connection, where[0])
    rewards = [row["reward"] for row in rows if row["stop_reason"] not in FAILED]
    return {
        **{name: rows[0][name] for name in ("attempt", "step", "phase", "group", "level_seed")},
        "still_counts": counts,
        "kept": bool(rows[0]["kept"]),
        "group_score": rows[0]["group_score"],
        "rule": chosen.get("rule"),
        "score_name": chosen.get("score"),
        "value": chosen.get("value"),
        "include_zero": chosen.get("include_zero"),
        "num_played": len(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "previous": around[0],
        "next": around[1],
        "episodes": episodes,
    }


def _filter_changes(connection: sqlite3.Connection, attempt: int) -> dict[str, Any]:
    """The filter's settings that rollbacks changed, up to the start of an attempt."""
    changes: dict[str, Any] = {}
    for (data,) in connection.execute(
        "SELECT data FROM events WHERE kind = 'guard' AND data ->> 'attempt' <= ? ORDER BY id",
        (attempt,),
    ):
        changes |= loaded(data)["changes"]
    section = "filter."
    return {k.removeprefix(section): v for k, v in changes.items() if k.startswith(section)}
