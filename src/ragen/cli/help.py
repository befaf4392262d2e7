"""Help texts: the overview, recipes, algorithms and config keys, and shell completion."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

from ragen.cli.command import Command, Parser

FIRST_KEYS = (
    "env",
    "model",
    "algorithm",
    "seed",
    "steps",
    "threads",
    "env.max_turns",
    "env.max_actions",
    "prompt.think",
    "model.dtype",
    "lora.rank",
    "rollout.num_groups",
    "rollout.group_size",
    "rollout.max_tokens",
    "rollout.temperature",
    "filter.value",
    "loss.kl",
    "update.lr",
    "update.critic_lr",
    "update.minibatch_episodes",
    "eval.every",
    "eval.episodes",
    "checkpoint.every",
)

SHELLS = ("bash", "zsh", "fish")
TOPICS = ("recipes", "algorithms", "keys")
"""The topics of ``ragen help``, in addition to the commands."""


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

    names = textwrap.wrap(", ".join(recipes()), _width() - 2, break_on_hyphens=False)
    lines = ["recipes (ragen help recipes describes them; a path to a .toml works too):"]
    lines += [f"  {line}" for line in names]
    lines.append("\ncommon keys (ragen help keys lists all):")
    return "\n".join([*lines, *map(_describe, FIRST_KEYS)])


def topic_help(topic: str) -> str:
    """All recipes or algorithms with their first comment, or all keys by section."""
    from ragen.config.keys import keys
    from ragen.config.reading import first_comment, presets, recipes

    if topic == "keys":
        lines = ["keys, each with its type and its default (a preset or recipe may change it):"]
        known = [key for key in keys() if key != "recipe"]
        for _, section in groupby(known, lambda key: key.rpartition(".")[0]):
            lines += ["", *map(_describe, section)]
        return "\n".join(lines)
    title = f"{topic}: ragen train RECIPE"
    if topic == "algorithms":
        title += " --algorithm NAME"
    files = recipes() if topic == "recipes" else presets()
    return "\n".join([title, *(_entry(name, first_comment(file)) for name, file in files.items())])


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


def _describe(name: str) -> str:
    """A key, by its full or short name, with its type, default and meaning."""
    from ragen.config.keys import SHORT, TABLES, expected, keys

    key = SHORT.get(name, name)
    field = keys()[key]
    if key in TABLES:
        return _entry(f"--{key}.NAME", field.description or "")
    value = field.default
    plain = str(value).lower() if isinstance(value, bool) else str(value)
    shorts = [f", --{short}" for short, long in SHORT.items() if long == name]
    title = "".join([f"--{name}", *shorts])
    return _entry(title, f"{expected(key)} [{plain}]. {field.description or ''}")


def _entry(name: str, text: str) -> str:
    fill = partial(textwrap.fill, break_on_hyphens=False)
    first = f"  {name:<27} "
    return fill(text, _width(), initial_indent=first, subsequent_indent=" " * 30) or first


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 110)
