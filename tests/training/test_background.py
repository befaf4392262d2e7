"""Evaluations in the background: the numbers of a run that waits, whatever happens on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.core.errors import NotFiniteError, RagenError, UnplayableError
from ragen.diagnostics.guard import Alarm, GuardState, read_history
from ragen.engines.local import LocalEngine
from ragen.storage import checkpoint
from ragen.training import background, recovery, running
from ragen.training.background import Background, Evaluated, evaluate_checkpoint
from ragen.training.trainer import resume, train
from tests.training.test_trainer import (
    KINDS,
    NotedWatcher,
    assert_same_results,
    exit_code,
    fork,
    make_config,
    recorded_results,
    rows,
    uninterrupted,
)

EVERY: dict[str, Any] = {"eval__every": 2, "steps": 5, "checkpoint__keep": 1}
BACKGROUND = EVERY | {"eval__background": True}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play in this process when the answer is taken: another one takes seconds to start."""
    asked: list[tuple[Path, int]] = []

    async def answer(background: Background) -> Evaluated:
        return await evaluate_checkpoint(*asked[-1], lambda _: None)

    monkeypatch.setattr(
        Background, "ask", lambda _, folder, step, beat: asked.append((folder, step))
    )
    monkeypatch.setattr(Background, "answer", answer)


def results(run: Path) -> dict[str, Any]:
    """All that a run came to, but for the hash of its settings."""
    found = recorded_results(run)
    del found["state"][checkpoint.SETTINGS_HASH]
    found["checkpoints"] = [path.name for path in checkpoint.folders(run)]
    found["policies"] = rows(
        run,
        "SELECT phase, e.step, level_seed, member, policy_version, reply, snapshot FROM episodes e"
        " JOIN turns ON episode_id = e.id ORDER BY phase, e.step, level_seed, member, turn",
    )
    return found


def test_evaluations_in_another_process_have_the_numbers_of_those_in_the_run(
    tmp_path: Path,
) -> None:
    for name, settings in (("waits", EVERY), ("beside", BACKGROUND)):
        train(make_config(**settings), tmp_path / name)
    expected, found = results(tmp_path / "waits"), results(tmp_path / "beside")
    assert [record["episodes"] for record in found["evaluations"]] == [4] * 6
    for part, value in expected.items():
        assert found[part] == value, part


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["gae", "bfloat16", "lora"])
def test_a_saved_policy_plays_as_the_one_in_training(tmp_path: Path, kind: str) -> None:
    more = {"lora__rank": 4} if kind == "lora" else KINDS[kind]
    for name, settings in (("waits", EVERY), ("beside", BACKGROUND)):
        train(make_config(**settings | {"steps": 3} | more), tmp_path / name)
    expected, found = results(tmp_path / "waits"), results(tmp_path / "beside")
    for part, value in expected.items():
        assert found[part] == value, part


@pytest.mark.usefixtures("here")
def test_the_guard_sees_an_evaluation_where_the_next_one_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[int]] = {}

    def recording(history: Any, step: int, state: GuardState, detectors: Any) -> list[Alarm]:
        state.checked_step = step
        seen[step] = list(history["evaluation/success"])
        return []

    monkeypatch.setattr(recovery, "raise_alarms", recording)
    train(make_config(**BACKGROUND), tmp_path / "run")
    assert seen == {1: [0], 2: [0], 3: [0], 4: [0, 2], 5: [0, 2]}
    assert list(read_history(tmp_path / "run", 1.0)["evaluation/success"]) == [0, 2, 4, 5]


# A moment in which a run stops: a function, and the number of its call.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "the evaluation was asked for": (Background, "ask", 1),
    "a step between": (running.Clock, "metrics", 3),
    "its answer is taken": (Background, "answer", 1),
    "it was recorded": (running, "compare_with_best", 3),  # after those of step 0
    "the next checkpoint": (checkpoint, "drop_old", 5),
    "the last step": (running.Clock, "metrics", 5),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_ended_during_an_evaluation_makes_it_up(
    tmp_path: Path, moment: str, number: int
) -> None:
    owner, name, left = MOMENTS[moment]
    before, config, run = getattr(owner, name), make_config(**BACKGROUND), tmp_path / "run"

    def ending(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
        return before(*arguments, **named)

    def work() -> None:
        setattr(owner, name, ending)
        train(config, run)

    code = exit_code(fork(work))
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


ROLLBACK = ("drop_after", "replace_state", "make_engine")
"""What `recovery.roll_back` calls."""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "killed_in",
    [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ROLLBACK)],
)
@pytest.mark.parametrize(
    ("at", "onset", "evaluated"),
    [
        (3, 3, [(0, 0), (2, 0), (4, 1), (5, 1)]),  # in the evaluation of the step it goes back to
        (4, 3, [(0, 0), (2, 0), (4, 1), (5, 1)]),  # after that evaluation
        (5, 5, [(0, 0), (2, 0), (4, 0), (5, 1)]),
        (5, 3, [(0, 0), (2, 0), (4, 0), (4, 1), (5, 1)]),  # in one that is given up
    ],
)
def test_a_rollback_keeps_the_evaluations_of_the_steps_that_still_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    onset: int,
    evaluated: list[tuple[int, int]],
    killed_in: str | None,
) -> None:
    run, taken = tmp_path / "run", running.record_evaluation

    def scripted(history: Any, step: int, state: GuardState, detectors: Any) -> list[Alarm]:
        state.checked_step = step
        due = step == at and state.rollbacks == 0
        return [Alarm("grad_spike", step, onset, 9.0, 1.0)] if due else []

    def best_before(run: Any, step: int, evaluation: Any, groups: Any) -> None:
        success = 2.0 if step == onset - 1 else 0.5
        taken(run, step, replace(evaluation, success=success), groups)

    monkeypatch.setattr(recovery, "raise_alarms", scripted)
    monkeypatch.setattr(running, "record_evaluation", best_before)
    config = make_config(**BACKGROUND, guard__responses={"grad_spike": "rollback"})
    if killed_in is None:
        train(config, run)
    else:
        kill: Any = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(recovery, killed_in, kill)
            assert exit_code(fork(lambda: train(config, run))) == -signal.SIGKILL
        resume(run)
    query = "SELECT step, attempt FROM evaluations WHERE temperature = 1 ORDER BY 1, 2"
    assert rows(run, query) == evaluated
    state = checkpoint.read_state(checkpoint.newest(run))["loop"]
    assert (state["attempt"], state["best_step"], state["best_success"]) == (1, onset - 1, 2.0)
    assert (run / "checkpoints" / f"step-{onset - 1}").is_dir()


@pytest.mark.usefixtures("here")
def test_a_broken_policy_is_rolled_back_where_its_evaluation_would_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, save, left = tmp_path / "run", LocalEngine.save, [4]

    async def broken_once(engine: LocalEngine, folder: Path) -> dict[str, Any]:
        left[0] -= 1
        if left[0] == 0:  # after step 0, 1 and 2: in step 3
            raise NotFiniteError("the weights of the policy")
        return await save(engine, folder)

    monkeypatch.setattr(LocalEngine, "save", broken_once)
    response = {"non_finite": "rollback"}
    train(make_config(**BACKGROUND | {"eval__every": 1}, guard__responses=response), run)
    query = "SELECT step, attempt FROM evaluations WHERE temperature = 1 ORDER BY 1, 2"
    assert rows(run, query) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("at", [2, 3])
def test_a_rollback_needs_no_evaluation_of_a_step_that_it_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The weights of step 2 are broken, so they cannot be evaluated either."""
    run, answer, failed = tmp_path / "run", Background.answer, list[bool]()

    async def broken_once(background: Background) -> Evaluated:
        if not failed:
            failed.append(True)
            raise RagenError("the logits are not finite")
        return await answer(background)

    def scripted(history: Any, step: int, state: GuardState, detectors: Any) -> list[Alarm]:
        state.checked_step = step
        due = step == 3 and state.rollbacks == 0
        return [Alarm("grad_spike", step, at, 9.0, 1.0)] if due else []

    monkeypatch.setattr(Background, "answer", broken_once)
    monkeypatch.setattr(recovery, "raise_alarms", scripted)
    config = make_config(**BACKGROUND, guard__responses={"grad_spike": "rollback"})
    if at == 3:  # it goes back to step 2, which still counts
        with pytest.raises(RagenError, match="the logits are not finite"):
            train(config, run)
        return
    watcher = NotedWatcher()
    train(config, run, watcher=watcher)
    assert "step 2 is not evaluated: the logits are not finite" in watcher.alarms
    query = "SELECT step, attempt FROM evaluations WHERE temperature = 1 ORDER BY 1, 2"
    assert rows(run, query) == [(0, 0), (2, 1), (4, 1), (5, 1)]


# The process.

UNPLUGGED = """
import os

from ragen.envs.bandit import Bandit


class Unplugged(Bandit):
    name = "unplugged"

    def step(self, action):
        if "UNPLUGGED" in os.environ:
            raise OSError("its server is gone")
        return super().step(action)
"""


def test_a_killed_process_is_one_line_and_the_run_makes_the_evaluation_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ask, config = tmp_path / "run", Background.ask, make_config(**BACKGROUND)

    def killed(self: Background, *arguments: Any) -> None:
        ask(self, *arguments)
        assert self._process is not None
        self._process.kill()

    monkeypatch.setattr(Background, "ask", killed)
    with pytest.raises(RagenError) as failure:
        train(config, run)
    assert str(failure.value) == (
        f"the process that evaluates step 2 ended with code -9; resume with: ragen resume {run} "
        "(--eval.background false leaves this evaluation out)"
    )
    assert checkpoint.newest(run).name == "step-3"
    monkeypatch.undo()
    watcher = NotedWatcher()
    resume(run, watcher, {"eval.background": False})
    assert "step 2 is not evaluated: eval.background is false now" in watcher.alarms
    assert rows(run, "SELECT DISTINCT step FROM evaluations ORDER BY 1") == [(0,), (4,), (5,)]


def test_the_process_has_one_sampler_however_many_the_run_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More episodes at once would take each other's place in its cache, and memory."""
    several = {"engine.name": "ray", "engine.samplers": 4, "rollout.slots": 3}
    saved = {"loop": {"threads": 1}, "engine": {"version": 2}}
    at_once = list[int]()

    async def nothing() -> None:
        """There is nothing to close."""

    async def noted(policy: Any, setups: Any, config: Config, *_: Any) -> None:
        at_once.append(config.episodes_at_once)

    policy = SimpleNamespace(close=nothing)
    for name, stand_in in {
        "run_config": lambda folder: resolve("bandit", several),
        "sound": lambda folder, files: saved,
        "make_policy": lambda config, path: (policy, None),
        "open_setups": lambda config, chat, stack: {},
        "use_threads": lambda threads: None,
        "evaluate_envs": noted,
    }.items():
        monkeypatch.setattr(background, name, stand_in)
    asyncio.run(evaluate_checkpoint(Path("run"), 4, lambda _: None))
    assert at_once == [3]


def test_an_evaluation_that_fails_is_the_line_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Background.ask

    def damaged(self: Background, folder: Path, step: int, beat: Callable[[], None]) -> None:
        (folder / "checkpoints" / f"step-{step}" / "model.safetensors").write_bytes(b"")
        ask(self, folder, step, beat)

    monkeypatch.setattr(Background, "ask", damaged)
    with pytest.raises(RagenError, match=r"^.*step-2/model.safetensors is damaged") as failure:
        train(make_config(**BACKGROUND), tmp_path / "run")
    assert "\n" not in str(failure.value)


def test_an_evaluation_whose_episodes_all_fail_stops_the_run_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that the run waits for; once the server of the environment is back, it goes on."""
    (tmp_path / "unplugged.py").write_text(UNPLUGGED)
    run, ask = tmp_path / "run", Background.ask

    def without_server(self: Background, *arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("UNPLUGGED", "1")
            ask(self, *arguments)

    name = f"{tmp_path / 'unplugged.py'}:Unplugged"
    config = make_config(**BACKGROUND, env__name=name)
    monkeypatch.setattr(Background, "ask", without_server)
    with pytest.raises(UnplayableError, match=r"in every episode.*; stopped after 4 steps; resume"):
        train(config, run)
    assert checkpoint.newest(run).name == "step-4"
    monkeypatch.setattr(Background, "ask", ask)
    resume(run)
    assert_same_results(run, uninterrupted(config, tmp_path))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_the_process_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run, process, ask = tmp_path / "run", tmp_path / "process", Background.ask

    def stopped(self: Background, *arguments: Any) -> None:
        ask(self, *arguments)
        assert self._process is not None
        process.write_text(str(self._process.pid))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Background, "ask", stopped)
    exit_code(fork(lambda: train(make_config(**BACKGROUND), run)))
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{process.read_text()}").exists()
