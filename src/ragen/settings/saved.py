"""A run's settings: the copy in its database, and `config.toml`, which has to agree with it.

Every text that `config.toml` has had is a row of the table `settings`, and the last one is valid. A
file that was cut, damaged or edited is refused, with the command that restores it.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from ragen.config.config import Config
from ragen.config.keys import Flat, parse_value, show
from ragen.config.reading import flatten, parse_config, read_config
from ragen.core.errors import RagenError
from ragen.core.files import file_errors, whole_file
from ragen.storage.database import CONFIG, DATABASE, reading_database, restoring_config
from ragen.storage.recorder import Recorder

MOST_NAMED = 4


def run_config(run: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The settings of a run, from its database; a folder without one has only `config.toml`.

    Raises:
        RagenError: `config.toml` is missing, cannot be read, or has other values than the run. The
            values of `overrides`, which are about to change, may be in the file already.
    """
    texts = _texts(run)
    if not texts:
        return read_config(run / CONFIG)
    config = parse_config(texts[-1], f"{run}'s settings")
    _refuse_edited(run, flatten(config), overrides or {})
    return config


def write_settings(recorder: Recorder, text: str) -> None:
    """Make `text` the settings of a run, in `config.toml` and in the database.

    The file is written first: if the process is killed in between, the same command goes on.
    """
    path = recorder.folder / CONFIG
    with (
        file_errors("write", path, f"free space there or make {path.parent} writable"),
        whole_file(path) as temporary,
    ):
        temporary.write_text(text, encoding="utf-8")
    recorder.keep_settings(text)


def differing(one: Flat, other: Flat) -> dict[str, tuple[Any, Any]]:
    """The keys with different values in two configs, with both; a missing entry is ``None``."""
    pairs = {key: (one.get(key), other.get(key)) for key in {**one, **other}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def changes_in_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """The old and the new value of each key, such as ``steps from 3 to 4``."""
    return ", ".join(f"{key} from {_show(a)} to {_show(b)}" for key, (a, b) in changes.items())


def _texts(run: Path) -> list[str]:
    if not (run / DATABASE).is_file():
        return []
    with reading_database(run) as connection:
        return kept_texts(connection)


def kept_texts(connection: sqlite3.Connection) -> list[str]:
    """Every text that `config.toml` has had, in order."""
    return [str(text) for (text,) in connection.execute("SELECT text FROM settings ORDER BY id")]


def _refuse_edited(run: Path, own: Flat, overrides: Mapping[str, Any]) -> None:
    """Refuse a `config.toml` that cannot be read, or has other values than the run's `own`."""
    path, restore = run / CONFIG, restoring_config(run)
    if not path.is_file():
        is_there = os.path.lexists(path)
        wrong = "is no file; move it away, and write it again" if is_there else "is missing"
        raise RagenError(f"{path} {wrong}: {restore}")
    try:
        found = flatten(read_config(path))
    except RagenError as error:
        raise RagenError(f"{error}; to restore it: {restore}") from None
    edits = {key: value for key, (_, value) in differing(own, found).items()}
    if all(key in overrides and overrides[key] == value for key, value in edits.items()):
        return
    named = [f"{key} = {_show(edits[key])}, not {_show(own.get(key))}" for key in edits]
    more = f", and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    change = ""
    if not more and not any(value is None or isinstance(value, dict) for value in edits.values()):
        options = " ".join(f"--{key} {_word(typed(key, value))}" for key, value in edits.items())
        change = f" (to change them: ragen resume {_word(run)} {options})"
    raise RagenError(
        f"{path} has other values than the run: {'; '.join(named[:MOST_NAMED])}{more}{change}; "
        f"to keep the run's: {restore}"
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
