"""Conversion of episodes to database rows, and their insertion.

A row is a tuple in the order of its table's columns (`ragen.storage.schema`), without the ids,
which are assigned on insertion.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ragen.core.types import Episode, Turn
from ragen.storage.schema import compress, turn_id

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """The row of an episode, the rows of its turns, and the token ids in them."""

    episode: Row
    turns: tuple[Row, ...]
    token_ids: frozenset[int]


def episode_rows(
    episode: Episode,
    phase: str,
    kept: bool = True,
    group_score: float | None = None,
) -> EpisodeRows:
    """The rows of an episode.

    Its ``entropy`` is the mean of −logprob over its sampled tokens, in nats. Given the tokens
    before it, −logprob of a sampled token has the entropy as its expectation, so this estimate
    needs no other logprobs.

    Args:
        episode: The episode.
        phase: ``train``, ``eval`` or ``eval greedy``.
        kept: Whether the filter kept its group.
        group_score: The filter's score of its group, if there is one.
    """
    turns = episode.turns
    sampled = [turn.completion.token_ids for turn in turns]
    logprobs = [each for turn in turns for each in turn.completion.logprobs or ()]
    countable = None not in sampled
    spans = [turn.thought_span or (0, 0) for turn in turns]
    row = (
        phase,
        episode.group,
        episode.member,
        kept,
        episode.env,
        episode.level_seed,
        episode.noise_seed,
        episode.stop_reason,
        episode.terminated,
        episode.truncated,
        episode.success,
        float(episode.total_reward),
        float(sum(turn.penalty for turn in turns)),
        len(turns),
        sum(len(ids or ()) for ids in sampled) if countable else None,
        sum(end - start for start, end in spans) if countable else None,
        -fmean(logprobs) if logprobs else None,
        group_score,
        optional_text(episode.error),
        optional_text(episode.final_observation),
        None if episode.final_picture is None else as_json(episode.final_picture),
    )
    ids = {token for turn in turns for token in turn.prompt.token_ids or ()}
    ids.update(token for each in sampled for token in each or ())
    return EpisodeRows(row, tuple(_turn_rows(turns)), frozenset(ids))


def _turn_rows(turns: Sequence[Turn]) -> list[Row]:
    rows: list[Row] = []
    before: tuple[int, ...] = ()
    for index, turn in enumerate(turns):
        prompt_ids, completion = turn.prompt.token_ids, turn.completion
        ids, logprobs = completion.token_ids, completion.logprobs
        joins = None
        if prompt_ids is not None:
            joins = bool(before) and prompt_ids[: len(before)] == before
            before, prompt_ids = prompt_ids + (ids or ()), prompt_ids[joins * len(before) :]
        start, end = turn.thought_span or (None, None)
        rows.append(
            (
                index,
                storable(turn.observation),
                None if turn.picture is None else as_json(turn.picture),
                storable(completion.text),
                optional_text(turn.thought),
                as_json(turn.actions_asked),
                as_json(turn.actions_executed),
                float(turn.reward),
                float(turn.penalty),
                turn.well_formed,
                None if ids is None else len(ids),
                completion.finish_reason,
                completion.policy_version,
                storable(turn.state_key),
                None if turn.snapshot is None else as_json(turn.snapshot),
                None if prompt_ids is None else compress("prompt_ids", prompt_ids),
                joins,
                None if ids is None else compress("completion_ids", ids),
                None if logprobs is None else compress("logprobs", logprobs),
                start,
                end,
            )
        )
    return rows


def write_episodes(
    connection: sqlite3.Connection, attempt: int, step: int, episodes: Sequence[EpisodeRows]
) -> None:
    """Insert episodes with their turns, and index the turns' thoughts for search."""
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM episodes").fetchone()
    numbered = list(enumerate(episodes, last + 1))
    insert(connection, "episodes", [(key, attempt, step, *e.episode) for key, e in numbered])
    turns = [(turn_id(key, turn[0]), key, *turn) for key, e in numbered for turn in e.turns]
    insert(connection, "turns", turns)
    connection.execute(
        "INSERT INTO thoughts_fts (rowid, thought) SELECT id, thought FROM turns"
        " WHERE episode_id > ? AND thought IS NOT NULL",
        (last,),
    )


def write_tokens(
    connection: sqlite3.Connection, token_ids: Iterable[int], text_of: Callable[[int], str]
) -> None:
    """Insert the texts of tokens; existing rows stay as they are."""
    rows = [(token, storable(text_of(token))) for token in token_ids]
    connection.executemany("INSERT OR IGNORE INTO tokens VALUES (?,?)", rows)


def insert(connection: sqlite3.Connection, table: str, rows: Sequence[Row]) -> None:
    """Insert rows with a value for every column."""
    if rows:
        marks = ",".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


def as_json(value: Any) -> str:
    """JSON in ASCII with escapes, which preserves a lone surrogate in a snapshot."""
    return json.dumps(value, separators=(",", ":"))


def storable(text: str) -> str:
    """The text in valid UTF-8; a lone surrogate, which an environment may send, becomes ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


def optional_text(text: str | None) -> str | None:
    """`storable` for a text that may be missing."""
    return None if text is None else storable(text)
