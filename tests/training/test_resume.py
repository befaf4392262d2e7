"""A run that is stopped or killed, and resumed, has the results of one that nothing stopped."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen.core import files
from ragen.core.errors import RagenError
from ragen.core.stopping import SIGNALS, StopRequested
from ragen.learning import saving
from ragen.learning.learner import Learner
from ragen.sampling.local_sampler import Sampler
from ragen.storage import checkpoint, recorder
from ragen.storage.database import DATABASE
from ragen.storage.recorder import Recorder
from ragen.training import running
from ragen.training.progress import Watcher
from ragen.training.trainer import resume, train
from tests.shared import own
from tests.training.runs import (
    GAE,
    SMALL,
    NotedWatcher,
    SendSignal,
    assert_same_results,
    make_config,
    recorded_results,
    rows,
    train_and_kill,
    uninterrupted,
    uninterrupted_run,
)

UPDATES = SMALL | {"filter__rule": "all", "update__minibatch_episodes": 2}
"""Two updates a step, or four of PPO's two epochs."""

# Stops: the run is saved as of its last finished step.

SHARED = GAE | {"model__critic": "shared"}
MIXTURE = {"env__mix": {"bandit": 2, "bandit-rev": 1}, "rollout__num_groups": 3}
BUDGET = {"budget": "updates", "steps": 6}  # four in a step of the mixture
KINDS: dict[str, dict[str, Any]] = {
    "shared critic, mixture, budget of updates": SHARED | MIXTURE | BUDGET,
    "bfloat16": GAE | {"model__dtype": "bfloat16"},
}


MOMENTS = [  # an event, its occurrence since the last stop, a signal, finished steps by then
    ("evaluated", 1, "SIGINT", 0),  # the greedy evaluation is left
    ("evaluated", 2, "SIGTERM", 1),
    ("episode", 2, "SIGHUP", 1),
    ("evaluated", 1, "SIGXCPU", 2),
]


@pytest.mark.parametrize(
    "kind",
    [kind if "," in kind else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_a_run_that_is_stopped_at_each_moment_equals_the_uninterrupted_run(
    tmp_path: Path, kind: str
) -> None:
    config, run = make_config(**SMALL | KINDS[kind]), tmp_path / "run"
    handlers = [signal.getsignal(each) for each in SIGNALS]
    for event, at, name, steps in MOMENTS:
        watcher = SendSignal(event, at, getattr(signal, name))
        with pytest.raises(StopRequested, match=f"after {steps} steps; resume with: ragen resume"):
            resume(run, watcher) if run.exists() else train(config, run, watcher=watcher)
        assert [signal.getsignal(each) for each in SIGNALS] == handlers
        assert checkpoint.newest(run).name == f"step-{steps}"
        assert not list(run.glob(f"{DATABASE}-*")), "the database is a plain file again"
    assert resume(run).after is not None
    assert_same_results(run, uninterrupted(config))
    query = "SELECT count(*) FROM metrics WHERE name = 'kl/reference' AND value > -1e-6"
    assert config.loss.kl == 0 or rows(run, query) == [(2,)], "one in every step"
    events = rows(run, "SELECT kind, data FROM events ORDER BY id")
    assert [(kind, json.loads(data)) for kind, data in events] == [
        ("resume", {"checkpoint": f"step-{steps}"}) for *_, steps in MOMENTS
    ]


@pytest.mark.slow
def test_a_second_signal_interrupts_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, while the last step is saved, exits; older checkpoints stay intact."""
    run, before = tmp_path / "run", running.write_state

    def interrupted_write(folder: Path, state: dict[str, Any]) -> None:
        if state["loop"]["step"] == 1:
            signal.raise_signal(signal.SIGINT)
        before(folder, state)

    config = make_config(**UPDATES, checkpoint__every=0)
    monkeypatch.setattr(running, "write_state", interrupted_write)
    with pytest.raises(KeyboardInterrupt):
        train(config, run, watcher=SendSignal("step", 1, signal.SIGINT))
    monkeypatch.undo()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-0"]
    resume(run)
    expected = uninterrupted(make_config(**UPDATES))  # saved at each step, else equal
    assert_same_results(run, {part: expected[part] for part in expected.keys() - {"state"}})


def test_a_step_whose_episodes_all_fail_stops_the_run_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the server of an environment is gone; once it is back, the run goes on."""

    class Unplugs(Watcher):
        def step(self, step: int, metrics: Any) -> None:
            if step == 1:
                monkeypatch.setattr(
                    "ragen.envs.worlds.bandit.Bandit.step", lambda env, action: 1 / 0
                )

    run = tmp_path / "my run"
    said = (
        "every episode: ZeroDivisionError.*; stopped after 1 steps; "
        f"resume with: ragen resume {re.escape(shlex.quote(str(run)))}$"
    )
    config = make_config(**UPDATES)
    with monkeypatch.context() as monkeypatch, pytest.raises(RagenError, match=said):
        train(config, run, watcher=Unplugs())
    assert checkpoint.newest(run).name == "step-1"
    resume(run)
    assert_same_results(run, uninterrupted(config))


# Kills: the run goes on from its last checkpoint.

PHASES: dict[str, tuple[tuple[Any, str], int]] = {  # a call in each, and which one since step 1
    "update": ((Learner, "_apply"), 2),  # after the first update
    "inside a commit": ((recorder, "write_tokens"), 1),
    "writing a checkpoint": ((files, "flush"), 1),
}
MORE_PHASES: dict[str, tuple[tuple[Any, str], int]] = {
    "rollout": ((Sampler, "_draw"), 5),
    "inside an optimiser": ((torch.optim.AdamW, "step"), 2),
    "before a commit": ((Recorder, "_write"), 1),
    "evaluation": ((running, "evaluate_envs"), 1),
    "after a commit": ((Watcher, "step"), 1),
    "writing the weights": ((saving, "save_model"), 1),
    "writing the state": ((running, "write_state"), 1),
    "before a checkpoint gets its name": ((Path, "rename"), 1),
    "after a checkpoint": ((checkpoint, "drop_old"), 1),
}


@pytest.mark.parametrize(
    ("phases", "more"),
    [
        pytest.param(PHASES, {}, id="grpo"),
        pytest.param(MORE_PHASES, GAE, id="gae", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_in_each_phase_equals_the_uninterrupted_run(
    tmp_path: Path, phases: dict[str, Any], more: dict[str, Any]
) -> None:
    """It dies in the first evaluation, and then in each phase of the second step."""
    config, run = make_config(**UPDATES | more), tmp_path / "run"
    train_and_kill(config, run, (running, "evaluate_envs"), 2, after="step-0")
    for place, number in phases.values():
        train_and_kill(config, run, place, number)
        for folder in checkpoint.folders(run):
            checkpoint.verified_state(folder)
    resume(run)
    assert_same_results(run, uninterrupted(config))
    assert not list((run / "checkpoints").glob(".*"))


# Runs that have nothing to resume, or have lost a part.


def test_resume_of_a_finished_run_changes_nothing(
    own_bandit_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, watcher = own_bandit_run, NotedWatcher()
    before = recorded_results(run)
    written = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    monkeypatch.setattr("ragen.training.trainer.make_engine", None)  # no model is loaded
    assert resume(run, watcher).after is not None
    (note,) = watcher.notes
    assert note.startswith("the run is finished at step 3; to train its model further: ragen train")
    assert_same_results(run, before)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert not rows(run, "SELECT * FROM events")


@pytest.fixture
def finished() -> Path:
    """A run of one step with a critic. Read only."""
    return uninterrupted_run(make_config(**SMALL | {"steps": 1}, algorithm="starpo/ppo"))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return own(finished, tmp_path).rename(tmp_path / "run")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),  # what a file system may leave after a power cut
    "half": lambda data: data[: len(data) // 2],
    "one bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "other": lambda data: b'{"loop": {}}',
    "no object": lambda data: b"[]",
}


def test_every_damage_of_every_file_of_a_checkpoint_is_found(run: Path) -> None:
    newest = checkpoint.newest(run)
    names = {path.name for path in newest.iterdir()}
    assert {"state.json", "config.json", "model.safetensors", "critic.safetensors"} <= names
    for path in sorted(newest.iterdir()):
        data = path.read_bytes()
        for damage in DAMAGES.values() if path.suffix == ".json" else [DAMAGES["one bit"]]:
            path.write_bytes(damage(data))
            with pytest.raises(checkpoint.Damaged, match=re.escape(f"{path.name} is damaged (")):
                checkpoint.verified_state(newest)
        path.unlink()
        with pytest.raises(checkpoint.Damaged, match=r"\(it is missing\)"):
            checkpoint.verified_state(newest)
        path.write_bytes(data)
    checkpoint.verified_state(newest)


def test_resume_sets_a_damaged_checkpoint_aside(run: Path, finished: Path) -> None:
    """The damage is reported, only the damaged checkpoint is lost, and no result changes."""
    path, watcher = checkpoint.newest(run) / "model.safetensors", NotedWatcher()
    path.write_bytes(DAMAGES["one bit"](path.read_bytes()))
    resume(run, watcher)
    assert_same_results(run, recorded_results(finished))
    (line,) = watcher.alarms
    aside = run / "checkpoints" / "damaged-step-1"
    assert line.startswith(f"resuming from step-0: in {aside}, {path.name} is damaged (")
    assert "\n" not in line and aside.is_dir()
    ((kind, text, data),) = rows(run, "SELECT kind, text, data FROM events WHERE kind != 'resume'")
    assert (kind, text) == ("damaged checkpoint", line)
    assert json.loads(data) == {
        "checkpoint": "step-0",
        "damaged": "step-1",
        "set_aside": "damaged-step-1",
        "reason": line.partition(f"{aside}, ")[2],
    }
    assert [path.name for path in checkpoint.folders(run)] == ["step-0", "step-1"]
    resume(run, watcher)
    assert len(watcher.alarms) == 1, "a checkpoint that was set aside is not read again"


def test_resume_without_an_intact_checkpoint_is_refused(run: Path) -> None:
    (run / "checkpoints" / "step-1" / "model.safetensors").unlink()
    (run / "checkpoints" / "step-0" / "state.json").write_text("{")
    before = sorted(run.rglob("*"))
    with pytest.raises(RagenError) as caught:
        resume(run)
    assert str(caught.value).startswith(
        f"no checkpoint of {run} is intact (step-1: model.safetensors is damaged (it is missing); "
        "step-0: state.json is damaged ("
    )
    assert "\n" not in str(caught.value) and sorted(run.rglob("*")) == before


def test_a_checkpoint_of_another_version_is_refused_in_one_line(run: Path) -> None:
    newest = checkpoint.newest(run)
    state = checkpoint.read_state(newest)
    state["loop"]["later"] = 0
    checkpoint.replace_state(newest, state)
    with pytest.raises(RagenError, match=r"another version of RAGEN .*; use that version"):
        resume(run)


def test_resume_without_a_run_a_database_or_a_checkpoint_is_refused(run: Path) -> None:
    with pytest.raises(RagenError, match="nowhere"):
        resume(run.with_name("nowhere"))
    (run / DATABASE).write_bytes(b"no database at all" * 100)
    with pytest.raises(RagenError, match="cannot be read"):
        resume(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RagenError, match="no checkpoint"):
        resume(run)


@pytest.mark.slow
def test_a_kl_term_that_comes_later_needs_the_model_that_the_run_began_with(
    tmp_path: Path,
) -> None:
    model, run = shutil.copytree(make_config().model.path, tmp_path / "model"), tmp_path / "run"
    config = make_config(steps=1, eval__episodes=0, rollout__group_size=2, model__path=str(model))
    train(config, run)
    shutil.copy(checkpoint.newest(run) / "model.safetensors", model / "model.safetensors")
    resume(run, overrides={"steps": 2})  # without KL it does not matter
    with pytest.raises(RagenError, match="reference is lost"):
        resume(run, overrides={"steps": 3, "loss.kl": 0.01})
