"""Exact random and optimal play of environments of Gymnasium that list their transitions (``P``).

Values are pairs of arrays over states: the probability of success, and the expected return.
**A** actions, **S** states, **K** outcomes of an action, **N** sequences of actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_PLANS = 2048
"""Maximum number of plans of a turn that are compared; with more, optimal play is unknown."""
FIRST = 1e9
"""The weight of success in the choice of a plan: success takes precedence over the return."""

Transitions = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
"""By state and action, the outcomes: probability, next state, reward, and whether it ends."""


class Played(NamedTuple):
    """A probability of success, an expected return, and the actions of the first turn."""

    success: float
    reward: float
    plan: tuple[int, ...] = ()


class Table:
    """The transitions of an environment, and the values of play from its states.

    With `every_end_solves`, every end is a success; otherwise, only an end with a positive reward.

    Example:
        One state, in which action 1 wins half of the time and action 0 does nothing:

        >>> stays = (0.5, 0, 0.0, False)
        >>> table = Table({0: {0: [stays, stays], 1: [stays, (0.5, 0, 1.0, True)]}}, False)
        >>> table.random(0, moves=2)  # 1 - 0.75²
        Played(success=0.4375, reward=0.4375, plan=())
        >>> table.optimal(0, turns=1, actions=2, per_turn=2)
        Played(success=0.75, reward=0.75, plan=(1, 1))
    """

    def __init__(self, transitions: Transitions, every_end_solves: bool) -> None:
        states, names = range(len(transitions)), range(len(transitions[0]))
        most = max(len(outcomes) for each in transitions.values() for outcomes in each.values())
        shape = (len(names), len(states), most)
        self._following = np.zeros(shape, dtype=np.int64)
        self._going_on = np.zeros(shape)
        self._gained = np.zeros((2, *shape[:2]))
        for state in states:
            for name in names:
                for at, (chance, there, reward, ended) in enumerate(transitions[state][name]):
                    won = ended and (every_end_solves or reward > 0)
                    self._following[name, state, at] = there
                    self._going_on[name, state, at] = 0.0 if ended else chance
                    self._gained[:, name, state] += chance * float(won), chance * float(reward)
        self._is_certain = most == 1
        self._none = np.zeros((2, len(states)))
        self._random = [self._none]
        self._best: dict[tuple[int, int, int], tuple[Floats, list[tuple[int, ...]]]] = {}

    def random(self, state: int, moves: int) -> Played:
        """Uniformly random play of `moves` actions."""
        while len(self._random) <= moves:
            self._random.append(self._before(self._random[-1][None])[:, 0].mean(axis=0))
        success, reward = self._random[moves][:, state]
        return Played(float(success), float(reward))

    def optimal(self, state: int, turns: int, actions: int, per_turn: int) -> Played | None:
        """The play with the highest probability of success, and the highest return among those.

        It chooses all actions of a turn before it sees their outcomes. ``None`` if there are more
        than `MOST_PLANS` plans of a turn.
        """
        if self._is_certain:  # nothing is learned between turns
            moves, plan, place = min(actions, turns * per_turn), list[int](), state
            values, _ = self._values(moves, moves, 1)
            while moves > 0 and len(plan) < per_turn:
                plan += self._values(moves, moves, 1)[1][place]
                ends = self._going_on[plan[-1], place, 0] == 0
                place, moves = int(self._following[plan[-1], place, 0]), 0 if ends else moves - 1
            return Played(float(values[0, state]), float(values[1, state]), tuple(plan))
        if len(self._following) ** min(per_turn, actions) > MOST_PLANS:
            return None
        values, plans = self._values(turns, actions, per_turn)
        return Played(float(values[0, state]), float(values[1, state]), plans[state])

    def _values(
        self, turns: int, actions: int, per_turn: int
    ) -> tuple[Floats, list[tuple[int, ...]]]:
        if turns == 0 or actions == 0:
            return self._none, [()] * self._none.shape[1]
        key = turns, actions, per_turn
        if key not in self._best:
            found: list[tuple[Floats, list[tuple[int, ...]]]] = []
            for count in range(1, min(per_turn, actions) + 1):
                values = self._values(turns - 1, actions - count, per_turn)[0][None]
                plans: list[tuple[int, ...]] = [()]
                for _ in range(count):
                    values = self._before(values).reshape(-1, *self._none.shape)
                    names = range(len(self._following))
                    plans = [(name, *plan) for name in names for plan in plans]
                found.append((values, plans))
            whole = np.concatenate([values for values, _ in found])
            every = [plan for _, plans in found for plan in plans]
            chosen = (FIRST * whole[:, 0] + whole[:, 1]).argmax(axis=0)
            best = np.take_along_axis(whole, chosen[None, None], axis=0)[0]
            self._best[key] = best, [every[index] for index in chosen]
        return self._best[key]

    def _before(self, values_N2S: Floats) -> Floats:
        """The values before one action, for each action: ``(A, N, 2, S)``."""
        after = values_N2S[:, :, self._following]  # N, 2, A, S, K
        value = (after * self._going_on).sum(axis=-1) + self._gained
        return np.moveaxis(value, 2, 0)
