"""The guard in a run: stops, rollbacks, resumes after them, and a run that hangs."""

from __future__ import annotations

import asyncio
import copy
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ragen.algorithms.batch import Batch
from ragen.cli.main import main
from ragen.config.reading import dump
from ragen.core.errors import GuardStop
from ragen.core.metrics import Metrics
from ragen.core.stopping import StopRequested
from ragen.diagnostics.detectors import EMPTY_STEPS, EVALUATED, LEVELS, History
from ragen.diagnostics.guard import Alarm, GuardState, read_history
from ragen.engines.local import LocalEngine
from ragen.storage import checkpoint
from ragen.storage.checkpoint import folders
from ragen.storage.reader import read_events, read_metrics
from ragen.storage.recorder import Recorder
from ragen.training import loop, recovery, watchdog
from ragen.training.progress import OfCommand, Watcher
from ragen.training.running import LoopState, evaluated
from ragen.training.trainer import Result, resume, train
from ragen.training.watchdog import STACKS, Watchdog, report_stall
from tests.training.runs import (
    SendSignal,
    assert_same_results,
    exit_code,
    fork,
    make_config,
    recorded_results,
    rows,
    uninterrupted,
)

Plan = Callable[..., None]

ROLLBACK: dict[str, Any] = {"guard__responses": {"grad_spike": "rollback"}, "steps": 5}
PPO: dict[str, Any] = {"algorithm": "starpo/ppo", "loss__kl": 0.01}


class NotedAlarms(Watcher):
    def __init__(self) -> None:
        self.alarms: list[tuple[int, str]] = []

    def alarm(self, step: int, text: str) -> None:
        self.alarms.append((step, text))


def scripted(*moments: tuple[int, int], detector: str = "grad_spike") -> Callable[..., list[Alarm]]:
    """In the place of `raise_alarms`: alarms at each (rollbacks so far, step).

    Their onset is one step earlier.
    """

    def alarms(history: Any, step: int, state: GuardState, detectors: Any) -> list[Alarm]:
        state.checked_step = step
        due = (state.rollbacks, step) in moments
        return [Alarm(detector, step, step - 1, 9.0, 1.0)] if due else []

    return alarms


@pytest.fixture
def alarms_at(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Raises alarms as `scripted` does."""
    return lambda *moments, **named: monkeypatch.setattr(
        recovery, "raise_alarms", scripted(*moments, **named)
    )


class RolledBack(NamedTuple):
    """A run that was rolled back from step 3 to step 1, and the last history its guard saw."""

    folder: Path
    result: Result
    said: list[tuple[int, str]]
    history: History


TO_STEP_1: dict[str, Any] = ROLLBACK | {
    "eval__every": 2,
    "steps": 4,
    "rollout__group_size": 2,
    "eval__episodes": 2,
}


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> RolledBack:
    """Trained with `TO_STEP_1`."""
    run, seen, histories = tmp_path_factory.mktemp("rolled") / "run", NotedAlarms(), list[History]()
    alarms = scripted((0, 3))

    def recording(history: History, *arguments: Any) -> list[Alarm]:
        histories.append(copy.deepcopy(history))
        return alarms(history, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "raise_alarms", recording)
        result = train(make_config(**TO_STEP_1), run, watcher=seen)
    return RolledBack(run, result, seen.alarms, histories[-1])


def events(run: Path) -> list[tuple[int, int, str]]:
    return [(e["attempt"], e["step"], e["kind"]) for e in read_events(run)]


def steps_of(run: Path) -> list[tuple[int, int]]:
    query = "SELECT attempt, step FROM metrics WHERE name = 'reward/mean' ORDER BY 1, 2"
    return [(attempt, step) for attempt, step in rows(run, query)]


# Log and stop.


def test_a_stop_saves_first_is_one_line_and_can_be_resumed(
    tmp_path: Path, alarms_at: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    alarms_at((0, 1), detector="empty_filter")
    run, recipe = tmp_path / "my run", tmp_path / "mine.toml"
    recipe.write_text(dump(make_config(checkpoint__every=0, steps=2, eval__episodes=0)))
    assert main(["train", str(recipe), "--out", str(run), "--quiet"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ragen: the guard stopped the run: step 1, empty_filter: ")
    assert line.endswith(f"ragen resume {shlex.quote(str(run))}")
    assert checkpoint.newest(run).name == "step-1"
    assert events(run) == [(0, 1, "alarm"), (0, 1, "guard")]
    resume(run)
    assert checkpoint.newest(run).name == "step-2"


def test_a_resumed_run_stops_again_if_the_condition_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "select", lambda *_, **__: [])
    monkeypatch.setattr(recovery, "GRACE_STEPS", 2)
    few = {"rollout__num_groups": 1, "rollout__group_size": 2}
    settings = make_config(steps=30, checkpoint__every=0, eval__episodes=0, **few)
    with pytest.raises(GuardStop, match=f"step {EMPTY_STEPS}, empty_filter"):
        train(settings, tmp_path / "run")
    with pytest.raises(GuardStop, match=f"step {EMPTY_STEPS + 2 + 1}, empty_filter"):
        resume(tmp_path / "run")


# Rollback.


def test_history_kept_step_by_step_equals_history_read_from_the_database(
    rolled_back: RolledBack,
) -> None:
    history, kept = read_history(rolled_back.folder, 1.0), copy.deepcopy(rolled_back.history)
    # The last evaluation comes after the guard's last check, and so does the time of saving.
    del history[EVALUATED][4], history[LEVELS][4]
    del history["time/save_s"], kept["time/save_s"]
    assert kept == history and list(history[EVALUATED]) == [0, 2]
    assert all(list(series) == list(history[name]) for name, series in kept.items())


def test_a_rollback_starts_another_attempt_from_before_the_onset(rolled_back: RolledBack) -> None:
    run = rolled_back.folder
    # The newest checkpoint before onset 2 is that of step 1.
    assert [text for _, text in rolled_back.said][1] == (
        "rolled back to step 1, attempt 1: update.lr = 0.000333333, update.critic_lr = 3.33333e-06"
    )
    assert events(run) == [(0, 3, "alarm"), (0, 3, "guard")]
    assert steps_of(run) == [*((0, s) for s in (1, 2, 3)), *((1, s) for s in (2, 3, 4))]
    rates = read_metrics(run)["update/lr"]
    # Linear decay to a tenth over four steps: by a quarter of .9 at the second.
    assert rates[1] == pytest.approx(1e-3)
    assert rates[2] == pytest.approx(1e-3 / 3 * (1 - 0.9 / 4))
    state = checkpoint.read_state(checkpoint.newest(run))
    loop_state = state["loop"]
    assert (loop_state["attempt"], loop_state["begins"], loop_state["step"]) == (1, [0, 1], 4)
    assert state["loop"]["updates"] == max(read_metrics(run)["progress/updates"].values())
    assert rolled_back.result.after is not None and len(rolled_back.result.alarms) == 1
    query = "SELECT count(*) FROM episodes WHERE attempt = 0 AND step = 3"
    assert rows(run, query) == [(4,)], "the abandoned attempt can be read"
    attempts = [checkpoint.read_state(path)["loop"]["attempt"] for path in folders(run)]
    assert attempts == [0, 1, 1, 1, 1], "step 1 is where the second attempt began"


def test_the_remedy_of_other_seeds_changes_only_random_numbers(
    tmp_path: Path, alarms_at: Plan
) -> None:
    run = tmp_path / "run"
    alarms_at((0, 2))
    more = {"guard__remedy": "seeds", "steps": 2, "eval__episodes": 2}
    train(make_config(**ROLLBACK | more, rollout__num_groups=4, rollout__group_size=2), run)
    episodes = "FROM episodes WHERE phase = 'train' AND step = 2"
    first, second = (
        rows(run, f'SELECT noise_seed {episodes} AND attempt = {attempt} ORDER BY "group", id')
        for attempt in (0, 1)
    )
    assert first != second
    levels = rows(run, f"SELECT DISTINCT level_seed {episodes}")
    assert len(levels) == 4, "both attempts play the same levels"
    evaluated = "SELECT DISTINCT noise_seed FROM episodes WHERE phase = 'eval' AND level_seed = 123"
    assert len(rows(run, evaluated)) == 1, "evaluations stay comparable"


def test_without_a_checkpoint_before_the_onset_the_run_stops(
    tmp_path: Path, alarms_at: Plan
) -> None:
    alarms_at((0, 1))
    with pytest.raises(GuardStop, match="no checkpoint before step 0 is left"):
        train(make_config(**ROLLBACK, eval__episodes=0), tmp_path / "run")


@pytest.mark.slow
def test_resume_after_a_stop_around_two_rollbacks_equals_the_uninterrupted_run(
    tmp_path: Path, alarms_at: Plan
) -> None:
    alarms_at((0, 2), (1, 2))
    config = make_config(**ROLLBACK | PPO | {"eval__every": 2, "steps": 3})
    with pytest.raises(StopRequested):  # in a collection of the second attempt
        train(config, tmp_path / "run", watcher=SendSignal("episode", 3 * 8 + 2, signal.SIGINT))
    resume(tmp_path / "run")
    assert steps_of(tmp_path / "run")[-3:] == [(2, 1), (2, 2), (2, 3)]
    assert_same_results(tmp_path / "run", uninterrupted(config))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["replace_state", "event"])
def test_resume_after_a_kill_during_a_rollback(
    tmp_path: Path, alarms_at: Plan, rolled_back: RolledBack, step: str
) -> None:
    alarms_at((0, 3))
    config, run = make_config(**TO_STEP_1), tmp_path / "run"

    def work() -> None:
        place: Any = recovery if step == "replace_state" else Recorder
        real = getattr(place, step)

        def killing(*arguments: Any, **named: Any) -> Any:
            if step != "event" or "rolled" in arguments[3]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(place, step, killing)
        train(config, run)

    assert exit_code(fork(work)) == -signal.SIGKILL
    resume(run)
    assert_same_results(run, recorded_results(rolled_back.folder))


# A run that hangs.


def test_a_command_whose_run_hangs_reports_its_stacks_and_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, update = tmp_path / "run", LocalEngine.update

    async def hangs(engine: LocalEngine, batch: Batch, step: int) -> Metrics:
        if step == 1:
            time.sleep(60)  # blocks the event loop, as a broken collective would
        return await update(engine, batch, step)

    monkeypatch.setattr(LocalEngine, "update", hangs)
    monkeypatch.setattr(watchdog, "STALL_S", 1.0)
    start = time.monotonic()
    config = make_config(eval__episodes=0)
    assert exit_code(fork(lambda: train(config, run, watcher=OfCommand()))) == 3
    assert time.monotonic() - start < 30
    stacks = (run / STACKS).read_text()
    assert "the last checkpoint is step-1" in stacks and "hangs" in stacks
    (event,) = read_events(run)
    assert (event["kind"], event["step"], event["data"]["detector"]) == ("alarm", 1, "stalled")


def test_a_run_in_python_that_waits_forever_raises_and_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose other results would be lost with its process."""

    async def hangs(engine: LocalEngine, batch: Batch, step: int) -> Metrics:
        await asyncio.sleep(60)
        return {}

    monkeypatch.setattr(LocalEngine, "update", hangs)
    monkeypatch.setattr(watchdog, "STALL_S", 0.5)
    with pytest.raises(GuardStop, match=r"stalled: .* the last checkpoint is step-0; all st"):
        train(make_config(eval__episodes=0), tmp_path / "run")
    monkeypatch.undo()
    assert resume(tmp_path / "run", overrides={"steps": 1}).run == tmp_path / "run"


def test_a_stall_can_be_logged_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, seen = LocalEngine.publish, NotedAlarms()

    async def slow(engine: LocalEngine) -> None:
        time.sleep(1.5)
        await publish(engine)

    monkeypatch.setattr(LocalEngine, "publish", slow)
    monkeypatch.setattr(watchdog, "STALL_S", 1.0)
    config = make_config(guard__responses={"stalled": "log"}, steps=1, eval__episodes=0)
    result = train(config, tmp_path / "run", watcher=seen)
    assert [alarm.detector for alarm in result.alarms] == ["stalled"]
    assert [step for step, _ in seen.alarms] == [0]


def test_a_stall_is_reported_if_the_checkpoints_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    seen = NotedAlarms()
    config = make_config(guard__responses={"stalled": "log"})
    run: Any = SimpleNamespace(folder=tmp_path, state=LoopState(), watcher=seen, original=config)
    report_stall(run, 1800.0)
    ((step, text),) = seen.alarms
    assert step == 0 and "cannot read" in text and STACKS in text
    assert "report_stall" in (tmp_path / STACKS).read_text()


def test_every_beat_resets_the_watchdog() -> None:
    silences: list[float] = []
    ended: list[str] = []

    def report(seconds: float) -> str:
        silences.append(seconds)
        return "" if len(silences) == 1 else "it hangs"

    with Watchdog(0.2, report, lambda: ended.append(dog.reason)) as dog:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            time.sleep(0.01)
            dog.beat()
        assert not silences
        time.sleep(0.6)
        dog.beat()
        time.sleep(0.6)
    assert len(silences) == 2, "once per silence"
    assert ended == ["it hangs"]
    with Watchdog(0.0, report, ended.clear):
        time.sleep(0.1)
    assert len(silences) == 2


def test_an_error_of_the_watchdog_s_thread_is_raised() -> None:
    def fails(_: float) -> str:
        called.set()
        raise OSError("the terminal is gone")

    called = threading.Event()
    with pytest.raises(OSError, match="the terminal is gone"), Watchdog(0.01, fails, called.clear):
        called.wait(10)


def test_no_evaluation_of_an_abandoned_attempt_counts(bandit_run: Path) -> None:
    """The first attempt of the run is abandoned after step 1, and the second one after step 2."""
    states = [LoopState(step, attempt=2, begins=[0, 1, 2]) for step in range(4)]
    counted = [bool(evaluated(bandit_run, state)) for state in states]
    assert counted == [True, True, False, False]


def test_the_checkpoint_of_a_stop_replaces_no_regular_checkpoint(tmp_path: Path) -> None:
    def saved(*steps: int) -> list[int]:
        for step in steps:
            folder = tmp_path / "checkpoints" / f"step-{step}"
            folder.mkdir(parents=True)
            checkpoint.write_state(folder, {})
        checkpoint.drop_old(tmp_path, keep=2, best=0, every=10)
        return [checkpoint.step_of(path) for path in folders(tmp_path)]

    assert saved(0, 10, 20) == [0, 10, 20]
    assert saved(25) == [0, 10, 20, 25]
    assert saved(30) == [0, 20, 30]
    checkpoint.drop_after(tmp_path, 20)
    assert saved() == [0, 20]
