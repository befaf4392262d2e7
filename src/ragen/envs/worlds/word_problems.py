"""Word problems: questions with a number as answer, from a file in GSM8K's format.

A file holds one problem per line, ``{"question": text, "answer": text}``. The last line of the
answer is ``#### 42``. RAGEN's own sample is made from templates by ``scripts/word_problems.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ragen.core.errors import RagenError
from ragen.core.files import file_errors, read_json_lines
from ragen.core.seeding import EVAL_LEVELS, TRAIN_LEVELS
from ragen.envs.contract import Baselines, Env, Info, Options, State, fresh_seed, pick

SAMPLE = "word_problems.jsonl"
"""RAGEN's own problems, beside this file."""
HELD_OUT = 4
"""One problem in this many is for evaluation, unless there is a separate file for it."""
MOST_BYTES = 2**28
LONGEST = 50
"""Maximum number of characters in a number."""
MOST_NUMBERS = 8
"""Maximum number of a question's numbers that random play computes with."""
MARK = "####"
FORM = f'{{"question": text, "answer": "… {MARK} 42"}}'
NUMBER = re.compile(
    r"(?P<sign>[-+−]?)\$?(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?P<rest>\.[0-9]+|/[0-9]+)?[.%]?"
)


def read_number(text: str) -> Fraction | None:
    """The exact number that a text consists of; ``None`` if it is not a number.

    It may have a sign, a dollar sign, commas between thousands, and decimals or a denominator; a
    point or a percent sign may follow.
    """
    match = NUMBER.fullmatch(text.strip(" \t\r\n")) if len(text) <= LONGEST else None
    if match is None:
        return None
    try:
        value = Fraction(match["whole"].replace(",", "") + (match["rest"] or ""))
    except (ValueError, ZeroDivisionError):  # no digits, or a denominator of 0
        return None
    return value if match["sign"] in ("", "+") else -value


class Problem(NamedTuple):
    """A question and its answer."""

    question: str
    answer: Fraction


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    question: Annotated[str, Field(min_length=1)]
    answer: str


def read_problems(path: Path) -> tuple[Problem, ...]:
    r"""The problems of a file, one per line; empty lines are skipped.

    Raises:
        RagenError: The file cannot be read or holds no problem, or a line is not a problem.
    """
    with file_errors("read", path):
        known = path.stat()
    return _read(path, known.st_mtime_ns, known.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> tuple[Problem, ...]:
    """The problems of a file, which is read again after it has changed."""
    lines = read_json_lines(path, _Line, MOST_BYTES, FORM)
    if not lines:
        raise RagenError(f"{path} holds no problem; write one per line, {FORM}")
    return tuple(_problem(found, where) for where, found in lines)


def _problem(found: _Line, where: str) -> Problem:
    _, mark, end = found.answer.rpartition(MARK)
    answer = read_number(end) if mark else None
    if answer is None:
        raise RagenError(f"{where}: answer must end in {MARK} and a number, such as {MARK} 42")
    return Problem(found.question, answer)


class WordProblems(Env):
    """Answer a question with a number, from a file or from the 1,024 problems of RAGEN.

    Levels below 10,000 are for evaluation and all others for training, and they share no problem.
    The first of every four problems of a file is for evaluation, or those of `test_path` if it is
    given; a question that appears in both parts is left out of training. In each part, the levels
    follow the order of the file and begin again at its end.

    Observation:
        The question; after a wrong answer, what was wrong with it.

    Actions:
        Free text: the number alone. It is compared exactly, as a fraction. Random play answers
        with a number of the question, or with two of them added, subtracted, multiplied or divided.

    Reward:
        1 for the right number at the first attempt, and half as much at each further one.

    Ends when:
        The number is right (a success), or the attempts are used up.

    Parameters:
        path: A file in GSM8K's format; RAGEN's own sample if it is empty.
        test_path: A second file, for evaluation only.
        attempts: Number of answers, one a turn.

    Example:
        >>> env = WordProblems(attempts=2)
        >>> print(env.reset(seed=123)[0])
        A cake needs 3/2 cups of flour. How many cups does Priya need for 5 cakes?
        >>> print(env.step("8 cups")[0].splitlines()[-1])
        Your last answer was not a number alone.
        >>> env.step("7.5")[1:]
        (0.5, True, False, {'success': True, 'effective': True})
    """

    goal = "Word problems"
    actions_per_turn = 1
    prompt_style = "paper"
    actions = None

    def __init__(
        self, path: str = "", test_path: str = "", attempts: Annotated[int, Field(ge=1, le=30)] = 1
    ) -> None:
        self.name = "word-problems"
        self.max_turns = self.max_actions = self._attempts = attempts
        sample = Path(str(resources.files("ragen.envs.worlds") / SAMPLE))
        problems = read_problems(Path(path) if path else sample)
        self._evaluation = read_problems(Path(test_path)) if test_path else problems[::HELD_OUT]
        held_out = {problem.question for problem in self._evaluation}
        self._training = tuple(each for each in problems if each.question not in held_out)
        if not self._training:
            raise RagenError(
                f"{path}: all its problems are for evaluation, and none is left for training; give "
                "it more problems"
            )
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        tries = "one answer" if self._attempts == 1 else f"up to {self._attempts} answers"
        return (
            "You are solving a word problem. Work out the number that the question asks for. "
            f"You have {tries}.\n"
            "An action is the number alone, without a unit: 42, -3, 1,250, 2.5 or 3/4. It has to "
            "be exact."
        )

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        seed = fresh_seed() if seed is None else seed
        if seed < TRAIN_LEVELS:
            self._problem = self._evaluation[(seed - EVAL_LEVELS) % len(self._evaluation)]
        else:
            self._problem = self._training[(seed - TRAIN_LEVELS) % len(self._training)]
        self._tried, self._report = 0, ""
        return self.state_key(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        before, number = self._report, read_number(action)
        solved = number == self._problem.answer
        if number is None:
            self._report = "\nYour last answer was not a number alone."
        else:
            self._report = f"\nYour last answer, {number}, is {'right' if solved else 'not right'}."
        reward = 0.5**self._tried if solved else 0.0
        self._tried += 1
        info = {"success": solved, "effective": self._report != before}
        ended = solved or self._tried >= self._attempts
        return self.state_key(), reward, ended, False, info

    def get_state(self) -> State:
        question, answer = self._problem
        state = {"question": question, "answer": str(answer)}
        return {**state, "tried": self._tried, "report": self._report}

    def set_state(self, state: State) -> None:
        self._problem = Problem(state["question"], Fraction(state["answer"]))
        self._tried, self._report = state["tried"], state["report"]

    def state_key(self) -> str:
        return self._problem.question + self._report

    def random_action(self, generator: np.random.Generator) -> str:
        """One of `guesses`."""
        return str(pick(generator, guesses(self._problem.question)))

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        return [str(self._problem.answer)]

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines:
        possible = guesses(self._problem.question)
        hit = possible.count(self._problem.answer) / len(possible)
        tries = range(self._tried, min(self._attempts, self._tried + min(turns, actions)))
        expected = sum(hit * (1 - hit) ** (n - self._tried) * 0.5**n for n in tries)
        return Baselines(1 - (1 - hit) ** len(tries), 1.0, expected, 0.5**self._tried)


@lru_cache(maxsize=1024)
def guesses(question: str) -> Sequence[Fraction]:
    """The answers of random play, all equally likely.

    They are the numbers of the question, and each two of them added, subtracted, multiplied and
    divided. If the question has no number, the only answer is 0.
    """
    numbers = [*_numbers(question)][:MOST_NUMBERS]
    pairs = list(permutations(numbers, 2))
    joined = [result for a, b in pairs for result in (a + b, a - b, a * b, *([a / b] if b else []))]
    return (*numbers, *joined) or (Fraction(0),)


def _numbers(question: str) -> Iterator[Fraction]:
    for word in re.findall(r"[0-9][0-9,./]*", question):
        number = read_number(word.rstrip(",./"))
        if number is not None:
            yield number
