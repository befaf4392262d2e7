"""FrozenLake's demonstrators: thoughts that read the map cell by cell, and walks without an aim.

A careful thought finds the player and the goal, then looks from cell to cell: `` b0 c0 O`` is a
look from b0 at c0, which holds a hole; a direction follows only if that cell is accepted. So the
answer is the thought's directions in their order, and no move is ever taken back::

     P b0 G c1 : b0 c0 O b0 b1 _ Right b1 c1 G Down

A walk looks just as truthfully, but not for the goal, and takes whatever it looks at::

     P b0 : b0 c0 O Down

Where one stands is repeated at each look, so that all a direction depends on is close by: models of
three layers learn it ten times sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ragen.demonstrations import Piece, Reply, Writer, answer
from ragen.env import Env, pick
from ragen.envs.frozen_lake import FrozenLake, Lake
from ragen.envs.grid import cell_name
from ragen.prompt import Limits

LONGEST_WALK = 4


Turn = Callable[[FrozenLake, Limits, np.random.Generator], str]
"""Writes a careful turn."""


def turns_of(careful: float, turn: Turn, walks_trained: bool) -> Writer:
    """A share of careful turns, the others walks."""

    def write(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        assert isinstance(env, FrozenLake)
        if generator.random() < careful:
            return [Piece(turn(env, limits, generator))]
        length = min(1 + int(generator.random() * LONGEST_WALK), limits.actions_left)
        return [Piece(walk(env, length, generator), walks_trained)]

    return write


def still_lake(careful: float, moves: int = 3, walks_trained: bool = True) -> Writer:
    """Turns on ice that does not slip: a share of them careful, the others walks.

    Args:
        careful: Share of careful turns.
        moves: Of a careful turn at most.
        walks_trained: Whether walks are to be learnt, or only bring the player to odd places.
    """
    return turns_of(careful, partial(careful_turn, moves=moves), walks_trained)


def careful_turn(
    env: FrozenLake, limits: Limits, generator: np.random.Generator, moves: int
) -> str:
    """Up to `moves` moves along a shortest path; holes that tempt on the way are looked at first.

    Example:
        >>> lake = FrozenLake(success_probability=1.0)
        >>> print(lake.reset(seed=123)[0])
        ___P
        __O_
        ___O
        _G_O
        >>> generator = np.random.Generator(np.random.PCG64(0))
        >>> careful_turn(lake, Limits(1, 5, 10, 5), generator, moves=2)
        ' P a3 G d1 : a3 a2 _ Left a2 b2 O a2 a1 _ Left</think><answer>Left || Left</answer>'
    """
    lake, here = env.lake, env.player
    steps = lake.distances()
    said = f" P {name_of(lake, here)} G {name_of(lake, lake.goal)} :"
    actions: list[str] = []
    while len(actions) < min(moves, limits.actions_left) and here != lake.goal:
        ways = neighbours(env, here)
        action, ahead = pick(generator, [way for way in ways if steps[way[1]] < steps[here]])
        nearer = straight_line(lake, ahead) < straight_line(lake, here)
        for _, cell in ways:
            tempts = straight_line(lake, cell) < straight_line(lake, here)
            # Beside a good cell a hole is looked at now and then, before a detour always.
            if cell in lake.holes and tempts and (not nearer or generator.random() < 0.5):
                said += look(env, here, cell)
        said += f"{look(env, here, ahead)} {action}"
        actions.append(action)
        here = ahead
    return said + answer(actions)


def slippery_lake(careful: float, moves: int = 2, walks_trained: bool = True) -> Writer:
    """Turns on ice that slips: a share of them the best player's, the others walks.

    Args:
        careful: Share of turns of the best player.
        moves: Of such a turn at most: after each slip that is seen, play can be better.
        walks_trained: Whether walks are to be learnt.
    """
    return turns_of(careful, partial(slippery_turn, moves=moves), walks_trained)


def slippery_turn(env: FrozenLake, limits: Limits, _: np.random.Generator, moves: int) -> str:
    """The best plan of up to `moves` moves; before each, a look at all that a slip may reach.

    Example:
        >>> lake = FrozenLake()
        >>> print(lake.reset(seed=123)[0])
        ___P
        __O_
        ___O
        _G_O
        >>> generator = np.random.Generator(np.random.PCG64(0))
        >>> slippery_turn(lake, Limits(1, 5, 10, 5), generator, moves=1)
        ' P a3 G d1 : a3 a2 _ a3 b3 _ Down</think><answer>Down</answer>'
    """
    lake, here = env.lake, env.player
    actions = env.solve(limits.turns_left, limits.actions_left, min(moves, limits.actions_per_turn))
    said = f" P {name_of(lake, here)} G {name_of(lake, lake.goal)} :"
    for action in actions:
        said += "".join(look(env, here, cell) for _, cell in neighbours(env, here)) + f" {action}"
        here = lake.neighbour(here, env.action_index(action))
    return said + answer(actions)


def walk(
    env: FrozenLake, moves: int, generator: np.random.Generator, over_holes: bool = True
) -> str:
    """A random walk until the goal or a hole ends it.

    Args:
        env: The world.
        moves: At most.
        generator: Where to.
        over_holes: Take whatever cell is looked at; otherwise holes are only looked at.

    Example:
        >>> lake = FrozenLake()
        >>> _ = lake.reset(seed=123)
        >>> walk(lake, 2, np.random.Generator(np.random.PCG64(0)))
        ' P a3 : a3 b3 _ Down b3 b2 O Left</think><answer>Down || Left</answer>'
    """
    lake, here = env.lake, env.player
    said = f" P {name_of(lake, here)} :"
    actions: list[str] = []
    while len(actions) < moves and here != lake.goal and here not in lake.holes:
        action, ahead = pick(generator, neighbours(env, here))
        said += look(env, here, ahead)
        if over_holes or ahead not in lake.holes:
            said += f" {action}"
            actions.append(action)
            here = ahead
    return said + answer(actions)


def stroll(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """A long walk around the holes: reading, geometry and copying, before there is any aim."""
    assert isinstance(env, FrozenLake)
    return [Piece(walk(env, limits.actions_per_turn, generator, over_holes=False))]


def neighbours(env: FrozenLake, cell: int) -> list[tuple[str, int]]:
    """The actions that lead somewhere if nothing slips, and where."""
    ways = [(name, env.lake.neighbour(cell, index)) for index, name in enumerate(env.actions)]
    return [way for way in ways if way[1] != cell]


def look(env: FrozenLake, here: int, cell: int) -> str:
    """From where which cell is looked at, and what the map says of it, as `` b0 c0 O``."""
    return f" {name_of(env.lake, here)} {name_of(env.lake, cell)} {env.symbol(cell)}"


def name_of(lake: Lake, cell: int) -> str:
    """The cell's name in the map."""
    return cell_name(*divmod(cell, lake.size))


def straight_line(lake: Lake, cell: int) -> int:
    """Steps from a cell to the goal if there were no holes."""
    (row, col), (goal_row, goal_col) = divmod(cell, lake.size), divmod(lake.goal, lake.size)
    return abs(row - goal_row) + abs(col - goal_col)
