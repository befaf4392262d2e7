"""Upgrades of schemas 3 to 5 to schema 6, in place and in one transaction.

Schema 6 adds the results of tool calls to turns. Schema 5 adds what was wrong with a reply, the
seconds of its completion, and the messages of prompts without token ids. Schema 4 renames `world`
to `env` and `best` to `optimal`, and drops the column `bootstrap`, which was false in every
episode. Settings of evaluations get the present names of their keys (`ragen.config.old_keys`).
Events of the guard get their action as data, which only their text had.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from ragen.config.old_keys import present_values
from ragen.core.files import parse_json
from ragen.storage.schema import SCHEMA_VERSION, SETTINGS, TURN, as_json, kind_of

OLD_VERSIONS = (3, 4, 5)

ADDED = {5: ("problem", "completion_s", "messages"), 6: ("results",)}
"""Columns of a turn, by the schema that added them."""

RECORD_KEYS: Mapping[str, str] = MappingProxyType(
    {"world": "env", "best": "optimal", "best_return": "optimal_return"}
)
"""Keys of an evaluation's record in schema 3, and their names in schema 4."""

GUARD_KEYS: Mapping[str, str] = MappingProxyType(
    {"looked": "checked_step", "troubled": "last_held"}
)
"""Keys of the guard's state in a checkpoint of an earlier version, and their present names."""


def upgrade_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint with the present names of its keys."""
    return state | {"guard": _renamed(state["guard"], GUARD_KEYS)} if "guard" in state else state


def upgrade(connection: sqlite3.Connection) -> None:
    """Bring a database to the present schema, unless another process has just done so.

    Args:
        connection: To the run's database or to that of its branches, in autocommit mode.

    Raises:
        sqlite3.Error: It cannot be written; nothing is changed.
    """
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        ((version,),) = connection.execute("PRAGMA user_version")
        if version == 3:
            _use_present_names(connection)
        if version in OLD_VERSIONS:
            added = (names for schema, names in ADDED.items() if schema > version)
            for name in chain.from_iterable(added):
                kind = kind_of(TURN[name]).sql
                connection.execute(f'ALTER TABLE turns ADD COLUMN "{name}" {kind}')
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _use_present_names(connection: sqlite3.Connection) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    for table in ("episodes", "evaluations", "outcomes"):
        if table in tables:
            connection.execute(f"ALTER TABLE {table} RENAME COLUMN world TO env")
    connection.execute("ALTER TABLE episodes DROP COLUMN bootstrap")
    if "evaluations" not in tables:
        return
    connection.execute(SETTINGS)
    guard = "SELECT id, data FROM events WHERE kind = 'guard'"
    for key, data in connection.execute(guard).fetchall():
        details = {"action": "rollback", **parse_json(data)} if data else {"action": "stop"}
        connection.execute("UPDATE events SET data = ? WHERE id = ?", (json.dumps(details), key))
    rows = connection.execute("SELECT id, record, settings FROM evaluations").fetchall()
    for key, record, settings in rows:
        present = as_json(_renamed(parse_json(record), RECORD_KEYS))
        chosen = settings and json.dumps(present_values(parse_json(settings)))
        query = "UPDATE evaluations SET record = ?, settings = ? WHERE id = ?"
        connection.execute(query, (present, chosen, key))


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}
