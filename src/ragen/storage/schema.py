"""The tables of a run's database, and the encoding of values in them.

Every row of a step has its `attempt` and `step`. Events are a log and are never deleted. Texts are
UTF-8, lists and objects are JSON, and arrays are the blobs of `compress`.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ragen.core.files import parse_json

Row = dict[str, Any]
"""A row: column name to value."""

SCHEMA_VERSION = 4
"""`PRAGMA user_version` of the database; other versions are refused."""

_FLOATS = ("sampled_logprobs", "old_logprobs", "entropies", "values", "advantages", "returns")

SAMPLE_ARRAYS: Mapping[str, str] = MappingProxyType(
    {
        "token_ids": "<i8",  # a picture token has 63 bits
        "loss_mask": "|b1",
        "turn_index": "<i2",
        **dict.fromkeys((*_FLOATS, "ratios"), "<f4"),
    }
)
"""The arrays of a recorded sample and their types. All have the sample's length. A column holds
zlib-compressed little-endian bytes, or NULL if the run has no such array (no values without a
critic)."""

TURNS_AN_EPISODE = 65536
"""Turn ids reserved for each episode; no context holds as many turns."""

ARRAYS: Mapping[str, str] = MappingProxyType(
    {
        **SAMPLE_ARRAYS,
        "prompt_ids": "<i8",
        **dict.fromkeys(("completion_ids", "own"), "<i4"),
        **dict.fromkeys(("logprobs", "scores"), "<f4"),
    }
)
"""The type of every array column, in samples, turns and cross-scores."""

LISTED = (
    "phase, env, stop_reason, step, attempt, success, kept, reward, "
    'num_turns, num_tokens, entropy, group_score, "group", level_seed'
)
"""The columns by which lists of episodes are filtered and sorted, all in one index.

A list is one pass over this index: about 25 ms for 100,000 episodes. An index for each order would
be faster for most lists and many times slower for filters that match few episodes. So a query says
``INDEXED BY episodes_for_lists``, names no other column, and afterwards fetches the rows of the few
matching ids. Each distinct value of the first columns takes one descent."""


class Kind(NamedTuple):
    """A kind of value: its type in SQLite, and the functions that convert it there and back."""

    sql: str
    encode: Callable[[Any], Any] = lambda value: value
    decode: Callable[[Any], Any] = lambda value: value


def as_json(value: Any) -> str:
    """JSON in ASCII with escapes, which preserves a lone surrogate in a snapshot."""
    return json.dumps(value, separators=(",", ":"))


def storable(text: str) -> str:
    """The text in valid UTF-8; a lone surrogate, which an environment may send, becomes ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _array_like(column: str) -> Kind:
    """Arrays of the type that `ARRAYS` gives a column, as lists in a row."""
    return Kind(
        "BLOB",
        lambda array: compress(column, array),
        lambda data: decompress(column, data).tolist(),
    )


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "bool": Kind("INTEGER", decode=bool),
        "int32": Kind("INTEGER"),
        "int64": Kind("INTEGER"),
        "float64": Kind("REAL", encode=float),
        "text": Kind("TEXT", encode=storable),
        "texts": Kind("TEXT", as_json, lambda text: [storable(each) for each in parse_json(text)]),
        "json": Kind("TEXT", encode=as_json),
        "int32s": _array_like("completion_ids"),
        "int64s": _array_like("prompt_ids"),
        "float32s": _array_like("logprobs"),
    }
)


def _table(columns: str) -> Mapping[str, str]:
    """Column name to kind; a kind with a question mark may be NULL."""
    return MappingProxyType(dict(column.split() for column in columns.split(",")))


EPISODE = _table("""
    attempt int32, step int32, phase text, group int32, member int32, kept bool,
    env text, level_seed int64, noise_seed int64, stop_reason text,
    terminated bool, truncated bool, success bool,
    reward float64, penalty float64, num_turns int32, num_tokens int32?, thought_tokens int32?,
    entropy float64?, group_score float64?,
    error text?, final_observation text?, final_drawing texts?, final_pictures texts?
""")
"""The columns of an episode, apart from its id; `docs/episodes.md` describes them."""

TURN = _table("""
    turn int32, observation text, drawing texts?, reply text, thought text?,
    actions_asked texts, actions_executed texts, reward float64, penalty float64, valid bool,
    num_tokens int32?, finish_reason text, policy_version int32, state_key text, snapshot json?,
    prompt_ids int64s?, prompt_joins bool?, completion_ids int32s?, logprobs float32s?,
    thought_start int32?, thought_end int32?, problem text?, completion_s float64?, messages json?,
    results texts?, parent int32?, link text?, role text?, pictures texts?
""")
"""The columns of a turn, apart from its ids.

If `prompt_joins` is false, `prompt_ids` are the whole prompt. If it is true, the prompt starts with
the prompt and completion of the previous turn, and `prompt_ids` are the rest. Prompts without ids
have `messages`: the whole prompt, or the rest after the messages of the previous prompt. `parent`,
`link` and `role` are the fields of `core.types.Call`; rows that are not trained on come last.
`pictures`, and `final_pictures` of an episode, are hashes, or NULL for none."""


def kind_of(column: str) -> Kind:
    """The kind in a table's column, which may have a question mark."""
    return KINDS[column.removesuffix("?")]


def _columns(table: Mapping[str, str]) -> str:
    return ", ".join(
        f'"{name}" {kind_of(column).sql}{"" if column.endswith("?") else " NOT NULL"}'
        for name, column in table.items()
    )


def encode(table: Mapping[str, str], row: Row) -> Row:
    """The values of a row as SQLite stores them."""
    return {
        name: None if value is None else kind_of(table[name]).encode(value)
        for name, value in row.items()
    }


def decode(table: Mapping[str, str], values: Iterable[Any]) -> Row:
    """The row of a table's stored values; objects stay JSON text."""
    row = {}
    for (name, column), value in zip(table.items(), values, strict=True):
        try:
            row[name] = None if value is None else kind_of(column).decode(value)
        except (ValueError, TypeError, zlib.error) as error:
            raise sqlite3.DatabaseError(f"a value of {name} is damaged: {error}") from None
    return row


PLAYED = f"""
CREATE TABLE episodes (id INTEGER PRIMARY KEY, {_columns(EPISODE)});
CREATE INDEX episodes_by_step ON episodes (attempt, step, phase, "group");
CREATE INDEX episodes_for_lists ON episodes ({LISTED});
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, episode_id INTEGER NOT NULL, {_columns(TURN)}
);
CREATE INDEX turns_by_episode ON turns (episode_id);
CREATE TABLE tokens (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE pictures (hash TEXT PRIMARY KEY, png BLOB NOT NULL) WITHOUT ROWID;
CREATE VIRTUAL TABLE thoughts_fts USING fts5 (thought, content='turns', content_rowid='id');
"""
"""The tables of episodes, turns, token texts, pictures, and the search index of thoughts."""

SCHEMA = f"""
CREATE TABLE metrics (
    attempt INTEGER NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
    PRIMARY KEY (attempt, step, name)
) WITHOUT ROWID;
{PLAYED}
CREATE TABLE settings (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
    "group" INTEGER NOT NULL, member INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    {", ".join(f'"{name}" BLOB' for name in SAMPLE_ARRAYS)}
);
CREATE INDEX samples_by_step ON samples (attempt, step);
CREATE TABLE cross_scores (
    attempt INTEGER NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL,
    scores BLOB NOT NULL, own BLOB NOT NULL,
    num_thoughts INTEGER NOT NULL, num_prompts INTEGER NOT NULL,
    thoughts TEXT NOT NULL, prompts TEXT NOT NULL,
    PRIMARY KEY (attempt, step, path)
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, step INTEGER NOT NULL,
    time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT
);
CREATE TRIGGER events_are_kept BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END;
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
    record TEXT NOT NULL
);
CREATE TABLE outcomes (
    env TEXT NOT NULL, level_seed INTEGER NOT NULL, sample INTEGER NOT NULL,
    success INTEGER NOT NULL, reward REAL NOT NULL, num_turns INTEGER NOT NULL,
    num_actions INTEGER NOT NULL, effective_actions INTEGER NOT NULL,
    valid_turns INTEGER NOT NULL, thought_words INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, error TEXT,
    PRIMARY KEY (level_seed, sample)
) WITHOUT ROWID;
PRAGMA user_version = {SCHEMA_VERSION};
"""
"""All tables of a run's database.

`settings` has every text that ``config.toml`` has had; the last one is valid.
In `cross_scores`, `scores` is num_thoughts × num_prompts, row by row, and `own` is the index of
each thought's own prompt. `thoughts`, and `prompts` (the observations in them), are JSON lists."""


def turn_id(episode: int, turn: int) -> int:
    """The id of a turn, which encodes its episode: a search hit needs no lookup."""
    assert 0 <= turn < TURNS_AN_EPISODE
    return episode * TURNS_AN_EPISODE + turn


def insert(
    connection: sqlite3.Connection, table: str, rows: Sequence[Row], verb: str = "INSERT"
) -> None:
    """Insert rows with the same columns; those that are left out are NULL."""
    if rows:
        names = ", ".join(f'"{name}"' for name in rows[0])
        values = ", ".join(f":{name}" for name in rows[0])
        connection.executemany(f"{verb} INTO {table} ({names}) VALUES ({values})", rows)


def compress(name: str, array: npt.ArrayLike) -> bytes:
    """Compress an array to the bytes of its column, with the type in `ARRAYS`."""
    return zlib.compress(np.ascontiguousarray(array, ARRAYS[name]).tobytes(), 1)


def decompress(name: str, data: bytes) -> npt.NDArray[Any]:
    """The array of a column, as one dimension."""
    return np.frombuffer(zlib.decompress(data), ARRAYS[name])
