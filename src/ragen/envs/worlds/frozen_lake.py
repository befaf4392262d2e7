"""FrozenLake: reach the goal over ice that may slip (arXiv:2504.20073, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count, islice
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ragen.core.errors import RagenError
from ragen.envs.contract import (
    Baselines,
    Info,
    Options,
    Probability,
    State,
    fresh_seed,
    generators,
    pick,
)
from ragen.envs.worlds.grid import GridEnv, Observation, Thoughts, format_note, thought_note
from ragen.envs.worlds.tiles import Tile

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""The change of row and column. Neighbours in this order are perpendicular, so a slip adds ±1."""
ACTIONS, DELTAS = tuple(MOVES), tuple(MOVES.values())
DRAWN = str.maketrans("OX√", "H@*")
"""The map's symbols in `Env.drawing`, where `O` is a target and not a hole."""
SYMBOLS = "P player, _ frozen, O hole, G goal, X player in hole, √ player on goal"
SEEN = "You are the blue disc, ice is white, holes are black discs, and the goal is a green square."
Floats = npt.NDArray[np.float64]
MOST_PLANNED = 5
"""Maximum number of actions that the solver plans for a turn: it compares 4⁵ plans. If a turn may
have more actions, optimal play is unknown."""
MOST_DRAWS = 10_000
"""Maximum number of maps drawn in search of a level whose distance lies within bounds."""


@dataclass(frozen=True)
class Lake:
    """A level; its cells are numbered row by row. `views` are its observations, by format."""

    size: int
    holes: frozenset[int]
    start: int
    goal: int
    views: dict[str, dict[Hashable, Any]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def neighbours(self) -> list[list[int]]:
        """By direction and cell, the cell after one step; at the edge, the same cell."""
        last, cells = self.size - 1, range(self.size**2)
        rows_and_columns = [divmod(cell, self.size) for cell in cells]
        return [
            [
                min(max(row + down, 0), last) * self.size + min(max(column + right, 0), last)
                for row, column in rows_and_columns
            ]
            for down, right in DELTAS
        ]

    def distances(self) -> list[float]:
        """Steps from each cell to the goal around the holes; infinite where there is no path."""
        steps = [math.inf] * self.size**2
        steps[self.goal] = 0
        frontier = [self.goal]
        for cell in frontier:
            for direction in range(4):
                beside = self.neighbours[direction][cell]
                if beside not in self.holes and steps[beside] == math.inf:
                    steps[beside] = steps[cell] + 1
                    frontier.append(beside)
        return steps


@lru_cache(maxsize=1024)
def generate(
    seed: int,
    size: int,
    p_frozen: float,
    min_distance: int = 1,
    max_distance: int | None = None,
) -> Lake:
    """The level of a seed, drawn until its shortest path has a length within the bounds.

    Raises:
        RagenError: The length is bounded, and `MOST_DRAWS` maps had no such path.
    """
    level, _ = generators(seed, None)
    highest = math.inf if max_distance is None else max_distance + 1
    for draws in count(1):
        frozen = level.random(size * size) < p_frozen
        start = pick(level, range(size * size))
        goal = pick(level, [cell for cell in range(size * size) if cell != start])
        holes = frozenset(int(cell) for cell in np.flatnonzero(~frozen)) - {start, goal}
        lake = Lake(size, holes, start, goal)
        if min_distance <= lake.distances()[start] < highest:
            return lake
        if draws >= MOST_DRAWS and (min_distance > 1 or max_distance is not None):
            break
    raise RagenError(
        f"no FrozenLake level of {size} × {size} cells was found whose shortest path has "
        f"{min_distance} to {max_distance or 'any number of'} steps: set min_distance and "
        "max_distance further apart, or give it more cells"
    )


class Planner:
    """Optimal play on one lake by dynamic programming over turns left, actions left and cells.

    The actions of a turn are chosen before the player sees whether any of them slips. With one
    action per turn, the player sees every slip before the next action.
    `discount` is a factor for each action and each turn. At 1, values are probabilities of success;
    a little below 1, the player prefers the shorter of two plans of equal probability.
    """

    def __init__(self, lake: Lake, success_probability: float, discount: float = 1.0) -> None:
        self._goal = lake.goal
        self._discount = discount
        self._lake, self._success_probability = lake, success_probability
        self._ended = np.zeros(lake.size**2, dtype=bool)
        self._ended[[lake.goal, *lake.holes]] = True
        self._known: dict[tuple[int, int, int], list[Floats]] = {}

    @cached_property
    def moves(self) -> Floats:
        """The `transition_matrices` of the lake."""
        return transition_matrices(self._lake, self._success_probability)

    def values(self, turns: int, actions: int, per_turn: int) -> Floats:
        """The value of optimal play from every cell, shape (cells,)."""
        value = np.zeros(len(self._ended))
        value[self._goal] = 1.0
        if turns:
            for length in range(1, min(per_turn, actions) + 1):
                leaving = self._by_length(turns - 1, actions - length, per_turn)
                value = np.maximum(value, leaving[length - 1])
        return value

    def best(self, cell: int, turns: int, actions: int, per_turn: int) -> list[int]:
        """The optimal sequence of directions for this turn; of several, a shortest one."""
        worth = [
            self._by_length(turns - 1, actions - length, per_turn)[length - 1][cell]
            for length in range(1, min(per_turn, actions) + 1)
        ]
        length = next(k for k, value in enumerate(worth, start=1) if value > max(worth) - 1e-12)
        by_length = self._plans(turns - 1, actions - length, per_turn)
        values = next(islice(by_length, length - 1, None))
        plan = int(values[:, cell].argmax())  # its digits in base 4 are the directions
        return [plan >> 2 * place & 3 for place in reversed(range(length))]

    def _by_length(self, turns_after: int, actions_after: int, per_turn: int) -> list[Floats]:
        """For each length, the values of the best plans that leave these turns and actions."""
        key = (turns_after, actions_after, per_turn)
        if key not in self._known:
            self._known[key] = [values.max(0) for values in self._plans(*key)]
        return self._known[key]

    def _plans(self, turns_after: int, actions_after: int, per_turn: int) -> Iterator[Floats]:
        """The values of all plans of each length from every cell, shape (4 ** length, cells)."""
        after = self.values(turns_after, actions_after, per_turn)
        after[~self._ended] *= self._discount  # the cost of another turn
        values = after[None]
        for _ in range(per_turn):
            values = self._discount * (values[None] @ self.moves.transpose(0, 2, 1))
            values = values.reshape(-1, values.shape[-1])
            values[:, self._ended] = after[self._ended]
            yield values


def transition_matrices(lake: Lake, success_probability: float) -> Floats:
    """Probability of each transition between cells by each action, shape (4, cells, cells).

    Example:
        >>> down = 1
        >>> transition_matrices(Lake(2, frozenset(), 0, 3), 0.8)[down, 0].round(3)
        array([0.1, 0.1, 0.8, 0. ])
    """
    cells = lake.size**2
    matrices = np.zeros((4, cells, cells))
    slip = (1 - success_probability) / 2
    for cell in range(cells):
        if cell == lake.goal or cell in lake.holes:
            matrices[:, cell, cell] = 1.0
            continue
        for action in range(4):
            for turn, chance in ((0, success_probability), (-1, slip), (1, slip)):
                matrices[action, cell, lake.neighbours[(action + turn) % 4][cell]] += chance
    return matrices


class FrozenLake(GridEnv):
    """Walk from the start to the goal around the holes; a move may slip sideways.

    Observation:
        The map: `P` player, `_` frozen, `O` hole, `G` goal, `X` player in a hole, `√` player on
        the goal. Or a picture of it.

    Actions:
        Left, Down, Right, Up. The player moves in the intended direction with probability
        `success_probability`, in each perpendicular one with half of the rest, and never in the
        opposite one. At the edge of the board it stays where it is.

    Reward:
        1 on the goal, otherwise 0.

    Ends when:
        The player is on the goal (a success) or in a hole.

    Parameters:
        size: Rows and columns.
        p_frozen: Probability that a cell is frozen: 0.8 in the paper, 0.9 in its sequel.
        success_probability: 1/3 in the paper, 0.98 in the sequel's text, 0.8 and 1 in its code.
        observation: The format of the map: its symbols, sizes and positions, both, every cell
            with its name (the format of the embedded model), or a picture.
        tile: The side of a cell in a picture, in pixels.
        thoughts: What the rules ask of a thought besides reasoning: nothing, the positions before
            the actions (``"state"``), after them (``"transition"``), or both (``"world"``).
        min_distance, max_distance: Steps of the shortest path from the start to the goal.

    Example:
        >>> env = FrozenLake(success_probability=1.0)
        >>> print(env.reset(seed=123)[0])
        ___P
        __O_
        ___O
        _G_O
        >>> env.step("Left")[1:]
        (0.0, False, False, {'success': False, 'effective': True})
    """

    goal = "FrozenLake"
    marks = MappingProxyType({"Player": "PX√", "Goal": "G√", "Holes": "OX"})
    letters = "PGO"
    actions = ACTIONS

    def __init__(
        self,
        size: Annotated[int, Field(ge=2, le=26)] = 4,
        p_frozen: Annotated[float, Field(ge=0.05, le=1)] = 0.8,
        success_probability: Probability = 1 / 3,
        observation: Observation = "grid",
        tile: Tile = 8,
        thoughts: Thoughts = "free",
        min_distance: Annotated[int, Field(ge=1)] = 1,
        max_distance: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        self.name = "frozen-lake"
        self._size, self._levels = size, (size, p_frozen, min_distance, max_distance)
        self._success_probability = success_probability
        self.observation, self.tile, self.thoughts = observation, tile, thoughts
        if thoughts != "free":
            self.goal = f"{self.goal} : {thoughts}"
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        slip = (
            "The ice is slippery: a move may go sideways instead.\n"
            if self._success_probability < 1
            else ""
        )
        return (
            "You are solving the FrozenLake puzzle. Walk over the frozen cells to the goal and "
            f"avoid the holes.\n{slip}{format_note(self.observation, SYMBOLS, SEEN)}"
            f"{thought_note(self.thoughts, self.letters, self.marks)}"
        )

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        seed = fresh_seed() if seed is None else seed
        _, self._noise = generators(seed, options)
        self._set_lake(generate(seed, *self._levels))
        self.player = self.lake.start
        return self.observe(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        intended = self.action_index(action)
        # Drawn even if nothing slips, so that a level's noise does not depend on the parameter.
        draw = self._noise.random()
        slip = (1 - self._success_probability) / 2
        turn = -1 if draw < slip else 1 if draw < 2 * slip else 0
        before = self.player
        if not self._ended:
            self.player = self.lake.neighbours[(intended + turn) % 4][before]
        success = self.player == self.lake.goal
        info = {"success": success, "effective": self.player != before}
        return self.observe(), float(success), self._ended, False, info

    def get_state(self) -> State:
        return {
            "holes": sorted(self.lake.holes),
            "start": self.lake.start,
            "goal": self.lake.goal,
            "player": self.player,
            "noise": self._noise.bit_generator.state,
        }

    def set_state(self, state: State) -> None:
        lake = Lake(self._size, frozenset(state["holes"]), state["start"], state["goal"])
        if lake != self.lake:
            self._set_lake(lake)
        self.player = state["player"]
        self._noise.bit_generator.state = state["noise"]

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        per_turn = min(actions_per_turn, MOST_PLANNED)
        plan = self._planner.best(self.player, turns_left, actions_left, per_turn)
        return [self.actions[index] for index in plan]

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines:
        planner = Planner(self.lake, self._success_probability)
        best = None
        if actions_per_turn <= MOST_PLANNED:
            best = float(planner.values(turns, actions, actions_per_turn)[self.player])
        chances = np.zeros(self._size**2)
        chances[self.player] = 1.0
        for _ in range(min(actions, turns * actions_per_turn)):
            chances = chances @ planner.moves.mean(0)
        random = float(chances[self.lake.goal])
        return Baselines(random, best, random, best)

    def drawing(self) -> list[str]:
        return [row.translate(DRAWN) for row in self.rows()]

    @property
    def moving(self) -> int:
        return self.player

    @property
    def _ended(self) -> bool:
        return self.player == self.lake.goal or self.player in self.lake.holes

    def _set_lake(self, lake: Lake) -> None:
        self.lake = lake
        self.views = lake.views.setdefault(self.observation, {})
        self._planner = Planner(lake, self._success_probability, discount=1 - 1e-6)

    def rows(self) -> list[str]:
        lake = self.lake
        symbols = ["O" if cell in lake.holes else "_" for cell in range(self._size**2)]
        symbols[lake.goal] = "G"
        symbols[self.player] = {"_": "P", "O": "X", "G": "√"}[symbols[self.player]]
        return ["".join(symbols[i : i + self._size]) for i in range(0, len(symbols), self._size)]
