"""FrozenLake's demonstrators: thoughts that read the map cell by cell, and walks without an aim.

A careful thought finds the player and the goal, then names each cell and what it holds before the
direction that leads there: `` P d0 G b1 : c0 O d1 _ Right c1 _ Up b1 G Up``. A direction is
written only once its cell is accepted, so the answer is the thought's directions in their order, and
no move is ever taken back. A walk names what it steps on just as truly, but does not look for the
goal: `` P d0 : c0 O Up``.
"""

from __future__ import annotations

import numpy as np

from ragen.demonstrations import Piece, Reply, Writer, answer
from ragen.env import Env, pick
from ragen.envs.frozen_lake import FrozenLake, Lake
from ragen.envs.grid import cell_name
from ragen.prompt import Limits

LONGEST_WALK = 4


def still_lake(careful: float, look: int = 3, walks_trained: bool = True) -> Writer:
    """Turns on ice that does not slip: a share of them careful, the others walks.

    Args:
        careful: Share of careful turns.
        look: Moves of a careful turn at most.
        walks_trained: Whether walks are to be learnt, or only bring the player to odd places.
    """

    def write(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        assert isinstance(env, FrozenLake)
        if generator.random() < careful:
            return [Piece(careful_turn(env, min(look, limits.actions_left), generator))]
        moves = min(1 + int(generator.random() * LONGEST_WALK), limits.actions_left)
        return [Piece(walk(env, moves, generator), walks_trained)]

    return write


def careful_turn(env: FrozenLake, moves: int, generator: np.random.Generator) -> str:
    """Up to `moves` moves along a shortest path; holes that tempt on the way are looked at first.

    Example:
        >>> lake = FrozenLake(success_probability=1.0)
        >>> print(lake.reset(seed=123)[0])
        ___P
        __O_
        ___O
        _G_O
        >>> careful_turn(lake, 2, np.random.Generator(np.random.PCG64(0)))
        ' P a3 G d1 : a2 _ Left b2 O a1 _ Left</think><answer>Left || Left</answer>'
    """
    lake, here = env.lake, env.player
    steps = lake.distances()
    said = f" P {name_of(lake, here)} G {name_of(lake, lake.goal)} :"
    actions: list[str] = []
    while len(actions) < moves and here != lake.goal:
        ways = neighbours(env, here)
        action, ahead = pick(generator, [way for way in ways if steps[way[1]] < steps[here]])
        nearer = straight_line(lake, ahead) < straight_line(lake, here)
        for _, cell in ways:
            tempts = straight_line(lake, cell) < straight_line(lake, here)
            # Beside a good cell a hole is looked at now and then, before a detour always.
            if cell in lake.holes and tempts and (not nearer or generator.random() < 0.5):
                said += fact(env, cell)
        said += f"{fact(env, ahead)} {action}"
        actions.append(action)
        here = ahead
    return said + answer(actions)


def walk(env: FrozenLake, moves: int, generator: np.random.Generator) -> str:
    """A random walk: whatever cell is looked at is stepped on, until a hole or the goal ends it.

    Example:
        >>> lake = FrozenLake()
        >>> _ = lake.reset(seed=123)
        >>> walk(lake, 2, np.random.Generator(np.random.PCG64(0)))
        ' P a3 : b3 _ Down b2 O Left</think><answer>Down || Left</answer>'
    """
    lake, here = env.lake, env.player
    said = f" P {name_of(lake, here)} :"
    actions: list[str] = []
    while len(actions) < moves and here != lake.goal and here not in lake.holes:
        action, here = pick(generator, neighbours(env, here))
        said += f"{fact(env, here)} {action}"
        actions.append(action)
    return said + answer(actions)


def neighbours(env: FrozenLake, cell: int) -> list[tuple[str, int]]:
    """The actions that lead somewhere if nothing slips, and where."""
    ways = [(name, env.lake.neighbour(cell, index)) for index, name in enumerate(env.actions)]
    return [way for way in ways if way[1] != cell]


def fact(env: FrozenLake, cell: int) -> str:
    """What the map says of a cell, as `` b2 O``."""
    return f" {name_of(env.lake, cell)} {env.symbol(cell)}"


def name_of(lake: Lake, cell: int) -> str:
    """The cell's name in the map."""
    return cell_name(*divmod(cell, lake.size))


def straight_line(lake: Lake, cell: int) -> int:
    """Steps from a cell to the goal if there were no holes."""
    (row, col), (goal_row, goal_col) = divmod(cell, lake.size), divmod(lake.goal, lake.size)
    return abs(row - goal_row) + abs(col - goal_col)
