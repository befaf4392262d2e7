"""What the commands share: what a command is, and where its words go.

Whatever is heavy (torch, the environments, pydantic, even rich) is imported by the command that
needs it: help and mistakes must not wait for it.
"""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ragen.cli.arguments import Parser

Overrides = dict[str, Any]
"""Values by config key, as typed."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it is for, its options, what it does, whether it takes config keys."""

    summary: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace, Overrides], int]
    takes_keys: bool = False
    keys_in_help: bool = False


def terminal(stderr: bool = False) -> Console:
    """Where tables and progress are drawn."""
    from rich.console import Console

    return Console(stderr=stderr)


def complain(text: str) -> None:
    """One line on standard error."""
    print(f"ragen: {text}", file=sys.stderr)


def program() -> str:
    """How this command is called from here."""
    if shutil.which("ragen"):
        return "ragen"
    return os.path.relpath(Path(sys.executable).with_name("ragen"))


def output_options(parser: Parser) -> None:
    """What commands that take long take alike."""
    parser.add_argument("--json", action="store_true", help="end with the result as one JSON line")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
