"""FrozenLake's demonstrators: thoughts that read the map, and walks without an aim.

A careful thought finds the player and the goal; before each move it looks at every cell around
(`` b0 a0 O``: from b0 at a0, which holds a hole), and only then says where to go::

     P b0 G c1 : b0 c0 O b0 b1 _ b0 a0 _ Right b1 b0 P b1 c1 G b1 b2 _ b1 a1 O Down

So the answer is the thought's directions in their order, and no move is ever taken back. A walk
looks just as truthfully, but not for the goal, and takes whatever it looks at::

     P b0 : b0 c0 O Down

Where one stands is repeated at each look, so that all a direction depends on is close by; a model
of three layers that has to look for it further back names wrong directions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ragen.envs.contract import Env, pick
from ragen.envs.frozen_lake import FrozenLake, Lake
from ragen.envs.grid import cell_name
from ragen.finetuning.demonstrations import Piece, Reply, Writer, answer
from ragen.rollout.prompt import Limits

LONGEST_WALK = 4
STROLL = 3


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


def still_lake(careful: float, moves: int = 2, walks_trained: bool = True) -> Writer:
    """Turns on ice that does not slip: a share of them careful, the others walks.

    Args:
        careful: Share of careful turns.
        moves: Of a careful turn at most.
        walks_trained: Whether walks are to be learnt, or only bring the player to odd places.
    """
    return turns_of(careful, partial(careful_turn, moves=moves), walks_trained)


def slippery_lake(careful: float, moves: int = 2, walks_trained: bool = True) -> Writer:
    """Turns on ice that slips: a share of them the optimal player's, the others walks.

    Args:
        careful: Share of turns of the optimal player.
        moves: Of such a turn at most: after each slip that is seen, play can be better.
        walks_trained: Whether walks are to be learnt.
    """
    return turns_of(careful, partial(slippery_turn, moves=moves), walks_trained)


def careful_turn(
    env: FrozenLake, limits: Limits, generator: np.random.Generator, moves: int
) -> str:
    """Up to `moves` moves along a shortest path.

    Example:
        >>> lake = FrozenLake(success_probability=1.0)
        >>> print(lake.reset(seed=123)[0])
        ___P
        __O_
        ___O
        _G_O
        >>> generator = np.random.Generator(np.random.PCG64(0))
        >>> careful_turn(lake, Limits(1, 5, 10, 5), generator, moves=1)
        ' P a3 G d1 : a3 a2 _ a3 b3 _ Left</think><answer>Left</answer>'
    """
    lake, here = env.lake, env.player
    steps = lake.distances()
    plan: list[str] = []
    while len(plan) < min(moves, limits.actions_left) and here != lake.goal:
        nearer = [way for way in neighbours(env, here) if steps[way[1]] < steps[here]]
        action, here = pick(generator, nearer)
        plan.append(action)
    return looking_round(env, plan)


def slippery_turn(env: FrozenLake, limits: Limits, _: np.random.Generator, moves: int) -> str:
    """The optimal player's plan of up to `moves` moves."""
    per_turn = min(moves, limits.actions_per_turn)
    return looking_round(env, env.solve(limits.turns_left, limits.actions_left, per_turn))


def looking_round(env: FrozenLake, plan: list[str]) -> str:
    """A plan in words: before each move, a look at every cell around, where a slip may lead too."""
    lake, here = env.lake, env.player
    said = f" P {name_of(lake, here)} G {name_of(lake, lake.goal)} :"
    for action in plan:
        said += "".join(look(env, here, cell) for _, cell in neighbours(env, here)) + f" {action}"
        here = lake.neighbour(here, env.action_index(action))
    return said + answer(plan)


def walk(env: FrozenLake, moves: int, generator: np.random.Generator) -> str:
    """A random walk until the goal or a hole ends it; it looks only where it goes.

    Example:
        >>> lake = FrozenLake()
        >>> _ = lake.reset(seed=123)
        >>> walk(lake, 2, np.random.Generator(np.random.PCG64(0)))
        ' P a3 : a3 b3 _ Down b3 b2 O Left</think><answer>Down || Left</answer>'
    """
    lake, here = env.lake, env.player
    said = f" P {name_of(lake, here)} :"
    plan: list[str] = []
    while len(plan) < moves and here != lake.goal and here not in lake.holes:
        action, ahead = pick(generator, neighbours(env, here))
        said += f"{look(env, here, ahead)} {action}"
        plan.append(action)
        here = ahead
    return said + answer(plan)


def stroll(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """Looks round and goes anywhere but into a hole: reading, geometry, copying, without an aim."""
    assert isinstance(env, FrozenLake)
    lake, here = env.lake, env.player
    plan: list[str] = []
    while len(plan) < STROLL and here != lake.goal:
        dry = [way for way in neighbours(env, here) if way[1] not in lake.holes]
        action, here = pick(generator, dry)
        plan.append(action)
    return [Piece(looking_round(env, plan))]


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


def winding(env: Env) -> bool:
    """Whether a level is one of the harder: four steps or more, or a detour around holes."""
    assert isinstance(env, FrozenLake)
    lake = env.lake
    steps = lake.distances()[lake.start]
    return steps >= 4 or steps > straight_line(lake, lake.start)
