"""The command line ``ragen COMMAND …``: each command calls one function and shows its result.

Results go to standard output, progress and errors to standard error. A user's mistake is one line
and exit code 2. A run that the guard stopped exits with 3. An interrupted run names the command
that resumes it and exits with 130 (Ctrl-C) or 143 (SIGTERM). A traceback always means a bug.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ragen.cli import evaluations, runs, tools
from ragen.cli.command import Command, Overrides, Parser, complain, parse
from ragen.cli.help import SHELLS, TOPICS, completion, overview, topic_help
from ragen.core.errors import RagenError

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes: 128 + the signal's number, as in shells; an error has its own."""

COMMANDS = runs.COMMANDS | evaluations.COMMANDS | tools.COMMANDS
"""All commands except ``help`` and ``completion``, by name."""


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
            # The reader (head, less) closed the pipe: keep Python from flushing into it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _mistake(error: RagenError | ExceptionGroup[RagenError]) -> int:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    complain(str(error))
    return error.exit_code


def _dispatch(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help") or (name == "help" and not rest):
        print(overview(COMMANDS | ABOUT))
        return 0
    if name in ("-V", "--version"):
        from importlib.metadata import version

        print(f"ragen {version('ragen-rl')}")
        return 0
    if name == "help" and rest[0] not in TOPICS:
        name, rest = rest[0], ["--help"]
    command = (COMMANDS | ABOUT).get(name)
    if command is None:
        from ragen.core.errors import nearest

        hint = nearest(name, [*COMMANDS, *ABOUT, *TOPICS], "ragen --help lists them all")
        raise RagenError(f"unknown command {name!r}{hint}")
    asks_help = any(argument in ("-h", "--help") for argument in rest)
    parser = Parser(f"ragen {name}", command.summary)
    if asks_help and command.epilog is not None:
        parser.epilog = command.epilog()
    command.options(parser)
    if asks_help and command.takes_keys:
        parser.take("--KEY", "VALUE", "any config key, such as --env.max_turns 8 (ragen help keys)")
    return command.run(*parse(parser, rest, command.takes_keys))


def _help_options(parser: Parser) -> None:
    parser.take("topic", "TOPIC", f"a command, or {', '.join(TOPICS)}", choices=TOPICS)


def _help(options: Namespace, _: Overrides) -> int:
    print(topic_help(options.topic))
    return 0


def _completion_options(parser: Parser) -> None:
    parser.take("shell", "SHELL", ", ".join(SHELLS), choices=SHELLS)
    parser.epilog = (
        "bash: ragen completion bash > ~/.local/share/bash-completion/completions/ragen\n"
        "zsh:  ragen completion zsh > DIR/_ragen, with DIR a folder of $fpath\n"
        "fish: ragen completion fish > ~/.config/fish/completions/ragen.fish"
    )


def _completion(options: Namespace, _: Overrides) -> int:
    print(completion(COMMANDS | ABOUT, options.shell))
    return 0


ABOUT: dict[str, Command] = {
    "help": Command("explain a command, or list recipes, algorithms, keys", _help_options, _help),
    "completion": Command("print a completion script", _completion_options, _completion),
}
"""``help`` and ``completion``, which describe the other commands."""


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Handle SIGTERM like Ctrl-C; the yielded list is non-empty once the signal has arrived."""
    received: list[int] = []

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
            return
        from ragen.core.stopping import cancel_running  # a background job of a script

        if not cancel_running():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
