"""MiniGrid: the mission, what is carried, and the grid with a word for each object or a picture."""

from __future__ import annotations

from typing import Any

from ragen.core.pictures import MARK

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


def rules(described: str, num_actions: int, view: str, sees: bool) -> str:
    """The rules: description, actions (in some environments only the first three), what is seen."""
    objects = (
        " pickup takes the object in front of you, drop puts it there, toggle opens or closes a "
        "door or a box in front of you (a locked door needs its key), done says that the mission "
        "is completed."
    )
    what, you = ("picture", "the red arrow") if sees else ("grid", "the arrow")
    if view == "agent":
        you = you if sees else "^"
        shows = f"what you see: you are {you} at the bottom and look up, whichever way you face."
    else:
        shows = f"everything, north on top; you are {you}."
    grid = f"The {what} shows {shows}"
    if not sees:
        grid += " # is a wall, . is free, ? is not seen, G is the goal, ~ is lava."
    return (
        f"{described}\n"
        "left and right turn you on the spot, forward moves you one cell."
        f"{objects if num_actions == len(ACTIONS) else ''}\n"
        f"{grid}"
    ).strip()


def show(env: Any, observation: Any, view: str, sees: bool) -> str:
    """An observation as text; the whole grid comes from the environment itself."""
    held = env.carrying
    carries = "nothing" if held is None else f"a {held.color} {held.type}"
    grid = MARK if sees else _grid(env, observation["image"], view)
    facing = FACING[int(observation["direction"])]
    return f"mission: {observation['mission']}\nyou face {facing} and carry {carries}\n{grid}"


def _grid(env: Any, image: Any, view: str) -> str:
    if view == "agent":
        size = len(image)
        agent, arrow = (size // 2, size - 1), "^"
    else:
        image = env.grid.encode()
        agent, arrow = (int(env.agent_pos[0]), int(env.agent_pos[1])), ARROWS[env.agent_dir]
    return "\n".join(
        " ".join(
            arrow if (column, row) == agent else _cell(image[column][row])
            for column in range(len(image))
        )
        for row in range(len(image[0]))
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
