"""Sudoku: unique solutions, answers of several moves, rewards, and baselines."""

from __future__ import annotations

from itertools import islice, product
from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.envs.registry import make
from ragen.envs.worlds.sudoku import LONGEST, generate, solutions

START = {"puzzle": ".32.241..24141..", "solution": "1324241332414132"}


def begin():
    """The level of the docstring: blanks at (1, 1), (1, 4), (2, 4), (3, 1), (4, 3), (4, 4)."""
    env = make("sudoku")
    env.set_state({**START, "board": START["puzzle"], "report": ""})
    return env


def is_full_and_valid(board, size):
    box = isqrt(size)
    rows = [board[start : start + size] for start in range(0, size**2, size)]
    boxes = [
        "".join(row[left : left + box] for row in rows[top : top + box])
        for top, left in product(range(0, size, box), repeat=2)
    ]
    columns = ["".join(column) for column in zip(*rows, strict=True)]
    every = [str(digit) for digit in range(1, size + 1)]
    return all(sorted(unit) == every for unit in (*rows, *columns, *boxes))


# Levels.


def test_all_boards_of_4_by_4_are_found():
    assert len(set(solutions([0] * 16, 4))) == 288


def test_a_contradictory_board_has_no_solution():
    assert not list(solutions([1, 0, 0, 1, *[0] * 12], 4))


@pytest.mark.parametrize(
    ("size", "blanks", "levels"), [(4, 1, 20), (4, 10, 20), (9, 40, 5), (9, 50, 2)]
)
def test_levels_have_their_blanks_and_one_solution(size, blanks, levels):
    for seed in range(levels):
        puzzle, solution = generate(seed, size, blanks)
        assert puzzle.count(".") == blanks and is_full_and_valid(solution, size)
        assert all(given in (".", right) for given, right in zip(puzzle, solution, strict=True))
        board = [0 if digit == "." else int(digit) for digit in puzzle]
        found = list(islice(solutions(board, size), 2))
        assert ["".join(map(str, each)) for each in found] == [solution]


# Answers.


@pytest.mark.parametrize(
    ("problem", "answers"),
    [
        (None, {"1 1 1": 1, "1 1 1; 1 4 4": 2, "1 1 1, 1 4 4\n2 4 3;": 3, "  1\t1  1 ": 1}),
        (None, {"1 1 1 || 1 4 4": 2, "1 1 1;\n1 4 4 ||": 2}),
        ("row 1, column 1 was not 2", {"1 1 2": 0}),
        ("row 1, column 4 was not 3", {"1 1 1; 1 4 3; 2 4 3": 1}),
        ("row 1, column 2 was full already", {"1 2 3": 0}),
        ("row 1, column 1 was full already", {"1 1 1; 1 1 1": 1}),
        ("a number was above 4", {"1 1 5": 0}),
        ("no move", dict.fromkeys(("", ";;;", "0 1 1", "-1 1 1", "1 1", "111", "1 1 11"), 0)),
        # Arabic ones, and spaces that are not ASCII.
        ("no move", dict.fromkeys(("1 1 1 1", "1 1 1 | 1 4 4", "١ ١ ١", "1\u00a01\u00a01"), 0)),
        (f"longer than {LONGEST}", {"9" * 100_000: 0}),
    ],
)
def test_moves_are_carried_out_up_to_the_first_that_is_wrong(problem, answers):
    for answer, filled in answers.items():
        env = begin()
        observation, reward, terminated, truncated, info = env.step(answer)
        assert reward == pytest.approx(filled / 6) and not (terminated or truncated)
        assert env.get_state()["board"].count(".") == 6 - filled
        last = observation.splitlines()[-1]
        assert last.startswith(f"Your last answer filled {filled}.") and len(observation) < 200
        assert (problem or "filled") in last and ("Then" in last) == (problem is not None)
        assert info == {"success": False, "effective": True}


def test_the_last_blank_ends_the_episode_with_success():
    env = begin()
    rewards = [env.step(move)[1] for move in ("1 1 1", "1 4 4; 2 4 3", "3 1 3; 4 3 3")]
    _, reward, terminated, _, info = env.step("4 4 2")
    assert terminated and info["success"] and sum(rewards) + reward == pytest.approx(1.0)


def test_one_answer_may_fill_the_whole_board():
    env = begin()
    (answer,) = env.solve(6, 6, 1)
    assert env.step(answer)[1:4] == (1.0, True, False)


@given(st.text(alphabet="0123456 ;,\n\t.-١x", max_size=40))
def test_whatever_is_answered_the_board_keeps_to_the_solution(text):
    env = begin()
    env.step(text)
    board = env.get_state()["board"]
    assert all(a in (".", b) for a, b in zip(board, START["solution"], strict=True))


# Budgets and baselines.


def test_an_episode_has_a_turn_for_each_blank():
    for params in ({}, {"blanks": 3}, {"size": 9, "blanks": 50}):
        env = make("sudoku", **params)
        budgets = (env.max_turns, env.actions_per_turn, env.max_actions)
        assert budgets == (env.state_key().count("."), 1, env.state_key().count("."))


def test_random_play_fills_every_blank_with_any_digit():
    env = begin()
    generator = np.random.Generator(np.random.PCG64(0))
    answers = [env.random_action(generator).split("; ") for _ in range(300)]
    assert {len({move[:3] for move in moves}) for moves in answers} == {6}
    assert {move[-1] for moves in answers for move in moves} == set("1234")


def test_one_turn_of_random_play_has_to_get_every_digit_right():
    assert begin().baselines(1, 1, 1).random == 0.25**6
