"""Journals: the training episodes since the last checkpoint, each written when it ends.

A step that was killed is played again from its journal: only what had not ended. A line of
``journal-STEP.jsonl`` is a hash and an episode in JSON. The hash is keyed by the origin of the
episodes, so a line of another origin counts as absent, as does one that was cut.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import PydanticSerializationError

from ragen.core.files import file_errors
from ragen.core.types import Episode, Turn
from ragen.storage.database import free_run

Place = tuple[str, int, int, int]
"""The environment, level seed, group and member of an episode."""

SYNC_S = 1.0
"""Seconds between flushes to the disk, of which each takes milliseconds. A process that is killed
loses nothing; a power failure may lose what was written after the last flush."""

Parts = tuple[Any, ...] | None
"""A field of a prompt that is in `GROWING`."""

GROWING = ("messages", "token_ids", "pictures")
"""The fields of a prompt that begin with those of the prompt before, as long as a context grows."""


class Journal:
    """The episodes of a step that have ended, but for those that failed.

    `origin` says what they depend on, apart from the weights. Nothing is read or written before
    `begin`.
    """

    def __init__(self, folder: Path, step: int, origin: str) -> None:
        self._path = folder / f"journal-{step}.jsonl"
        self._key = blake2b(origin.encode()).digest()
        self._file: IO[bytes] | None = None
        self._ended: dict[Place, Episode] = {}
        self._flushed = 0.0

    def begin(self) -> dict[Place, Episode]:
        """The episodes that ended before; from now on, others can be added."""
        if self._file is None:
            with self._errors():
                self._file = self._path.open("a+b", buffering=0)
                self._file.seek(0)
                lines, intact = self._file.readlines(), 0
                for line in lines:
                    _, _, data = line.partition(b" ")
                    if line != self._line(data):
                        break
                    with suppress(ValueError):
                        episode = read(data)
                        self._ended[place_of(episode)] = episode
                    intact += len(line)
                self._file.truncate(intact)
        return self._ended

    def add(self, episode: Episode) -> None:
        """Write an episode that ended; one that failed is left out, and may do better next time."""
        if self._file is None or self._file.closed or episode.failed:
            return
        with self._errors(), suppress(PydanticSerializationError):  # a text that is not Unicode
            self._file.write(self._line(written(episode)))
            if time.monotonic() - self._flushed > SYNC_S:
                os.fsync(self._file.fileno())
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file, which stays."""
        if self._file is not None:
            self._file.close()

    def _line(self, data: bytes) -> bytes:
        digest = blake2b(data, digest_size=16, key=self._key).hexdigest()
        return f"{digest} ".encode() + data

    def _errors(self) -> Any:
        return file_errors("write", self._path, free_run(self._path.parent))


def forget_journals(folder: Path, step: int) -> None:
    """Delete the journals up to a step, which has a checkpoint."""
    for path in folder.glob("journal-*.jsonl"):
        number = path.stem.removeprefix("journal-")
        if number.isdecimal() and int(number) <= step:
            path.unlink()


def place_of(episode: Episode) -> Place:
    """The place of an episode in its step."""
    return episode.env, episode.level_seed, episode.group, episode.member


def written(episode: Episode) -> bytes:
    """An episode as a line of JSON, without what a prompt repeats of the one before (`GROWING`).

    Otherwise, the size would be quadratic in the number of turns.
    """
    turns, counts = list[Turn](), list[list[int]]()
    before: Sequence[Parts] = [None] * len(GROWING)
    for turn in (*episode.turns, *episode.others):
        parts = _parts(turn)
        counts.append([_joined(old, new) for old, new in zip(before, parts, strict=True)])
        rest = [new and new[at:] for new, at in zip(parts, counts[-1], strict=True)]
        turns.append(_with_parts(turn, rest))
        before = parts
    return _codec().dump_json((_with_turns(episode, turns), counts)) + b"\n"


def read(data: bytes) -> Episode:
    """The episode of a line, the inverse of `written`.

    Raises:
        ValueError: It is none, or one of another version of RAGEN.
    """
    episode, counts = _codec().validate_json(data)
    turns = list[Turn]()
    before: Sequence[Parts] = [None] * len(GROWING)
    for turn, known in zip((*episode.turns, *episode.others), counts, strict=True):
        every = zip(before, _parts(turn), known, strict=True)
        before = [new if not at else (*(old or ())[:at], *(new or ())) for old, new, at in every]
        turns.append(_with_parts(turn, before))
    return _with_turns(episode, turns)


def _joined(before: Parts, parts: Parts) -> int:
    """The number of parts before, if the parts begin with all of them; else 0."""
    return len(before) if before and parts and parts[: len(before)] == before else 0


def _parts(turn: Turn) -> list[Parts]:
    return [getattr(turn.prompt, name) for name in GROWING]


def _with_parts(turn: Turn, parts: Sequence[Parts]) -> Turn:
    values: dict[str, Any] = dict(zip(GROWING, parts, strict=True))
    return replace(turn, prompt=replace(turn.prompt, **values))


def _with_turns(episode: Episode, turns: Sequence[Turn]) -> Episode:
    count = len(episode.turns)
    return replace(episode, turns=tuple(turns[:count]), others=tuple(turns[count:]))


@cache
def _codec() -> TypeAdapter[tuple[Episode, list[list[int]]]]:
    """Made once, and only where a journal is kept: it takes 0.1 s."""
    types = tuple[Episode, list[list[int]]]
    return TypeAdapter(types, config=ConfigDict(ser_json_inf_nan="constants"))
