"""Countdown: the grammar against attacks, levels that can be solved, rewards, and baselines."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.envs.registry import make
from ragen.envs.worlds.countdown import chances, evaluate, generate

GIVEN = [2, 3, 7, 25, 25]


def by_python(text: str) -> Fraction:
    """The value as Python computes it, with a fraction for each number."""
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", text))


# The grammar.


def test_an_expression_has_its_exact_value():
    for text, value in (
        *(("2 + 3 * 7", 23), ("(2 + 3) * 7", 35), ("25 - 7 - 3", 15), ("25 + 25", 50)),
        *(("25 / 2 / 25", Fraction(1, 2)), ("3 / (7 / 2)", Fraction(6, 7))),
        *(("2 - 3 * (7 - 25)", 56), ("((((25))))", 25), ("25×2÷25−3", -1), ("\t7\r\n+ 2", 9)),
    ):
        assert evaluate(text, GIVEN) == value


REFUSED = {
    "ends before it is complete": ("", "2 +"),
    "not an expression": (
        *("()", "2 3", "-2", "2 ** 3", "2 ^ 3", "2(3)", "2 + 3 = 5", "2.0 + 3", "2_5"),
        *("__import__('os')", "٣ + 2", "３ + 2", "² + 3", "2\u200b+ 3", "2\u00a0+ 3"),
    ),
    "not given": ("1e9", "0x7", "03 + 2", "4 + 3", "9" * 900),
    "not open": ("2 + 3)",),
    "leaves a bracket open": ("(2 + 3",),
    "more often than given": ("3 * 3", "25 + 25 + 25"),
    "divides by zero": ("2 / (25 - 25)",),
    "longer than 1000": ("(" * 1001, "1" * 100_000),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_anything_else_is_refused_with_its_reason(reason):
    for text in REFUSED[reason]:
        with pytest.raises(ValueError, match=reason) as error:
            evaluate(text, GIVEN)
        assert len(str(error.value)) < 100, "nothing of the answer is repeated"


def test_deep_brackets_need_no_recursion_and_little_time():
    deep = "(" * 499 + "2" + ")" * 499
    assert evaluate(deep, GIVEN) == 2
    start = time.process_time()
    for text in (deep, "(" * 1000, "2" + "+(" * 499, "((2)+" * 200):
        for _ in range(10):
            with suppress(ValueError):
                evaluate(text, GIVEN)
    assert time.process_time() - start < 1.0


@given(st.text(alphabet="0123457 ()+-*/×÷−=.a٣", max_size=30))
def test_whatever_is_accepted_has_the_value_that_python_gives(text):
    try:
        value = evaluate(text, GIVEN)
    except ValueError:
        return
    assert value == by_python(text.translate(str.maketrans("×÷−", "*/-")))


@given(st.integers(0, 500), st.integers(0, 2**32))
def test_random_play_writes_legal_expressions_of_at_least_two_numbers(level, seed):
    env = make("countdown")
    env.reset(seed=level)
    numbers = env.get_state()["numbers"]
    text = env.random_action(np.random.Generator(np.random.PCG64(seed)))
    try:
        expected = by_python(text)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="divides by zero"):
            evaluate(text, numbers)
    else:
        assert evaluate(text, numbers) == expected
    assert len(re.findall(r"\d+", text)) >= 2


# Levels.


@pytest.mark.parametrize("sizes", [(3, 4, 99, 999), (2, 2, 9, 20), (5, 8, 25, 100)])
def test_the_solver_solves_every_level(sizes):
    for seed in range(50):
        level = generate(seed, *sizes)
        assert evaluate(level.solution, level.numbers) == level.target
        assert sizes[0] <= len(level.numbers) <= sizes[1]
        assert max(level.numbers) <= sizes[2] and min(level.numbers) >= 1
        assert 1 <= level.target <= sizes[3] and level.target not in level.numbers


# Play.


def begin(**params):
    env = make("countdown", **params)
    env.set_state(
        {"numbers": [2, 3, 7], "target": 13, "solution": "2 * 3 + 7"}
        | {"tried": 0, "earned": 0.0, "report": ""}
    )
    return env


def test_one_answer_ends_the_episode():
    for answer, reward, report in (
        *(("2 * 3 + 7", 1.0, "gave 13"), ("2 + 3", 0.1, "gave 5"), ("7 / 3", 0.1, "gave 7/3")),
        ("13", 0.0, "did not count: it uses a number that is not given"),
        ("I think that it is 13", 0.0, "did not count: it is not an expression"),
        ("", 0.0, "did not count: it ends"),
    ):
        observation, paid, terminated, truncated, info = begin().step(answer)
        assert (paid, terminated, truncated) == (reward, True, False)
        assert info["success"] == (reward == 1) and report in observation


def test_of_several_attempts_the_best_counts():
    env = begin(attempts=4)
    assert (env.max_turns, env.actions_per_turn, env.max_actions) == (4, 1, 4)
    rewards = [env.step(answer)[1] for answer in ("nothing", "2 + 3", "2 + 7", "3 * 2 + 7")]
    assert rewards == [0.0, 0.1, 0.0, 0.9]
    env = begin(attempts=2)
    assert [env.step("2 + 3")[2] for _ in range(2)] == [False, True]


# Baselines.


def test_baselines_after_a_miss_count_what_is_left():
    env = begin(attempts=2)
    env.step("2 + 3")
    hit, _ = chances((2, 3, 7), 13)
    left = env.baselines(5, 1, 5)
    assert left.random == pytest.approx(hit) and left.optimal_return == 0.9
    assert left.random_return == pytest.approx(0.9 * hit)
