"""MiniGrid in text: the mission, what is carried, and the grid with a word for each object."""

from __future__ import annotations

from typing import Any

FAMILIES = ("MiniGrid-", "BabyAI-")
"""How the ids of its environments begin."""
ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
FACING = ("east", "south", "west", "north")
ARROWS = (">", "v", "<", "^")
CELLS = {"unseen": "?", "empty": ".", "floor": ".", "wall": "#", "goal": "G", "lava": "~"}
"""Symbols; any other object is a word with its colour, such as ``red-key``."""


def register() -> bool:
    """Register MiniGrid's environments with Gymnasium; returns whether the package is installed."""
    try:
        import minigrid  # noqa: F401 - its import registers them
    except ModuleNotFoundError:
        return False
    return True


def is_one(env: Any) -> bool:
    """True if a bare environment is one of MiniGrid's."""
    return any(
        base.__module__ == "minigrid.minigrid_env" and base.__name__ == "MiniGridEnv"
        for base in type(env).__mro__
    )


def rules(described: str, num_actions: int, view: str) -> str:
    """The rules: description, actions (in some environments only the first three) and symbols."""
    objects = (
        " pickup takes the object in front of you, drop puts it there, toggle opens or closes a "
        "door or a box in front of you (a locked door needs its key), done says that the mission "
        "is completed."
    )
    grid = (
        "The grid shows what you see: you are ^ at the bottom and look up, whichever way you face."
        if view == "agent"
        else "The grid shows everything, north on top; you are the arrow."
    )
    return (
        f"{described}\n"
        "left and right turn you on the spot, forward moves you one cell."
        f"{objects if num_actions == len(ACTIONS) else ''}\n"
        f"{grid} # is a wall, . is free, ? is not seen, G is the goal, ~ is lava."
    ).strip()


def show(env: Any, observation: Any, view: str) -> str:
    """An observation as text; the whole grid comes from the environment itself."""
    if view == "agent":
        image = observation["image"]
        size = len(image)
        agent, arrow = (size // 2, size - 1), "^"
    else:
        image = env.grid.encode()
        agent, arrow = (int(env.agent_pos[0]), int(env.agent_pos[1])), ARROWS[env.agent_dir]
    rows = [
        " ".join(
            arrow if (column, row) == agent else _cell(image[column][row])
            for column in range(len(image))
        )
        for row in range(len(image[0]))
    ]
    held = env.carrying
    carries = "nothing" if held is None else f"a {held.color} {held.type}"
    return "\n".join(
        (
            f"mission: {observation['mission']}",
            f"you face {FACING[int(observation['direction'])]} and carry {carries}",
            *rows,
        )
    )


def _cell(encoded: Any) -> str:
    """The symbol or the word of one cell, from MiniGrid's numbers of its kind, colour and state."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    kind, color, state = map(int, encoded)
    name = IDX_TO_OBJECT[kind]
    if name in CELLS:
        return CELLS[name]
    word = f"{IDX_TO_COLOR[color]}-{name}"
    if name != "door":
        return word
    return f"{next(each for each, number in STATE_TO_IDX.items() if number == state)}-{word}"
