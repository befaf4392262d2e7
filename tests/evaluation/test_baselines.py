"""Baselines: exact values against samples and the published table, and the cache."""

import json
import statistics
import sys
from pathlib import Path

import pytest

from ragen.core.user_code import UserCodeError
from ragen.envs.contract import Baselines
from ragen.envs.registry import make
from ragen.envs.worlds.bandit import Bandit
from ragen.envs.worlds.webshop.shop import WebShop
from ragen.evaluation import baselines
from ragen.evaluation.baselines import (
    Budget,
    compute_baselines,
    level_baselines,
    measure_baselines,
    sample_baselines,
    sources,
)
from tests.free_text import Echo, Mute

LEVELS = range(123, 379)
DOCS = Path(__file__).parents[2] / "docs" / "environment-cards.md"
PAPER = Budget(5, 5, 10)

PUBLISHED = [
    # environment, parameters, actions, random, optimal (per cent, levels 123–378 of the released
    # generators)
    ("sokoban", {}, 5, 12.8, 77.7),
    ("sokoban", {}, 10, 18.4, 100.0),
    ("sokoban", {}, 20, 26.7, None),
    ("sokoban-large", {}, 10, 2.8, 99.2),
    ("frozen-lake", {}, 5, 15.7, None),
    ("frozen-lake", {}, 10, 21.2, 48.3),
    ("frozen-lake", {}, 35, 29.5, None),
    ("frozen-lake", {"success_probability": 0.8}, 10, 21.2, 90.0),
    ("frozen-lake", {"success_probability": 0.8, "p_frozen": 0.9}, 10, 24.3, 94.4),
    ("frozen-lake-still", {}, 10, 21.2, 100.0),
]
QUICK = (PUBLISHED[7],)


@pytest.mark.parametrize(
    ("name", "params", "actions", "random", "optimal"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in PUBLISHED],
)
def test_baselines_equal_the_published_table_within_sampling_error(
    name, params, actions, random, optimal
):
    # Both means are over 256 levels drawn independently (other generators, other random streams),
    # so their difference has the standard error √2·s/√256, s the deviation over levels; three of
    # them are allowed. Published optimal play sees the effect of each action: one action per turn.
    env = make(name, **params)
    parts = [level_baselines(env, Budget(actions, 1, actions), level, 0) for level in LEVELS]
    for ours, published in (
        ([p.random for p in parts], random),
        ([p.optimal for p in parts], optimal),
    ):
        if published is not None:
            error = 2**0.5 * statistics.stdev(ours) / len(ours) ** 0.5
            # Where all of our levels are solved, one level of 256 may still differ.
            allowed = max(3 * error, 3 / 256)
            assert abs(statistics.fmean(ours) - published / 100) <= allowed


@pytest.mark.parametrize(
    "name",
    [
        *("bandit", "sudoku", "word-problems"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("countdown", "manor")),
    ],
)
def test_the_table_of_the_docs_holds_the_baselines(name):
    env = make(name)
    budget = Budget(env.max_turns, env.actions_per_turn, env.max_actions)
    computed = compute_baselines(env, budget, LEVELS)
    row = f"| `{name}` | {100 * computed.random:.1f} | {100 * computed.optimal:.1f} |"
    assert row in DOCS.read_text(encoding="utf-8") and computed.draws is None


def test_bandit_baselines_are_exact():
    computed = compute_baselines(make("bandit"), Budget(1, 1, 1), LEVELS)
    # Random: half of .15 and half of .25.
    assert (computed.random, computed.optimal, computed.draws) == (0.5, 1.0, None)
    assert computed.random_return == pytest.approx(0.2) and computed.optimal_return == 0.25


@pytest.mark.parametrize(
    ("name", "params", "budget"),
    [
        ("bandit", {}, Budget(1, 1, 1)),
        ("frozen-lake", {"success_probability": 0.8}, Budget(3, 2, 6)),
        ("sokoban", {}, PAPER),
        ("sokoban-large", {"boxes": 1}, Budget(2, 3, 10)),
    ],
)
def test_exact_and_sampled_baselines_agree(name, params, budget):
    env, draws = make(name, **params), 60
    for level in (123, 124):
        exact = level_baselines(env, budget, level, 0)
        sampled = sample_baselines(env, budget, level, draws)
        assert exact.draws is None and sampled.draws == draws
        for ours, theirs in ((exact.random, sampled.random), (exact.optimal, sampled.optimal)):
            error = (max(ours * (1 - ours), 1 / draws) / draws) ** 0.5
            assert abs(ours - theirs) <= 4 * error
        # Returns lie within 12 of each other; 4 standard errors of the widest case.
        assert abs(exact.random_return - sampled.random_return) <= 4 * 6 / draws**0.5
        if exact.optimal in (0.0, 1.0) and name != "bandit":
            assert exact.optimal_return == pytest.approx(sampled.optimal_return)


def test_an_environment_without_a_solver_has_no_optimal_play():
    class Unsolved(Bandit):
        solve, baselines = (lambda *_: None for _ in range(2))

    found = compute_baselines(Unsolved(), PAPER, range(10), draws=40)
    assert found.optimal is None and found.optimal_return is None and found.draws == 400
    assert abs(found.random - 0.5) <= 4 * 0.5 / 400**0.5


def test_random_play_of_free_text_is_measured():
    measured = sample_baselines(Echo(), Budget(2, 1, 2), 123, 400)
    # One of four words in each of two turns: 1 − (3/4)²; its return is the same. Four errors.
    assert abs(measured.random - 7 / 16) <= 4 * (7 / 16 * 9 / 16 / 400) ** 0.5
    assert measured.random_return == measured.random
    silent = sample_baselines(Mute(), Budget(2, 1, 2), 123, 4)
    assert (silent.random, silent.random_return) == (0.0, 0.0)


def test_cached_baselines_equal_computed_ones_and_are_reused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = measure_baselines("frozen-lake", {}, PAPER, range(123, 127))
    assert len(list(tmp_path.rglob("*.json"))) == 1 and not list(tmp_path.rglob("*.tmp"))
    assert first == compute_baselines(make("frozen-lake"), PAPER, range(123, 127))
    monkeypatch.setattr(
        baselines, "compute_baselines", lambda *a, **k: pytest.fail("computed again")
    )
    assert measure_baselines("frozen-lake", {}, PAPER, range(123, 127)) == first


def test_the_cache_distinguishes_parameters_budgets_and_levels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for params, budget, levels in [
        ({}, PAPER, [123]),
        ({"p_frozen": 0.9}, PAPER, [123]),
        ({}, Budget(5, 5, 9), [123]),
        ({}, PAPER, [124]),
    ]:
        measure_baselines("frozen-lake", params, budget, levels)
    assert len(list(tmp_path.rglob("*.json"))) == 4


def test_a_changed_file_has_other_baselines(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    problems = tmp_path / "problems.jsonl"
    for first in (1, 100, 100):
        lines = [
            json.dumps({"question": f"Say {n}.", "answer": f"So it is.\n#### {n}"})
            for n in range(first, first + 20)
        ]
        if not problems.exists() or problems.read_text() != "\n".join(lines):
            problems.write_text("\n".join(lines))
        params = {"path": str(problems)}
        measure_baselines("word-problems", params, Budget(1, 1, 1), [10_000])
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2


def test_baselines_are_computed_if_the_cache_is_damaged_or_unwritable(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = measure_baselines("bandit", {}, PAPER, [123])
    (file,) = tmp_path.rglob("*.json")
    unfit = '{"random": NaN, "optimal": 1, "random_return": "x", "optimal_return": 0}'
    for damaged in ("", "[]", '{"random": 1}', "\x00", unfit):
        file.write_text(damaged, encoding="utf-8")
        assert measure_baselines("bandit", {}, PAPER, [123]) == first
    blocked = tmp_path / "a file"
    blocked.write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))  # a file cannot contain a folder
    assert measure_baselines("bandit", {}, PAPER, [123]) == first


class Flaky(Bandit):
    """Fails in every tenth call, as an environment behind a network may."""

    calls = 0

    def step(self, action):
        Flaky.calls += 1
        if Flaky.calls % 10 == 0:
            raise ConnectionError("reset by peer")
        return super().step(action)

    def baselines(self, turns, actions_per_turn, actions):
        return None


def test_an_episode_in_which_the_environment_fails_is_left_out():
    found = compute_baselines(Flaky(), Budget(1, 1, 1), [123, 124], draws=200)
    assert found.random == pytest.approx(0.5, abs=0.1)
    assert found.optimal == 1.0


class Hasty(Bandit):
    """Its solver gives more actions than the budgets allow; the first is the worse arm."""

    def solve(self, turns_left, actions_left, actions_per_turn):
        return ["Wave", "Win"]

    @property
    def actions(self):
        return ("Wave", "Win")

    def step(self, action):
        return "", float(action == "Win"), action == "Win", False, {"success": action == "Win"}

    def baselines(self, turns, actions_per_turn, actions):
        return None


def test_optimal_play_takes_no_more_actions_than_the_budgets_allow():
    for budget, optimal in (Budget(2, 1, 2), 0.0), (Budget(1, 2, 1), 0.0), (Budget(1, 2, 2), 1.0):
        assert sample_baselines(Hasty(), budget, 123, 2).optimal == optimal


class Answering(Bandit):
    """Its exact baselines are `answer`."""

    answer = None

    def baselines(self, turns, actions_per_turn, actions):
        return self.answer


def test_baselines_that_are_no_chances_or_finite_returns_are_refused(monkeypatch):
    for answer, reason in (
        (Baselines(float("nan"), 1.0, 0.0, 0.0), "nan as random"),
        (Baselines(float("inf"), None, 0.0, None), "inf as random"),
        (Baselines(-0.1, 1.0, 0.0, 0.0), "0 ≤ random"),
        (Baselines(0.5, 1.5, 0.0, 0.0), "≤ 1"),
        (Baselines(0.5, 0.25, 0.0, 0.0), "random ≤ optimal"),
        (Baselines("0.5", 1.0, 0.0, 0.0), "'0.5' as random"),
        (Baselines(0.5, 1.0, 10**400, 0.0), "inf as random_return"),
        (Baselines(0.5, 1.0, 0.0, 1e308), "as optimal_return"),
        (Baselines(0.5, 1.0, None, 0.0), "None as random_return"),
        (Baselines(0.5, 1.0, 0.0, 0.0, draws=0), "draws"),
        (Baselines(0.5, 1.0, 0.0, 0.0, draws="many"), "draws"),
        ((0.5, 1.0, 0.0, 0.0), "a Baselines or None"),
    ):
        monkeypatch.setattr(Answering, "answer", answer)
        with pytest.raises(UserCodeError, match=reason):
            compute_baselines(Answering(), Budget(1, 1, 1), [123] * 6)


def test_what_an_environment_of_ragen_imports_belongs_to_its_cache(tmp_path, monkeypatch):
    module = sys.modules["ragen.envs.worlds.webshop.generator"]
    before = sources(WebShop), sources(Bandit)
    other = tmp_path / "webshop_generator.py"
    other.write_bytes(Path(module.__file__).read_bytes() + b"# other products\n")
    monkeypatch.setattr(module, "__file__", str(other))
    assert sources(WebShop) != before[0] and sources(Bandit) == before[1]
