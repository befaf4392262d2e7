"""The code and tasks from outside that a config names: where they are, and whether they changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.extensions import KINDS, library_of, load
from ragen.config.reading import changed
from ragen.core.errors import RagenError
from ragen.core.plugins import installed
from ragen.envs.adapters.agent import AgentEnv
from ragen.envs.registry import env_class


def value_of(config: Config, key: str) -> str | dict[str, Any]:
    """The name, or the table by name, under one of the keys of `KINDS`."""
    section, name = key.split(".")
    value: str | dict[str, Any] = getattr(getattr(config, section), name)
    return value


def sources(config: Config) -> dict[str, str]:
    """A file's hash or a version, by the name of each piece of code from outside.

    An agent's tasks and its verifier belong to it.
    """
    found = {}
    for key, kind in KINDS.items():
        value = value_of(config, key)
        for name in [value] if isinstance(value, str) else value:
            if ":" in name or (name not in kind.names and name in installed(kind.group)):
                found[name] = load(name, kind).source
    for each in config.by_env().values():
        cls = env_class(each.env.name)
        if issubclass(cls, AgentEnv):
            found |= cls.sources(each.env.params)
    return found


def resolve_paths(config: Config) -> Config:
    """The config with absolute paths of models and code, so that a run resumes in any folder."""
    changes: dict[str, Any] = {}
    for key, path in config.local_models.items():
        if path != "base" and Path(path).exists():
            changes[key] = str(Path(path).resolve())
    for key in KINDS:
        value = value_of(config, key)
        if isinstance(value, str):
            changes[key] = absolute(value)
        else:
            changes[key] = {absolute(entry): each for entry, each in value.items()}
    return changed(config, changes)


def load_code(config: Config) -> Config:
    """The config with the sources of all code from outside, which is loaded and checked.

    Raises:
        RagenError: A name cannot be loaded, a signature is wrong, or an object that was passed in
            Python has lost its name to another one.
    """
    load.cache_clear()  # A file may have been edited: what is recorded is what runs.
    found = changed(config, {"sources": sources(config)})
    for name, source in found.sources.items():
        if name.startswith("python:") and config.sources.get(name, source) != source:
            raise RagenError(
                f"{name} of this config has lost its name to what was passed later: give both "
                "different names, or define them in a file"
            )
    return found


def refuse_changed(config: Config) -> None:
    """Refuse to resume a run whose code from outside has changed.

    Raises:
        RagenError: A name cannot be loaded, or its code is not the code that the run began with.
    """
    for name, now in sources(config).items():
        before = config.sources.get(name)
        if before not in (None, now):  # earlier versions did not record an agent's tasks
            is_whole = name.startswith("python:") or library_of(name)
            code = name if is_whole else name.rpartition(":")[0] or name
            raise RagenError(
                f"{code} has changed since the run began ({before} then, {now} now): restore it, "
                "or start a new run"
            )


def absolute(name: str) -> str:
    """A reference with the full path of its file, so that it holds in any folder."""
    library, file, attribute = parts_of(name)
    if not file:
        return name
    return f"{library}{Path(file).resolve()}" + (f":{attribute}" if attribute else "")


def parts_of(name: str) -> tuple[str, str, str]:
    """The library with its colon, the file and the attribute; empty where a name has none."""
    library = f"{name.partition(':')[0]}:" if library_of(name) else ""
    if library not in ("", "agent:") and name.endswith(".py") and "://" not in name:
        return library, name.removeprefix(library), ""
    file, _, attribute = name.removeprefix(library).rpartition(":")
    return (
        (library, file, attribute) if file.endswith(".py") and "://" not in file else ("", "", "")
    )


def without_folder(name: str, value: Any) -> Any:
    """An environment's parameter; a path in it is shortened to its last part.

    A text is a path if the parameter's name ends in ``path``, or if it is a whole absolute path.

    Example:
        >>> without_folder("path", "data/shop.json"), without_folder("files", ["/home/me/a.txt"])
        ('shop.json', ['a.txt'])
        >>> without_folder("symbols", "a/b"), without_folder("prefix", "/say")
        ('a/b', '/say')
    """
    if isinstance(value, dict):
        return {key: without_folder(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folder(name, each) for each in value]
    if not isinstance(value, str):
        return value
    is_whole = Path(value).is_absolute() and len(Path(value).parts) > 2
    return Path(value).name if is_whole or name.endswith("path") else value
