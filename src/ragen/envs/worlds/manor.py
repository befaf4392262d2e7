"""Manor: the key that is chosen in the first turn decides the episode, of 40 turns by default.

There are few states, and no event is random. So breadth-first search finds optimal play, and the
success of random play is computed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, permutations
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from ragen.core.errors import RagenError
from ragen.envs.contract import (
    Baselines,
    Env,
    Info,
    Options,
    Probability,
    State,
    fresh_seed,
    generators,
    pick,
    shuffled,
)
from ragen.envs.worlds.search import shortest_path

COMPASS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
"""The change of row and column by each way."""
WAYS = tuple(COMPASS)
METALS = ("brass", "copper", "iron", "silver", "steel", "tin")
ROOMS = (
    "library",
    "kitchen",
    "chapel",
    "gallery",
    "nursery",
    "armoury",
    "cellar",
    "study",
    "orangery",
    "music room",
    "pantry",
    "laundry",
    "workshop",
    "observatory",
    "bath",
    "attic",
)
"""The names of all rooms but the first, which is the hall."""
SLACK = 25
"""Turns of an episode beyond `delay`."""
HALL, NO_DOOR, NO_KEY = 0, -1, -1


class Position(NamedTuple):
    """All that actions change. `levers` has a bit for each lever that is pulled."""

    room: int = HALL
    key: int = NO_KEY
    levers: int = 0
    is_open: bool = False
    is_broken: bool = False


@dataclass(frozen=True)
class House:
    """The fixed parts of a level; rooms are numbered from the hall.

    `doors` has, for each room, the rooms behind its doors in the order of `WAYS`, or `NO_DOOR`.
    `levers` are the rooms with a lever. `vault` is the room with the vault, and `right` is the
    number of the key for its lock.
    """

    rooms: tuple[str, ...]
    doors: tuple[tuple[int, ...], ...]
    levers: tuple[int, ...]
    vault: int
    keys: tuple[str, ...]
    right: int

    @cached_property
    def actions(self) -> tuple[str, ...]:
        """The names of the actions, the same in all rooms."""
        keys = (f"take {metal} key" for metal in self.keys)
        return (*WAYS, *keys, "pull lever", "unlock vault")

    def act(self, at: Position, action: str) -> tuple[Position, str]:
        """The position after an action, and what happened."""
        if at.is_open or at.is_broken:
            return at, "Nothing happens."
        if action in COMPASS:
            beyond = self.doors[at.room][WAYS.index(action)]
            if beyond == NO_DOOR:
                return at, f"There is no door to the {action}."
            if at.key == NO_KEY:
                return at, "The doors stay shut until you have taken a key."
            return at._replace(room=beyond), f"You go {action}."
        if action == "pull lever":
            return self._pull(at)
        if action == "unlock vault":
            return self._unlock(at)
        if at.room != HALL:
            return at, "There is no such key here."
        if at.key != NO_KEY:
            return at, "A bar covers the hooks."
        key = self.actions.index(action) - len(WAYS)
        return at._replace(key=key), f"You {action}, and a bar drops over the other hooks."

    def _pull(self, at: Position) -> tuple[Position, str]:
        if at.room not in self.levers:
            return at, "There is no lever here."
        pulled = at.levers | 1 << self.levers.index(at.room)
        if pulled == at.levers:
            return at, "The lever is down already."
        return at._replace(levers=pulled), "You pull the lever, and chains rattle far away."

    def _unlock(self, at: Position) -> tuple[Position, str]:
        if at.room != self.vault:
            return at, "There is no vault here."
        if not self._is_free(at):
            return at, "An iron grille still covers the vault."
        if at.key == self.right:
            return at._replace(is_open=True), "The key turns, and the vault opens."
        return at._replace(is_broken=True), "The key does not fit, and it breaks in the lock."

    def look(self, at: Position) -> str:
        """The player's view of a position."""
        lines = [f"You are in the {self.rooms[at.room]}. Doors: {self._doors_of(at.room)}."]
        if at.room == HALL:
            lines += ["On the wall hangs a plan of the house:", *self.plan]
            if at.key == NO_KEY:
                right = self.keys[self.right]
                keys = ", ".join(f"{metal} key" for metal in self.keys)
                lines.append(f"On the hooks: {keys}. You may take one.")
                lines.append(f"A note says: the vault has a lock for the {right} key.")
        if at.room in self.levers:
            down = at.levers >> self.levers.index(at.room) & 1
            lines.append(f"There is a lever, and it is {'down' if down else 'up'}.")
        if at.room == self.vault:
            closed = "locked" if self._is_free(at) else "behind a grille"
            lines.append(f"Here is the vault. It is {'open' if at.is_open else closed}.")
        held = "no key" if at.key == NO_KEY else f"the {self.keys[at.key]} key"
        held = "half a key" if at.is_broken else held
        down = at.levers.bit_count()
        return "\n".join([*lines, f"You hold {held}. Levers down: {down} of {len(self.levers)}."])

    @cached_property
    def plan(self) -> list[str]:
        """The plan of the house: a line for each room."""
        lines = [f"{name}: {self._doors_of(room)}" for room, name in enumerate(self.rooms)]
        for room in self.levers:
            lines[room] += "; a lever"
        lines[self.vault] += "; the vault"
        return lines

    def _doors_of(self, room: int) -> str:
        pairs = zip(WAYS, self.doors[room], strict=True)
        return ", ".join(f"{way} to {self.rooms[to]}" for way, to in pairs if to != NO_DOOR)

    def _is_free(self, at: Position) -> bool:
        return at.levers == (1 << len(self.levers)) - 1


@lru_cache(maxsize=1024)
def generate(seed: int, rooms: int, levers: int, keys: int, delay: int) -> House:
    """The level of a seed, drawn again until its shortest solution has the right length.

    The last action, which unlocks the vault, comes `delay` to ``delay + SLACK // 2`` turns after
    the first, which takes the key.

    Raises:
        RagenError: A thousand attempts found no level.
    """
    level, _ = generators(seed, None)
    for _ in range(1000):
        vault, *places = shuffled(level, range(1, rooms))
        house = House(
            rooms=("hall", *shuffled(level, ROOMS)[: rooms - 1]),
            doors=_floor_plan(level, rooms),
            levers=tuple(places[:levers]),
            vault=vault,
            keys=tuple(shuffled(level, METALS)[:keys]),
            right=pick(level, range(keys)),
        )
        if delay <= _turns_after_the_key(house) <= delay + SLACK // 2:
            return house
    raise RagenError(
        f"no manor of {rooms} rooms and {levers} levers with delay = {delay} was found: give it "
        "more rooms or levers or a smaller delay, or fewer rooms if it is too large"
    )


def _turns_after_the_key(house: House) -> int:
    """Shortest walk past all levers to the vault, with one action in each of these rooms."""
    steps = {room: _steps_from(house, room) for room in (HALL, *house.levers)}
    routes = ((HALL, *order, house.vault) for order in permutations(house.levers))
    walk = min(sum(steps[a][b] for a, b in pairwise(route)) for route in routes)
    return walk + len(house.levers) + 1


def _steps_from(house: House, start: int) -> dict[int, int]:
    steps, frontier = {start: 0}, [start]
    for room in frontier:
        for other in house.doors[room]:
            if other != NO_DOOR and other not in steps:
                steps[other] = steps[room] + 1
                frontier.append(other)
    return steps


def _floor_plan(level: np.random.Generator, rooms: int) -> tuple[tuple[int, ...], ...]:
    """The doors: one to each new room from an earlier one, and some between other neighbours."""
    cells = [(0, 0)]
    doors = [[NO_DOOR] * len(WAYS)]
    while len(cells) < rooms:
        room, way = pick(level, range(len(cells))), pick(level, range(len(WAYS)))
        (row, column), (down, right) = cells[room], COMPASS[WAYS[way]]
        beyond = row + down, column + right
        if beyond not in cells:
            cells.append(beyond)
            doors.append([NO_DOOR] * len(WAYS))
        elif level.random() >= 0.1:
            continue
        other = cells.index(beyond)
        doors[room][way], doors[other][(way + 2) % len(WAYS)] = other, room
    return tuple(map(tuple, doors))


@lru_cache(maxsize=4096)
def shortest_solution(house: House, start: Position) -> tuple[str, ...] | None:
    """The actions of a shortest solution; ``None`` if none exists."""
    return shortest_path(
        start, house.actions, lambda at, action: house.act(at, action)[0], lambda at: at.is_open
    )


class Manor(Env):
    """Choose a key in the hall, pull levers all over the house, and unlock the vault with it.

    Only one key may be taken, and the house cannot be entered without one. A note in the hall says
    which key fits. So the first action decides the episode, but only the last one shows it. This
    environment tests whether credit reaches the turn that earned it.

    Observation:
        What the last action did; the room, its doors and what is in it; in the hall a plan of the
        house.

    Actions:
        north, east, south, west, ``take METAL key`` for each key of the level, pull lever and
        unlock vault. An action that is not possible here changes nothing.

    Reward:
        1 when the vault opens, and `lever_reward` for each lever that is pulled.

    Ends when:
        The vault opens (a success), or the wrong key breaks in its lock.

    Parameters:
        rooms: Number of rooms, the hall included.
        levers: Number of levers; only when all are down can the vault be unlocked.
        keys: Number of keys on the hooks.
        delay: Minimum number of turns from the choice of the key to its effect. An episode has 25
            turns more; the shortest solution needs at most half of the 25.
        lever_reward: The reward of a lever.

    Example:
        >>> env = Manor(rooms=5, levers=1, delay=5)
        >>> print(env.reset(seed=123)[0])
        You are in the hall. Doors: east to workshop, west to armoury.
        On the wall hangs a plan of the house:
        hall: east to workshop, west to armoury
        armoury: east to hall, south to cellar, west to music room; the vault
        workshop: west to hall
        music room: east to armoury; a lever
        cellar: north to armoury
        On the hooks: silver key, iron key. You may take one.
        A note says: the vault has a lock for the iron key.
        You hold no key. Levers down: 0 of 1.
        >>> for action in ("take iron key", "west", "west", "pull lever", "east"):
        ...     _ = env.step(action)
        >>> observation, *rest = env.step("unlock vault")
        >>> rest
        [1.0, True, False, {'success': True, 'effective': True}]
    """

    goal = "Manor"
    actions_per_turn = 1
    prompt_style = "paper"

    def __init__(
        self,
        rooms: Annotated[int, Field(ge=4, le=16)] = 10,
        levers: Annotated[int, Field(ge=0, le=4)] = 2,
        keys: Annotated[int, Field(ge=2, le=4)] = 2,
        delay: Annotated[int, Field(ge=2, le=25)] = 15,
        lever_reward: Probability = 0.1,
    ) -> None:
        if levers > rooms - 2:
            raise RagenError(f"levers = {levers}: {rooms} rooms have place for {rooms - 2}")
        self.name = "manor"
        self.max_turns = self.max_actions = delay + SLACK
        self._sizes = (rooms, levers, keys, delay)
        self._lever_reward = lever_reward
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        return (
            "You are in a manor and want to open its vault. In the hall hang keys: take one, and "
            "the others are locked away for good. The hall's doors open once you hold a key. Each "
            "lever of the house has to be pulled before the vault can be unlocked. The wrong key "
            "breaks in the lock of the vault, and the game is lost.\n"
            "Going north, east, south or west leads through a door to the next room. Pulling a "
            "lever and unlocking the vault work in the room where they are."
        )

    @property
    def actions(self) -> tuple[str, ...]:
        return self.house.actions

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        self._seed = fresh_seed() if seed is None else seed
        self.house, self.at = generate(self._seed, *self._sizes), Position()
        return self.state_key(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self.action_index(action)
        before = self.at
        self.at, event = self.house.act(before, action)
        at = self.at
        info = {"success": at.is_open, "effective": at != before}
        observation = f"{event}\n{self.house.look(at)}"
        return observation, self._reward(before, at), at.is_open or at.is_broken, False, info

    def _reward(self, before: Position, after: Position) -> float:
        pulled = (after.levers ^ before.levers).bit_count()
        return pulled * self._lever_reward + float(after.is_open and not before.is_open)

    def get_state(self) -> State:
        return {"seed": self._seed, "at": list(self.at)}

    def set_state(self, state: State) -> None:
        self._seed = state["seed"]
        self.house, self.at = generate(self._seed, *self._sizes), Position(*state["at"])

    def state_key(self) -> str:
        return self.house.look(self.at)

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        plan = shortest_solution(self.house, self.at)
        if not plan:  # the wrong key, or the end: all actions are equally good
            return [WAYS[0]]
        return list(plan[: min(actions_left, actions_per_turn)])

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines:
        budget = min(actions, turns * actions_per_turn)
        random, random_return = self._random_play(budget)
        at, optimal_return = self.at, 0.0
        for action in (shortest_solution(self.house, at) or ())[:budget]:
            after, _ = self.house.act(at, action)
            optimal_return += self._reward(at, after)
            at = after
        return Baselines(random, float(at.is_open), random_return, optimal_return)

    def _random_play(self, actions: int) -> tuple[float, float]:
        """Exact probability of success and expected return of uniformly random actions.

        The distribution over positions is carried forward: p′(s′) = Σ_s p(s) · |{a: s → s′}| ÷ A.
        """
        names = self.actions
        positions, following, rewards = {self.at: 0}, [], []
        for at in (frontier := [self.at]):
            reached = [self.house.act(at, action)[0] for action in names]
            for after in reached:
                if after not in positions:
                    positions[after] = len(positions)
                    frontier.append(after)
            following.append([positions[after] for after in reached])
            rewards.append(sum(self._reward(at, after) for after in reached) / len(names))
        chances = np.zeros(len(positions))
        chances[0], expected = 1.0, 0.0
        for _ in range(actions):
            expected += float(chances @ np.array(rewards))
            shares = np.repeat(chances / len(names), len(names))
            chances = np.zeros(len(positions))
            np.add.at(chances, np.array(following).ravel(), shares)
        is_open = [at.is_open for at in positions]
        return float(chances @ np.array(is_open, dtype=float)), expected
