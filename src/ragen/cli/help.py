"""Help texts: the overview, recipes, algorithms and config keys, and shell completion."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType

from ragen.cli.command import Command, Parser

FIRST_KEYS = (
    *("env", "model", "algorithm", "seed", "steps", "threads"),
    *("env.max_turns", "env.max_actions", "prompt.think", "model.dtype", "lora.rank"),
    *("rollout.num_groups", "rollout.group_size", "rollout.max_tokens", "rollout.temperature"),
    *("filter.value", "loss.kl", "update.lr", "update.critic_lr", "update.minibatch_episodes"),
    *("eval.every", "eval.episodes", "checkpoint.every"),
)
"""The common config keys; ``ragen train --help`` shows them."""

SHELLS = ("bash", "zsh", "fish")


def overview(commands: Mapping[str, Command]) -> str:
    """The text of ``ragen --help``."""
    lines = [
        "RAGEN trains and evaluates LLM agents with multi-turn reinforcement learning.",
        "",
        "usage: ragen COMMAND [options]",
        "",
        *(f"  {name:<11} {command.summary}" for name, command in commands.items()),
        "",
        "Begin with:  ragen train bandit        (seconds on a laptop)",
        "More:        ragen help COMMAND, or one of: ragen help recipes, algorithms, keys",
    ]
    return "\n".join(lines)


def train_epilog() -> str:
    """The recipes and the common keys, under the help of ``ragen train``."""
    from ragen.config.reading import recipes

    width = _width()
    names = textwrap.fill(", ".join(recipes()), width, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(
        [
            "recipes (ragen help recipes describes them; a path to a .toml works too):",
            names,
            "\ncommon keys (ragen help keys lists all):",
            *_keys(FIRST_KEYS, width),
        ]
    )


def recipes_help() -> str:
    """Every recipe with its first comment."""
    from ragen.config.reading import recipes

    return _listing("recipes: ragen train RECIPE", recipes())


def algorithms_help() -> str:
    """Every algorithm preset with its first comment."""
    from ragen.config.reading import presets

    return _listing("algorithms: ragen train RECIPE --algorithm NAME", presets())


def keys_help() -> str:
    """Every config key with its type and its default."""
    from ragen.config.keys import keys

    title = "keys, each with its type and its default (a preset or recipe may change it):"
    return "\n".join([title, *_keys([key for key in keys() if key != "recipe"], _width())])


TOPICS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"recipes": recipes_help, "algorithms": algorithms_help, "keys": keys_help}
)
"""The topics of ``ragen help``, in addition to the commands."""


def completion(commands: Mapping[str, Command], shell: str) -> str:
    """A completion script for one of `SHELLS`: commands, options, keys, recipes and files."""
    import shtab

    from ragen.config.keys import keys
    from ragen.config.reading import recipes

    root = Parser("ragen")
    branches = root.add_subparsers(dest="command", parser_class=Parser)
    for name, command in commands.items():
        # shtab treats the summary as a format string.
        parser = branches.add_parser(name, help=command.summary.replace("%", "%%"))
        command.options(parser)
        for action in parser._actions:
            if action.dest == "recipe":
                action.choices = list(recipes())
            elif action.type is Path:
                kind = shtab.FILE if action.metavar == "FILE" else shtab.DIRECTORY
                action.complete = kind  # type: ignore[attr-defined]
        if command.takes_keys:
            known = parser.options()
            for key in keys():
                if f"--{key}" not in known and key != "recipe":
                    parser.add_argument(f"--{key}", metavar="VALUE")
    return str(shtab.complete(root, shell=shell))


def _keys(names: Sequence[str], width: int) -> Iterator[str]:
    from ragen.config.keys import SHORT, TABLES, expected, keys

    section = None
    full = {long: short for short, long in SHORT.items()}
    for name in names:
        key = SHORT.get(name, name)
        field = keys()[key]
        if name == key and key.rpartition(".")[0] != section and len(names) > len(FIRST_KEYS):
            section = key.rpartition(".")[0]
            yield ""
        value = field.default
        plain = str(value).lower() if isinstance(value, bool) else str(value)
        title = f"--{name}" + (f", --{full[key]}" if name == key and key in full else "")
        takes = f"{expected(key)} [{plain}]. "
        if key in TABLES:
            title, takes = f"--{key}.NAME", ""
        yield from _entry(title, f"{takes}{field.description or ''}", width)


def _listing(title: str, files: Mapping[str, Traversable]) -> str:
    from ragen.config.reading import first_comment

    lines = [title]
    for name, file in files.items():
        lines += _entry(name, first_comment(file), _width())
    return "\n".join(lines)


def _entry(name: str, text: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(
        text,
        width,
        initial_indent=f"  {name:<27} ",
        subsequent_indent=" " * 30,
        break_on_hyphens=False,
    )
    return wrapped or [f"  {name}"]


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 110)
