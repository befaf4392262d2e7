"""The command line ``ragen COMMAND …``: each command calls one function and shows its result.

Results go to standard output, progress and errors to standard error. A user's mistake and a limit
of the machine are one line and exit code 2. A run that the guard stopped exits with 3. An
interrupted run names the command that resumes it and exits with 128 + the signal's number, such as
130 (Ctrl-C) or 143 (SIGTERM). If the reader of the output closes it (``| head``), the code is 141.
A traceback always means a bug.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence

from ragen.cli import evaluations, runs, servers, tools
from ragen.cli.command import Command, Overrides, Parser, complain, parse
from ragen.cli.help import SHELLS, TOPICS, completion, overview, topic_help
from ragen.cli.process import drop_output, ending_signals, open_streams, refusal
from ragen.core.errors import RagenError
from ragen.core.files import file_errors

COMMANDS = runs.COMMANDS | evaluations.COMMANDS | servers.COMMANDS | tools.COMMANDS
"""All commands except ``help`` and ``completion``, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    open_streams()
    with ending_signals() as received:
        try:
            code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
            print(end="", flush=True)
            return code
        except BrokenPipeError:  # as head and less do: no other command complains about it
            drop_output()
            return 128 + getattr(signal, "SIGPIPE", 13)  # which Windows lacks
        except (
            ValueError,
            ExceptionGroup,
            MemoryError,
            OSError,
            RuntimeError,
            ImportError,
        ) as error:
            return _complaint(error)
        except KeyboardInterrupt as error:
            complain(str(error) or "interrupted")
            return 128 + (received or [signal.SIGINT])[0]


def _complaint(error: Exception) -> int:
    """Report a mistake or what the machine refused; raise any other exception again."""
    if isinstance(error, ExceptionGroup) and error.split(RagenError)[1] is None:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
    if isinstance(error, RagenError):
        complain(str(error))
        return error.exit_code
    line = refusal(error)
    if line is None:
        raise error
    # Commands add hints to an exception, such as how to resume.
    complain("; ".join([line, *getattr(error, "__notes__", [])]))
    return RagenError.exit_code


def _dispatch(arguments: list[str]) -> int:
    for place, argument in enumerate(arguments, 1):
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in argument):
            raise RagenError(f"argument {place}, {argument!r}, is not UTF-8 text")
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
    options = parse(parser, rest, command.takes_keys)
    with file_errors("find", "the working directory", "change to one that exists"):
        os.getcwd()
    return command.run(*options)


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


if __name__ == "__main__":
    sys.exit(main())
