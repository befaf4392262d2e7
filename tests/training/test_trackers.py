"""Trackers (TensorBoard, W&B): equal names and values, imported only if configured."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.reading import merge
from ragen.config.sections import TRACKERS
from ragen.core.errors import RagenError
from ragen.storage.reader import read_evaluations, read_metrics
from ragen.training import trackers
from ragen.training.progress import Watcher, Watchers
from ragen.training.trackers import Tracker, with_trackers
from ragen.training.trainer import resume, train
from tests.bandit_model import settings

Capture = pytest.CaptureFixture[str]
Points = dict[str, dict[int, list[float]]]


def needs(name: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not there, reason=f"needs the extra {name}")


@pytest.fixture(autouse=True)
def local_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)


# What each tracker holds, read back with its own library.


def in_tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: Points = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(name, {}).setdefault(event.step, []).append(event.value)
    return found


def in_wandb(run: Path) -> Points:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # wandb's process writes the rest on teardown
    found: Points = {}
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            items = Record.FromString(data).history.item
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            add_row(found, row)
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """Parse LevelDB's log format, in which offline runs are stored: blocks of 32 kB."""
    at, parts = 7, b""  # after the file's header
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # the rest of a block is too short for a header
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield parts
            parts = b""


def add_row(found: Points, row: Mapping[str, Any]) -> None:
    step = row.get(trackers.STEP)
    for name, value in row.items():
        if step is not None and not name.startswith("_") and name != trackers.STEP:
            found.setdefault(name, {}).setdefault(int(step), []).append(value)


READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb}
TRACKER_PARAMS = [pytest.param(name, marks=needs(name)) for name in TRACKERS]
EACH_TRACKER = pytest.mark.parametrize("name", TRACKER_PARAMS)


@EACH_TRACKER
def test_trackers_receive_metrics_under_ragens_names_also_after_a_resume(
    name: str, tmp_path: Path
) -> None:
    config = merge("bandit", settings(record__trackers=name, steps=2))
    run = train(config, tmp_path / "bandit-7").run
    resume(run, overrides={"steps": 3})
    recorded, found = read_metrics(run), READERS[name](run)
    tracked = {each for each in found if not each.startswith("eval")}
    # Averages and the time of a checkpoint are only in the database.
    assert tracked <= recorded.keys() and len(tracked) > 40
    assert {"success/mean", "reward/std_in_group", "time/rollout_s"} <= tracked
    for metric in tracked:
        for step, values in found[metric].items():
            assert values == [pytest.approx(recorded[metric][step], rel=1e-5)], metric
    assert set(found["success/mean"]) == {1, 2, 3}
    for evaluation in read_evaluations(run):
        section = "eval" if evaluation["temperature"] else "eval_greedy"
        (value,) = found[f"{section}/success"][evaluation["step"]]
        assert value == pytest.approx(evaluation["success"])


@EACH_TRACKER
def test_trackers_show_the_values_after_a_rollback_and_write_nothing_to_standard_output(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    """Steps 1 to 4, back to 2, and on: later values replace earlier ones, or are added to them."""
    run = tmp_path / "bandit-7"
    run.mkdir()
    watcher = with_trackers(Watcher(), name)
    watcher.begin(run, merge("bandit"), 0)
    for step, loss in ((1, 0.5), (2, 0.25), (3, 8.0), (4, 9.0), (3, 0.125), (4, 0.0625)):
        watcher.step(step, {"loss/policy": loss, "loss/kl": 0.0})
    watcher.step(4, {"loss/policy": 0.5, "loss/kl": 0.0})  # after another rollback, to step 3
    watcher.end()
    assert capsys.readouterr().out == ""
    found = READERS[name](run)["loss/policy"]
    earlier = {} if name == "tensorboard" else {3: [8.0], 4: [9.0, 0.0625]}
    current = {1: 0.5, 2: 0.25, 3: 0.125, 4: 0.5}
    assert found == {step: [*earlier.get(step, []), value] for step, value in current.items()}


@needs("tensorboard")
def test_tensorboard_shows_each_step_once_after_a_kill_before_the_first_checkpoint(
    tmp_path: Path,
) -> None:
    for number, loss in enumerate((8.0, 0.5)):
        time.sleep(1.1 * number)  # the names of its files have the second
        watcher = with_trackers(Watcher(), "tensorboard")
        watcher.begin(tmp_path, merge("bandit"), 0)
        for step in (1, 2):
            watcher.step(step, {"loss/policy": loss})
        watcher.end()
    assert in_tensorboard(tmp_path)["loss/policy"] == {1: [0.5], 2: [0.5]}


# Tests that need no tracker installed.


@pytest.fixture
def tracker_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls of a fake tracker, which is the only one."""
    calls: list[Any] = []

    class FakeTracker(Tracker):
        def begin(self, run: Path, config: Any, step: int) -> None:
            self._run = SimpleNamespace(finish=lambda: calls.append("close"))
            calls.append(("begin", run, step))

        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            calls.append(("log", step, dict(metrics)))

    monkeypatch.setattr(trackers, "TRACKERS", {"fake": FakeTracker})
    yield calls


def test_watchers_forward_every_call(tracker_calls: list[Any], tmp_path: Path) -> None:
    names, calls = ("note", "begin", "episode", "step", "evaluated", "alarm", "end"), list[str]()
    inner = Watcher()
    for name in names:
        setattr(inner, name, lambda *_, name=name: calls.append(name))
    watcher = Watchers(inner, trackers.TRACKERS["fake"]())
    watcher.note("by the way")
    watcher.begin(tmp_path, merge("bandit"), 3)
    watcher.episode(None)  # type: ignore[arg-type]
    watcher.step(4, {"loss/policy": 0.5})
    watcher.alarm(4, "look")
    watcher.end()
    watcher.end()  # the command calls it again
    assert calls == ["note", "begin", "episode", "step", "alarm", "end", "end"]
    assert tracker_calls == [("begin", tmp_path, 3), ("log", 4, {"loss/policy": 0.5}), "close"]


def test_a_failing_run_closes_its_tracker(tracker_calls: list[Any], tmp_path: Path) -> None:
    class Fails(Watcher):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise ZeroDivisionError

    config, fake_tracker = (
        merge("bandit", settings(eval__episodes=0)),
        trackers.TRACKERS["fake"](),
    )
    with pytest.raises(ZeroDivisionError):
        train(config, tmp_path / "run", watcher=Watchers(Fails(), fake_tracker))
    assert tracker_calls[-1] == "close"


def test_a_run_resumes_after_its_tracker_failed_to_start(
    tracker_calls: list[Any], tmp_path: Path
) -> None:
    class Refuses(Tracker):
        def begin(self, run: Path, config: Any, step: int) -> None:
            raise RagenError("no login")

    config, run = merge("bandit", settings(steps=1, eval__episodes=0)), tmp_path / "run"
    with pytest.raises(RagenError, match="no login"):
        train(config, run, watcher=Refuses())
    resume(run, trackers.TRACKERS["fake"]())
    assert tracker_calls[0] == ("begin", run, 0) and tracker_calls[-1] == "close"
    assert [each[:2] for each in tracker_calls[1:-1]] == [("log", 1)]


def test_no_tracker_is_imported_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in TRACKERS]:
        monkeypatch.delitem(sys.modules, name)
    watcher = Watcher()
    assert with_trackers(watcher, "") is watcher
    assert not [name for name in TRACKERS if name in sys.modules]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_tracker_is_one_line_before_the_run_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == name else find(module)
    )
    out = tmp_path / "run"
    assert main(["train", "bandit", "--out", str(out), "--record.trackers", name]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"ragen: record.trackers: {name} is not installed: pip install 'ragen-rl[{name}]'\n"
    )
    assert not out.exists()


def test_unknown_tracker_names_are_refused() -> None:
    for wrong in ("mlflow", "wandb,mlflow", "wandb tensorboard"):
        with pytest.raises(RagenError, match=r"record.trackers = .*: expected nothing, or names"):
            merge("bandit", {"record.trackers": wrong})
    assert merge("bandit").record.trackers == ""
    assert merge("bandit", {"record.trackers": "wandb, tensorboard"}).record.trackers


def test_tracker_names_equal_those_of_the_config() -> None:
    assert tuple(trackers.TRACKERS) == TRACKERS
