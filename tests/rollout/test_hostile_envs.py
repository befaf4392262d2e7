"""Hostile environments, in-process and isolated: a failed episode, and nothing else changes."""

from __future__ import annotations

import asyncio
import locale
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragen.core import user_code
from ragen.core.errors import RagenError
from ragen.core.types import Episode
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs.bandit import Bandit
from ragen.envs.checker import check
from ragen.envs.isolation import Workers
from ragen.rollout.groups import run_groups
from ragen.rollout.policies import ScriptedPolicy
from ragen.rollout.setup import Setup
from tests.hostile_envs import ANSWERS, HOSTILE, PROCESS, RAISED, TAKEN, UNDONE, WORKER, Hostile
from tests.rogue import Rogue

REPLY = "t</think><answer>Right</answer>"
TIMEOUT_S = 2.0


def play(setup: Setup, levels: list[int] | None = None) -> list[Episode]:
    policy = ScriptedPolicy(lambda prompt: REPLY)
    groups = asyncio.run(run_groups(policy, setup, levels or [0], 1, (0, "train", 0)))
    return [group.episodes[0] for group in groups]


@pytest.fixture(params=["in-process", "isolated"])
def corridor(request: pytest.FixtureRequest) -> Iterator[Any]:
    started: list[Workers] = []

    def make(deed: str, every: int = 1) -> Setup:
        if request.param == "in-process":
            return Setup("corridor", partial(Hostile, deed, every), timeout_s=TIMEOUT_S)
        params = {"deed": deed, "every": every}
        timeout_s = 60.0 if deed.startswith("torch") else TIMEOUT_S  # which it loads first
        started.append(Workers(HOSTILE, params, timeout_s, memory_gb=4.0))
        return Setup("corridor", started[-1].make, workers=started[-1])

    yield make
    for each in started:
        each.close()


def present() -> dict[str, Any]:
    """What a run depends on."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "folder": os.getcwd(),
        "umask": umask,
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "timers": [signal.getitimer(n) for n in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "closed": (sys.stdout.closed, sys.stderr.closed),
        "files": [os.fstat(fd)[:3] for fd in (1, 2)],
        "depth": sys.getrecursionlimit(),
        "warnings": list(warnings.filters),
        "environ": dict(os.environ),
        "hooks": (threading.excepthook, sys.excepthook),
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "floats": np.geterr(),
        "torch": torch.get_rng_state().tolist(),
        "arithmetic": (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        ),
        "locale": locale.setlocale(locale.LC_ALL),
        "threads": [each for each in threading.enumerate() if not each.daemon],
        "pid": os.getpid(),
    }


@pytest.mark.parametrize("deed", PROCESS | RAISED)
def test_what_would_end_the_run_fails_the_episode(corridor: Any, deed: str) -> None:
    before = present()
    bad, good = play(corridor(deed, every=2), [0, 1])
    assert (bad.stop_reason, good.stop_reason) == ("error", "solved")
    assert re.search((PROCESS | RAISED)[deed][1], bad.error or ""), bad.error
    assert len(bad.error or "") < 30_000
    assert present() == before


@pytest.mark.parametrize("deed", UNDONE)
def test_what_a_call_changes_is_undone(
    corridor: Any, deed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    play(Setup("corridor", Rogue))  # what is loaded or made once is not a change
    before = present()
    assert [episode.stop_reason for episode in play(corridor(deed))] == ["solved"]
    assert present() == before
    assert "printed" not in capfd.readouterr().out


@pytest.mark.parametrize("deed", ANSWERS)
def test_an_answer_that_breaks_the_contract_fails_the_episode(corridor: Any, deed: str) -> None:
    bad, good = play(corridor(deed, every=2), [0, 1])
    assert (bad.stop_reason, good.stop_reason) == ("error", "solved")
    assert re.search(ANSWERS[deed][1], bad.error or ""), bad.error


@pytest.mark.parametrize("deed", TAKEN)
def test_an_answer_of_another_type_is_taken_as_its_plain_value(corridor: Any, deed: str) -> None:
    (episode,) = play(corridor(deed))
    assert episode.stop_reason == "solved", episode.error
    assert episode.turns[0].reward == TAKEN[deed][1]
    assert all(type(turn.observation) is str for turn in episode.turns)
    assert "another" not in episode.turns[1].observation


@pytest.mark.parametrize("deed", WORKER)
def test_isolation_survives_what_a_process_can_do(deed: str) -> None:
    workers = Workers(HOSTILE, {"deed": deed, "every": 2}, TIMEOUT_S, memory_gb=0.5)
    setup = Setup("corridor", workers.make, workers=workers)
    started = time.monotonic()
    try:
        bad, good = play(setup, [0, 1])
    finally:
        workers.close()
    assert time.monotonic() - started < 30
    assert (bad.failed, good.stop_reason) == (True, "solved")
    assert re.search(WORKER[deed][1], bad.error or ""), bad.error


def test_the_children_of_a_worker_die_with_it() -> None:
    workers = Workers(HOSTILE, {"deed": "fork bomb"}, 1.0)
    env = workers.make()
    env.reset(seed=0)
    group = env._worker._process.pid  # type: ignore[attr-defined]
    with pytest.raises(UserCodeError, match="longer than"):
        env.step("Right")
    workers.close()
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a child of the worker is left")


@pytest.mark.parametrize("deed", ["os._exit", "chdir", "numpy", "10 MB", "KeyboardInterrupt"])
def test_other_groups_are_as_without_a_hostile_one(corridor: Any, deed: str) -> None:
    policy = ScriptedPolicy(lambda prompt: REPLY)
    levels, path = [1, 2, 3], (0, "train", 0)
    plain = asyncio.run(run_groups(policy, Setup("corridor", Rogue), levels, 2, path))
    groups = asyncio.run(run_groups(policy, corridor(deed, every=2), levels, 2, path))
    assert [groups[0], groups[2]] == [plain[0], plain[2]]


def test_an_exception_whose_text_never_ends_fails_the_episode() -> None:
    (episode,) = play(Setup("corridor", partial(Hostile, "slow text"), timeout_s=5.0))
    assert episode.stop_reason == "error"


def test_a_time_limit_holds_in_a_boundary_within_another() -> None:
    with pytest.raises(UserCodeError, match=r"0\.2 s in outer"), boundary("outer", 0.2):
        for _ in range(3):
            with pytest.raises(UserCodeError, match=r"0\.02 s in inner"), boundary("inner", 0.02):
                while True:
                    pass
        with boundary("inner", 9.0):
            while True:
                pass


@pytest.mark.parametrize("deed", ["blocked", "ignored"])
def test_code_that_keeps_the_timer_away_has_failed_when_it_returns(deed: str) -> None:
    with pytest.raises(UserCodeError, match=r"0\.05 s in step"), boundary("step", 0.05):
        if deed == "blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        else:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(0.2)


def test_a_time_limit_waits_for_the_import_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of torch, imported again, ends the process with a segmentation fault."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "slow_package.py").write_text("import time\ntime.sleep(0.3)\nwhole = True\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(UserCodeError, match=r"0\.05 s in step"), boundary("step", 0.05):
        import_module("slow_package")
        while True:
            pass
    assert sys.modules.pop("slow_package").whole
    monkeypatch.setattr(user_code, "IMPORT_S", 0.0)
    with pytest.raises(UserCodeError, match=r"0\.05 s in step"), boundary("step", 0.05):
        import_module("slow_package")
    assert "slow_package" not in sys.modules


CTRL_C = """
import os, signal, sys, threading, time
from ragen.core.user_code import UserCodeError, boundary

def press() -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
threading.Thread(target=press).start()
try:
    with boundary("step", 20.0):
        try:
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            {then}
except UserCodeError:
    sys.exit("contained")
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.mark.parametrize("then", ["raise", "pass", "raise ValueError"])
def test_ctrl_c_in_a_call_stops_the_program_whatever_the_code_does(then: str) -> None:
    """Only the program itself can press: the boundary refuses it to user code."""
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C.format(then=then)], capture_output=True, check=False
    )
    assert done.returncode == 77, done.stderr


THREAD = """
import sys, threading, time
from ragen.core.user_code import boundary
with boundary("step"):
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("from the environment")
print("result")
"""


def test_a_thread_left_behind_does_not_keep_the_program_from_ending() -> None:
    command = [sys.executable, "-c", THREAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("result\n", "from the environment\n")


def test_the_checker_reports_a_thread_that_is_left() -> None:
    class Threaded(Bandit):
        def reset(self, **seeds: Any) -> Any:
            threading.Thread(target=time.sleep, args=(600,), name="left").start()
            return super().reset(**seeds)

    with pytest.raises(RagenError, match="bandit: close must end the thread 'left'"):
        check(Threaded())


def test_a_fork_of_the_environment_is_no_second_run(tmp_path: Any) -> None:
    log = tmp_path / "log"
    with boundary("step"):
        os.fork()
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    assert log.read_text() == f"{os.getpid()}\n"
