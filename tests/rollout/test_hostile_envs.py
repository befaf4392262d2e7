"""Hostile environments, in-process and isolated: a failed episode, and nothing else changes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ragen.core.types import Episode
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs.isolation import Workers
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup
from ragen.rollout.venue import Venue
from tests.hostile_envs import ANSWERS, HOSTILE, POSIX, RAISED, TABLE, TAKEN, WORKER, Hostile
from tests.limits import needs_posix, needs_timer
from tests.rogue import Rogue
from tests.scripted_policy import ScriptedPolicy

POLICY = ScriptedPolicy(lambda prompt: "t</think><answer>Right</answer>")


def play(setup: Setup, *levels: int) -> list[Episode]:
    groups = asyncio.run(run_groups(POLICY, setup, levels, 1, (0, "train", 0)))
    return [group.episodes[0] for group in groups]


def play_isolated(
    deed: str, *levels: int, every: int = 1, timeout_s: float = 20.0
) -> list[Episode]:
    workers = Workers(HOSTILE, {"deed": deed, "every": every}, timeout_s)
    try:
        return play(Setup("corridor", workers.make, venue=Venue("workers", workers)), *levels)
    finally:
        workers.close()


@pytest.mark.parametrize(("isolated", "every"), [(False, 1), (True, 4)])
def test_exceptions_and_answers_that_break_the_contract_fail_their_episode(
    isolated: bool, every: int
) -> None:
    """One environment after the other, of which the isolated ones are in one process."""
    levels = range(0, len(TABLE), every)
    if isolated:
        episodes = play_isolated("", *levels)
    else:
        episodes = play(Setup("corridor", Hostile, timeout_s=20.0), *levels)
    for level, episode in zip(levels, episodes, strict=True):
        name, error = TABLE[level], episode.error or ""
        if name in TAKEN:
            reward = episode.turns[0].reward
            assert (episode.stop_reason, reward) == ("solved", TAKEN[name][1]), name
            assert all(type(turn.observation) is str for turn in episode.turns)
            assert "another" not in episode.turns[1].observation
        else:
            assert episode.stop_reason == "error", name
            assert re.search((RAISED | ANSWERS)[name][1], error), f"{name}: {error}"
            assert len(error) < 30_000


@pytest.mark.parametrize(
    "deed",
    [pytest.param(each, marks=needs_posix if each in POSIX else ()) for each in WORKER],
)
def test_isolation_survives_what_a_process_can_do(deed: str) -> None:
    reason = WORKER[deed][1]
    timeout_s = 1.5 if reason.startswith("longer than") else 20.0
    bad, good = play_isolated(deed, 0, 1, every=2, timeout_s=timeout_s)
    assert (bad.failed, good.stop_reason) == (True, "solved")
    assert re.search(reason, bad.error or ""), bad.error


def test_what_an_environment_prints_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (episode,) = play(Setup("corridor", partial(Hostile, "print")), 0)
    printed = capsys.readouterr()
    assert episode.stop_reason == "solved"
    assert printed.out == "" and "printed by the environment" in printed.err


@needs_posix
def test_the_children_of_a_worker_die_with_it() -> None:
    workers = Workers(HOSTILE, {"deed": "fork and hang"}, 1.5)
    env = workers.make()
    env.reset(seed=0)
    group = env._worker._process.pid  # type: ignore[attr-defined]
    with pytest.raises(UserCodeError, match="longer than"):
        env.step("Right")
    workers.close()
    for _ in range(1000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("a child of the worker is left")


@pytest.mark.parametrize("isolated", [False, True])
def test_other_groups_are_as_without_a_hostile_one(isolated: bool) -> None:
    levels = (1, 2, 3)
    plain = play(Setup("corridor", Rogue), *levels)
    if isolated:
        episodes = play_isolated("os._exit", *levels, every=2)
    else:
        hostile = partial(Hostile, "sys.exit", every=2)
        episodes = play(Setup("corridor", hostile), *levels)
    assert episodes[1].failed and [episodes[0], episodes[2]] == [plain[0], plain[2]]


@needs_timer
def test_a_time_limit_holds_in_a_boundary_within_another() -> None:
    with pytest.raises(UserCodeError, match=r"0\.2 s in outer"), boundary("outer", 0.2):
        for _ in range(3):
            with pytest.raises(UserCodeError, match=r"0\.02 s in inner"), boundary("inner", 0.02):
                while True:
                    pass
        with boundary("inner", 9.0):
            while True:
                pass


def test_ctrl_c_in_a_call_stops_the_program(set_sigint: Callable[[Any], None]) -> None:
    set_sigint(signal.default_int_handler)
    press = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    with pytest.raises(KeyboardInterrupt), boundary("step", 20.0):
        while True:
            time.sleep(0.01)
    press.join()
