"""What the commands share: the command record, the argument parser and output to the terminal.

Argparse reads a command's own options. Commands that take config keys accept any of them as
``--section.key value``. Keys are removed before argparse sees them, because an unknown key is
refused with the nearest name. Every mistake is a `RagenError` of one line.

The command that needs a heavy package (torch, the environments, pydantic, even rich) imports it, so
help and error messages do not wait for it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from typing_extensions import override

from ragen.core.errors import RagenError

if TYPE_CHECKING:
    from rich.console import Console

Overrides = dict[str, Any]
"""Values by config key, as typed."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting and accepts no abbreviations."""

    def __init__(self, prog: str, description: str = "", epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    @override
    def error(self, message: str) -> Never:
        raise RagenError(f"{message}; see {self.prog} --help")

    def options(self) -> set[str]:
        """The names of this parser's options, such as ``--json``."""
        return {name for action in self._actions for name in action.option_strings}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``ragen``.

    Attributes:
        summary: One line for the overview.
        options: Adds the command's options to a parser.
        run: Takes the options and the config keys that were set; returns the exit code.
        takes_keys: Whether config keys may be set.
        epilog: Returns the text under the command's help, if there is one.
    """

    summary: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace, Overrides], int]
    takes_keys: bool = False
    epilog: Callable[[], str] | None = None


def parse(
    parser: Parser, arguments: Sequence[str], takes_keys: bool
) -> tuple[Namespace, Overrides]:
    """Read a command's own options and the config keys that were set.

    Raises:
        RagenError: An option or key does not exist, or a value does not fit.

    Example:
        >>> parser = Parser("ragen train", "")
        >>> _ = parser.add_argument("recipe")
        >>> parse(parser, ["--update.lr", "3e-4", "bandit", "--seed=7"], takes_keys=True)
        (Namespace(recipe='bandit'), {'update.lr': 0.0003, 'seed': 7})
    """
    from ragen.config.keys import expected, keys, parse_value

    own: list[str] = []
    overrides: Overrides = {}
    known = parser.options()
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name == "--" or name in known:
            own.append(argument)
            continue
        if not takes_keys:
            hint = nearest_option(name, known) or f"; {parser.prog} --help lists them all"
            raise RagenError(f"unknown option {name}{hint}")
        key = _key(name, known)
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                takes = f": {expected(key)}" if key in keys() else ""
                raise RagenError(f"{name} needs a value{takes}")
        overrides[key] = parse_value(key, value)
    return parser.parse_args(own), overrides


def _key(name: str, options: set[str]) -> str:
    from ragen.config.keys import canonical_key

    try:
        return canonical_key(name.removeprefix("--").replace("-", "_"))
    except RagenError as error:
        hint = nearest_option(name, options)
        if hint and "section" not in str(error):
            raise RagenError(f"unknown option {name}{hint}") from None
        raise


def nearest_option(name: str, options: set[str]) -> str:
    """A suggestion for a mistyped option, or nothing."""
    import difflib

    matches = difflib.get_close_matches(name, sorted(options), 1, 0.75)
    return f"; did you mean {matches[0]}?" if matches else ""


def terminal(stderr: bool = False) -> Console:
    """The console for tables and progress."""
    from rich.console import Console

    return Console(stderr=stderr)


def complain(text: str) -> None:
    """Print one line on standard error."""
    print(f"ragen: {text}", file=sys.stderr)


def program() -> str:
    """The command that starts RAGEN from the current folder."""
    if shutil.which("ragen"):
        return "ragen"
    return os.path.relpath(Path(sys.executable).with_name("ragen"))


def output_options(parser: Parser) -> None:
    """Add the output options of long-running commands."""
    parser.add_argument("--json", action="store_true", help="end with the result as one JSON line")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
