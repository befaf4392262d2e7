"""Reading a command line: a command's own options, and any config key as ``--section.key value``.

argparse reads the options; keys are taken out before it sees them, since they depend on the preset
and the environment and must be refused by the nearest name. Every mistake is a `RagenError` of one
line.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Never

from typing_extensions import override

from ragen.config.reading import (
    SHORT,
    TABLES,
    canonical_key,
    expected,
    first_comment,
    keys,
    parse_value,
    presets,
    recipes,
)
from ragen.core.errors import RagenError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting, and abbreviates nothing."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    @override
    def error(self, message: str) -> Never:
        raise RagenError(f"{message}; {self.prog} --help says how")

    def options(self) -> set[str]:
        """The names this parser knows, such as ``--json``."""
        return {name for action in self._actions for name in action.option_strings}


def parse(
    parser: Parser, arguments: Sequence[str], takes_keys: bool
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The command's own options, and the config keys that were set.

    Raises:
        RagenError: An option or key that does not exist, or a value that does not fit.

    Example:
        >>> parser = Parser("ragen train", "")
        >>> _ = parser.add_argument("recipe")
        >>> parse(parser, ["--update.lr", "3e-4", "bandit", "--seed=7"], takes_keys=True)
        (Namespace(recipe='bandit'), {'update.lr': 0.0003, 'seed': 7})
    """
    own: list[str] = []
    overrides: dict[str, Any] = {}
    known = parser.options()
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name == "--" or name in known:
            own.append(argument)
            continue
        if not takes_keys:
            near = _nearest(name, known) or f"; {parser.prog} --help lists them all"
            raise RagenError(f"unknown option {name}{near}")
        key = _key(name, known)
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                takes = f": {expected(keys()[key])}" if key in keys() else ""
                raise RagenError(f"{name} needs a value{takes}")
        overrides[key] = parse_value(key, value)
    return parser.parse_args(own), overrides


def keys_help() -> str:
    """Recipes, presets and every key, for ``ragen train --help``."""
    return "\n".join(_help_lines(min(shutil.get_terminal_size().columns, 110)))


def _key(name: str, options: set[str]) -> str:
    try:
        return canonical_key(name.removeprefix("--").replace("-", "_"))
    except RagenError as error:
        near = _nearest(name, options)
        if near and "section" not in str(error):
            raise RagenError(f"unknown option {name}{near}") from None
        raise


def _nearest(name: str, options: set[str]) -> str:
    found = difflib.get_close_matches(name, sorted(options), 1, 0.75)
    return f"; did you mean {found[0]}?" if found else ""


def _help_lines(width: int) -> Iterator[str]:
    yield "recipes (or a path to a .toml):"
    for name, file in recipes().items():
        yield from _entry(name, first_comment(file), width)
    yield "\nalgorithms:"
    for name, file in presets().items():
        yield from _entry(name, first_comment(file), width)
    yield "\nkeys, each with what it takes and its default (a preset or recipe may say otherwise):"
    section = ""
    for key, field in keys().items():
        if key == "recipe":
            continue
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            yield ""
        default = f" [{_plain(field.default)}]" if field.default_factory is None else ""
        short = "".join(f", --{name}" for name, full in SHORT.items() if full == key)
        name, takes = f"--{key}{short}", f"{expected(field)}{default}. "
        if key in TABLES:
            name, takes = f"--{key}.NAME", ""
        text = f"{takes}{field.description or ''}"
        yield from _entry(name, text, width)


def _entry(name: str, text: str, width: int) -> list[str]:
    indent = " " * 30
    wrapped = textwrap.wrap(
        text,
        width,
        initial_indent=f"  {name:<27} ",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return wrapped or [f"  {name}"]


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
