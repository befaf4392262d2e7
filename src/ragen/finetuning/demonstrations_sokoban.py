"""The Sokoban demonstrator: one straight push a turn, chosen, walked to and carried out in words.

A careful turn finds player, box and target, then names the push that begins a shortest solution:
its direction, the cell to stand on before it, the cell where the box shall end. Then it looks from
cell to cell, `` b1 c1 _`` from b1 at c1, which is floor: where the player goes, or the pushed box.
A direction follows if the cell is accepted, so the answer is the thought's directions in order::

     P b1 X c2 O c4 push Right c1 c4 : b1 c1 _ Down c2 c3 _ Right c3 c4 O Right

A slip is carried out just as well, but any push will do, and the target is not looked for::

     P b1 X c2 push Right c1 c3 : b1 c1 _ Down c2 c3 _ Right
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ragen.envs.contract import Env, pick
from ragen.envs.grid import cell_name
from ragen.envs.sokoban import ACTIONS, Board, Room, Sokoban
from ragen.finetuning.demonstrations import Piece, Reply, Writer, answer
from ragen.rollout.prompt import Limits


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


def takes(fewest: int, most: int = 10) -> Callable[[Env], bool]:
    """Accepts levels whose shortest solution takes from `fewest` to `most` actions.

    Example:
        >>> env = Sokoban()
        >>> env.solve(5, 10, 5)
        ['Up', 'Right']
        >>> takes(2)(env), takes(3)(env)
        (True, False)
    """

    def accept(env: Env) -> bool:
        assert isinstance(env, Sokoban)
        return fewest <= distances(env.room)[env.board] <= most

    return accept


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


class Way(NamedTuple):
    """A move of the player or of the box: the action, where from, and the cells looked at for it.

    The last of these is where it goes.
    """

    action: int
    here: int
    seen: tuple[int, ...]


def looks(room: Room, board: Board, stand: int) -> list[Way]:
    """A shortest walk to `stand`; cells are looked at in the order of their straight distance."""
    left, here = reach(room, board, stand), board.player
    walk: list[Way] = []
    while here != stand:
        nearest = sorted(
            range(len(room.steps)),
            key=lambda action: (distance(room, here + room.steps[action], stand), action),
        )
        seen: list[int] = []
        for action in nearest:
            seen.append(here + room.steps[action])
            if left.get(seen[-1], left[here]) < left[here]:
                break
        walk.append(Way(action, here, tuple(seen)))
        here = seen[-1]
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
        walk = tuple(way.action for way in looks(room, board, stand))
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


def sokoban_plan(careful: float, slips_trained: bool = True) -> Writer:
    """Turns of one straight push: a share of them careful, the others slips.

    Args:
        careful: Share of careful turns. Where all is lost, every turn is a slip.
        slips_trained: Whether the choice of a slip is to be learnt, or only leads to odd boards.
    """

    def write(env: Env, limits: Limits, generator: np.random.Generator) -> Reply:
        assert isinstance(env, Sokoban)
        room, board = env.room, env.board
        push = best_push(room, board) if generator.random() < careful else None
        is_careful = push is not None
        if push is None:
            options = pushes(room, board)
            if not options:
                return [Piece(answer([pick(generator, ACTIONS)]), trained=False)]
            push = pick(generator, pick(generator, options))

        def name(cell: int) -> str:
            return cell_name(*divmod(cell, room.cols))

        box, target = board.boxes.bit_length() - 1, room.targets.bit_length() - 1
        step = room.steps[push.action]
        ways = looks(room, board, push.stand)
        ways += [
            Way(push.action, box + step * index, (box + step * (index + 1),))
            for index in range(push.length)
        ]
        ways = ways[: min(limits.actions_per_turn, limits.actions_left)]
        said = "".join(
            "".join(f" {name(way.here)} {name(cell)} {env.symbol(cell)}" for cell in way.seen)
            + f" {ACTIONS[way.action]}"
            for way in ways
        )
        found = f" O {name(target)}" if is_careful else ""
        choice = f" push {ACTIONS[push.action]} {name(push.stand)} {name(push.end)}"
        return [
            Piece(f" P {name(board.player)} X {name(box)}"),
            Piece(found + choice, trained=is_careful or slips_trained),
            Piece(f" :{said}{answer([ACTIONS[way.action] for way in ways])}"),
        ]

    return write
