"""The code from outside that a config names, and whether it has changed since a run began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.extensions import KINDS, load
from ragen.core.errors import RagenError
from ragen.core.plugins import installed


def value_of(config: Config, key: str) -> str | dict[str, Any]:
    """The name, or the table by name, under one of the keys of `KINDS`."""
    section, name = key.split(".")
    value: str | dict[str, Any] = getattr(getattr(config, section), name)
    return value


def sources(config: Config) -> dict[str, str]:
    """What identifies the code behind every name from outside: a file's hash or a version.

    Raises:
        RagenError: A name cannot be loaded.
    """
    found = {}
    for key, kind in KINDS.items():
        value = value_of(config, key)
        for name in [value] if isinstance(value, str) else value:
            if ":" in name or (name not in kind.names and name in installed(kind.group)):
                found[name] = load(name, kind).source
    return found


def refuse_changed(config: Config) -> None:
    """Refuse to resume a run whose code from outside has changed.

    Raises:
        RagenError: A name cannot be loaded, or its code is not the code that the run began with.
    """
    for name, now in sources(config).items():
        before = config.sources.get(name)
        if before != now:
            code = name if name.startswith("python:") else name.rpartition(":")[0] or name
            raise RagenError(
                f"{code} has changed since the run began ({before} then, {now} now): restore it, "
                "or start a new run"
            )


def absolute(name: str) -> str:
    """A reference with the full path of its file, so that it holds in any folder.

    Example:
        >>> absolute("ppo_clip"), absolute("/tmp/mine.py:loss")
        ('ppo_clip', '/tmp/mine.py:loss')
    """
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if file.endswith(".py") else name
