"""Sudoku: fill a board so that every row, column and box has each digit once (arXiv:2604.06268).

Cells are numbered row by row. A board is a text of digits, with ``.`` for a blank cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import isqrt
from typing import Annotated, Literal, NamedTuple

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
    shuffled,
)

BLANK = "."
MOST_BLANKS = {4: 10, 9: 50}
"""Maximum number of blank cells, by the size of the board. The generator needs only a few boards
to reach it."""
LONGEST = 2000
"""Maximum number of characters in an answer."""
SEPARATORS = re.compile(r"[;,\n]|\|\|")
"""The separator of moves; `||` separates actions in other environments."""
MOVE = re.compile(r"[ \t\r]*([1-9])[ \t]+([1-9])[ \t]+([1-9])[ \t\r]*")


class Level(NamedTuple):
    """A board with blanks, and its only solution."""

    puzzle: str
    solution: str


def solutions(
    board: Sequence[int], size: int, generator: np.random.Generator | None = None
) -> Iterator[tuple[int, ...]]:
    """All ways to complete a board; 0 is a blank.

    The cell with the fewest possible digits comes first; digits ascend, or `generator` orders them.
    """
    cells, units = list(board), _units(size)
    used = [0] * (3 * size)  # by row, column and box, a bit for each digit
    for cell, digit in enumerate(cells):
        if digit:
            for unit in units[cell]:
                used[unit] |= 1 << digit
    every = (1 << size + 1) - 2

    def free(cell: int) -> int:
        row, column, box = units[cell]
        return every & ~(used[row] | used[column] | used[box])

    def complete(blanks: list[int]) -> Iterator[tuple[int, ...]]:
        if not blanks:
            yield tuple(cells)
            return
        cell = min(blanks, key=lambda each: free(each).bit_count())
        rest = [each for each in blanks if each != cell]
        possible = free(cell)
        digits = [digit for digit in range(1, size + 1) if possible >> digit & 1]
        for digit in digits if generator is None else shuffled(generator, digits):
            cells[cell] = digit
            for unit in units[cell]:
                used[unit] ^= 1 << digit
            yield from complete(rest)
            for unit in units[cell]:
                used[unit] ^= 1 << digit

    return complete([cell for cell, digit in enumerate(board) if not digit])


@lru_cache(maxsize=2)
def _units(size: int) -> list[tuple[int, int, int]]:
    """The row, column and box of each cell; rows are numbered first, then columns, then boxes."""
    box = isqrt(size)
    return [
        (row, size + column, 2 * size + row // box * box + column // box)
        for row in range(size)
        for column in range(size)
    ]


@lru_cache(maxsize=1024)
def generate(seed: int, size: int, blanks: int) -> Level:
    """The level of a seed: a random full board, and cells removed while its solution is unique.

    Raises:
        RagenError: A hundred full boards gave no such level.
    """
    level, _ = generators(seed, None)
    for _ in range(100):
        solution = next(solutions([0] * size**2, size, level))
        cells, left = list(solution), blanks
        for cell in shuffled(level, range(size**2)):
            if not left:
                break
            cells[cell] = 0
            if len(list(islice(solutions(cells, size), 2))) == 1:
                left -= 1
            else:
                cells[cell] = solution[cell]
        if not left:
            return Level(_text(cells), _text(solution))
    raise RagenError(
        f"no Sudoku of {size} × {size} cells with {blanks} blanks was found: lower blanks"
    )


def _text(cells: Sequence[int]) -> str:
    return "".join(str(digit) if digit else BLANK for digit in cells)


class Sudoku(Env):
    """Fill the blanks so that each row, each column and each box holds every digit once.

    Observation:
        The board, one row a line, ``.`` for a blank; then the result of the last answer.

    Actions:
        Free text: one or more moves ``row column digit``, counted from 1 at the top left, with
        ``;`` between them. They are carried out in order, up to the first that is wrong.
        Random play fills all blanks in random order with random digits.

    Reward:
        For each blank that is filled, 1 divided by the number of blanks of the level.

    Ends when:
        The board is full (a success).

    Parameters:
        size: Rows, columns and digits: 4 or 9.
        blanks: Blank cells; at most 10 of 16 and 50 of 81. An episode has as many turns.

    Example:
        >>> env = Sudoku()
        >>> print(env.reset(seed=123)[0])
        . 3 2 .
        2 4 1 .
        . 2 4 1
        4 1 . .
        >>> print(env.step("1 1 1; 1 4 3")[0].splitlines()[-1])
        Your last answer filled 1. Then row 1, column 4 was not 3.
    """

    goal = "Sudoku"
    actions_per_turn = 1
    prompt_style = "paper"
    actions = None

    def __init__(self, size: Literal[4, 9] = 4, blanks: Annotated[int, Field(ge=1)] = 6) -> None:
        if blanks > MOST_BLANKS[size]:
            raise RagenError(
                f"blanks = {blanks}: a board of {size} × {size} cells may have "
                f"{MOST_BLANKS[size]}, so that its solution is unique"
            )
        self.name = "sudoku"
        self.max_turns = self.max_actions = blanks
        self._size, self._blanks = size, blanks
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        size, box = self._size, isqrt(self._size)
        return (
            f"You are solving a Sudoku of {size} × {size} cells. Fill each blank (.) with a digit "
            f"from 1 to {size}, so that every row, every column and every box of {box} × {box} "
            "cells holds each digit once. There is one solution.\n"
            "An action is a move, row column digit, counted from 1 at the top left: 1 2 3 writes 3 "
            "into row 1, column 2. It may also be several moves with ; between them. They are "
            "carried out in order, up to the first that is wrong."
        )

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        seed = fresh_seed() if seed is None else seed
        self._level = generate(seed, self._size, self._blanks)
        self._board, self._report = self._level.puzzle, ""
        return self.state_key(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        before = self._board, self._report
        blanks = self._board.count(BLANK)
        problem = self._carry_out(action)
        placed = blanks - self._board.count(BLANK)
        self._report = f"\nYour last answer filled {placed}."
        if problem is not None:
            self._report += f" Then {problem}."
        solved = placed == blanks
        info = {"success": solved, "effective": (self._board, self._report) != before}
        reward = placed / self._level.puzzle.count(BLANK)
        return self.state_key(), reward, solved, False, info

    def _carry_out(self, answer: str) -> str | None:
        """Write the digits of an answer up to the first wrong one; returns what was wrong."""
        if len(answer) > LONGEST:
            return f"nothing was read: it is longer than {LONGEST} characters"
        size = self._size
        pieces = [each for each in SEPARATORS.split(answer) if each.strip()]
        for piece in pieces or [answer]:
            move = MOVE.fullmatch(piece)
            if move is None:
                return "something was no move: a move is row column digit, such as 1 2 3"
            row, column, digit = map(int, move.groups())
            if max(row, column, digit) > size:
                return f"a number was above {size}"
            cell = (row - 1) * size + column - 1
            if self._board[cell] != BLANK:
                return f"row {row}, column {column} was full already"
            if self._level.solution[cell] != str(digit):
                return f"row {row}, column {column} was not {digit}"
            self._board = f"{self._board[:cell]}{digit}{self._board[cell + 1 :]}"
        return None

    def get_state(self) -> State:
        puzzle, solution = self._level
        state = {"puzzle": puzzle, "solution": solution}
        return {**state, "board": self._board, "report": self._report}

    def set_state(self, state: State) -> None:
        self._level = Level(state["puzzle"], state["solution"])
        self._board, self._report = state["board"], state["report"]

    def state_key(self) -> str:
        return "\n".join(map(" ".join, self.drawing())) + self._report

    def random_action(self, generator: np.random.Generator) -> str:
        """A random digit for each blank, in random order."""
        blanks = [cell for cell, digit in enumerate(self._board) if digit == BLANK]
        digits = range(1, self._size + 1)
        return self._moves({cell: pick(generator, digits) for cell in shuffled(generator, blanks)})

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        pairs = enumerate(zip(self._board, self._level.solution, strict=True))
        return [self._moves({cell: right for cell, (digit, right) in pairs if digit == BLANK})]

    def _moves(self, digits: dict[int, int] | dict[int, str]) -> str:
        size = self._size
        return "; ".join(f"{cell // size + 1} {cell % size + 1} {d}" for cell, d in digits.items())

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines:
        left, right = self._board.count(BLANK), 1 / self._size
        chances = [0.0] * left + [1.0]  # by the number of blanks
        for _ in range(min(turns, actions)):
            after = [chances[0]] + [0.0] * left
            for blanks in range(1, left + 1):
                for placed in range(blanks):
                    after[blanks - placed] += chances[blanks] * right**placed * (1 - right)
                after[0] += chances[blanks] * right**blanks
            chances = after
        blanks_left = sum(blanks * chance for blanks, chance in enumerate(chances))
        total = self._level.puzzle.count(BLANK)
        return Baselines(chances[0], 1.0, (left - blanks_left) / total, left / total)

    def drawing(self) -> list[str]:
        size = self._size
        return [self._board[start : start + size] for start in range(0, size**2, size)]
