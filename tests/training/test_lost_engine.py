"""A run whose engine is lost goes on by itself, with the results of a run that lost none."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragen.algorithms.batch import Batch
from ragen.core.errors import EngineLost, MachineAway, RagenError
from ragen.core.metrics import Metrics
from ragen.core.stopping import StopRequested
from ragen.diagnostics.guard import Alarm, GuardState
from ragen.engines.engine import Late
from ragen.engines.local import LocalEngine
from ragen.engines.sampler import Sampler
from ragen.storage import checkpoint
from ragen.storage.reader import read_events
from ragen.training import recovery, running
from ragen.training.trainer import resume, train
from ragen.training.watchdog import STACKS
from tests.diagnostics.test_guard_run import NotedAlarms
from tests.training.test_background import here  # noqa: F401  (a fixture)
from tests.training.test_trainer import (
    GAE,
    SendSignal,
    assert_same_results,
    make_config,
    recorded_results,
    rows,
    uninterrupted,
)

Losing = Callable[..., list[str]]
TEXT = "learner 1 of 2 was killed"
DETAILS = "many lines\nfrom Ray"
EVERY: dict[str, Any] = {"eval__every": 2, "steps": 5, "checkpoint__every": 2}
# PPO with its critic and a KL reference saves and restores more than GRPO; its updates are two.
PPO: dict[str, Any] = EVERY | GAE | {"diagnose__gradients_every": 2}


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Losing:
    """Loses the engine at some calls of a function: as it begins, or once its work is done.

    Returns the list of losses, which grows.
    """

    def lose(owner: Any, name: str, *calls: int, late: bool = False) -> list[str]:
        before, count, losses = getattr(owner, name), 0, list[str]()

        def is_due() -> bool:
            nonlocal count
            count += 1
            if count in calls:
                losses.append(f"{name} {count}")
            return count in calls

        async def waiting(*arguments: Any, **named: Any) -> Any:
            due = is_due()
            if due and not late:
                raise EngineLost(TEXT, DETAILS)
            answer = await before(*arguments, **named)
            if due:
                raise EngineLost(TEXT)
            return answer

        def at_once(*arguments: Any, **named: Any) -> Any:
            if is_due():
                raise EngineLost(TEXT)
            return before(*arguments, **named)

        monkeypatch.setattr(
            owner, name, waiting if inspect.iscoroutinefunction(before) else at_once
        )
        return losses

    return lose


def engine_events(run: Path) -> list[tuple[int, str]]:
    return [
        (each["step"], each["data"]["what"])
        for each in read_events(run)
        if each["kind"] == "engine"
    ]


def assert_complete(run: Path, steps: int) -> None:
    """Each training episode once, and each step once."""
    twice = 'GROUP BY attempt, phase, step, "group", member HAVING count(*) > 1'
    assert rows(run, f"SELECT step FROM episodes {twice}") == []
    query = "SELECT step FROM metrics WHERE name = 'reward/mean' ORDER BY 1"
    assert rows(run, query) == [(step,) for step in range(1, steps + 1)]


# What is lost: a function, the number of its call, and whether its work was done.
PLACES: dict[str, tuple[Any, str, tuple[int, ...], bool]] = {
    "the first save": (LocalEngine, "save", (1,), False),
    "a sampler in the first evaluation": (Sampler, "complete", (3,), False),
    "a sampler in a collection": (Sampler, "complete", (60,), False),
    "gradient norms": (LocalEngine, "gradient_norms", (1,), True),
    "scores": (LocalEngine, "score", (5,), True),
    "the first update": (LocalEngine, "update", (1,), True),
    "between two updates": (LocalEngine, "update", (6,), True),
    "a publication": (LocalEngine, "publish", (4,), True),
    "a checkpoint that is half written": (LocalEngine, "save", (3,), True),
    "a checkpoint before its state": (running, "write_state", (2,), False),
    "the last checkpoint": (LocalEngine, "save", (4,), True),
    "an evaluation": (running, "evaluate_envs", (3,), True),
    "the last evaluation": (running, "evaluate_envs", (6,), False),
    "again, as its successor loads": (LocalEngine, "load", (1, 2), True),
}
AFTER: dict[str, tuple[Any, str, tuple[int, ...], bool]] = {
    "again, as its successor loads": (LocalEngine, "update", (4,), True),
}
"""Where a first loss leads to the place."""


@pytest.mark.parametrize("place", PLACES)
def test_a_lost_engine_changes_no_result(tmp_path: Path, losing: Losing, place: str) -> None:
    config, run = make_config(**PPO), tmp_path / "run"
    expected = uninterrupted(config, tmp_path)
    owner, name, calls, late = PLACES[place]
    losses = losing(owner, name, *calls, late=late)
    if place in AFTER:
        owner, name, calls, late = AFTER[place]
        losses += losing(owner, name, *calls, late=late)
    result = train(config, run)
    assert result.after.episodes == expected["evaluations"][-1]["episodes"]
    assert_same_results(run, expected)
    assert_complete(run, 5)
    whats = [what for _, what in engine_events(run)]
    assert (
        losses
        and whats.count("restored") == 1
        and whats.count("lost") == len(losses) + (place in AFTER)
    )
    assert not list((run / "checkpoints").glob(".*")), "no half-written checkpoint stays"


def test_a_lost_engine_changes_no_result_with_evaluations_in_the_background(
    tmp_path: Path,
    losing: Losing,
    here: None,  # noqa: F811
) -> None:
    config, run = make_config(**EVERY | {"eval__background": True}), tmp_path / "run"
    losing(LocalEngine, "update", 3, 6, 9)
    train(config, run)
    assert_same_results(run, uninterrupted(config, tmp_path))


def test_losses_without_a_new_checkpoint_end_the_run_which_can_be_resumed(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = make_config(**EVERY), tmp_path / "run"
    # Twice after step 0 and three times after step 2, then for ever after step 4.
    losing(LocalEngine, "publish", 1, 2, 5, 7, 9, *range(12, 100))
    with pytest.raises(RagenError, match=f"after step 4.*{TEXT}.* for the 4th time.*ragen resume"):
        train(config, run)
    assert checkpoint.newest(run).name == "step-4"
    assert [step for step, what in engine_events(run) if what == "restored"] == [
        *(0, 0, 2, 3, 3),
        *(4, 4, 4),
    ]
    monkeypatch.undo()
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


def test_an_engine_that_cannot_be_replaced_ends_the_run_in_one_line(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = make_config(**EVERY), tmp_path / "run"

    def refuse(config: Any, path: str | None = None, after: Any = None) -> Any:
        raise RagenError("no node has a GPU")

    losing(LocalEngine, "publish", 3)
    monkeypatch.setattr(recovery, "make_engine", refuse)
    with pytest.raises(RagenError, match=f"{TEXT}; no new .*: no node has a GPU; .*ragen resume"):
        train(config, run)
    monkeypatch.undo()
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


@pytest.mark.parametrize("looks", [2, 100])
def test_a_new_engine_waits_for_a_machine_that_is_away(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """The machine comes back at the third look, or not in time: a smaller engine goes on."""
    config, run = make_config(**EVERY), tmp_path / "run"
    before, asked = recovery.make_engine, list[Any]()

    def away(config: Any, path: str | None = None, after: Any = None) -> Any:
        asked.append(after)
        if after is not None and len(asked) <= looks:
            raise MachineAway("the cluster has 1 CPUs")
        return before(config, path, after)

    monkeypatch.setattr(recovery, "make_engine", away)
    monkeypatch.setattr(recovery, "RETRY_S", 0.01)
    monkeypatch.setattr(recovery, "AWAY_S", 60.0 if looks == 2 else 0.1)
    losing(LocalEngine, "publish", 3)
    train(config, run)
    assert_same_results(run, uninterrupted(config, tmp_path))
    assert engine_events(run) == [(2, "lost"), (2, "restored")]
    if looks == 2:
        assert len(asked) == 3 and isinstance(asked[0], LocalEngine) and len({*asked}) == 1
    else:
        assert asked[-1] is None and None not in asked[:-1]


def test_a_stop_ends_the_wait_for_a_machine_that_is_away(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = make_config(**EVERY), tmp_path / "run"

    def away(config: Any, path: str | None = None, after: Any = None) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise MachineAway("the cluster has 1 CPUs")

    monkeypatch.setattr(recovery, "make_engine", away)
    losing(LocalEngine, "publish", 3)
    start = time.monotonic()
    with pytest.raises(StopRequested, match=r"after step 2.*has 1 CPUs.*ragen resume"):
        train(config, run)
    assert time.monotonic() - start < recovery.RETRY_S + 30
    assert [what for _, what in engine_events(run)] == ["lost", "lost"]
    monkeypatch.undo()
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


def test_a_rollback_whose_engine_is_lost_is_completed(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(guard__responses={"grad_spike": "rollback"}, steps=4)

    def once(history: Any, step: int, state: GuardState, detectors: Any) -> list[Alarm]:
        state.checked_step = step
        return [Alarm("grad_spike", 2, 2, 9.0, 1.0)] if (state.rollbacks, step) == (0, 2) else []

    monkeypatch.setattr(recovery, "raise_alarms", once)
    train(config, tmp_path / "expected")
    expected = recorded_results(tmp_path / "expected")
    assert expected["state"]["loop"]["attempt"] == 1
    losing(LocalEngine, "load", 1, late=True)
    losing(LocalEngine, "publish", 4)
    train(config, tmp_path / "run")
    assert_same_results(tmp_path / "run", expected)
    whats = [what for _, what in engine_events(tmp_path / "run")]
    assert whats == ["lost", "restored"] * 2


def test_settings_that_changed_on_a_resume_stay_changed(tmp_path: Path, losing: Losing) -> None:
    config, lower = make_config(checkpoint__every=2), {"update.lr": 1e-4, "steps": 5}
    for name in ("expected", "run"):
        train(config, tmp_path / name)
    resume(tmp_path / "expected", overrides=lower)
    losing(LocalEngine, "publish", 1)
    resume(tmp_path / "run", overrides=lower)
    assert engine_events(tmp_path / "run") == [(3, "lost"), (3, "restored")]
    text = f"after step 3, the engine is lost: {TEXT}; a new one takes the last checkpoint"
    (lost, _) = read_events(tmp_path / "run", "engine")
    assert lost["text"] == text and lost["data"] == {"what": "lost", "details": DETAILS}
    assert_same_results(tmp_path / "run", recorded_results(tmp_path / "expected"))


def test_a_damaged_checkpoint_is_set_aside_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run, score = make_config(**EVERY | GAE), tmp_path / "run", LocalEngine.score

    async def damaging(engine: LocalEngine, *arguments: Any) -> Any:
        if (newest := checkpoint.checkpoint_of(run, 4)) is not None and not engine_events(run):
            (newest / "model.safetensors").write_bytes(b"nothing")
            raise EngineLost(TEXT)
        return await score(engine, *arguments)

    monkeypatch.setattr(LocalEngine, "score", damaging)
    train(config, run)
    assert_same_results(run, uninterrupted(config, tmp_path))
    assert [each["kind"] for each in read_events(run)] == ["engine", "damaged checkpoint", "engine"]


def test_a_stop_comes_before_a_new_engine(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = make_config(**EVERY), tmp_path / "run"
    losing(LocalEngine, "save", 3)
    with pytest.raises(StopRequested, match=f"stopped, and after step 3.*{TEXT}.*ragen resume"):
        train(config, run, watcher=SendSignal("step", 3, signal.SIGTERM))
    assert engine_events(run) == [(3, "lost")]
    assert read_events(run, "engine")[0]["text"].endswith("; the run stops")
    monkeypatch.undo()
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


def test_every_engine_of_a_run_is_closed(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, closed = list[LocalEngine](), list[LocalEngine]()
    begin, close = LocalEngine.__init__, LocalEngine.close

    def making(engine: LocalEngine, *arguments: Any) -> None:
        made.append(engine)
        begin(engine, *arguments)

    async def closing(engine: LocalEngine) -> None:
        closed.append(engine)
        await close(engine)

    losing(LocalEngine, "publish", 1, 3)
    monkeypatch.setattr(LocalEngine, "__init__", making)
    monkeypatch.setattr(LocalEngine, "close", closing)
    train(make_config(steps=2), tmp_path / "run")
    assert len(made) == 3 and set(map(id, closed)) == set(map(id, made))


def test_a_process_that_is_late_is_named_and_ended_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run, update = make_config(**EVERY), tmp_path / "run", LocalEngine.update
    hanging, ended, seen = threading.Event(), threading.Event(), NotedAlarms()

    async def hangs(engine: LocalEngine, batch: Batch, step: int) -> Metrics:
        if step == 3 and not hanging.is_set():
            hanging.set()
            await asyncio.to_thread(ended.wait)
            raise EngineLost("learner 0 was ended")
        return await update(engine, batch, step)

    def end_late(engine: LocalEngine) -> list[Late]:
        if not hanging.is_set() or ended.is_set():
            return []
        ended.set()
        return [Late("learner 0", "update", 5.0, 'File "fsdp.py", line 1, in all_reduce')]

    monkeypatch.setattr(LocalEngine, "update", hangs)
    monkeypatch.setattr(LocalEngine, "end_late", end_late)
    train(config, run, watcher=seen)
    found = {each["data"]["what"]: each for each in read_events(run) if each["kind"] == "engine"}
    assert found.keys() == {"late", "lost", "restored"}
    late = found["late"]
    assert "learner 0 has not answered for 5 s, in the phase update" in late["text"]
    about = {name: late["data"][name] for name in ("process", "what", "phase", "seconds")}
    assert about == {"process": "learner 0", "what": "late", "phase": "update", "seconds": 5.0}
    assert "all_reduce" in (run / STACKS).read_text() and "all_reduce" in late["data"]["stacks"]
    assert late["step"] == 3 and (3, late["text"]) in seen.alarms
    assert_same_results(run, uninterrupted(config, tmp_path))
