"""The common parts of commands: their record, the argument parser and output to the terminal.

Argparse reads a command's own options. Config keys (``--section.key value``) are removed before it
sees them, because an unknown key is refused with the nearest name. Every mistake is a `RagenError`
of one line. A command imports its heavy packages (torch, pydantic, even rich) itself, so help and
error messages do not wait for them.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from typing_extensions import override

from ragen.core.errors import RagenError, printable

if TYPE_CHECKING:
    from rich.console import Console

Overrides = dict[str, Any]
"""Values by config key, as typed."""

LONGEST_LINE = 1500
"""Characters of an error message; the middle of a longer one is left out."""
LARGEST = 2**31 - 1
"""The largest whole number of an option without a bound of its own."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting and accepts no abbreviations."""

    def __init__(self, prog: str, description: str = "") -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, allow_abbrev=False, formatter_class=raw)

    @override
    def error(self, message: str) -> Never:
        raise RagenError(f"{message}; see {self.prog} --help")

    def take(
        self,
        name: str,
        metavar: str,
        text: str,
        kind: Callable[[str], Any] = str,
        default: Any = None,
        **more: Any,
    ) -> None:
        """Add an argument with a value; its help ends with the default."""
        shown = text if default is None else f"{text} [{default}]"
        self.add_argument(name, metavar=metavar, help=shown, type=kind, default=default, **more)

    def flag(self, name: str, text: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=text)

    def output_flags(self) -> None:
        """Add the output options of long-running commands."""
        self.flag("--json", "end with the result as one JSON line")
        self.flag("--quiet", "show no progress")

    def options(self) -> set[str]:
        """The names of this parser's options, such as ``--json``."""
        return {name for action in self._actions for name in action.option_strings}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``ragen``.

    `summary` is its line in the overview. `options` adds its options to a parser, and `run` returns
    the exit code. `takes_keys` says that config keys may be set. `epilog` returns a text under the
    help; it is called only when the help is shown, because it takes time.
    """

    summary: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace, Overrides], int]
    takes_keys: bool = False
    epilog: Callable[[], str] | None = None


def parse(
    parser: Parser, arguments: Sequence[str], takes_keys: bool
) -> tuple[Namespace, Overrides]:
    """Read a command's own options and the config keys that were set."""
    from ragen.config.keys import TABLES, expected, keys, parse_value

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
        if key.partition(".")[0] == "sources":
            raise RagenError(f"{name}: RAGEN fills in sources when a run begins; leave it out")
        overrides[key] = parse_value(key, value)
        if overrides[key] == {} and key in TABLES:
            raise RagenError(f"{name} {{}} sets nothing; set {name}.NAME")
    return parser.parse_args(own), overrides


def _key(name: str, options: set[str]) -> str:
    from ragen.config.keys import PARAMS, canonical_key, table_of

    given = name.removeprefix("--")
    # The names of sections, keys and parameters have no hyphens; another entry may be a path.
    table = table_of(given.replace("-", "_"))
    inside = "" if table in (None, PARAMS) else given[len(table) :]
    try:
        return canonical_key(given.removesuffix(inside).replace("-", "_") + inside)
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
    """The console for tables, episodes and progress; it prints text as `printable` gives it."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Terminal(Console):
        @override
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(printable(text), style)

    return Terminal(stderr=stderr)


def complain(text: str) -> None:
    """Print one line on standard error, as `printable` gives it, shortened inside."""
    text = printable(" ".join(text.split()))
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE // 2]} … {text[-LONGEST_LINE // 2 :]}"
    print(f"ragen: {text}", file=sys.stderr)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that takes a whole number of this range."""

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
        if number is None or not least <= number <= (LARGEST if most is None else most):
            bounds = f"≥ {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}")
        return number

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """The type of an option that takes a number of this range."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            bounds = f"≥ {least:g} and ≤ {most:g}"
            raise argparse.ArgumentTypeError(f"expected a number {bounds}")
        return value

    return parse


def program() -> str:
    """The command that starts RAGEN from the current folder, as it is typed."""
    if shutil.which("ragen"):
        return "ragen"
    script = Path(sys.executable).with_name("ragen")
    with suppress(FileNotFoundError):  # the current folder was removed
        return shlex.quote(os.path.relpath(script))
    return shlex.quote(str(script))
