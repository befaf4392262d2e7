"""The command line, ``ragen COMMAND …``: each command calls one function and shows its result.

Results go to standard output, progress and errors to standard error. A user's mistake is one line
and exit code 2; a run that the guard stopped exits with 3; an interrupted run says how to go on and
exits with 130 (Ctrl-C) or 143 (SIGTERM). A traceback always means a bug.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ragen.cli import evaluations as cli_evaluations
from ragen.cli import runs as cli_runs
from ragen.cli import tools as cli_tools
from ragen.cli import view as cli_viewer
from ragen.cli.command import complain
from ragen.core.errors import RagenError

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes: 128 + the signal's number, as shells have it; an error brings its own."""

COMMANDS = cli_runs.COMMANDS | cli_evaluations.COMMANDS | cli_viewer.COMMANDS | cli_tools.COMMANDS
"""All commands, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    with _sigterm_as_ctrl_c() as terminated:
        try:
            return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        except RagenError as error:
            return _mistake(error)
        except ExceptionGroup as group:
            mistakes, bugs = group.split(RagenError)
            if mistakes is None or bugs is not None:
                raise
            return _mistake(mistakes)
        except KeyboardInterrupt as error:
            complain(str(error) or "interrupted")
            return TERMINATED if terminated else INTERRUPTED
        except BrokenPipeError:
            # The reader (head, less) has seen enough; keep Python from flushing into a closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _mistake(error: RagenError | ExceptionGroup[RagenError]) -> int:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    complain(" ".join(str(error).split()))
    return error.exit_code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"ragen {version('ragen')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise RagenError(f"unknown command {name!r}{_nearest(name)}; ragen --help lists them all")
    from ragen.cli.arguments import Parser, keys_help, parse

    command = COMMANDS[name]
    asks_help = any(argument in ("-h", "--help") for argument in rest)
    epilog = keys_help() if command.keys_in_help and asks_help else ""
    parser = Parser(f"ragen {name}", command.summary, epilog)
    command.options(parser)
    return command.run(*parse(parser, rest, command.takes_keys))


def _overview() -> str:
    lines = [
        "RAGEN trains and evaluates LLM agents with multi-turn reinforcement learning.",
        "",
        "usage: ragen COMMAND [options]",
        "",
        *(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()),
        "",
        "Begin with:  ragen train bandit        (seconds on a laptop)",
        "More:        ragen COMMAND --help",
    ]
    return "\n".join(lines)


def _nearest(name: str) -> str:
    import difflib

    found = difflib.get_close_matches(name, COMMANDS, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Let SIGTERM take Ctrl-C's way inside; what is yielded is no longer empty once it came."""
    came: list[int] = []

    def pass_on(number: int, _: object) -> None:
        came.append(number)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
            return
        from ragen.core.stopping import cancel_running  # a background job of a script

        if not cancel_running():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
