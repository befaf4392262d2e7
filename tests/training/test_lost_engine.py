"""A run whose engine is lost goes on by itself, with the results of a run that lost none."""

from __future__ import annotations

import inspect
import signal
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ragen.core.errors import EngineLost, RagenError
from ragen.core.stopping import StopRequested
from ragen.engines.local import LocalEngine
from ragen.sampling.local_sampler import Seat
from ragen.storage import checkpoint
from ragen.storage.reader import read_events
from ragen.training import recovery, running
from ragen.training.trainer import resume, train
from tests.shared import own
from tests.training.runs import (
    SendSignal,
    assert_same_results,
    make_config,
    recorded_results,
    rows,
)

TEXT = "learner 1 of 2 was killed"
DETAILS = "many lines\nfrom Ray"
SAME: dict[str, Any] = {"eval__every": 1, "checkpoint__keep": 9}
"""Settings of `bandit_run`."""


class Moment(NamedTuple):
    """A call of a function in which the engine is lost, counted from the loss before."""

    name: str
    call: int = 1
    late: bool = False
    """Whether the engine is lost when the function's work is done, or as it begins."""
    owner: Any = LocalEngine


class Losses:
    """Loses the engine at these moments, one after the other; `found` are the losses so far."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self.found, self._left, self._count = list[str](), deque(moments), 0

    def due(self, owner: Any, name: str) -> Moment | None:
        """The moment that a call of this function is, if it is the next one."""
        if not self._left or (self._left[0].owner, self._left[0].name) != (owner, name):
            return None
        self._count += 1
        if self._count < self._left[0].call:
            return None
        self._count = 0
        self.found.append(name)
        return self._left.popleft()

    def losing(self, owner: Any, name: str) -> Callable[..., Any]:
        """What stands in for a function."""
        before = getattr(owner, name)

        async def waiting(*arguments: Any, **named: Any) -> Any:
            moment = self.due(owner, name)
            if moment and not moment.late:
                raise EngineLost(TEXT, DETAILS, "learner 1")
            answer = await before(*arguments, **named)
            if moment:
                raise EngineLost(TEXT)
            return answer

        def at_once(*arguments: Any, **named: Any) -> Any:
            if self.due(owner, name):
                raise EngineLost(TEXT)
            return before(*arguments, **named)

        return waiting if inspect.iscoroutinefunction(before) else at_once


Losing = Callable[..., list[str]]


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Losing:
    """Loses the engine at some moments; returns the losses, as they come."""

    def lose(*moments: Moment) -> list[str]:
        losses = Losses(moments)
        for owner, name in {(each.owner, each.name) for each in moments}:
            monkeypatch.setattr(owner, name, losses.losing(owner, name))
        return losses.found

    return lose


def engine_events(run: Path) -> list[tuple[int, str]]:
    return [(each["step"], each["data"]["what"]) for each in read_events(run, "engine")]


def assert_survives(run: Path, losses: list[str], moments: tuple[Moment, ...]) -> None:
    """The engine was lost at all of these moments; each episode and step is there once."""
    assert losses == [each.name for each in moments]
    whats = [what for _, what in engine_events(run)]
    assert whats.count("lost") == len(losses)
    assert whats.count("restored") == len(losses) - losses.count("load")
    twice = 'GROUP BY attempt, phase, step, "group", member HAVING count(*) > 1'
    assert rows(run, f"SELECT step FROM episodes WHERE phase = 'train' {twice}") == []
    assert not list((run / "checkpoints").glob(".*")), "no half-written checkpoint stays"


MOMENTS = (
    Moment("save"),  # the first one: the run starts again
    Moment("complete", 3, owner=Seat),  # in the first evaluation
    Moment("update", late=True),  # in step 1
    Moment("load", late=True),  # again, as its successor loads
    Moment("complete", 15, owner=Seat),  # in the collection of step 2
    Moment("save", late=True),  # a checkpoint that is half written
    Moment("write_state", 2, owner=running),  # the last checkpoint, before its state
)


def test_a_lost_engine_changes_no_result(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch, bandit_run: Path
) -> None:
    made, closed = list[LocalEngine](), list[LocalEngine]()
    begin, close = LocalEngine.__init__, LocalEngine.close

    def making(engine: LocalEngine, *arguments: Any) -> None:
        made.append(engine)
        begin(engine, *arguments)

    async def closing(engine: LocalEngine) -> None:
        closed.append(engine)
        await close(engine)

    monkeypatch.setattr(LocalEngine, "__init__", making)
    monkeypatch.setattr(LocalEngine, "close", closing)
    losses = losing(*MOMENTS)
    train(make_config(**SAME), tmp_path / "run")
    assert_same_results(tmp_path / "run", recorded_results(bandit_run))
    assert_survives(tmp_path / "run", losses, MOMENTS)
    assert len(made) == len(MOMENTS) + 1 and set(map(id, closed)) == set(map(id, made))


def test_losses_without_a_new_checkpoint_end_the_run(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(recovery, "MOST_LOSSES", 1)
    losing(Moment("publish"), Moment("publish", 2), Moment("publish"))
    with pytest.raises(
        RagenError, match=f"after step 1.*{TEXT}; 2 engines were lost since .*ragen resume"
    ):
        train(make_config(eval__episodes=0), run)
    assert checkpoint.newest(run).name == "step-1"
    one = [(0, "lost"), (0, "restored")]
    assert engine_events(run) == [*one, (1, "lost"), (1, "restored"), (1, "lost")]


def test_an_engine_that_cannot_be_replaced_ends_the_run_in_one_line(
    tmp_path: Path, losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: Any, path: str | None = None, after: Any = None) -> Any:
        raise RagenError("no node has a GPU")

    losing(Moment("publish"))
    monkeypatch.setattr(recovery, "make_engine", refuse)
    with pytest.raises(RagenError, match=f"{TEXT}; no new .*: no node has a GPU; .*ragen resume"):
        train(make_config(eval__episodes=0), tmp_path / "run")


@pytest.mark.slow
def test_settings_that_changed_on_a_resume_stay_changed(
    tmp_path: Path, losing: Losing, bandit_run: Path
) -> None:
    expected, run = (own(bandit_run, tmp_path / name) for name in ("expected", "run"))
    changes = {"update.lr": 1e-4, "steps": 4}
    resume(expected, overrides=changes)
    losing(Moment("publish"))
    resume(run, overrides=changes)
    assert engine_events(run) == [(3, "lost"), (3, "restored")]
    text = f"after step 3, the engine is lost: {TEXT}; a new one takes the last checkpoint"
    (lost, _) = read_events(run, "engine")
    data = {"process": "learner 1", "what": "lost", "details": DETAILS}
    assert lost["text"] == text and lost["data"] == data
    assert_same_results(run, recorded_results(expected))


def test_a_damaged_checkpoint_is_set_aside_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, publish = tmp_path / "run", LocalEngine.publish

    async def damaging(engine: LocalEngine) -> None:
        if (newest := checkpoint.checkpoint_of(run, 1)) is not None and not engine_events(run):
            (newest / "model.safetensors").write_bytes(b"nothing")
            raise EngineLost(TEXT)
        await publish(engine)

    monkeypatch.setattr(LocalEngine, "publish", damaging)
    train(make_config(steps=2, eval__episodes=0), run)
    assert [each["kind"] for each in read_events(run)] == ["engine", "damaged checkpoint", "engine"]
    assert read_events(run, "engine")[1]["data"]["to"] == 0
    assert checkpoint.newest(run).name == "step-2"


def test_a_stop_comes_before_a_new_engine(tmp_path: Path, losing: Losing) -> None:
    run = tmp_path / "run"
    losing(Moment("save", 2))
    config = make_config(eval__episodes=0, checkpoint__every=2)
    with pytest.raises(StopRequested, match=f"stopped, and after step 1.*{TEXT}.*ragen resume"):
        train(config, run, watcher=SendSignal("step", 1, signal.SIGTERM))
    assert engine_events(run) == [(1, "lost")]
    assert read_events(run, "engine")[0]["text"].endswith("; the run stops")
