"""The Sokoban demonstrator: one straight push a turn, chosen, walked to and carried out in words.

`` P b1 X c2 O c4 push Right c1 c4 : c1 _ Down c3 _ Right c4 O Right``: where player, box and target
are; the direction of the push, the cell to stand on before it and the cell where the box shall end;
then, move by move, the cell that the player (or the pushed box) comes to and what the map shows
there, before the direction. A cell that is looked at and not taken is followed by another cell
instead of a direction; so the answer is the thought's directions in their order.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ragen.demonstrations import Piece, Reply, Writer, answer
from ragen.env import Env, pick
from ragen.envs.grid import cell_name
from ragen.envs.sokoban import ACTIONS, Board, Room, Sokoban
from ragen.prompt import Limits


class Push(NamedTuple):
    """A straight push of a lone box, some cells on."""

    action: int
    stand: int
    end: int
    walk: tuple[int, ...]
    """Actions to the cell behind the box; the push itself follows."""
    length: int
    after: Board

    @property
    def moves(self) -> tuple[int, ...]:
        """All its actions."""
        return (*self.walk, *(self.action,) * self.length)


@lru_cache(maxsize=4096)
def distances(room: Room) -> dict[Board, int]:
    """Fewest actions to the solution from each board of a room with one box; the lost are left out.

    Breadth first from the solved boards, backwards along the actions that lead to each board.
    """
    cells = [cell for cell in range(room.floor.bit_length()) if room.floor >> cell & 1]
    boards = [Board(player, 1 << box) for player in cells for box in cells if player != box]
    before: dict[Board, list[Board]] = {}
    for board in boards:
        if board.boxes != room.targets:
            for step in room.steps:
                before.setdefault(room.push(board, step), []).append(board)
    found = {board: 0 for board in boards if board.boxes == room.targets}
    frontier = deque(found)
    while frontier:
        board = frontier.popleft()
        for earlier in before.get(board, ()):
            if earlier not in found:
                found[earlier] = found[board] + 1
                frontier.append(earlier)
    return found


def reach(room: Room, board: Board, start: int) -> dict[int, int]:
    """Fewest steps, without a push, between `start` and each cell in reach."""
    free = room.floor & ~board.boxes
    found = {start: 0}
    frontier = deque(found)
    while frontier:
        cell = frontier.popleft()
        for step in room.steps:
            if free >> (cell + step) & 1 and cell + step not in found:
                found[cell + step] = found[cell] + 1
                frontier.append(cell + step)
    return found


def looks(room: Room, board: Board, stand: int) -> list[tuple[int, list[int]]]:
    """A shortest walk to `stand`: each action, and the cells looked at for it.

    Cells are looked at in the order of their straight distance to `stand`; the last is taken.
    """
    left, cell, walk = reach(room, board, stand), board.player, []
    while cell != stand:
        near = sorted(
            (distance(room, cell + step, stand), action) for action, step in enumerate(room.steps)
        )
        seen = []
        for _, action in near:
            seen.append(cell + room.steps[action])
            if left.get(seen[-1], left[cell]) < left[cell]:
                break
        walk.append((action, seen))
        cell = seen[-1]
    return walk


def distance(room: Room, a: int, b: int) -> int:
    """Rows and columns between two cells."""
    return abs(a // room.cols - b // room.cols) + abs(a % room.cols - b % room.cols)


def pushes(room: Room, board: Board) -> list[list[Push]]:
    """All straight pushes of a lone box, by direction; in each, the shorter come first."""
    box = board.boxes.bit_length() - 1
    near = reach(room, board, board.player)
    found = []
    for action, step in enumerate(room.steps):
        stand = box - step
        if stand not in near:
            continue
        walk = tuple(taken for taken, _ in looks(room, board, stand))
        here, line = Board(stand, board.boxes), list[Push]()
        while here.boxes != room.targets and (after := room.push(here, step)) != here:
            here = after
            end = here.player + step
            line.append(Push(action, stand, end, walk, len(line) + 1, here))
        if line:
            found.append(line)
    return found


def best_push(room: Room, board: Board) -> Push | None:
    """The longest straight push that begins a shortest solution; ``None`` if there is none."""
    left = distances(room)
    options = [push for line in pushes(room, board) for push in line if push.after in left]
    return min(
        options,
        key=lambda push: (len(push.moves) + left[push.after], -push.length),
        default=None,
    )


def sokoban_plan(careful: float, learn_slips: bool = True) -> Writer:
    """Chooses the push that begins a shortest solution, or any; walks and pushes without a mistake.

    Args:
        careful: Share of turns with the best push; in the others, and where all is lost, it is any.
        learn_slips: Whether the choice of any push is to be learnt.
    """

    def write(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        assert isinstance(env, Sokoban)
        room, board = env.room, env.board
        push = best_push(room, board) if generator.random() < careful else None
        learnt = push is not None or learn_slips
        if push is None:
            options = pushes(room, board)
            if not options:
                return [Piece(answer([pick(generator, ACTIONS)]), trained=False)]
            push = pick(generator, pick(generator, options))

        def name(cell: int) -> str:
            return cell_name(*divmod(cell, room.cols))

        box, target = board.boxes.bit_length() - 1, room.targets.bit_length() - 1
        ways = looks(room, board, push.stand)
        step = room.steps[push.action]
        ways += [(push.action, [box + step * (1 + index)]) for index in range(push.length)]
        ways = ways[: min(limits.actions_per_turn, limits.actions_left)]
        said = "".join(
            "".join(f" {name(cell)} {env.symbol(cell)}" for cell in seen) + f" {ACTIONS[action]}"
            for action, seen in ways
        )
        return [
            Piece(f" P {name(board.player)} X {name(box)} O {name(target)} push"),
            Piece(f" {ACTIONS[push.action]} {name(push.stand)} {name(push.end)}", trained=learnt),
            Piece(f" :{said}{answer([ACTIONS[action] for action, _ in ways])}"),
        ]

    return write
