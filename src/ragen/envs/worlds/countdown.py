"""Countdown: reach a target with given numbers, each at most once (arXiv:2604.06268).

An answer is an expression in free text, with a small grammar of its own. It is read in time linear
in its length, without recursion, and computed with exact fractions:

    expression = term { ("+" | "-") term }
    term       = factor { ("*" | "/") factor }
    factor     = number | "(" expression ")"

``×``, ``÷`` and ``−`` stand for ``*``, ``/`` and ``-``. A number is one of the level's numbers in
the same digits. There are no signs and no powers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from math import gcd
from operator import add, mul, sub
from statistics import fmean
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np
from pydantic import Field

from ragen.core.errors import RagenError
from ragen.envs.contract import (
    Baselines,
    Env,
    Info,
    Options,
    State,
    fresh_seed,
    generators,
    pick,
)

Value: TypeAlias = int | Fraction
OPERATIONS: dict[str, Callable[[Value, Value], Value]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": lambda a, b: a // b if a % b == 0 else Fraction(a) / b,  # whole numbers are fast
}
RANKS = {"+": 1, "-": 1, "*": 2, "/": 2}
"""Precedence of the operators: a higher rank is carried out first."""
OTHER_SIGNS = str.maketrans("×÷−", "*/-")
TOKEN = re.compile(r"[0-9]+|[^ \t\r\n]")
LONGEST = 1000
"""Maximum number of characters in an answer."""
MOST_EXACT = 4
"""The `chances` of random play are computed for levels with at most this many numbers."""
LEGAL = 0.1
"""The reward of an expression that uses the numbers as allowed and misses the target."""
Ratio: TypeAlias = tuple[int, int]
"""A fraction in lowest terms, the second part positive."""


def evaluate(text: str, numbers: Sequence[int]) -> Value:
    """The value of an expression that uses each of `numbers` at most once.

    Raises:
        ValueError: It is no such expression, or divides by zero. The message does not quote it.
    """
    if len(text) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST} characters")
    unused = Counter(map(str, numbers))
    values: list[Value] = []
    waiting: list[str] = []  # operators and open brackets
    has_value = False  # whether the last token ended a value
    for token in TOKEN.findall(text.translate(OTHER_SIGNS)):
        if has_value and token in RANKS:
            _carry_out(values, waiting, RANKS[token])
            waiting.append(token)
        elif has_value and token == ")":
            _carry_out(values, waiting, 0)
            if not waiting:
                raise ValueError("it closes a bracket that is not open")
            waiting.pop()
            continue
        elif not has_value and token == "(":
            waiting.append(token)
            continue
        elif not has_value and token.isdecimal() and token.isascii():
            values.append(_take(unused, token))
        else:
            raise ValueError("it is not an expression of numbers, + - * / and brackets")
        has_value = not has_value
    if not has_value:
        raise ValueError("it ends before it is complete")
    _carry_out(values, waiting, 0)
    if waiting:
        raise ValueError("it leaves a bracket open")
    return values[0]


def _take(unused: Counter[str], token: str) -> int:
    if not unused[token]:
        raise ValueError("it uses a number that is not given, or one more often than given")
    unused[token] -= 1
    return int(token)


def _carry_out(values: list[Value], waiting: list[str], rank: int) -> None:
    """Carry out the operators since the last open bracket that have at least this rank."""
    while waiting and RANKS.get(waiting[-1], -1) >= rank:
        second, first = values.pop(), values.pop()
        operator = waiting.pop()
        if operator == "/" and not second:
            raise ValueError("it divides by zero")
        values.append(OPERATIONS[operator](first, second))


class Level(NamedTuple):
    """The numbers, the target, and an expression that reaches it."""

    numbers: tuple[int, ...]
    target: int
    solution: str


@lru_cache(maxsize=1024)
def generate(
    seed: int, min_numbers: int, max_numbers: int, largest_number: int, largest_target: int
) -> Level:
    """The level of a seed; the target is the value of a random expression of all its numbers.

    Every part of that expression is a positive integer. The target differs from all of the numbers.

    Raises:
        RagenError: A thousand attempts found no level.
    """
    level, _ = generators(seed, None)
    for _ in range(1000):
        count = pick(level, range(min_numbers, max_numbers + 1))
        numbers = tuple(1 + int(level.random() * largest_number) for _ in range(count))
        solution, target = _join(level, numbers, _whole_results)
        if target <= largest_target and target not in numbers:
            return Level(numbers, target, solution)
    raise RagenError(
        f"no Countdown level with a target up to {largest_target} was found: raise largest_target, "
        "or lower largest_number or max_numbers"
    )


def _whole_results(a: int, b: int) -> list[tuple[str, int]]:
    """The operators that give a positive integer for two numbers, and the results."""
    results = [("+", a + b), ("*", a * b)]
    if a > b:
        results.append(("-", a - b))
    if a % b == 0:
        results.append(("/", a // b))
    return results


def _any_result(a: int, b: int) -> list[tuple[str, int]]:
    """All operators, each with the result 0: results are not computed here."""
    return [(operator, 0) for operator in OPERATIONS]


def _join(
    generator: np.random.Generator,
    numbers: Sequence[int],
    results: Callable[[int, int], list[tuple[str, int]]],
) -> tuple[str, int]:
    """Join two random parts by one of their `results`, until one is left: a text and its value."""
    parts = [(str(number), number) for number in numbers]
    while len(parts) > 1:
        first = parts.pop(int(generator.random() * len(parts)))
        second = parts.pop(int(generator.random() * len(parts)))
        operator, value = pick(generator, results(first[1], second[1]))
        a, b = (f"({text})" if " " in text else text for text, _ in (first, second))
        parts.append((f"{a} {operator} {b}", value))
    return parts[0]


@lru_cache(maxsize=1024)
def chances(numbers: tuple[int, ...], target: int) -> tuple[float, float]:
    """The probabilities that random play reaches the target, and that its expression has a value.

    An expression that divides by 0 has no value. The recursion covers all results of joining two
    values and visits each set of values once. It is exact, because values are fractions.

    Example:
        >>> chances((2, 2), 1)  # of four operators, division reaches it
        (0.25, 1.0)
        >>> chances((5,), 5), chances((1, 1), 7)
        ((1.0, 1.0), (0.0, 1.0))
    """
    known: dict[tuple[Ratio, ...], tuple[float, float]] = {}

    def of(values: tuple[Ratio, ...]) -> tuple[float, float]:
        if len(values) == 1:
            return float(values[0] == (target, 1)), 1.0
        if values not in known:
            hits, valid = 0.0, 0.0
            pairs = list(combinations(range(len(values)), 2))
            for i, j in pairs:
                rest = values[:i] + values[i + 1 : j] + values[j + 1 :]
                for weight, result in _ratios(values[i], values[j]):
                    hit, defined = of(tuple(sorted((*rest, result))))
                    hits += weight * hit
                    valid += weight * defined
            known[values] = hits / len(pairs), valid / len(pairs)
        return known[values]

    ratios = sorted((number, 1) for number in numbers)
    by_count = [
        [of(chosen) for chosen in combinations(ratios, count)]
        for count in range(min(2, len(ratios)), len(ratios) + 1)
    ]
    return (
        fmean(fmean(hit for hit, _ in parts) for parts in by_count),
        fmean(fmean(valid for _, valid in parts) for parts in by_count),
    )


def _ratios(first: Ratio, second: Ratio) -> list[tuple[float, Ratio]]:
    """The probabilities and results of random play on two values; division by 0 gives no result."""
    (a, b), (c, d) = first, second
    made = [(0.25, a * d + c * b, b * d), (0.25, a * c, b * d)]
    made += [(0.125, a * d - c * b, b * d), (0.125, c * b - a * d, b * d)]
    if c:
        made.append((0.125, a * d, b * c))
    if a:
        made.append((0.125, c * b, d * a))
    reduced = []
    for weight, top, bottom in made:
        divisor = gcd(top, bottom) * (1 if bottom > 0 else -1)
        reduced.append((weight, (top // divisor, bottom // divisor)))
    return reduced


class Countdown(Env):
    """Write an expression over the numbers whose value is the target.

    Observation:
        The numbers and the target; after a wrong answer, the reason why it is wrong.

    Actions:
        Free text: an expression with ``+ - * /`` and brackets that uses each number at most once.
        Random play joins two or more of the numbers by random operators.

    Reward:
        1 for the target; 0.1 for another value, if the numbers are used as allowed; otherwise 0.
        The best of several attempts counts: a later attempt earns only what it adds to the best
        one before it.

    Ends when:
        The target is reached (a success), or the attempts are used up.

    Parameters:
        min_numbers, max_numbers: How many numbers a level has.
        largest_number: The numbers are from 1 to this.
        largest_target: The target is from 1 to this.
        attempts: Number of answers, one a turn; feedback follows a wrong answer.

    Example:
        >>> env = Countdown(attempts=2)
        >>> print(env.reset(seed=123)[0])
        Numbers: 92, 90, 46, 41
        Target: 187
        >>> print(env.step("92 + 90")[0].splitlines()[-1])
        Your last answer gave 182.
        >>> env.step("92 + 90 + 46 - 41")[1:]
        (0.9, True, False, {'success': True, 'effective': True})
    """

    goal = "Countdown"
    actions_per_turn = 1
    prompt_style = "paper"
    actions = None

    def __init__(
        self,
        min_numbers: Annotated[int, Field(ge=2, le=8)] = 3,
        max_numbers: Annotated[int, Field(ge=2, le=8)] = 4,
        largest_number: Annotated[int, Field(ge=2, le=10_000)] = 99,
        largest_target: Annotated[int, Field(ge=2, le=1_000_000)] = 999,
        attempts: Annotated[int, Field(ge=1, le=100)] = 1,
    ) -> None:
        if min_numbers > max_numbers:
            raise RagenError(f"min_numbers = {min_numbers} is above max_numbers = {max_numbers}")
        self.name = "countdown"
        self.max_turns = self.max_actions = self._attempts = attempts
        self._sizes = (min_numbers, max_numbers, largest_number, largest_target)
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        tries = "one answer" if self._attempts == 1 else f"up to {self._attempts} answers"
        return (
            "You are playing Countdown. Write an arithmetic expression whose value is exactly the "
            "target. Use only the given numbers, each at most once, the operators + - * / and "
            f"brackets. Fractions on the way are fine. You have {tries}.\n"
            "An action is the expression alone, such as (3 + 25) * 7, without an equals sign."
        )

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        self._level = generate(fresh_seed() if seed is None else seed, *self._sizes)
        self._tried, self._earned, self._report = 0, 0.0, ""
        return self.state_key(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        before = self._report
        try:
            value = evaluate(action, self._level.numbers)
        except ValueError as problem:
            solved, worth = False, 0.0
            self._report = f"\nYour last answer did not count: {problem}."
        else:
            solved = value == self._level.target
            worth = 1.0 if solved else LEGAL
            self._report = f"\nYour last answer gave {value}."
        reward = max(0.0, worth - self._earned)
        self._earned += reward
        self._tried += 1
        info = {"success": solved, "effective": self._report != before}
        ended = solved or self._tried >= self._attempts
        return self.state_key(), reward, ended, False, info

    def get_state(self) -> State:
        numbers, target, solution = self._level
        return {
            "numbers": list(numbers),
            "target": target,
            "solution": solution,
            "tried": self._tried,
            "earned": self._earned,
            "report": self._report,
        }

    def set_state(self, state: State) -> None:
        self._level = Level(tuple(state["numbers"]), state["target"], state["solution"])
        self._tried, self._earned = state["tried"], state["earned"]
        self._report = state["report"]

    def state_key(self) -> str:
        numbers = ", ".join(map(str, self._level.numbers))
        return f"Numbers: {numbers}\nTarget: {self._level.target}{self._report}"

    def random_action(self, generator: np.random.Generator) -> str:
        """An expression of two or more of the numbers, joined in random order."""
        numbers = list(self._level.numbers)
        count = pick(generator, range(2, len(numbers) + 1))
        chosen = [numbers.pop(int(generator.random() * len(numbers))) for _ in range(count)]
        return _join(generator, chosen, _any_result)[0]

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        return [self._level.solution]

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines | None:
        if len(self._level.numbers) > MOST_EXACT:
            return None
        hit, legal = chances(self._level.numbers, self._level.target)
        tries = min(turns, actions, self._attempts - self._tried)
        random, illegal = 1 - (1 - hit) ** tries, (1 - legal) ** tries
        consoled = 0.0 if self._earned else LEGAL * (1 - random - illegal)
        best = 1 - self._earned
        return Baselines(random, 1.0, random * best + consoled, best)
