"""Environments in worker processes: equal episodes, and failures that do not stop a run."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.user_code import UserCodeError
from ragen.envs import answers, registry
from ragen.envs.isolation import Workers
from ragen.envs.registry import make
from ragen.evaluation.evaluation import evaluate_target
from ragen.rollout.groups import run_groups
from ragen.rollout.players import random_player
from ragen.rollout.setup import Setup, make_setup
from ragen.rollout.venue import Venue
from tests.limits import needs_timer
from tests.scripted_policy import ScriptedPolicy

ROGUE = f"{Path(__file__).parents[1] / 'rogue.py'}:Rogue"
FREE = ROGUE.replace("rogue.py:Rogue", "free_text.py:Echo")
SEEN = ROGUE.replace("rogue.py:Rogue", "seeing_envs.py:Seen")
UNREADABLE = ROGUE.replace("Rogue", "Unreadable")
RIGHT = "t</think><answer>Right || Right || Right || Right || Right</answer>"


@pytest.fixture
def start_workers() -> Iterator[Any]:
    started: list[Workers] = []

    def workers(env: str = ROGUE, timeout_s: float = 10.0, **params: Any) -> Workers:
        started.append(Workers(env, params, timeout_s))
        return started[-1]

    yield workers
    for each in started:
        each.close()
    assert not multiprocessing.active_children()


def setup(workers: Workers) -> Setup:
    return Setup("corridor", workers.make, venue=Venue("workers", workers))


def test_helpers_of_one_name_do_not_replace_each_other_in_workers(
    start_workers: Any, tmp_path: Path
) -> None:
    made = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_rules.py").write_text(f"GOAL = 'Reach {folder}'\n")
        (tmp_path / folder / "env.py").write_text(
            "from tests.free_text import Echo as Base\nfrom own_rules import GOAL\n"
            "class Echo(Base):\n    goal = GOAL\n"
        )
        made.append(start_workers(f"{tmp_path / folder / 'env.py'}:Echo").make())
    assert [each.goal for each in made] == ["Reach one", "Reach two"]
    for each in made:
        each.close()


@pytest.mark.parametrize("name", ["frozen-lake", "bandit", SEEN])
def test_the_proxy_behaves_as_the_environment(start_workers: Any, name: str) -> None:
    """It returns the same values and pictures, and restores snapshots."""
    proxy, plain = start_workers(name).make(), make(name)
    assert (proxy.name, proxy.goal) == (plain.name, plain.goal)
    for env in (proxy, plain):
        env.reset(seed=5, options={"noise_seed": 6})
    assert proxy.shows_pictures == (name == SEEN)
    assert (proxy.rules, proxy.actions) == (plain.rules, plain.actions)
    assert proxy.solve(3, 6, 3) == plain.solve(3, 6, 3)
    assert proxy.baselines(3, 2, 6) == plain.baselines(3, 2, 6)
    start = proxy.get_state()
    assert start == plain.get_state()
    player = random_player(0)
    for _ in range(2):
        for action in player(plain, 1, 5, 5):
            result = plain.step(action)
            assert (proxy.step(action), proxy.state_key()) == (result, plain.state_key())
            assert proxy.drawing() == plain.drawing()
            assert answers.pictures(proxy.pictures()) == answers.pictures(plain.pictures())
            if result[2]:
                break
        for env in (proxy, plain):
            env.set_state(start)
        assert proxy.drawing() == plain.drawing()
    with pytest.raises(UserCodeError, match="knows no action 'fly'"):
        proxy.step("fly")
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(proxy)
    proxy.close()


def test_isolated_episodes_are_equal_and_workers_are_reused(start_workers: Any) -> None:
    workers = start_workers(slip=0.5)
    policy = ScriptedPolicy(lambda prompt: RIGHT)
    plain = Setup("corridor", lambda: make(ROGUE, slip=0.5))
    path, levels = (0, "train", 0), [1, 2, 3]
    expected = asyncio.run(run_groups(policy, plain, levels, 4, path, 2))
    assert asyncio.run(run_groups(policy, setup(workers), levels, 4, path, 2)) == expected
    assert len(workers._all) <= 2


def test_a_reset_makes_the_environment_again_after_its_worker_ended(start_workers: Any) -> None:
    env = start_workers(misdeed="die", every=2).make()
    for level in range(3):
        env.reset(seed=level)
        if level % 2:
            assert env.step("Right")[0] == ".A..."
        else:
            with pytest.raises(UserCodeError, match="signal 11"):
                env.step("Right")
            with pytest.raises(UserCodeError, match="process had ended before state_key"):
                env.state_key()
    env.close()


def test_a_hang_in_close_costs_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine of them would take longer than the test may."""
    monkeypatch.setattr(registry, "CLOSE_S", 1.5)
    monkeypatch.setattr(registry, "_HANGING", set())
    values = {"env": ROGUE, "env.params.misdeed": "hang in close"}
    start = time.monotonic()
    limits = {"env.timeout_s": 1.5, "env.max_turns": 1}
    result, _ = evaluate_target("random", values | limits, episodes=8)
    assert result.failed == 0 and time.monotonic() - start < 13


@needs_timer
@pytest.mark.parametrize("isolate", [False, True])
def test_a_hang_in_init_ends_an_evaluation_at_once(
    monkeypatch: pytest.MonkeyPatch, isolate: bool
) -> None:
    monkeypatch.setattr(registry, "LOAD_S", 0.3)
    values = {"env": ROGUE, "env.params.misdeed": "hang in init", "env.isolate": isolate}
    start = time.monotonic()
    with pytest.raises(RagenError, match=r"cannot be made: .* longer than 0\.3 s"):
        evaluate_target("random", values, episodes=4)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("isolate", [False, True])
def test_an_environment_that_cannot_be_made_or_read_is_refused(isolate: bool) -> None:
    for env, params, reason in (
        (ROGUE, {"misdeed": "refuse"}, "no misdeed"),
        (ROGUE, {"misdeed": "raise in init"}, "cannot be made: KeyError"),
        (UNREADABLE, {"attribute": "rules", "then": "raise"}, "cannot be made: .*by zero"),
        (UNREADABLE, {"attribute": "goal", "then": "exit"}, "cannot be made: .*SystemExit: 3"),
        (UNREADABLE, {"then": "hang"}, "cannot be made: .*longer than"),
        (UNREADABLE, {"attribute": "actions", "then": "be empty"}, "no actions: names, or None"),
    ):
        limit = 1.0 if "hang" in params.values() else 30.0
        values = {"env": env, "env.params": params, "env.isolate": isolate, "env.timeout_s": limit}
        with pytest.raises(RagenError, match=reason):
            make_setup(merge(None, values), None)
        assert not multiprocessing.active_children()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no process groups")
@pytest.mark.slow
def test_a_signal_to_the_group_interrupts_an_evaluation_and_fails_no_episode(
    set_sigint: Callable[[Any], None], tmp_path: Path
) -> None:
    set_sigint(signal.SIG_IGN)  # as in a background job of a script
    path = tmp_path / "slow.py"
    path.write_text(
        """
import time
from ragen.envs.worlds.frozen_lake import FrozenLake

class Slow(FrozenLake):
    def step(self, action):
        time.sleep(0.05)
        return super().step(action)
""",
        encoding="utf-8",
    )
    options = ("--env.isolate", "true", "--out", f"{tmp_path}/out")
    command = (sys.executable, "-m", "ragen", "eval", "random", "--env", f"{path}:Slow", *options)
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, start_new_session=True, text=True, env=os.environ
    )

    def outcomes() -> list[tuple[str | None]]:
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(database)) as connection:
            return connection.execute("SELECT error FROM outcomes").fetchall()
        return []

    database = tmp_path / "out" / "random-Slow-1" / "run.sqlite"
    deadline = time.monotonic() + 60
    while not (database.exists() and outcomes()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode in (143, -signal.SIGTERM) and "interrupted" in errors
    assert {error for (error,) in outcomes()} == {None} and len(outcomes()) < 256
