"""The episodes of an evaluation, in a folder like that of a run without steps.

`ragen view` shows the folder, and `ragen export --episodes` exports it. Folders are numbered. An
evaluation that continues, after a kill or with more levels, uses its earlier folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ragen.config.config import Config
from ragen.config.extensions import short_name
from ragen.config.reading import changed, dump
from ragen.core.errors import RagenError
from ragen.core.types import Episode, Group, Turn
from ragen.models.names import resolve_model
from ragen.storage.checkpoint import run_of
from ragen.storage.database import CONFIG, DATABASE, is_claimed, new_run_folder, read
from ragen.storage.recorder import Recorder

FOLDER = "evals"
"""The folder of evaluations: in the working folder, or in the run that is evaluated."""

EVENT = "evaluation"
"""The kind of the first event. Its data hold the key of the outcomes."""

MOST = 10_000
"""Maximum number of episodes kept of an evaluation: those that end first."""

LONGEST = 100_000
"""Maximum number of characters kept of a reply; a server's answer may have 4 MB."""

MOST_ACTIONS = 1000
"""Maximum number of actions kept of a reply."""


class KeptEpisodes:
    """The episodes of one evaluation.

    The folder is made when the first episode was played, so that a mistake leaves no file behind.
    It is `NAME-1`, `NAME-2`, …: an earlier evaluation stays as it is, unless it has the same `key`.

    Args:
        out: Where outcomes are stored: a run, or a folder for all other targets.
        target: The name of the agent.
        config: The settings of the evaluation.
        key: Key of the evaluation in the outcome store.

    Attributes:
        folder: The folder, once there is one.
    """

    def __init__(self, out: Path, target: str, config: Config, key: str) -> None:
        is_run = (out / CONFIG).is_file()
        self._root = out / FOLDER if is_run else out
        names = [config.env.name] if is_run else [target, config.env.name]
        self._name = "-".join(map(_file_name, names))
        self._config, self._key, self._target = config, key, target
        self._recorder: Recorder | None = None
        self._waiting: list[Episode] = []
        self._count = 0
        self.folder = self._found()

    def _found(self) -> Path | None:
        """The folder of an earlier part of this evaluation."""
        for folder in sorted(self._root.glob(f"{self._name}-*")):
            with suppress(RagenError):  # the folder is no run, or damaged: a new one is made
                query = "SELECT data ->> 'key' FROM events WHERE kind = ?"
                if (folder / DATABASE).is_file() and (self._key,) in read(folder, query, (EVENT,)):
                    return folder
        return None

    def add(self, episode: Episode, text_of: Callable[[int], str] | None) -> None:
        """Write an episode; it replaces one of the same level and sample.

        `text_of` is the text of one token, ``None`` without token ids.
        """
        if self._recorder is None:
            self._waiting = [*self._waiting, episode][-MOST:]
            if episode.error is not None or not episode.turns:
                return
            self._recorder = self._opened(text_of)
        for each in self._waiting or [episode]:
            self._write(self._recorder, each)
        self._waiting = []

    def _opened(self, text_of: Callable[[int], str] | None) -> Recorder:
        if self.folder is not None and not is_claimed(self.folder):
            ((self._count,),) = read(self.folder, "SELECT count(*) FROM episodes")
            return Recorder.open(self.folder, text_of=text_of)
        self.folder, self._count = new_run_folder(self._root, self._name), 0
        recorder = Recorder.create(self.folder, dump(self._config), text_of)
        recorder.event(0, EVENT, f"Evaluation of {self._target}.", {"key": self._key})
        return recorder

    def _write(self, recorder: Recorder, episode: Episode) -> None:
        self._count -= recorder.forget_episode(episode.level_seed, episode.member)
        if self._count < MOST:
            recorder.episodes(0, [Group((_shortened(episode),))], phase="eval", timed=True)
            recorder.commit()
            self._count += 1

    def invalid_reply(self) -> tuple[str, str]:
        """A reply that was not valid, and what was wrong with it; empty texts if there is none."""
        query = "SELECT reply, problem FROM turns WHERE problem IS NOT NULL ORDER BY id LIMIT 1"
        with suppress(RagenError):
            for reply, problem in read(self.folder, query) if self.folder else ():
                return reply, problem
        return "", ""

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write the result of the whole evaluation, if an episode was played or it is missing."""
        if self._recorder is None and self.folder is not None and not is_claimed(self.folder):
            if read(self.folder, "SELECT 1 FROM evaluations"):
                return
            self._recorder = Recorder.open(self.folder)
        if self._recorder is not None:
            self._recorder.evaluation(0, record)
            self._recorder.commit()

    def close(self) -> None:
        """Close the database."""
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def evaluation_config(
    config: Config, target: str, episodes: int, seed: int, temperature: float
) -> Config:
    """The settings of a run without steps that begins with the target and evaluates it."""
    model = resolve_model(target, config.env.name) if run_of(target) else target
    played = {"eval.episodes": episodes, "eval.temperature": temperature}
    return changed(config, {"steps": 0, "seed": seed, "model.path": model, **played})


def _file_name(name: str) -> str:
    r"""The last part of a name, with characters that are plain in any file's name.

    Example:
        >>> _file_name("models/smollm2/"), _file_name("my envs/maze.py:Maze"), _file_name("..")
        ('smollm2', 'Maze', 'eval')
        >>> _file_name("openenv:http://host:8000"), _file_name("openenv:registry/echo:latest")
        ('openenv-host', 'echo')
    """
    last = short_name(name) if name.count(":") > 1 else re.split(r"[/\\:]", name.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", last).strip("-.")[:60] or "eval"


def _shortened(episode: Episode) -> Episode:
    """The episode without the rest of very long replies."""
    if all(len(turn.completion.text) <= LONGEST for turn in episode.turns):
        return episode
    return replace(episode, turns=tuple(map(_shortened_turn, episode.turns)))


def _shortened_turn(turn: Turn) -> Turn:
    messages = tuple({**m, "content": _beginning(m["content"])} for m in turn.prompt.messages)
    return replace(
        turn,
        prompt=replace(turn.prompt, messages=messages),
        completion=replace(turn.completion, text=_beginning(turn.completion.text)),
        thought=turn.thought and _beginning(turn.thought),
        actions_asked=tuple(map(_beginning, turn.actions_asked[:MOST_ACTIONS])),
        results=turn.results and tuple(map(_beginning, turn.results[:MOST_ACTIONS])),
    )


def _beginning(text: str) -> str:
    left = len(text) - LONGEST
    return text if left <= 0 else f"{text[:LONGEST]}… ({left:,} more characters)"
