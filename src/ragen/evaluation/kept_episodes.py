"""The outcomes and episodes of an evaluation, in a folder like the folder of a run without steps.

`ragen view` shows the folder, and `ragen export --episodes` exports it. Folders are numbered. An
evaluation that continues, after a kill or with more levels, uses its earlier folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ragen.config.extensions import short_name
from ragen.core.errors import RagenError
from ragen.core.types import Episode, Group
from ragen.evaluation.outcomes import Outcome, outcome_of
from ragen.storage.database import CONFIG, DATABASE, is_claimed, new_run_folder, read
from ragen.storage.recorder import Recorder

FOLDER = "evals"
"""The folder of evaluations: in the working folder, or in the run that is evaluated."""

EVENT = "evaluation"
"""The kind of the first event. Its data hold the settings of the evaluation and their key."""

COLUMNS = ", ".join(field.name for field in fields(Outcome))


class KeptEpisodes:
    """The outcomes and episodes of one evaluation.

    They are written as episodes end, under a key of everything that determines them. So a killed
    evaluation goes on where it stopped, and a finished one is read instead of played again.

    The folder is in `out`, a run or a folder for all other targets; ``None`` stores nothing. It is
    made when the first episode was played, so that a mistake leaves no file behind. It is `NAME-1`,
    `NAME-2`, …: an earlier evaluation stays as it is, unless it has the same key. `config_text` has
    the settings of a run without steps that evaluates the target, and `settings` everything that
    determines the outcomes (`targets.outcome_settings`).

    Attributes:
        known: The outcomes that are stored there already, in the order of (level, sample).
        invalid: A reply that was not valid, and what was wrong with it; empty if there is none.
    """

    def __init__(
        self,
        out: Path | None,
        target: str,
        env: str,
        config_text: str,
        settings: Mapping[str, Any],
    ) -> None:
        self._config_text, self._target = config_text, target
        text = json.dumps(settings, sort_keys=True, default=repr)
        self._settings = json.loads(text)
        self._key = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._recorder: Recorder | None = None
        self._waiting: list[Episode] = []
        self.folder: Path | None = None
        self.known: list[Outcome] = []
        self.invalid = "", ""
        self._root = out
        if out is not None:
            is_run = (out / CONFIG).is_file()
            self._root = out / FOLDER if is_run else out
            names = [env] if is_run else [target, env]
            self._name = "-".join(map(_file_name, names))
            self.folder = self._found(self._root)
        if self.folder is not None:
            rows = read(self.folder, f"SELECT {COLUMNS} FROM outcomes ORDER BY level_seed, sample")
            outcomes = [Outcome(*row) for row in rows]
            self.known = [replace(each, success=bool(each.success)) for each in outcomes]
            query = "SELECT reply, problem FROM turns WHERE problem IS NOT NULL ORDER BY id LIMIT 1"
            self.invalid = next(iter(read(self.folder, query)), self.invalid)

    def _found(self, root: Path) -> Path | None:
        """The folder of an earlier part of this evaluation."""
        for folder in sorted(root.glob(f"{self._name}-*")):
            with suppress(RagenError):  # the folder is no run, or damaged: a new one is made
                query = "SELECT data ->> 'key' FROM events WHERE kind = ?"
                if (folder / DATABASE).is_file() and (self._key,) in read(folder, query, (EVENT,)):
                    return folder
        return None

    def add(self, episode: Episode, text_of: Callable[[int], str] | None) -> None:
        """Write an episode over one of the same level and sample; `text_of` decodes one token."""
        for turn in episode.turns:
            if turn.problem is not None and not self.invalid[1]:
                self.invalid = turn.completion.text, turn.problem
        if self._root is None:
            return
        self._waiting.append(episode)
        if self._recorder is None:
            if episode.error is not None or not episode.turns:
                return
            self._recorder = self._opened(self._root, text_of)
        for each in self._waiting:
            self._write(self._recorder, each)
        self._waiting = []

    def _opened(self, root: Path, text_of: Callable[[int], str] | None) -> Recorder:
        if self.folder is not None and not is_claimed(self.folder):
            return Recorder.open(self.folder, text_of=text_of)
        self.folder = new_run_folder(root, self._name)
        recorder = Recorder.create(self.folder, self._config_text, text_of)
        about = {"key": self._key, "settings": self._settings}
        recorder.event(0, EVENT, f"Evaluation of {self._target}.", about)
        return recorder

    def _write(self, recorder: Recorder, episode: Episode) -> None:
        recorder.forget_episode(episode.level_seed, episode.member)
        recorder.episodes(0, [Group((episode,))], phase="eval", timed=True)
        recorder.commit()
        recorder.outcome(asdict(outcome_of(episode)))

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


def _file_name(name: str) -> str:
    r"""The last part of a name, with characters that are plain in any file's name.

    Example:
        >>> _file_name("models/smollm2/"), _file_name("my envs/maze.py:Maze"), _file_name("..")
        ('smollm2', 'Maze', 'eval')
        >>> _file_name("openenv:http://host:8000")
        'openenv-host'
    """
    last = short_name(name) if name.count(":") > 1 else re.split(r"[/\\:]", name.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", last).strip("-.")[:60] or "eval"
