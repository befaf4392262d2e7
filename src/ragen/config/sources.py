"""The code from outside that a config names, and whether it has changed since a run began."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ragen.config.config import Config
from ragen.config.kinds import KINDS, load
from ragen.core.errors import RagenError
from ragen.core.plugins import installed


def names_of(config: Config, key: str) -> list[str]:
    """The names under one of the keys of `KINDS`.

    Example:
        >>> names_of(Config(), "loss.name"), names_of(Config(), "reward.terms")
        (['ppo_clip'], [])
    """
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    return [value] if isinstance(value, str) else list(value)


def from_outside(config: Config) -> Iterator[tuple[str, str]]:
    """The key and name of everything in a config that is not RAGEN's own."""
    for key, kind in KINDS.items():
        for name in names_of(config, key):
            if ":" in name or (name not in kind.names and name in installed(kind.group)):
                yield key, name


def sources(config: Config) -> dict[str, str]:
    """What identifies the code behind every name from outside: a file's hash or a version.

    Raises:
        RagenError: A name cannot be loaded.

    Example:
        >>> sources(Config())
        {}
    """
    found = {}
    for key, name in from_outside(config):
        provenance = load(name, KINDS[key]).provenance
        found[name] = provenance.get("hash") or " ".join(provenance.values())
    return found


def refuse_changed(config: Config) -> None:
    """Refuse to resume a run whose code from outside has changed.

    Raises:
        RagenError: A name cannot be loaded, or its code is not the code that the run began with.
    """
    for name, now in sources(config).items():
        before = config.sources.get(name)
        if before != now:
            raise RagenError(
                f"{name} has changed since the run began ({before} then, {now} now): restore it, "
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
