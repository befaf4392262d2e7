"""Sokoban: push every box onto a target (arXiv:2504.20073, section 3.1).

Cells are numbered row by row; a set of cells is an integer with one bit for each cell. The outer
cells are always wall, so a step from the inside never leaves the board.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import Field

from ragen.core.errors import RagenError
from ragen.envs.contract import Baselines, Info, Options, State, fresh_seed, generators, pick
from ragen.envs.worlds.grid import GridEnv, Observation, Thoughts, format_note, thought_note
from ragen.envs.worlds.search import shortest_path
from ragen.envs.worlds.tiles import Tile

ACTIONS = ("Up", "Down", "Left", "Right")
Cells: TypeAlias = int
"""A set of cells as bits."""


class Symbols(NamedTuple):
    """The symbols of a map."""

    wall: str
    floor: str
    target: str
    box_on_target: str
    box: str
    player: str
    player_on_target: str


SYMBOLS = {"standard": Symbols(*"#_O√XPS"), "new": Symbols(*"W.GCBA@")}
"""The paper's symbols, and others that test whether a skill transfers."""

SEEN = (
    "You are the blue disc, walls are grey, the floor is white, boxes are brown squares, and "
    "targets are red diamonds, which also show on a box or behind you."
)

MASKS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
"""Cells that become floor around each cell of the generator's walk: bars, corners, a square."""
MAX_BOARDS = 300_000


class Board(NamedTuple):
    """The moving parts of a level."""

    player: int
    boxes: Cells


@dataclass(frozen=True, slots=True)
class Room:
    """The fixed parts of a level; the floor includes targets, and `views` are texts by format."""

    rows: int
    cols: int
    floor: Cells
    targets: Cells
    views: dict[str, dict[Hashable, Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """The difference of cell numbers for each of `ACTIONS`."""
        return (-self.cols, self.cols, -1, 1)

    def distance(self, a: int, b: int) -> int:
        """The Manhattan distance between two cells."""
        return abs(a // self.cols - b // self.cols) + abs(a % self.cols - b % self.cols)

    def push(self, board: Board, step: int) -> Board:
        """The board after a step: a push, a walk, or no change if the way is blocked."""
        player, boxes = board
        ahead = player + step
        if not self.floor >> ahead & 1:
            return board
        if boxes >> ahead & 1:
            behind = ahead + step
            if not (self.floor & ~boxes) >> behind & 1:
                return board
            boxes ^= 1 << ahead | 1 << behind
        return Board(ahead, boxes)

    def reward(self, before: Board, after: Board) -> float:
        """−0.1 per action, ±1 for a box that reaches or leaves a target, +10 for a solution."""
        gained = (after.boxes & self.targets).bit_count() - (
            before.boxes & self.targets
        ).bit_count()
        return gained - 0.1 + (10.0 if after.boxes == self.targets else 0.0)


@lru_cache(maxsize=1024)
def generate(
    seed: int,
    rows: int,
    cols: int,
    boxes: int,
    search_depth: int,
    min_solution: int = 1,
    max_solution: int | None = None,
) -> tuple[Room, Board]:
    """The level of a seed, generated once for all episodes of a group.

    It is solvable, because reverse play pulls boxes away from the solved board. It is drawn again
    until no box is on a target, and the length of the shortest solution is within the bounds.

    Raises:
        RagenError: A thousand attempts found no level.
    """
    level, _ = generators(seed, None)
    is_bounded = min_solution > 1 or max_solution is not None
    for _ in range(1000):
        floor = _floor(level, rows, cols)
        cells = _to_list(floor)
        if len(cells) <= boxes + 1:
            continue
        player = pick(level, cells)
        cells.remove(player)
        targets = 0
        for _ in range(boxes):
            target = pick(level, cells)
            cells.remove(target)
            targets |= 1 << target
        room = Room(rows, cols, floor, targets)
        board, displacement = _pull_away(room, player, search_depth)
        if displacement:
            board = _wander(level, room, board, 0.8 if displacement == 1 else 0.5)
            if not is_bounded:
                return room, board
            solution = shortest_solution(room, board)
            if solution and min_solution <= len(solution) <= (max_solution or len(solution)):
                return room, board
    bounds = (
        f", or set min_solution = {min_solution} and max_solution = {max_solution} further apart"
    )
    raise RagenError(
        f"no Sokoban level of {rows} × {cols} cells with {boxes} boxes was found: "
        "give it more cells, fewer boxes or a larger search_depth" + (bounds if is_bounded else "")
    )


def _floor(level: np.random.Generator, rows: int, cols: int) -> Cells:
    """Floor along a random walk of int(1.7·(rows + cols)) steps."""
    directions = ((1, 0), (0, 1), (-1, 0), (0, -1))
    direction = pick(level, directions)
    row, col = pick(level, range(1, rows - 1)), pick(level, range(1, cols - 1))
    floor = 0
    for _ in range(int(1.7 * (rows + cols))):
        if level.random() < 0.35:
            direction = pick(level, directions)
        row = min(max(row + direction[0], 1), rows - 2)
        col = min(max(col + direction[1], 1), cols - 2)
        for down, right in pick(level, MASKS):
            r, c = row + down, col + right
            if 0 < r < rows - 1 and 0 < c < cols - 1:
                floor |= 1 << r * cols + c
    return floor


def _pull_away(room: Room, player: int, search_depth: int) -> tuple[Board, int]:
    """Depth-first search over pulls and walks for the hardest board.

    The score of a board is how often the pulled box changed on the way, the first pull included,
    times the boxes' total Manhattan distance from the targets where they began. The score is 0 if a
    box or the player covers a target. The first board with the highest score wins. Each board is
    visited once, in a fixed order. Returns the board and the distance, which is 0 if no board has a
    score above 0.
    """
    homes = tuple(_to_list(room.targets))
    best_score, best_board, best_displacement = 0, Board(player, room.targets), 0
    visited: set[Board] = set()
    # Player, boxes in the order of their homes, box pulled last, changes of the pulled box, depth.
    stack = [(player, homes, -1, 0, 1)]
    while stack and len(visited) < MAX_BOARDS:
        player, boxes, last, swaps, depth = stack.pop()
        occupied = _to_bits(boxes)
        board = Board(player, occupied)
        if board in visited:
            continue
        visited.add(board)
        if not (occupied | 1 << player) & room.targets:
            displacement = sum(map(room.distance, boxes, homes))
            if swaps * displacement > best_score:
                best_score, best_board = swaps * displacement, board
                best_displacement = displacement
        if depth + 1 >= search_depth:
            continue
        free = room.floor & ~occupied
        steps = [step for step in room.steps if free >> (player + step) & 1]
        pulls, walks = [], []
        for step in steps:
            behind = player - step
            walks.append((player + step, boxes, last, swaps, depth + 1))
            if occupied >> behind & 1:
                pulled = boxes.index(behind)
                moved = (*boxes[:pulled], player, *boxes[pulled + 1 :])
                pulls.append((player + step, moved, pulled, swaps + (pulled != last), depth + 1))
            else:
                pulls.append(walks[-1])
        stack += reversed(pulls + walks)  # so that pulls are visited first
    return best_board, best_displacement


def _wander(level: np.random.Generator, room: Room, board: Board, chance: float) -> Board:
    """With probability `chance`, move the player up to three random steps over free cells."""
    if level.random() >= chance:
        return board
    player, visited = board.player, 1 << board.player
    for _ in range(3):
        free = room.floor & ~board.boxes & ~visited
        ahead = [player + step for step in room.steps if free >> (player + step) & 1]
        if not ahead:
            break
        player = pick(level, ahead)
        visited |= 1 << player
        if level.random() >= 0.5:
            break
    return Board(player, board.boxes)


def _to_bits(cells: Iterable[int]) -> Cells:
    return sum(1 << cell for cell in set(cells))


def _to_list(cells: Cells) -> list[int]:
    return [cell for cell in range(cells.bit_length()) if cells >> cell & 1]


@lru_cache(maxsize=4096)
def shortest_solution(room: Room, board: Board) -> tuple[int, ...] | None:
    """Action indices of a shortest solution; ``None`` if none exists."""
    steps = room.steps
    return shortest_path(
        board,
        range(len(steps)),
        lambda here, action: room.push(here, steps[action]),
        lambda here: here.boxes == room.targets,
    )


class Sokoban(GridEnv):
    """Push all boxes onto targets. Boxes cannot be pulled, so a wrong push may be final.

    Observation:
        The map: `#` wall, `_` floor, `O` target, `√` box on target, `X` box, `P` player, `S`
        player on target. With ``symbols = "new"``, in the same order: ``W . G C B A @``. Or a
        picture of it.

    Actions:
        Up, Down, Left, Right. If a box is ahead and the cell behind it is free, the player pushes
        it; if the cell ahead is free, the player walks; otherwise nothing happens.

    Reward:
        −0.1 for each action, +1 when a box reaches a target, −1 when one leaves it, +10 when all
        are on targets. So a solution by one push pays 10.9.

    Ends when:
        All boxes are on targets (a success).

    Parameters:
        rows, cols: The size, including the outer wall.
        boxes: Number of boxes and of targets.
        search_depth: Moves that the generator plays backwards; it bounds the difficulty.
        symbols: The symbols of the map.
        observation, tile, thoughts: The format of the map and of thoughts, as in FrozenLake.
        min_solution, max_solution: Actions of the shortest solution.

    Example:
        >>> env = Sokoban()
        >>> observation, _ = env.reset(seed=123)
        >>> [observation.count(symbol) for symbol in "PXO"]
        [1, 1, 1]
    """

    goal = "Sokoban"
    letters = "PXO"  # demonstrations use these, whatever the symbols of the map are
    border = 1
    actions = ACTIONS

    def __init__(
        self,
        rows: Annotated[int, Field(ge=4, le=26)] = 6,
        cols: Annotated[int, Field(ge=4, le=26)] = 6,
        boxes: Annotated[int, Field(ge=1)] = 1,
        search_depth: Annotated[int, Field(ge=3)] = 300,
        symbols: Literal["standard", "new"] = "standard",
        observation: Observation = "grid",
        tile: Tile = 8,
        thoughts: Thoughts = "free",
        min_solution: Annotated[int, Field(ge=1)] = 1,
        max_solution: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        if boxes > (rows - 2) * (cols - 2) - 2:
            raise RagenError(f"boxes = {boxes} does not fit into {rows} × {cols} cells")
        self.name = "sokoban"
        self._size = (rows, cols)
        self._levels = (rows, cols, boxes, search_depth, min_solution, max_solution)
        self._symbols = s = SYMBOLS[symbols]
        self.observation, self.tile, self.thoughts = observation, tile, thoughts
        if thoughts != "free":
            self.goal = f"{self.goal} : {thoughts}"
        self.marks = {
            "Player": s.player + s.player_on_target,
            "Boxes": s.box + s.box_on_target,
            "Targets": s.target + s.box_on_target + s.player_on_target,
        }
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        s = self._symbols
        symbols = (
            f"{s.wall} wall, {s.floor} empty, {s.target} target, {s.box_on_target} box on target, "
            f"{s.box} box, {s.player} player, {s.player_on_target} player on target"
        )
        return (
            "You are solving the Sokoban puzzle. You are the player and need to push all boxes "
            "onto the targets. When you are next to a box you push it by moving towards it. A box "
            "cannot be pushed into a wall or another box, and it cannot be pulled.\n"
            f"{format_note(self.observation, symbols, SEEN)}"
            f"{thought_note(self.thoughts, self.letters, self.marks)}"
        )

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        seed = fresh_seed() if seed is None else seed
        room, self.board = generate(seed, *self._levels)
        self._set_room(room)
        return self.observe(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        before = self.board
        self.board = self.room.push(before, self.room.steps[self.action_index(action)])
        reward = self.room.reward(before, self.board)
        solved = self.board.boxes == self.room.targets
        info = {"success": solved, "effective": self.board != before}
        return self.observe(), reward, solved, False, info

    def get_state(self) -> State:
        return {
            "floor": _to_list(self.room.floor),
            "targets": _to_list(self.room.targets),
            "player": self.board.player,
            "boxes": _to_list(self.board.boxes),
        }

    def set_state(self, state: State) -> None:
        self._set_room(Room(*self._size, _to_bits(state["floor"]), _to_bits(state["targets"])))
        self.board = Board(state["player"], _to_bits(state["boxes"]))

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        plan = shortest_solution(self.room, self.board)
        if not plan:  # unsolvable or solved: all actions are equally good
            return [ACTIONS[0]]
        return [ACTIONS[index] for index in plan[: min(actions_left, actions_per_turn)]]

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines:
        budget = min(actions, turns * actions_per_turn)
        random, random_return = random_play(self.room, self.board, budget)
        board, optimal_return = self.board, 0.0
        plan = shortest_solution(self.room, board)
        assert plan is not None
        for index in plan[:budget]:
            after = self.room.push(board, self.room.steps[index])
            optimal_return += self.room.reward(board, after)
            board = after
        return Baselines(random, float(len(plan) <= budget), random_return, optimal_return)

    def drawing(self) -> list[str]:
        drawn = str.maketrans(dict(zip(self._symbols, SYMBOLS["standard"], strict=True)))
        return [row.translate(drawn) for row in self.rows()]

    @property
    def moving(self) -> Board:
        return self.board

    def _set_room(self, room: Room) -> None:
        self.room = room
        self.views = room.views.setdefault(f"{self.observation} {self._symbols.wall}", {})

    def rows(self) -> list[str]:
        room, (player, boxes), s = self.room, self.board, self._symbols
        cells = range(room.rows * room.cols)
        symbols = [s.floor if room.floor >> cell & 1 else s.wall for cell in cells]
        for cell in _to_list(room.targets):
            symbols[cell] = s.target
        for cell in _to_list(boxes):
            symbols[cell] = s.box_on_target if room.targets >> cell & 1 else s.box
        symbols[player] = s.player_on_target if room.targets >> player & 1 else s.player
        return ["".join(symbols[i : i + room.cols]) for i in cells[:: room.cols]]


def random_play(room: Room, board: Board, actions: int) -> tuple[float, float]:
    """Exact probability of success and expected return of uniformly random actions.

    The distribution over boards is carried forward: p′(b′) = Σ_b p(b)·¼·|{a: b → b′}|.
    """
    chances, solved, expected = {board: 1.0}, 0.0, 0.0
    for _ in range(actions):
        following: dict[Board, float] = {}
        for here, chance in chances.items():
            for step in room.steps:
                after = room.push(here, step)
                expected += chance / 4 * room.reward(here, after)
                if after.boxes == room.targets:
                    solved += chance / 4
                else:
                    following[after] = following.get(after, 0.0) + chance / 4
        chances = following
    return solved, expected
