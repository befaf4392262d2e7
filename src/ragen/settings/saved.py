"""A run's settings: `config.toml`, and the copy in the database that it is compared with.

Every text that `config.toml` has had is a row of the table `settings`, and the last one is valid.
The state of a checkpoint has the hash of the text that was valid when it was saved. So a file that
was cut, damaged or edited is never taken for the settings of the run.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from ragen.config.config import Config
from ragen.config.keys import Flat, parse_value, show
from ragen.config.reading import changed, dump, flatten, parse_config, read_config, unread
from ragen.config.rules import READ_WITH
from ragen.core.errors import RagenError
from ragen.core.files import file_errors, whole_file
from ragen.storage.checkpoint import hash_text, set_aside
from ragen.storage.database import CONFIG, DATABASE, check_run_folder, reading_database
from ragen.storage.recorder import Recorder

MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run that is to be resumed.

    Attributes:
        text: As `config.toml` has to say them.
        damage: The damage of `config.toml`, which is then written again; empty if there is none.
        is_kept: The database has the text; otherwise only the file has it.
    """

    run: Path
    config: Config
    text: str
    damage: str
    is_kept: bool

    def with_changes(self, overrides: Mapping[str, Any]) -> Config:
        """The settings with other values."""
        config = changed(self.config, overrides)
        for key in set(overrides).intersection(unread(config)):
            raise RagenError(f"{key} has no effect: it takes {READ_WITH[key].words}")
        return config

    def write(
        self, recorder: Recorder, step: int, config: Config, changes: Mapping[str, Sequence[Any]]
    ) -> list[str]:
        """Write the settings file and the events before the run continues with `config`.

        The file is written first, so that the same command has the same result if the process is
        killed in between. A damaged file and changes are recorded as events.

        `changes` are the old and the new value of each key that changes. Returns a line about each
        event.
        """
        lines = []
        is_new = config != self.config
        text = dump(config) if is_new else self.text
        path = self.run / CONFIG
        if self.damage:
            aside = set_aside(path).name if os.path.lexists(path) else None
            moved = f"; what was there is now {aside}" if aside else ""
            lines.append(f"{self.damage}; it is written again from the run's own copy{moved}")
        if self.damage or is_new:
            with (
                file_errors("write", path, f"free space there or make {self.run} writable"),
                whole_file(path) as temporary,
            ):
                temporary.write_text(text, encoding="utf-8")
        if self.damage:
            data = {"reason": self.damage, "set_aside": aside}
            recorder.event(step, "damaged config", lines[0], data)
        if is_new or not self.is_kept:
            recorder.keep_settings(text)
        recorder.settings_hash = hash_text(text)
        if changes:
            words = (f"{key} from {_show(a)} to {_show(b)}" for key, (a, b) in changes.items())
            lines.append(f"changed {', '.join(words)}")
            recorder.event(step, "settings", lines[-1], {"changes": changes})
        return lines


def find_settings(run: Path, expected: str, overrides: Mapping[str, Any]) -> Settings:
    """The settings with which a run is resumed, before `overrides` change them on purpose.

    `expected` is the hash in the state of the checkpoint.
    """
    texts = _texts(run)
    is_kept = expected in map(hash_text, texts)
    if not is_kept:
        check_run_folder(run)
        with file_errors("read", run / CONFIG):
            text = (run / CONFIG).read_text(encoding="utf-8", errors="replace")
        if expected != hash_text(text):
            raise RagenError(
                f"neither {run / CONFIG} nor {run / DATABASE} has the settings that the run's "
                "checkpoint was saved with: restore one of them, or start a new run from its "
                f"policy: ragen train RECIPE --model {_word(run)}"
            )
        texts = [text]
    config = parse_config(texts[-1], f"{run}'s settings")
    damage, edits = _compared(run, texts[-1], config)
    if {key: value for key, value in edits.items() if overrides.get(key) != value}:
        raise RagenError(_differs(run, config, edits))
    return Settings(run, config, texts[-1], damage, is_kept)


def run_config(run: Path) -> Config:
    """The settings of a run, to read it or to play with its policy."""
    texts = _texts(run)
    if not texts:
        return read_config(run / CONFIG)
    config = parse_config(texts[-1], f"{run}'s settings")
    damage, edits = _compared(run, texts[-1], config)
    if damage:
        raise RagenError(f"{damage}; to write it again: ragen resume {_word(run)}")
    if edits:
        raise RagenError(_differs(run, config, edits))
    return config


def differing(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """The keys with different values in two configs, with both; a missing entry is ``None``."""
    one, other = flatten(a), flatten(b)
    pairs = {key: (one.get(key), other.get(key)) for key in {**one, **other}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _texts(run: Path) -> list[str]:
    """Every text that `config.toml` has had; none if there is no database."""
    if not (run / DATABASE).is_file():
        return []
    with reading_database(run) as connection:
        return kept_texts(connection)


def kept_texts(connection: sqlite3.Connection) -> list[str]:
    """Every text that `config.toml` has had, in order."""
    return [str(text) for (text,) in connection.execute("SELECT text FROM settings ORDER BY id")]


def _compared(run: Path, text: str, config: Config) -> tuple[str, Flat]:
    """The problem with `config.toml`, and its values that are not the run's.

    A file that is missing, cut off or no valid config is damaged. Any other difference is an edit.
    """
    path = run / CONFIG
    if not path.is_file():
        return f"{path} is {'no file' if os.path.lexists(path) else 'missing'}", {}
    try:
        found = read_config(path)
        data = path.read_bytes()
    except RagenError as error:
        return str(error), {}
    edits = {key: new for key, (_, new) in differing(config, found).items()}
    if edits and text.encode().startswith(data):
        return f"{path} is cut off", {}
    return "", edits


def _differs(run: Path, config: Config, edits: Flat) -> str:
    own = flatten(config)
    named = [f"{key} = {_show(edits[key])}, not {_show(own.get(key))}" for key in edits]
    more = f", and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    change = ""
    if not more and not any(value is None or isinstance(value, dict) for value in edits.values()):
        options = " ".join(f"--{key} {_word(typed(key, value))}" for key, value in edits.items())
        change = f" (to change them: ragen resume {_word(run)} {options})"
    return (
        f"{run / CONFIG} has other values than the run: {'; '.join(named[:MOST_NAMED])}{more}"
        f"{change}; to keep the run's, move the file away and resume: it is written again"
    )


def _show(value: Any) -> str:
    return "unset" if value is None else show(value)


def typed(key: str, value: Any) -> str:
    """A value as the command line takes it: `parse_value` reads it back.

    Example:
        >>> typed("env.params.flags", [True, "a"]), typed("env.params.name", "true")
        ('[true,"a",]', '"true"')
    """
    if isinstance(value, str) and parse_value(key, value) == value:
        return value
    text = tomli_w.dumps({"value": value}, indent=0)
    return text.removeprefix("value = ").replace("\n", "")


def _word(text: object) -> str:
    return shlex.quote(str(text))
