"""The Sokoban teacher: one straight push per turn, chosen, walked to and carried out in words.

A careful turn names player, box and target, then the push that begins a shortest solution: its
direction, the cell from which to push, and the box's last cell. Then it looks from cell to cell:
`` b1 c1 _`` looks from b1 at c1, which is floor. It looks at the next cell of the player or of the
pushed box, and names the direction if it accepts the cell. So the answer is the thought's
directions::

     P b1 X c2 O c4 push Right c1 c4 : b1 c1 _ Down c2 c3 _ Right c3 c4 O Right

A slip is a random push. It is carried out in the same way, but the target is not named::

     P b1 X c2 push Right c1 c3 : b1 c1 _ Down c2 c3 _ Right
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ragen.bases.demonstrations import Chart, Piece, Reply, Teacher, answer
from ragen.chat.prompt import Limits
from ragen.core.errors import RagenError
from ragen.envs.contract import Env, pick
from ragen.envs.worlds.sokoban import ACTIONS, Board, Room, Sokoban, shortest_solution


class Push(NamedTuple):
    """A straight push of the only box over `length` cells, after the walk to the cell behind it."""

    action: int
    stand: int
    walk: list[Move]
    length: int
    after: Board


class Move(NamedTuple):
    """A move of player or box from `here`; the thought looks at `cells`, the last one its end."""

    action: int
    here: int
    cells: tuple[int, ...]


def solved_in(fewest: int, most: int = 10) -> Callable[[Env], bool]:
    """Accept levels whose shortest solution takes from `fewest` to `most` actions.

    Example:
        >>> env = Sokoban()
        >>> env.solve(5, 10, 5)
        ['Up', 'Right']
        >>> solved_in(2)(env), solved_in(3)(env)
        (True, False)
    """

    def accept(env: Env) -> bool:
        assert isinstance(env, Sokoban)
        solution = shortest_solution(env.room, env.board)
        assert solution is not None, "levels are solvable"
        return fewest <= len(solution) <= most

    return accept


def reachable_cells(room: Room, board: Board, start: int) -> dict[int, int]:
    """Fewest steps without a push from `start` to each reachable cell."""
    free, found, frontier = room.floor & ~board.boxes, {start: 0}, [start]
    for here in frontier:
        for there in (here + step for step in room.steps):
            if free >> there & 1 and there not in found:
                found[there] = found[here] + 1
                frontier.append(there)
    return found


def walk_to(room: Room, board: Board, stand: int) -> list[Move]:
    """A shortest walk to `stand`; before a move it looks at cells by their distance to `stand`."""
    left, here = reachable_cells(room, board, stand), board.player
    walk: list[Move] = []
    while here != stand:
        nearest = sorted(
            range(len(room.steps)),
            key=lambda action: (room.distance(here + room.steps[action], stand), action),
        )
        cells: list[int] = []
        for action in nearest:
            cells.append(here + room.steps[action])
            if left.get(cells[-1], left[here]) < left[here]:
                break
        walk.append(Move(action, here, tuple(cells)))
        here = cells[-1]
    return walk


def pushes(room: Room, board: Board) -> list[list[Push]]:
    """All straight pushes of the only box by direction, the shorter ones first."""
    box = board.boxes.bit_length() - 1
    near = reachable_cells(room, board, board.player)
    found = []
    for action, step in enumerate(room.steps):
        stand = box - step
        if stand not in near:
            continue
        walk = walk_to(room, board, stand)
        here, line = Board(stand, board.boxes), list[Push]()
        while here.boxes != room.targets and (after := room.push(here, step)) != here:
            here = after
            line.append(Push(action, stand, walk, len(line) + 1, here))
        if line:
            found.append(line)
    return found


def optimal_push(room: Room, board: Board) -> Push | None:
    """The longest straight push that begins a shortest solution, or ``None``."""
    costs: dict[tuple[int, int], Push] = {}
    for push in (push for line in pushes(room, board) for push in line):
        rest = shortest_solution(room, push.after)
        if rest is not None:
            costs.setdefault((len(push.walk) + push.length + len(rest), -push.length), push)
    return costs[min(costs)] if costs else None


def sokoban_plan(careful: float, slips_trained: bool = True) -> Teacher:
    """A teacher whose turns are one straight push, either optimal or a random slip.

    A push is optimal with probability `careful`; on an unsolvable board every turn is a slip. A
    slip whose choice is not trained only leads to unusual boards.
    """

    def write(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        assert isinstance(env, Sokoban)
        room, board = env.room, env.board
        if room.targets.bit_count() != 1:
            raise RagenError("the teacher of sokoban pushes one box only: take --player solver")
        push = optimal_push(room, board) if generator.random() < careful else None
        is_careful = push is not None
        if push is None:
            options = pushes(room, board)
            if not options:
                return [Piece(answer([pick(generator, ACTIONS)]), trained=False)]
            push = pick(generator, pick(generator, options))

        chart = Chart(env)
        box, target = board.boxes.bit_length() - 1, room.targets.bit_length() - 1
        step = room.steps[push.action]
        cells = [box + step * index for index in range(push.length + 1)]
        moves = push.walk + [Move(push.action, here, (to,)) for here, to in pairwise(cells)]
        moves = moves[: min(limits.actions_per_turn, limits.actions_left)]
        text = "".join(
            f"{chart.looks(move.here, move.cells)} {ACTIONS[move.action]}" for move in moves
        )
        goal = f" O {chart.name(target)}" if is_careful else ""
        choice = f" push {ACTIONS[push.action]} {chart.name(push.stand)} {chart.name(cells[-1])}"
        return [
            Piece(f" P {chart.name(board.player)} X {chart.name(box)}"),
            Piece(goal + choice, trained=is_careful or slips_trained),
            Piece(f" :{text}{answer([ACTIONS[move.action] for move in moves])}"),
        ]

    return write
