"""FrozenLake's teachers: careful thoughts that read the map, and random walks.

A careful thought names the player and the goal. Before each move it looks at every neighbouring
cell (`` b0 c0 O``: from b0 at c0, which holds a hole) and only then names the direction::

     P b0 G c1 : b0 c0 O b0 b1 _ b0 a0 _ Right b1 b0 P b1 c1 G b1 b2 _ b1 a1 O Down

So the answer is the thought's directions in order, and none is retracted. A random walk also reads
the map truthfully, but it ignores the goal and enters the cell that it looks at::

     P b0 : b0 c0 O Down

Each look repeats the player's cell, so that everything a direction depends on is nearby. A model of
three layers that has to find it further back names wrong directions.

A wanderer looks at every neighbouring cell, says to which one it goes, and names the direction. The
cell is drawn at random, whatever it holds::

     P b0 G c1 : c0 O b1 _ a0 _ to c0 Down

Both can be written in the parts that VAGEN asks for (arXiv:2510.16907), too, where only the parts
name the goal and all holes, or without a thought::

    <observation> P b0 G c1 O c0</observation> P b0 : b0 c0 O b0 a0 _ b0 b1 _ Right
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ragen.bases.demonstrations import Chart, Piece, Reply, Teacher, answer
from ragen.chat.prompt import Limits
from ragen.envs.contract import Env, pick
from ragen.envs.worlds.frozen_lake import FrozenLake

LONGEST_WALK = 4
SAFE_WALK_MOVES = 3
LONGEST_WANDER = 2
CAREFUL_MOVES = 2
"""Greatest number of moves in a careful turn; shorter turns observe slips earlier."""

CarefulTurn = Callable[[FrozenLake, Limits, np.random.Generator], str]
"""Writes a careful turn: `careful_turn` for ice that does not slip, else `slippery_turn`."""


def lake_turns(turn: CarefulTurn, careful: float, walks_trained: bool = True) -> Teacher:
    """A teacher whose turns are careful with probability `careful` and random walks otherwise.

    Walks that are not trained only lead the player to unusual cells.
    """

    def write(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        assert isinstance(env, FrozenLake)
        if generator.random() < careful:
            return [Piece(turn(env, limits, generator))]
        walk = write_plan(env, _walk(env, limits, generator), careful=False)
        return [Piece(walk, walks_trained)]

    return write


def in_parts(careful: float) -> Teacher:
    """Careful turns and trained walks in the parts of a thought that `GridEnv.thoughts` names."""

    def write(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        assert isinstance(env, FrozenLake)
        is_careful = generator.random() < careful
        plan = (_careful_plan if is_careful else _walk)(env, limits, generator)
        words, end = _plan_in_words(env, plan, is_careful)
        text = f" P {Chart(env).name(env.player)} :{words}"
        if env.thoughts in ("state", "world"):
            text = f"<observation>{_positions(env, env.player)}</observation>{text}"
        if env.thoughts in ("transition", "world"):
            text += f"<prediction>{_positions(env, end)}</prediction>"
        return [Piece(text + answer(plan))]

    return write


def unthinking(teacher: Teacher) -> Teacher:
    """The answers of a teacher, after a pre-filled ``<answer>``."""

    def write(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        (whole,) = teacher(env, limits, generator)
        return [Piece(whole.text.partition("<answer>")[2])]

    return write


def careful_turn(env: FrozenLake, limits: Limits, generator: np.random.Generator) -> str:
    """Up to `CAREFUL_MOVES` moves along a shortest path."""
    return write_plan(env, _careful_plan(env, limits, generator))


def slippery_turn(env: FrozenLake, limits: Limits, _: np.random.Generator) -> str:
    """The optimal player's plan of up to `CAREFUL_MOVES` moves."""
    per_turn = min(CAREFUL_MOVES, limits.actions_per_turn)
    return write_plan(env, env.solve(limits.turns_left, limits.actions_left, per_turn))


def safe_walk(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """A random walk around the holes without a goal: it trains reading, geometry and copying."""
    assert isinstance(env, FrozenLake)
    holes = env.lake.holes
    plan = plan_moves(env, SAFE_WALK_MOVES, generator, lambda _, ahead: ahead not in holes)
    return [Piece(write_plan(env, plan))]


def wander(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
    """One or two random moves, holes and goal included: perception without an aim.

    Example:
        >>> lake = FrozenLake(success_probability=1.0)
        >>> _ = lake.reset(seed=123)
        >>> wander(lake, Limits(1, 5, 10, 1), np.random.Generator(np.random.PCG64(0)))[0].text
        ' P a3 G d1 : a2 _ b3 _ to a2 Left</think><answer>Left</answer>'
    """
    assert isinstance(env, FrozenLake)
    chart, lake, here = Chart(env), env.lake, env.player
    most = min(LONGEST_WANDER, limits.actions_left, limits.actions_per_turn)
    plan = plan_moves(env, 1 + int(generator.random() * most), generator)
    text = f" P {chart.name(here)} G {chart.name(lake.goal)} :"
    for action in plan:
        text += "".join(chart.fact(cell) for _, cell in moves_from(env, here))
        here = lake.neighbours[env.action_index(action)][here]
        text += f" to {chart.name(here)} {action}"
    return [Piece(text + answer(plan))]


def _careful_plan(env: FrozenLake, limits: Limits, generator: np.random.Generator) -> list[str]:
    steps = env.lake.distances()
    most = min(CAREFUL_MOVES, limits.actions_left, limits.actions_per_turn)
    return plan_moves(env, most, generator, lambda a, b: steps[b] < steps[a])


def _walk(env: FrozenLake, limits: Limits, generator: np.random.Generator) -> list[str]:
    most = min(limits.actions_left, limits.actions_per_turn)
    return plan_moves(env, min(1 + int(generator.random() * LONGEST_WALK), most), generator)


def plan_moves(
    env: FrozenLake,
    most: int,
    generator: np.random.Generator,
    accept: Callable[[int, int], bool] = lambda here, ahead: True,
) -> list[str]:
    """At most `most` random moves, to the goal or a hole; `accept` takes the cells of a move."""
    lake, here = env.lake, env.player
    plan: list[str] = []
    while len(plan) < most and here != lake.goal and here not in lake.holes:
        moves = [move for move in moves_from(env, here) if accept(here, move[1])]
        action, here = pick(generator, moves)
        plan.append(action)
    return plan


def write_plan(env: FrozenLake, plan: list[str], careful: bool = True) -> str:
    """A plan in words.

    A careful plan names the goal and looks at every neighbour before a move, since a slip may lead
    to any of them. Any other plan looks only at the cell ahead.
    """
    chart = Chart(env)
    goal = f" G {chart.name(env.lake.goal)}" if careful else ""
    words, _ = _plan_in_words(env, plan, careful)
    return f" P {chart.name(env.player)}{goal} :{words}{answer(plan)}"


def _plan_in_words(env: FrozenLake, plan: list[str], careful: bool) -> tuple[str, int]:
    """The looks and directions of a plan, and the cell where it ends."""
    chart, here, words = Chart(env), env.player, ""
    for action in plan:
        ahead = env.lake.neighbours[env.action_index(action)][here]
        near = [cell for _, cell in moves_from(env, here)] if careful else [ahead]
        words += f"{chart.looks(here, near)} {action}"
        here = ahead
    return words, here


def _positions(env: FrozenLake, player: int) -> str:
    """All that `GridEnv.read_thought` compares: the player, the goal and the holes."""
    chart, lake = Chart(env), env.lake
    holes = "".join(f" O {chart.name(hole)}" for hole in sorted(lake.holes))
    return f" P {chart.name(player)} G {chart.name(lake.goal)}{holes}"


def moves_from(env: FrozenLake, cell: int) -> list[tuple[str, int]]:
    """The actions that leave a cell if nothing slips, with their destinations."""
    moves = [(name, env.lake.neighbours[index][cell]) for index, name in enumerate(env.actions)]
    return [move for move in moves if move[1] != cell]


def hard_level(env: Env) -> bool:
    """True if a level takes four steps or more, or a detour around holes."""
    assert isinstance(env, FrozenLake)
    lake = env.lake
    steps = lake.distances()[lake.start]
    (row, col), (goal_row, goal_col) = divmod(lake.start, lake.size), divmod(lake.goal, lake.size)
    return steps >= 4 or steps > abs(row - goal_row) + abs(col - goal_col)
