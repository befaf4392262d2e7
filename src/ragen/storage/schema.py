"""The tables of a run's database, and the encoding of arrays in them.

Every row of a step has its `attempt` and `step`. Events are a log and are never deleted. Texts are
UTF-8, lists and objects are JSON, and arrays are the blobs of `compress`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

SCHEMA_VERSION = 4
"""`PRAGMA user_version` of the database; other versions are refused or upgraded."""

SAMPLE_ARRAYS: Mapping[str, str] = MappingProxyType(
    {
        "token_ids": "<i4",
        "loss_mask": "|b1",
        "turn_index": "<i2",
        "sampled_logprobs": "<f4",
        "old_logprobs": "<f4",
        "entropies": "<f4",
        "values": "<f4",
        "advantages": "<f4",
        "returns": "<f4",
        "ratios": "<f4",
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
        "prompt_ids": "<i4",
        "completion_ids": "<i4",
        "logprobs": "<f4",
        "scores": "<f4",
        "own": "<i4",
    }
)
"""The type of every array column, including those of turns and cross-scores."""

LISTED = (
    *("phase", "env", "stop_reason", "step", "attempt", "success", "kept", "reward"),
    *("num_turns", "num_tokens", "entropy", "group_score", '"group"', "level_seed"),
)
"""The columns by which lists of episodes are filtered and sorted, all in one index.

A list is one pass over this index: about 25 ms for 100,000 episodes. An index for each order would
be faster for most lists and many times slower for filters that match few episodes. So a query says
``INDEXED BY episodes_for_lists``, names no other column, and afterwards fetches the rows of the few
matching ids. Each distinct value of the first columns takes one descent."""

PLAYED = f"""
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, step INTEGER NOT NULL, phase TEXT NOT NULL,
    "group" INTEGER NOT NULL, member INTEGER NOT NULL, kept INTEGER NOT NULL,
    env TEXT NOT NULL, level_seed INTEGER NOT NULL, noise_seed INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, terminated INTEGER NOT NULL, truncated INTEGER NOT NULL,
    success INTEGER NOT NULL,
    reward REAL NOT NULL, penalty REAL NOT NULL, num_turns INTEGER NOT NULL,
    num_tokens INTEGER, thought_tokens INTEGER, entropy REAL, group_score REAL,
    error TEXT, final_observation TEXT, final_picture TEXT
);
CREATE INDEX episodes_by_step ON episodes (attempt, step, phase, "group");
CREATE INDEX episodes_for_lists ON episodes ({", ".join(LISTED)});
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, episode_id INTEGER NOT NULL, turn INTEGER NOT NULL,
    observation TEXT NOT NULL, picture TEXT, reply TEXT NOT NULL, thought TEXT,
    actions_asked TEXT NOT NULL, actions_executed TEXT NOT NULL,
    reward REAL NOT NULL, penalty REAL NOT NULL, well_formed INTEGER NOT NULL,
    num_tokens INTEGER, finish_reason TEXT NOT NULL, policy_version INTEGER NOT NULL,
    state_key TEXT NOT NULL, snapshot TEXT,
    prompt_ids BLOB, prompt_joins INTEGER, completion_ids BLOB, logprobs BLOB,
    thought_start INTEGER, thought_end INTEGER
);
CREATE INDEX turns_by_episode ON turns (episode_id);
CREATE TABLE tokens (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE VIRTUAL TABLE thoughts_fts USING fts5 (thought, content='turns', content_rowid='id');
"""
"""The tables of episodes, turns, token texts, and the search index of thoughts.

A turn's id is `turn_id`. If `prompt_joins` is 0, `prompt_ids` are the whole prompt. If it is 1, the
prompt starts with the prompt and completion of the previous turn, and `prompt_ids` are the rest."""

SCHEMA = f"""
CREATE TABLE metrics (
    attempt INTEGER NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
    PRIMARY KEY (attempt, step, name)
) WITHOUT ROWID;
{PLAYED}
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
    id INTEGER PRIMARY KEY, attempt INTEGER, step INTEGER, time REAL NOT NULL,
    env TEXT, temperature REAL, episodes INTEGER, success REAL, record TEXT NOT NULL,
    key TEXT, settings TEXT
);
CREATE TABLE outcomes (
    key TEXT NOT NULL, env TEXT NOT NULL, level_seed INTEGER NOT NULL, sample INTEGER NOT NULL,
    success INTEGER NOT NULL, total_reward REAL NOT NULL, num_turns INTEGER NOT NULL,
    num_actions INTEGER NOT NULL, effective_actions INTEGER NOT NULL,
    valid_turns INTEGER NOT NULL, thought_words INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, error TEXT,
    PRIMARY KEY (key, level_seed, sample)
) WITHOUT ROWID;
PRAGMA user_version = {SCHEMA_VERSION};
"""
"""All tables of a run's database.

In `cross_scores`, `scores` is num_thoughts × num_prompts, row by row, and `own` is the index of
each thought's own prompt. `thoughts`, and `prompts` (the observations in them), are JSON lists."""


def turn_id(episode: int, turn: int) -> int:
    """The id of a turn, which encodes its episode: a search hit needs no lookup.

    Example:
        >>> divmod(turn_id(7, 2), TURNS_AN_EPISODE)
        (7, 2)
    """
    assert 0 <= turn < TURNS_AN_EPISODE
    return episode * TURNS_AN_EPISODE + turn


def compress(name: str, array: npt.ArrayLike) -> bytes:
    """Compress an array to the bytes of its column, with the type in `ARRAYS`.

    Example:
        >>> decompress("token_ids", compress("token_ids", [3, 10, 11])).tolist()
        [3, 10, 11]
    """
    return zlib.compress(np.ascontiguousarray(array, ARRAYS[name]).tobytes(), 1)


def decompress(name: str, data: bytes) -> npt.NDArray[Any]:
    """The array of a column, as one dimension."""
    return np.frombuffer(zlib.decompress(data), ARRAYS[name])
