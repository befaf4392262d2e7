"""Every key is set by a preset, a recipe, a study or a command of docs/settings.md."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from ragen.config.keys import canonical_key, keys, parse_value, table_of
from ragen.config.reading import load_preset, load_recipe, merge, presets, recipes

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
COMMANDS = re.findall(r"`ragen train ([^`\n]+ [^`\n]+)` \|$", PAGE.read_text("utf-8"), re.MULTILINE)
FILLED_IN = {"recipe", "sources"}


def options(command: str) -> tuple[str, dict[str, Any]]:
    recipe, *words = shlex.split(command)
    pairs = zip(words[::2], words[1::2], strict=True)
    return recipe, {key[2:]: parse_value(canonical_key(key[2:]), text) for key, text in pairs}


def keys_in_study(tree: Any, prefix: str = "") -> Iterator[str]:
    """The keys in a study's file, in any of its tables."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from (name, f"{prefix}{name}")
            yield from keys_in_study(value, f"{name}.")


def test_every_documented_command_is_valid() -> None:
    assert COMMANDS
    for command in COMMANDS:
        recipe, values = options(command)
        assert merge(recipe, values), command


def test_every_key_is_used_somewhere() -> None:
    used = {key for name in presets() for key in load_preset(name)}
    used |= {key for name in recipes() for key in load_recipe(name)[1]}
    used |= {key for command in COMMANDS for key in options(command)[1]}
    for file in (resources.files("ragen.studies") / "findings").iterdir():
        if file.name.endswith(".toml"):
            used |= set(keys_in_study(tomllib.loads(file.read_text("utf-8"))))
    used |= {table for key in used if (table := table_of(key))}
    assert keys().keys() - used - FILLED_IN == set()
