"""The wanderer: random moves on a map, with thoughts in plain English that describe the map.

A thought says where the player and its aims are, in which direction they lie and, on a lake, what
the neighbouring cells hold. Then it goes to one of these at random::

    I am at (1, 1). The goal at (2, 1) is down. Left (1, 0) is free, Down (2, 1) is the goal,
    Right (1, 2) is a hole, Up (0, 1) is free. I go Right.

The word for the chosen move is not trained. So a language model learns the form of a reply and to
read the map, but no aim and no plan, and it keeps what it knows about words: a model that is
trained to choose at random learns to ignore its own description. The positions are as in the
observation ``coord``.
"""

from __future__ import annotations

import numpy as np

from ragen.bases.demonstrations import Piece, Reply, answer
from ragen.chat.prompt import Limits
from ragen.core.errors import RagenError
from ragen.envs.contract import Env, pick
from ragen.envs.worlds.frozen_lake import MOVES, FrozenLake
from ragen.envs.worlds.grid import Cell, GridEnv, cells_of
from ragen.envs.worlds.sokoban import Sokoban


def wanderer(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """One random move inside the map, after a description of the map; its choice is not trained."""
    if isinstance(env, FrozenLake):
        (here,), (goal,) = places(env, "Player"), places(env, "Goal")
        holds = dict.fromkeys(places(env, "Holes"), "a hole") | {goal: "the goal"}
        text = f"I am at {here}. The goal at {goal} is {direction(here, goal)}."
        looks = ", ".join(
            f"{action} {cell} is {holds.get(cell, 'free')}"
            for action, cell in neighbours(env, here).items()
        )
        text += f" {looks}."
    elif isinstance(env, Sokoban) and len(places(env, "Boxes")) == 1:
        (here,), (box,), (target,) = (places(env, mark) for mark in env.marks)
        text = f"I am at {here}. The box at {box} is {direction(here, box)}."
        text += f" From the box, the target at {target} is {direction(box, target)}."
    else:
        raise RagenError("a wanderer plays frozen-lake, and sokoban with one box: take random")
    action = pick(generator, list(neighbours(env, here)))
    chosen = Piece(f" {action}", trained=False)
    return [Piece(f"{text} I go"), chosen, Piece(f".{answer([action])}")]


def places(env: GridEnv, mark: str) -> list[Cell]:
    """The cells that hold a mark."""
    return [cell for cell, symbol in cells_of(env.rows()).items() if symbol in env.marks[mark]]


def neighbours(env: GridEnv, here: Cell) -> dict[str, Cell]:
    """The neighbouring cells that are on the map, by the action towards each."""
    cells, (row, col) = cells_of(env.rows()), here
    moves = ((action, MOVES[action]) for action in env.actions or ())
    ahead = {action: (row + down, col + right) for action, (down, right) in moves}
    return {action: cell for action, cell in ahead.items() if cell in cells}


def direction(start: Cell, end: Cell) -> str:
    """Where a cell lies from another one, such as ``down and left``; ``here`` for itself."""
    down, right = (there - here for here, there in zip(start, end, strict=True))
    parts = ["down" if down > 0 else "up"] if down else []
    parts += ["right" if right > 0 else "left"] if right else []
    return " and ".join(parts) or "here"
