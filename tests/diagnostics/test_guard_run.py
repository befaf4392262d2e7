"""The guard in a run: stops, rollbacks, resumes after them, and a run that hangs."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragen.algorithms.batch import Batch
from ragen.cli.main import main
from ragen.config.config import Config
from ragen.config.reading import dump, resolve
from ragen.config.sections import GuardConfig
from ragen.core.errors import GuardStop
from ragen.core.metrics import Metrics
from ragen.core.stopping import StopRequested
from ragen.diagnostics.detectors import EMPTY_STEPS, EVALUATED, LEVELS
from ragen.diagnostics.guard import GRACE_STEPS, Alarm, GuardState, read_history
from ragen.engines.local import LocalEngine
from ragen.storage import checkpoint
from ragen.storage.checkpoint import folders
from ragen.storage.reader import read_events, read_metrics
from ragen.storage.recorder import Recorder
from ragen.training import loop, recovery
from ragen.training.progress import Watcher
from ragen.training.running import LoopState, kept_checkpoints
from ragen.training.trainer import resume, train
from ragen.training.watchdog import STACKS, Watchdog, end_late, report_stall
from tests.training.test_trainer import (
    SendSignal,
    assert_same_results,
    exit_code,
    fork,
    kill_and_resume,
    make_config,
    recorded_results,
    rows,
)

Plan = Callable[..., None]

ROLLBACK: dict[str, Any] = {"guard__responses": {"grad_spike": "rollback"}, "steps": 5}
PPO: dict[str, Any] = {"algorithm": "starpo/ppo", "loss__kl": 0.01}


class NotedAlarms(Watcher):
    def __init__(self) -> None:
        self.alarms: list[tuple[int, str]] = []

    def alarm(self, step: int, text: str) -> None:
        self.alarms.append((step, text))


@pytest.fixture
def alarms_at(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Raises an alarm, with its onset one step earlier, at each (rollbacks so far, step)."""

    def plan(*moments: tuple[int, int], detector: str = "grad_spike") -> None:
        def scripted(history: Any, step: int, state: GuardState, detectors: Any) -> list[Alarm]:
            state.checked_step = step
            due = (state.rollbacks, step) in moments
            return [Alarm(detector, step, step - 1, 9.0, 1.0)] if due else []

        monkeypatch.setattr(recovery, "raise_alarms", scripted)

    return plan


def events(run: Path) -> list[tuple[int, int, str]]:
    return [(e["attempt"], e["step"], e["kind"]) for e in read_events(run)]


def steps_of(run: Path) -> list[tuple[int, int]]:
    query = "SELECT attempt, step FROM metrics WHERE name = 'reward/mean' ORDER BY 1, 2"
    return [(attempt, step) for attempt, step in rows(run, query)]


# Log and stop.


def test_the_response_log_changes_no_result_of_a_run(tmp_path: Path, alarms_at: Plan) -> None:
    train(make_config(), tmp_path / "quiet")
    alarms_at((0, 2))
    seen = NotedAlarms()
    result = train(make_config(), tmp_path / "run", watcher=seen)
    alarm = Alarm("grad_spike", 2, 1, 9.0, 1.0)
    assert result.alarms == (alarm,) and seen.alarms == [(2, str(alarm))]
    (event,) = read_events(tmp_path / "run")
    assert (event["kind"], event["text"], event["data"]["baseline"]) == ("alarm", str(alarm), 1.0)
    assert_same_results(tmp_path / "run", recorded_results(tmp_path / "quiet"))


def test_a_stop_saves_first_and_can_be_resumed(tmp_path: Path, alarms_at: Plan) -> None:
    alarms_at((0, 2), detector="empty_filter")
    run = tmp_path / "my run"
    command = re.escape(f"ragen resume {shlex.quote(str(run))}")
    with pytest.raises(GuardStop, match=f"step 2, empty_filter: .* {command}$"):
        train(make_config(checkpoint__every=0), run)
    assert checkpoint.newest(run).name == "step-2"
    assert events(run) == [(0, 2, "alarm"), (0, 2, "guard")]
    assert resume(run).after is not None


def test_a_resumed_run_stops_again_if_the_condition_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "select", lambda *_, **__: [])
    settings = make_config(steps=30, checkpoint__every=0, eval__episodes=0)
    with pytest.raises(GuardStop, match=f"step {EMPTY_STEPS}, empty_filter"):
        train(settings, tmp_path / "run")
    with pytest.raises(GuardStop, match=f"step {EMPTY_STEPS + GRACE_STEPS + 1}, empty_filter"):
        resume(tmp_path / "run")


def test_a_stop_is_one_line_and_exit_code_3(
    tmp_path: Path, alarms_at: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    alarms_at((0, 1), detector="degenerate_text")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(dump(make_config()))
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), "--quiet"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ragen: the guard stopped the run: step 1, degenerate_text: ")


def test_history_kept_step_by_step_equals_history_read_from_the_database(
    tmp_path: Path, alarms_at: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms_at((0, 3))
    scripted, seen = recovery.raise_alarms, []

    def recording(history: Any, step: int, state: GuardState, detectors: Any) -> list[Alarm]:
        seen.append(copy.deepcopy(history))
        return scripted(history, step, state, detectors)

    monkeypatch.setattr(recovery, "raise_alarms", recording)
    train(make_config(**ROLLBACK, eval__every=2), tmp_path / "run")
    history = read_history(tmp_path / "run", 1.0)
    # The last evaluation comes after the guard's last check.
    del history[EVALUATED][5], history[LEVELS][5]
    del history["time/save_s"], seen[-1]["time/save_s"]  # written after the guard's check
    assert seen[-1] == history and list(history[EVALUATED]) == [0, 2, 4]
    assert all(list(series) == list(history[name]) for name, series in seen[-1].items())


# Rollback.


def test_a_rollback_starts_another_attempt_from_before_the_onset(
    tmp_path: Path, alarms_at: Plan
) -> None:
    run, seen = tmp_path / "run", NotedAlarms()
    alarms_at((0, 3))
    result = train(make_config(**ROLLBACK), run, watcher=seen)
    # The newest checkpoint before onset 2 is that of step 1.
    assert [text for _, text in seen.alarms][1] == (
        "rolled back to step 1, attempt 1: update.lr = 0.000333333, update.critic_lr = 3.33333e-06"
    )
    assert events(run) == [(0, 3, "alarm"), (0, 3, "guard")]
    assert steps_of(run) == [*((0, s) for s in (1, 2, 3)), *((1, s) for s in (2, 3, 4, 5))]
    rates = read_metrics(run)["update/lr"]
    # Linear decay to a tenth over five steps: by a fifth of .9 at the second.
    assert rates[1] == pytest.approx(1e-3)
    assert rates[2] == pytest.approx(1e-3 / 3 * (1 - 0.9 / 5))
    state = checkpoint.read_state(checkpoint.newest(run))
    assert (state["loop"]["attempt"], state["loop"]["began"], state["loop"]["step"]) == (1, 1, 5)
    assert state["loop"]["updates"] == max(read_metrics(run)["progress/updates"].values())
    assert result.after is not None and len(result.alarms) == 1


@pytest.mark.parametrize("remedy", ["lr", "filter", "kl", "seeds"])
def test_a_remedy_changes_only_its_setting(tmp_path: Path, alarms_at: Plan, remedy: str) -> None:
    run = tmp_path / "run"
    alarms_at((0, 3))
    config = make_config(
        **ROLLBACK, guard__remedy=remedy, filter__rule="all", rollout__num_groups=4
    )
    train(config, run)
    query = 'SELECT noise_seed FROM episodes WHERE step = 2 AND attempt = ? ORDER BY "group", id'
    first, second = (rows(run, query.replace("?", str(attempt))) for attempt in (0, 1))
    assert (first != second) == (remedy == "seeds"), "only this remedy changes random numbers"
    levels = "SELECT DISTINCT level_seed FROM episodes WHERE step = 2"
    assert len(rows(run, levels)) == 4, "both attempts play the same levels"
    evaluated = "SELECT DISTINCT noise_seed FROM episodes WHERE phase = 'eval' AND level_seed = 123"
    assert len(rows(run, evaluated)) == 1, "evaluations stay comparable"
    kept = "SELECT attempt, avg(kept) FROM episodes WHERE phase = 'train' GROUP BY 1"
    assert rows(run, kept) == [(0, 1.0), (1, 0.25 if remedy == "filter" else 1.0)]
    with_kl = {a for (a,) in rows(run, "SELECT attempt FROM metrics WHERE name = 'kl/reference'")}
    assert with_kl == ({1} if remedy == "kl" else set())


def test_a_rollback_keeps_earlier_attempts_readable_and_drops_their_later_checkpoints(
    tmp_path: Path, alarms_at: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(recovery, "ROLLBACKS", 1)
    alarms_at((0, 4), (1, 4))
    with pytest.raises(GuardStop, match="no rollback is left"):
        train(make_config(**ROLLBACK, checkpoint__keep=5), run)
    # Onset 3: back to step 2 and on to 4, where the second alarm saves and stops the run.
    assert [path.name for path in folders(run)] == [f"step-{s}" for s in range(5)]
    assert steps_of(run) == [*((0, s) for s in (1, 2, 3, 4)), (1, 3), (1, 4)]
    assert checkpoint.read_state(folders(run)[3])["loop"]["attempt"] == 1
    assert rows(run, "SELECT count(*) FROM episodes WHERE attempt = 0 AND step = 4") == [(8,)]


def test_without_a_checkpoint_before_the_onset_the_run_stops(
    tmp_path: Path, alarms_at: Plan
) -> None:
    alarms_at((0, 1))
    with pytest.raises(GuardStop, match="no checkpoint before step 0 is left"):
        train(make_config(**ROLLBACK), tmp_path / "run")


@pytest.mark.parametrize(
    ("response", "every", "kept"),
    [
        ({}, 20, 2),
        ({"grad_spike": "rollback"}, 20, 3),  # ten steps back, one checkpoint every five
        ({"reward_drop": "log", "grad_spike": "rollback"}, 20, 3),
        ({"reward_drop": "rollback"}, 20, 9),  # an alarm at 100, an onset at 61: 60, 65 … 100
        ({"reward_drop": "rollback"}, 3, 3),
    ],
)
def test_enough_checkpoints_are_kept_to_precede_an_onset(
    response: dict[str, str], every: int, kept: int
) -> None:
    config = make_config(guard__responses=response, checkpoint__every=5, eval__every=every)
    run: Any = SimpleNamespace(
        config=config, guard=GuardState(checked_step=100), state=LoopState(100), spacing=5
    )
    assert kept_checkpoints(run) == kept


_UNINTERRUPTED: dict[str, dict[str, Any]] = {}


def uninterrupted(config: Config, tmp_path: Path, name: str) -> dict[str, Any]:
    """The recorded results of an uninterrupted run, trained once per name."""
    if name not in _UNINTERRUPTED:
        train(config, tmp_path / "uninterrupted")
        _UNINTERRUPTED[name] = recorded_results(tmp_path / "uninterrupted")
    return _UNINTERRUPTED[name]


CASES = [
    pytest.param("grpo", {}, id="grpo", marks=pytest.mark.slow),
    pytest.param("gae", PPO, id="gae"),
]
ROLLBACK_AND_EVAL: dict[str, Any] = ROLLBACK | {"eval__every": 2}


@pytest.mark.parametrize(("kind", "more"), CASES)
@pytest.mark.parametrize(
    ("event", "at"),
    [("episode", 3 * 8 + 2), ("step", 4), ("evaluated", 4), ("step", 6)],
)
def test_resume_after_a_stop_after_a_rollback_equals_the_uninterrupted_run(
    tmp_path: Path, alarms_at: Plan, kind: str, more: dict[str, Any], event: str, at: int
) -> None:
    alarms_at((0, 3), (1, 4))
    config = make_config(**ROLLBACK_AND_EVAL, **more)
    with pytest.raises(StopRequested):
        train(config, tmp_path / "run", watcher=SendSignal(event, at, signal.SIGINT))
    resume(tmp_path / "run")
    assert steps_of(tmp_path / "run")[-3:] == [(2, 3), (2, 4), (2, 5)]
    assert_same_results(tmp_path / "run", uninterrupted(config, tmp_path, kind))


@pytest.mark.parametrize("step", ["drop_after", "replace_state", "event", "build"])
def test_resume_after_a_kill_during_a_rollback(tmp_path: Path, alarms_at: Plan, step: str) -> None:
    alarms_at((0, 3))
    config, run = make_config(**ROLLBACK_AND_EVAL), tmp_path / "run"

    def work() -> None:
        place, name = {
            "drop_after": (recovery, "drop_after"),
            "replace_state": (recovery, "replace_state"),
            "event": (Recorder, "event"),
            "build": (LocalEngine, "load"),
        }[step]
        real = getattr(place, name)

        def killing(*arguments: Any, **named: Any) -> Any:
            if step != "event" or "rolled" in arguments[3]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(place, name, killing)
        train(config, run)

    assert exit_code(fork(work)) == -signal.SIGKILL
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path, "one rollback"))


@pytest.mark.slow
def test_resume_after_many_kills_around_a_rollback(tmp_path: Path, alarms_at: Plan) -> None:
    import random

    alarms_at((0, 3), (1, 4))
    config = make_config(**ROLLBACK_AND_EVAL)
    train(config, tmp_path / "uninterrupted")
    assert kill_and_resume(tmp_path, config, 1.5, random.Random(3), most=20) > 0
    assert_same_results(tmp_path / "run", recorded_results(tmp_path / "uninterrupted"))


@pytest.mark.slow
def test_a_collapse_of_the_embedded_model_is_rolled_back(tmp_path: Path) -> None:
    """With vanilla GRPO on the bandit, the reward std falls before success does."""
    more = {"guard.responses.reward_std_cliff": "rollback", "guard.remedy": "filter"}
    small = {"steps": 12, "threads": 1, "eval.episodes": 0, "seed": 4, "checkpoint.every": 5}
    result = train(resolve("collapse", more | small), tmp_path / "run")
    first = result.alarms[0]
    assert first.detector == "reward_std_cliff" and first.step <= 12
    assert events(tmp_path / "run")[:2] == [(0, first.step, "alarm"), (0, first.step, "guard")]
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "run"))
    assert state["guard"]["changes"]["filter.rule"] == "top_k"


# A run that hangs.


def test_a_run_that_hangs_reports_its_stacks_and_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, update = tmp_path / "run", LocalEngine.update

    async def hangs(engine: LocalEngine, batch: Batch, step: int) -> Metrics:
        if step == 2:
            time.sleep(60)  # blocks the event loop, as a broken collective would
        return await update(engine, batch, step)

    monkeypatch.setattr(LocalEngine, "update", hangs)
    monkeypatch.setattr(loop, "STALLED_S", 1.0)
    start = time.monotonic()
    assert exit_code(fork(lambda: train(make_config(), run))) == 3
    assert time.monotonic() - start < 30
    stacks = (run / STACKS).read_text()
    assert "the last checkpoint is step-2" in stacks and "hangs" in stacks
    (event,) = read_events(run)
    assert (event["kind"], event["step"], event["data"]["detector"]) == ("alarm", 2, "stalled")
    monkeypatch.undo()
    assert resume(run).after is not None


def test_a_stall_can_be_logged_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, seen = LocalEngine.publish, NotedAlarms()

    async def slow(engine: LocalEngine) -> None:
        time.sleep(1.5 if engine.version == 1 else 0)
        await publish(engine)

    monkeypatch.setattr(LocalEngine, "publish", slow)
    monkeypatch.setattr(loop, "STALLED_S", 1.0)
    config = make_config(guard__responses={"stalled": "log"})
    result = train(config, tmp_path / "run", watcher=seen)
    assert [alarm.detector for alarm in result.alarms] == ["stalled"]
    assert [step for step, _ in seen.alarms] == [1]
    off = GuardConfig(responses={"stalled": "off"})
    silent = make_config().model_copy(update={"guard": off})
    assert train(silent, tmp_path / "silent", watcher=seen).alarms == ()
    assert len(seen.alarms) == 1


def test_a_stall_is_reported_if_the_checkpoints_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    seen = NotedAlarms()
    config = make_config(guard__responses={"stalled": "log"})
    run: Any = SimpleNamespace(folder=tmp_path, state=LoopState(), watcher=seen, original=config)
    report_stall(run, 1800.0)
    ((step, text),) = seen.alarms
    assert step == 0 and "cannot read" in text and STACKS in text
    assert "report_stall" in (tmp_path / STACKS).read_text()


def test_stacks_are_written_in_utf_8_whatever_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, seen, folder = Path.open, NotedAlarms(), tmp_path / "läufe"
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", buffering=-1, encoding=None, *more, **named: opened(
            path, mode, buffering, encoding or (None if "b" in mode else "ascii"), *more, **named
        ),
    )
    folder.mkdir()
    late = SimpleNamespace(process="learner 1", phase="update", seconds=9.0, stacks="in müll.py")
    engine = SimpleNamespace(end_late=lambda: [late])
    run: Any = SimpleNamespace(folder=folder, state=LoopState(), watcher=seen, engine=engine)
    end_late(run)
    assert len(seen.alarms) == 1 and "in müll.py" in (folder / STACKS).read_text("utf-8")


def test_every_beat_resets_the_watchdog() -> None:
    silences: list[float] = []
    with Watchdog(0.4, silences.append) as dog:
        for _ in range(10):
            time.sleep(0.1)
            dog.beat()
        assert not silences
        time.sleep(1.0)
        dog.beat()
        time.sleep(1.0)
    assert len(silences) == 2, "once per silence"
    with Watchdog(0.0, silences.append):
        time.sleep(0.1)
    assert len(silences) == 2


def test_the_watchdog_looks_a_last_time_at_the_end() -> None:
    looks: list[float] = []
    with Watchdog(0.0, looks.append, lambda: looks.append(time.monotonic())):
        end = time.monotonic()
    assert len(looks) == 1 and looks[0] >= end


def test_the_guards_state_survives_json() -> None:
    from dataclasses import asdict

    state = GuardState(7, 10, 1, {"grad_spike": 5}, {"update.lr": 1e-4})
    assert GuardState(**json.loads(json.dumps(asdict(state)))) == state


def test_the_checkpoint_of_a_stop_replaces_no_regular_checkpoint(tmp_path: Path) -> None:
    def saved(*steps: int) -> list[int]:
        for step in steps:
            folder = tmp_path / "checkpoints" / f"step-{step}"
            folder.mkdir(parents=True)
            checkpoint.write_state(folder, {})
        checkpoint.drop_old(tmp_path, keep=2, others=[0], every=10)
        return [checkpoint.step_of(path) for path in folders(tmp_path)]

    assert saved(0, 10, 20) == [0, 10, 20]
    assert saved(25) == [0, 10, 20, 25]
    assert saved(30) == [0, 20, 30]
    checkpoint.drop_after(tmp_path, 20)
    assert saved() == [0, 20]
