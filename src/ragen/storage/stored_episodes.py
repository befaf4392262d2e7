"""Episodes as rows of a database (`ragen.storage.schema`), in both directions.

Prompts that extend the previous turn are stored without that part.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from ragen.core.errors import RagenError
from ragen.core.files import parse_json
from ragen.core.pictures import Picture
from ragen.core.types import Call, Completion, Episode, Prompt, Turn
from ragen.storage.database import DATABASE, reading_database
from ragen.storage.schema import (
    EPISODE,
    TURN,
    Row,
    as_json,
    decode,
    encode,
    insert,
    storable,
    turn_id,
)

_PICTURES = ("pictures", "final_pictures")
_OF_EPISODE = [f.name for f in fields(Episode) if f.name in EPISODE and f.name not in _PICTURES]
_OF_TURN = [f.name for f in fields(Turn) if f.name in TURN and f.name not in _PICTURES]
_OF_CALL = [field.name for field in fields(Call)]
"""The fields of the records that are columns of the same name."""

KEPT_PICTURES = 256
"""Pictures that are kept while episodes are read."""


# Writing.


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """The row of an episode, the rows of its turns, and the words and pictures in them."""

    episode: Row
    turns: tuple[Row, ...]
    token_ids: frozenset[int]
    pictures: frozenset[Picture]


def episode_rows(
    episode: Episode,
    phase: str,
    kept: bool = True,
    group_score: float | None = None,
    timed: bool = False,
) -> EpisodeRows:
    """The rows of an episode, without its id, attempt and step.

    Its ``entropy`` is the mean of −logprob over its sampled tokens, in nats. Given the tokens
    before it, −logprob of a sampled token has the entropy as its expectation, so this estimate
    needs no other logprobs. `kept` is whether the filter kept its group, and `group_score` the
    filter's score, if there is one. The seconds of completions are left out unless `timed`.
    """
    turns = episode.turns
    sampled = [turn.completion.token_ids for turn in turns]
    counts = [_num_tokens(turn.completion) for turn in turns]
    logprobs = [each for turn in turns for each in turn.completion.logprobs or ()]
    spans = [turn.thought_span or (0, 0) for turn in turns]
    row = {name: getattr(episode, name) for name in _OF_EPISODE} | {
        "phase": phase,
        "kept": kept,
        "reward": episode.reward,
        "penalty": sum(turn.penalty for turn in turns),
        "num_turns": len(turns),
        "num_tokens": None if None in counts else sum(each or 0 for each in counts),
        "thought_tokens": None if None in sampled else sum(end - start for start, end in spans),
        "entropy": -fmean(logprobs) if logprobs else None,
        "group_score": group_score,
        "final_pictures": _hashes(episode.final_pictures),
    }
    turns = (*turns, *episode.others)
    ids = {token for turn in turns for token in turn.prompt.token_ids or () if token >= 0}
    ids.update(token for turn in turns for token in turn.completion.token_ids or ())
    pictures = frozenset(episode.final_pictures).union(*(turn.pictures for turn in turns))
    rows = tuple(_turn_rows(turns, timed))
    return EpisodeRows(encode(EPISODE, row), rows, frozenset(ids), pictures)


def _hashes(pictures: Sequence[Picture]) -> list[str] | None:
    return [picture.hash for picture in pictures] or None


def _num_tokens(completion: Completion) -> int | None:
    """The number of sampled tokens: of ids, or the server's count."""
    if completion.token_ids is not None:
        return len(completion.token_ids)
    return None if completion.usage is None else completion.usage.completion_tokens


def _turn_rows(turns: Sequence[Turn], timed: bool) -> Iterator[Row]:
    before: tuple[Any, ...] = ()
    for index, turn in enumerate(turns):
        prompt_ids, completion = turn.prompt.token_ids, turn.completion
        ids, has_ids = completion.token_ids, prompt_ids is not None
        prompt = turn.prompt.messages if prompt_ids is None else prompt_ids
        joins = bool(before) and prompt[: len(before)] == before
        rest = prompt[joins * len(before) :]
        before = prompt if prompt_ids is None else prompt_ids + (ids or ())
        start, end = turn.thought_span or (None, None)
        row = {name: getattr(turn, name) for name in _OF_TURN} | {
            "turn": index,
            "reply": completion.text,
            "num_tokens": _num_tokens(completion),
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
            "prompt_ids": rest if has_ids else None,
            "prompt_joins": joins,
            "completion_ids": ids,
            "logprobs": completion.logprobs,
            "thought_start": start,
            "thought_end": end,
            "messages": None if has_ids else rest,
            "completion_s": turn.completion_s if timed else None,
            "pictures": _hashes(turn.pictures),
            **(dict.fromkeys(_OF_CALL) if turn.call is None else asdict(turn.call)),
        }
        yield encode(TURN, row)


def write_episodes(
    connection: sqlite3.Connection, attempt: int, step: int, episodes: Sequence[EpisodeRows]
) -> None:
    """Insert episodes with their turns and pictures, and index the turns' thoughts for search."""
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM episodes").fetchone()
    numbered = list(enumerate(episodes, last + 1))
    when = {"attempt": attempt, "step": step}
    insert(connection, "episodes", [{"id": key, **when, **e.episode} for key, e in numbered])
    turns = [
        {"id": turn_id(key, turn["turn"]), "episode_id": key, **turn}
        for key, rows in numbered
        for turn in rows.turns
    ]
    insert(connection, "turns", turns)
    _write_pictures(connection, frozenset[Picture]().union(*(rows.pictures for rows in episodes)))
    connection.execute(
        "INSERT INTO thoughts_fts (rowid, thought) SELECT id, thought FROM turns"
        " WHERE episode_id > ? AND thought IS NOT NULL",
        (last,),
    )


def _write_pictures(connection: sqlite3.Connection, pictures: Iterable[Picture]) -> None:
    """Insert the pictures that are not stored yet."""
    new = {picture.hash: picture for picture in pictures}
    query = "SELECT hash FROM pictures WHERE hash IN (SELECT value FROM json_each(?))"
    for (known,) in connection.execute(query, (as_json([*new]),)).fetchall():
        del new[known]
    insert(connection, "pictures", [{"hash": key, "png": new[key].png()} for key in sorted(new)])


def delete_episodes(connection: sqlite3.Connection, where: str, values: Sequence[int]) -> None:
    """Delete the episodes that meet a condition, their turns, and the index of their thoughts.

    Texts of tokens and pictures stay.
    """
    theirs = f"episode_id IN (SELECT id FROM episodes WHERE {where})"
    for statement in (
        # The index has no copy of the text and needs it for a deletion.
        "INSERT INTO thoughts_fts (thoughts_fts, rowid, thought)"
        f" SELECT 'delete', id, thought FROM turns WHERE thought IS NOT NULL AND {theirs}",
        f"DELETE FROM turns WHERE {theirs}",
        f"DELETE FROM episodes WHERE {where}",
    ):
        connection.execute(statement, values)


def write_tokens(
    connection: sqlite3.Connection, token_ids: Iterable[int], text_of: Callable[[int], str]
) -> None:
    """Insert the texts of tokens; existing rows stay as they are."""
    rows = [{"id": token, "text": storable(text_of(token))} for token in sorted(token_ids)]
    insert(connection, "tokens", rows, "INSERT OR IGNORE")


# Reading.


@dataclass(frozen=True, slots=True)
class Recorded:
    """An episode from a run's database, with its attempt, step and phase.

    Its prompts have only token ids and their pictures, and none if the policy gave no ids.
    """

    id: int
    attempt: int
    step: int
    phase: str
    episode: Episode

    def exact(self, turn: int) -> bool:
        """True if the token ids of its prompts up to a turn are known."""
        return all(each.prompt.token_ids is not None for each in self.episode.turns[: turn + 1])


def read_episode(run: Path, episode: int) -> Recorded:
    """Read one episode."""
    recorded = next(_read(run, episode), None)
    if recorded is None:
        raise RagenError(
            f"{run} has no episode {episode} in its {DATABASE}; choose one that `ragen view` lists"
        )
    return recorded


def read_episodes(run: Path) -> Iterator[Recorded]:
    """Read all episodes in order, one at a time."""
    return _read(run)


def _read(run: Path, episode: int | None = None) -> Iterator[Recorded]:
    with reading_database(run) as connection:
        picture = lru_cache(KEPT_PICTURES)(partial(_picture, connection))
        for row in _rows(connection, episode):
            yield _recorded(row, picture)


def _picture(connection: sqlite3.Connection, key: str) -> Picture:
    try:
        picture = Picture.of_png(stored_picture(connection, key))
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's errors
        raise sqlite3.DatabaseError(f"the picture {key} is damaged: {error}") from None
    if picture.hash != key:
        raise sqlite3.DatabaseError(f"the picture {key} is damaged: it is another one")
    return picture


def stored_picture(connection: sqlite3.Connection, key: str) -> bytes:
    """The PNG file of a picture's hash."""
    found = connection.execute("SELECT png FROM pictures WHERE hash = ?", (key,)).fetchone()
    if found is None:
        raise sqlite3.DatabaseError(f"the picture {key} is missing")
    return bytes(found[0])


def records(run: Path, episode: int | None = None) -> Iterator[Row]:
    """Read the rows of a run's episodes (or of one), each with its ``turns``, one at a time.

    Episodes that are written meanwhile are left out.
    """
    with reading_database(run) as connection:
        yield from _rows(connection, episode)


def _rows(connection: sqlite3.Connection, episode: int | None) -> Iterator[Row]:
    chosen = "" if episode is None else f" WHERE id = {episode:d}"
    columns = ", ".join(f'"{name}"' for name in EPISODE)
    for key, *row in connection.execute(f"SELECT id, {columns} FROM episodes{chosen} ORDER BY id"):
        yield {"id": key, **decode(EPISODE, row), "turns": _turns(connection, key)}


def _turns(connection: sqlite3.Connection, episode: int) -> list[Row]:
    turns: list[Row] = []
    before: list[int] = []
    messages: list[Any] = []
    query = f"SELECT {', '.join(TURN)} FROM turns WHERE episode_id = ? ORDER BY turn"
    for row in connection.execute(query, (episode,)):
        turn = decode(TURN, row)
        joins = turn.pop("prompt_joins")
        if turn["messages"] is not None:
            messages = [*(messages if joins else ()), *_parsed(turn["messages"])]
            turn["messages"] = as_json(messages)
        elif joins:
            turn["prompt_ids"] = before + turn["prompt_ids"]
        before = (turn["prompt_ids"] or []) + (turn["completion_ids"] or [])
        turns.append(turn)
    return turns


def _parsed(messages: str) -> list[Any]:
    try:
        return list(parse_json(messages))
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a value of messages is damaged: {error}") from None


def _recorded(record: Row, picture: Callable[[str], Picture]) -> Recorded:
    played = {name: _frozen(record[name]) for name in _OF_EPISODE}
    played["final_pictures"] = tuple(map(picture, record["final_pictures"] or ()))
    known = dict[int, Picture]()  # the pictures so far, by their first token
    turns = tuple(_turn(each, picture, known) for each in record["turns"])
    count = record["num_turns"]
    return Recorded(
        **{name: record[name] for name in ("id", "attempt", "step", "phase")},
        episode=Episode(**played, turns=turns[:count], others=turns[count:]),
    )


def _turn(record: Row, picture: Callable[[str], Picture], known: dict[int, Picture]) -> Turn:
    values = {name: _frozen(value) for name, value in record.items()}
    pictures = tuple(map(picture, values["pictures"] or ()))
    known |= {each.token_ids(1)[0]: each for each in pictures}
    shown = tuple(known[token] for token in values["prompt_ids"] or () if token in known)
    ids, logprobs = values["completion_ids"], values["logprobs"]
    end, version = values["finish_reason"], values["policy_version"]
    span, snapshot = (values["thought_start"], values["thought_end"]), values["snapshot"]
    return Turn(
        **{name: values[name] for name in _OF_TURN}
        | {
            "prompt": Prompt((), values["prompt_ids"], 0, 0, 0.0, 0, pictures=shown),
            "pictures": pictures,
            "completion": Completion(ids, logprobs, values["reply"], end, version),
            "thought_span": None if None in span else span,
            "snapshot": None if snapshot is None else json.loads(snapshot),
            "call": None if values["role"] is None else Call(*(values[n] for n in _OF_CALL)),
        }
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
