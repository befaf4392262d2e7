"""Write the cards of RAGEN's environments into `docs/environment-cards.md`, below its marker.

A card is the docstring of the environment's class, its budgets, the defaults of its parameters and
the first observation of one level. So the page says what the code says, and a test compares them.

    python scripts/environment_cards.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ragen.envs.contract import Env
from ragen.envs.registry import ENVS, env_class, make

PAGE = Path(__file__).parents[1] / "docs" / "environment-cards.md"
MARKER = "<!-- scripts/environment_cards.py writes what follows. -->\n"
HEADINGS = ("Observation", "Actions", "Reward", "Ends when")
LEVEL = 123


def write() -> None:
    """Replace what follows the marker of the page."""
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")


def renewed(page: str) -> str:
    """The page with the cards as the code has them now."""
    head, marker, _ = page.partition(MARKER)
    assert marker, f"{PAGE} has lost its marker"
    names: dict[type[Env], list[str]] = {}
    for name in ENVS:
        names.setdefault(env_class(name), []).append(name)
    return head + marker + "".join(f"\n{card(cls, names[cls])}" for cls in names)


def card(cls: type[Env], names: list[str]) -> str:
    """The card of a class that is registered under `names`."""
    text = (inspect.getdoc(cls) or "").replace("``", "`")
    intro, *sections = re.split(r"^([A-Z][a-z ]+):\n", text, flags=re.MULTILINE)
    bodies = {
        heading: inspect.cleandoc(body)
        for heading, body in zip(sections[::2], sections[1::2], strict=True)
    }
    env = make(names[0])
    lines = [f"## {cls.__name__}", intro.strip()]
    lines += [f"**{heading}.** {bodies[heading]}" for heading in HEADINGS]
    lines += [f"**Budgets.** {budgets(env)}", "**Parameters.**"]
    lines.append("\n".join(parameters(cls, bodies["Parameters"])))
    if variants := [variant(name) for name in names if ENVS[name].params]:
        lines.append(f"**Variants.** {'; '.join(variants)}.")
    drawn = ", which the viewer draws as a board" if env.draws else ""
    observation, _ = env.reset(seed=LEVEL)
    lines.append(f"Level {LEVEL} of `{names[0]}`{drawn}:\n\n```text\n{observation}\n```")
    return "\n\n".join(lines) + "\n"


def budgets(env: Env) -> str:
    """The budgets in words."""
    turns = f"{env.max_turns} turns" if env.max_turns > 1 else "One turn"
    if env.actions_per_turn == 1:
        return f"{turns} of one action."
    return f"{turns} of up to {env.actions_per_turn} actions, {env.max_actions} actions in all."


def parameters(cls: type[Env], section: str) -> Iterator[str]:
    """The parameters as a list, each with its default and the other values of a choice."""
    defaults = inspect.signature(cls).parameters
    hints = get_type_hints(cls.__init__)
    for entry in re.split(r"\n(?=\S)", section):
        keys, _, text = entry.partition(": ")
        shown = []
        for key in keys.split(", "):
            default = defaults[key].default
            shown.append(f"`{key}`" if default is None else f"`{key} = {as_toml(default)}`")
            if get_origin(hints[key]) is Literal:
                others = [as_toml(value) for value in get_args(hints[key]) if value != default]
                shown[-1] += f" (or {', '.join(f'`{other}`' for other in others)})"
        yield f"- {', '.join(shown)}: {' '.join(text.split())}"


def variant(name: str) -> str:
    """A registered name with its parameters."""
    params = (f"`{key} = {as_toml(value)}`" for key, value in ENVS[name].params.items())
    return f"`{name}` has {', '.join(params)}"


def as_toml(value: Any) -> str:
    """A parameter's value as a recipe writes it, a number with three digits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.3g}"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    write()
