"""Word problems: exact numbers, files in GSM8K's format, the split, and baselines."""

from __future__ import annotations

import json
import runpy
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.core.errors import RagenError
from ragen.core.seeding import EVAL_LEVELS, REFILL_LEVELS, SFT_LEVELS, TRAIN_LEVELS
from ragen.envs.registry import make
from ragen.envs.worlds import word_problems
from ragen.envs.worlds.word_problems import SAMPLE, guesses, read_number, read_problems

SCRIPT = Path(__file__).parents[2] / "scripts" / "word_problems.py"
OWN = Path(word_problems.__file__).with_name(SAMPLE)


def line(question, answer):
    return json.dumps({"question": question, "answer": answer})


@pytest.fixture
def file(tmp_path):
    """Writes problems whose answers are 0, 1, 2 …; the question is the answer."""

    def write(count, name="problems.jsonl", first=0):
        path = tmp_path / name
        texts = [line(f"Say {n}.", f"Easy.\n#### {n}") for n in range(first, first + count)]
        path.write_text("\n".join(texts), encoding="utf-8")
        return str(path)

    return write


# Numbers.


NUMBERS = {
    42: ("42", " 42\n", "42.0", "42.", "042", "+42", "$42"),
    -42: ("-42", "−42"),
    Fraction(-85, 2): ("-$42.50",),
    1_234_567: ("1,234,567", "1234567"),
    Fraction(2469, 2): ("1,234.5",),
    Fraction(1, 2): (".5",),
    Fraction(1, 10): ("0.1",),
    50: ("50%",),
    Fraction(3, 2): ("6/4",),
    Fraction(-1, 3): ("-1/3",),
    0: ("0/5", "-0"),
}
NO_NUMBERS = (
    *("", " ", ".", "-", "$", "/", "%", "/2", "1/", "1/0", "1//2", "1/2/3", "1.5/2", "--1"),
    *("12,34", "1,2345", ",123", "1,23", "1.2.3", "1e3", "0x10", "1_000", "inf", "nan"),
    *("4 2", "42 apples", "= 42", "#### 42", "42 43", "1 1/2", "42..", "42%%", "$$4"),
    *("٤٢", "４２", "²", "½", "Ⅳ", "4\u200b2", "\u00a042"),
    *("9" * 51, "9" * 100_000, "1/" + "0" * 49, "(" * 1000),
)


def test_a_number_is_read_exactly_and_anything_else_is_no_number():
    for value, texts in NUMBERS.items():
        assert [read_number(text) for text in texts] == [value] * len(texts)
    assert [text for text in NO_NUMBERS if read_number(text) is not None] == []


@given(st.text(alphabet="0123456789,./%$+-− ٣e", max_size=60))
def test_reading_never_raises(text):
    value = read_number(text)
    assert value is None or isinstance(value, Fraction)


@given(st.fractions(max_denominator=10**9), st.integers(-(10**15), 10**15))
def test_what_is_written_is_read_again(fraction, whole):
    assert read_number(str(fraction)) == fraction
    assert read_number(f"{whole:,}") == whole
    assert read_number(f"{abs(whole)}.250") == abs(whole) + Fraction(1, 4)


# Files.


def test_the_sample_is_what_its_script_writes():
    assert OWN.read_text("utf-8") == runpy.run_path(str(SCRIPT))["sample"]()


def test_a_file_of_gsm8k_is_read(tmp_path):
    path = tmp_path / "train.jsonl"
    text = (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"
    )
    texts = [line("How many clips?", text), "", line("How far?", "#### 1,250"), ""]
    path.write_text("\n".join(texts), encoding="utf-8")
    assert [p.answer for p in read_problems(path)] == [72, 1250]


def test_a_broken_line_is_named_in_one_line(file):
    path = Path(file(1))
    start, end = path.read_text("utf-8"), "answer must end in #### and a number"
    for text, message in (
        ("{", "the line: Invalid JSON"),
        ("[1]", "the line: "),
        ("[" * 100_000, "the line: "),
        ('{"question": "Why?"}', "answer: Field required"),
        ('{"question": 7, "answer": "#### 7"}', "question: "),
        ('{"question": "", "answer": "#### 7"}', "question: "),
        *((line("Why?", answer), end) for answer in ("42", "#### because", "#### 1/0")),
        (line("Why?", "#### 42 or so"), end),
        (f'{start[:-1]}, "choices": ["1", "2"]}}', "choices: this key is not understood, so"),
        (f'{start[:-1]}, "answer": "#### 2"}}', "the key 'answer' comes twice"),
    ):
        path.write_text(f"{start}\n\n{text}\n", encoding="utf-8")
        with pytest.raises(RagenError) as error:
            make("word-problems", path=str(path))
        assert f"{path}, line 3: {message}" in str(error.value) and "\n" not in str(error.value)


def test_files_that_hold_nothing_are_refused(file, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    for path, message in (
        (empty, "holds no problem; write one per line"),
        (tmp_path, "is a directory"),
        (tmp_path / "missing.jsonl", "No such file"),
        (file(1), "all its problems are for evaluation"),
    ):
        with pytest.raises(RagenError, match=f"(?i){message}") as error:
            make("word-problems", path=str(path))
        assert "\n" not in str(error.value)


# The split.


def questions(env, levels):
    return [env.reset(seed=level)[0] for level in levels]


def test_the_first_of_four_problems_is_for_evaluation(file):
    env = make("word-problems", path=file(8))
    assert questions(env, range(EVAL_LEVELS, EVAL_LEVELS + 3)) == ["Say 0.", "Say 4.", "Say 0."]
    trained = questions(env, range(TRAIN_LEVELS, TRAIN_LEVELS + 7))
    assert trained == [f"Say {n}." for n in (1, 2, 3, 5, 6, 7, 1)]


def test_training_and_evaluation_share_no_problem_of_the_sample():
    env = make("word-problems")
    evaluated = set(questions(env, range(EVAL_LEVELS, TRAIN_LEVELS)))
    starts = (TRAIN_LEVELS, REFILL_LEVELS, SFT_LEVELS)
    trained = {each for start in starts for each in questions(env, range(start, start + 1000))}
    assert len(evaluated) == 256 and len(trained) == 768 and not evaluated & trained


def test_a_question_that_appears_twice_is_not_trained_on(file):
    path = Path(file(8))
    path.write_text(path.read_text("utf-8") + f"\n{line('Say 0.', '#### 0')}" * 3, encoding="utf-8")
    env = make("word-problems", path=str(path))
    assert "Say 0." not in questions(env, range(TRAIN_LEVELS, TRAIN_LEVELS + 50))


def test_a_second_file_is_for_evaluation_alone(file):
    env = make("word-problems", path=file(4), test_path=file(2, "test.jsonl", first=3))
    assert questions(env, range(EVAL_LEVELS, EVAL_LEVELS + 3)) == ["Say 3.", "Say 4.", "Say 3."]
    assert questions(env, range(TRAIN_LEVELS, TRAIN_LEVELS + 4)) == [
        f"Say {n}." for n in (0, 1, 2, 0)
    ]


# Play.


def test_one_answer_ends_the_episode(file):
    env = make("word-problems", path=file(8))
    for answer, solved, report in (
        *(("4", True, "4, is right"), ("$4.00", True, "4, is right"), ("8/2", True, "4, is")),
        *(("4.0000001", False, "is not right"), ("3.5", False, "7/2, is not right")),
        *(("four", False, "was not a number alone"), ("", False, "was not a number alone")),
    ):
        env.reset(seed=EVAL_LEVELS + 1)
        observation, reward, terminated, truncated, info = env.step(answer)
        assert (reward, terminated, truncated) == (float(solved), True, False)
        assert info["success"] == solved and report in observation


def test_the_reward_halves_with_each_attempt(file):
    env = make("word-problems", path=file(8), attempts=3)
    assert (env.max_turns, env.actions_per_turn, env.max_actions) == (3, 1, 3)
    for misses in range(3):
        env.reset(seed=EVAL_LEVELS + 1)
        rewards = [env.step("9")[1] for _ in range(misses)]
        assert [*rewards, env.step("4")[1]] == [0.0] * misses + [0.5**misses]
    env.reset(seed=EVAL_LEVELS + 1)
    assert [env.step("9")[2] for _ in range(3)] == [False, False, True]


# Baselines.


def test_random_play_guesses_from_the_numbers_of_the_question():
    assert guesses("No number here.") == (0,)
    assert guesses("Take 0 and 5.") == (0, 5, 5, -5, 0, 0, 5, 5, 0)
    assert len(guesses(" ".join(map(str, range(1, 100))))) == 8 + 8 * 7 * 4
