"""Sorting: balls of hidden weights are compared on a scale, and then named in order.

Only a tool, the scale, reveals weights. Comparisons are scarce and have to be chosen well.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, permutations
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ragen.envs.contract import Baselines, Info, Options, State, generators, pick
from ragen.envs.tools import ToolEnv, ToolError, tool, write_call

Ball = Literal["A", "B", "C", "D"]
BALLS = "ABCD"

Orders = frozenset[str]
"""The orders of the balls, lightest first, that agree with all comparisons so far."""


class Sorting(ToolEnv):
    """Find the order of balls by weight, with a scale that compares two at a time.

    Observation:
        The names of the balls; then the result of each call.

    Actions:
        Calls of the tool ``compare``, or an answer: the names from the lightest ball to the
        heaviest, as in ``C A D B``.

    Reward:
        1 for the right order, otherwise 0.

    Ends when:
        An order is answered: a success if it is right.

    Parameters:
        balls: The number of balls.

    Example:
        >>> env = Sorting()
        >>> env.reset(seed=123)[0]
        'Balls: A B C D'
        >>> env.step(write_call("compare", first="A", second="B"))[0]
        'A is lighter than B.'
        >>> env.step("D B A C")[1:]
        (0.0, True, False, {'success': False, 'effective': True})
    """

    name = "sorting"
    goal = "Sort the balls"
    prompt_style = "paper"
    max_turns, actions_per_turn, max_actions = 4, 2, 6

    def __init__(self, balls: Annotated[int, Field(ge=2, le=4)] = 4) -> None:
        self._balls = BALLS[:balls]
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        return (
            f"There are {len(self._balls)} balls of different weights. A scale compares two of "
            "them at a time. Find their order.\n"
            "Your answer is the names of all balls from the lightest to the heaviest, with spaces "
            f"between them, such as {' '.join(reversed(self._balls))}."
        )

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        level, _ = generators(seed, options)
        self._order = pick(level, _orders(self._balls))
        self._compared: list[str] = []
        self._answer = ""
        return f"Balls: {' '.join(self._balls)}", {}

    @tool
    def compare(self, first: Ball, second: Ball) -> str:
        """Compare the weights of two balls on the scale."""
        if first == second or not {first, second} <= set(self._balls):
            raise ToolError(f"name two different balls of {', '.join(self._balls)}")
        lighter, heavier = sorted((first, second), key=self._order.index)
        if lighter + heavier not in self._compared:
            self._compared = sorted([*self._compared, lighter + heavier])
        return f"{first} is {'lighter' if first == lighter else 'heavier'} than {second}."

    def answer(self, text: str) -> tuple[str, float, bool, bool, Info]:
        said = "".join(text.split())
        if sorted(said) != sorted(self._balls):
            shown = f"That is not an order of the balls {' '.join(self._balls)}."
            return shown, 0.0, False, False, {"success": False, "effective": False}
        before, self._answer = self._answer, said
        solved = said == self._order
        shown = f"The order is {'' if solved else 'not '}{' '.join(said)}."
        info = {"success": solved, "effective": said != before}
        return shown, float(solved), True, False, info

    def get_state(self) -> State:
        return {"order": self._order, "compared": self._compared, "answer": self._answer}

    def set_state(self, state: State) -> None:
        self._order, self._answer = state["order"], state["answer"]
        self._compared = list(state["compared"])

    def state_key(self) -> str:
        known = ", ".join(" < ".join(pair) for pair in self._compared)
        return f"Balls: {' '.join(self._balls)}; {known}; {self._answer}"

    def random_action(self, generator: np.random.Generator) -> str:
        """A random comparison or a random order, each half of the time."""
        if generator.random() < 0.5:
            return " ".join(pick(generator, _orders(self._balls)))
        first, second = pick(generator, list(permutations(self._balls, 2)))
        return write_call("compare", first=first, second=second)

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        left = self._left()
        _, pairs = best(left, turns_left, actions_left, actions_per_turn)
        if not pairs:
            return [" ".join(min(left))]
        return [write_call("compare", first=pair[0], second=pair[1]) for pair in pairs]

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines:
        left = self._left()
        solved, _ = best(left, turns, actions, actions_per_turn)
        answered = 1 - 0.5 ** min(turns, actions)  # random play takes one action a turn
        random = answered / len(_orders(self._balls))
        return Baselines(random, solved / len(left), random, solved / len(left))

    def _left(self) -> Orders:
        orders = _orders(self._balls)
        return frozenset(
            order for order in orders if all(_agrees(order, c) for c in self._compared)
        )


@cache
def _orders(balls: str) -> tuple[str, ...]:
    return tuple("".join(order) for order in permutations(balls))


def _agrees(order: str, pair: str) -> bool:
    return order.index(pair[0]) < order.index(pair[1])


@cache
def best(
    left: Orders, turns: int, actions: int, actions_per_turn: int
) -> tuple[int, tuple[str, ...]]:
    """Optimal play from the orders that are left, all equally likely.

    Returns how many of these orders it answers correctly, and the comparisons of this turn, which
    are none if it answers. All comparisons of a turn are chosen before their results are seen.

    Example:
        >>> orders = frozenset({"ABC", "ACB", "BAC", "BCA", "CAB", "CBA"})
        >>> best(orders, turns=2, actions=2, actions_per_turn=1)  # one comparison, two outcomes
        (2, ('AB',))
    """
    found: tuple[int, tuple[str, ...]] = (int(turns > 0 and actions > 0), ())
    if len(left) == 1 or turns < 2:
        return found
    pairs_of_balls = map("".join, combinations(sorted(min(left)), 2))
    open_pairs = [pair for pair in pairs_of_balls if len(_parts(left, (pair,))) == 2]
    for count in range(1, min(actions_per_turn, actions - 1) + 1):
        for pairs in combinations(open_pairs, count):
            rest = turns - 1, actions - count, actions_per_turn
            solved = sum(best(part, *rest)[0] for part in _parts(left, pairs))
            if solved > found[0]:
                found = solved, pairs
            if solved == len(left):
                return found
    return found


def _parts(left: Orders, pairs: tuple[str, ...]) -> list[Orders]:
    """The orders that are left after each possible outcome of comparing some pairs."""
    outcomes: dict[tuple[bool, ...], set[str]] = {}
    for order in left:
        outcomes.setdefault(tuple(_agrees(order, pair) for pair in pairs), set()).add(order)
    return list(map(frozenset, outcomes.values()))
