"""A run goes on where its environment tries to end it, and leaves the process as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ragen
from ragen.envs.worlds.bandit import Bandit
from ragen.storage.reader import read_events, read_metrics
from ragen.training.trainer import CANNOT_INTERRUPT, Result
from tests.bandit_model import settings
from tests.limits import INTERRUPTS
from tests.training.runs import NotedWatcher, rows

FEW = {"steps": 1, "eval__episodes": 0, "rollout__num_groups": 4, "rollout__group_size": 2}


class Exiting(Bandit):
    """It tries to end the run on every third level."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = super().reset(seed=seed, options=options)
        if seed is not None and seed % 3 == 1:
            self.misbehave()
        return answer

    def misbehave(self) -> None:
        raise SystemExit(3)


class Slow(Exiting):
    """It takes long on every third level."""

    def misbehave(self) -> None:
        time.sleep(0.21)


def present() -> list[Any]:
    """What code may call that ends the process, changes its folder or starts threads."""
    functions = [os._exit, os.kill, os.chdir, signal.signal, threading.Thread.start]
    return [*functions, *map(signal.getsignal, signal.valid_signals()), os.getcwd()]


def test_a_run_goes_on_where_episodes_try_to_end_it_and_replaces_no_function(
    tmp_path: Path,
) -> None:
    before, watcher = present(), NotedWatcher()
    values = settings(**FEW)
    run = ragen.train("bandit", values, env=Exiting, out=tmp_path / "run", watcher=watcher).run
    failed = read_metrics(run)["episodes/failed"]
    assert failed == {1: 4.0}
    said = "4 of 8 episodes (50%) failed and are not trained on, 4 of them with: SystemExit: 3"
    assert watcher.alarms == [f"step 1, failed_episodes: {said}"]
    (event,) = read_events(run, "alarm")
    assert event["step"] == 1 and event["data"]["value"] == 0.5
    assert present() == before and (CANNOT_INTERRUPT in watcher.notes) != INTERRUPTS


@pytest.mark.slow
def test_in_a_notebook_a_run_says_that_it_interrupts_nothing_and_fails_slow_episodes(
    tmp_path: Path,
) -> None:
    """Calls are interrupted in the main thread only, which the notebook's event loop has."""
    watcher = NotedWatcher()

    async def cell() -> Result:
        values = settings(**FEW, env__timeout_s=0.2)
        return ragen.train("bandit", values, env=Slow, out=tmp_path / "run", watcher=watcher)

    run = asyncio.run(cell()).run
    assert CANNOT_INTERRUPT in watcher.notes
    query = "SELECT stop_reason, error, count(*) FROM episodes WHERE error IS NOT NULL GROUP BY 1"
    ((reason, error, count),) = rows(run, query)
    assert (reason, error) == ("timeout", "user code took longer than 0.2 s in reset")
    assert 0 < count < 8
