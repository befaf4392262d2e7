"""Runs that begin with the policy of another run, which goes on."""

from __future__ import annotations

import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ragen.core.errors import RagenError
from ragen.core.stopping import StopRequested
from ragen.evaluation.evaluation import evaluate_target
from ragen.finetuning.sft import sft
from ragen.reports.card import origin
from ragen.storage import checkpoint
from ragen.storage.settings import run_config
from ragen.training import trainer
from ragen.training.trainer import resume, train
from tests.training.test_trainer import (
    NotedWatcher,
    SendSignal,
    assert_same_results,
    make_config,
    recorded_results,
)

FEW = {"eval__every": 0, "eval__episodes": 2, "checkpoint__every": 1, "checkpoint__keep": 1}
NEEDS: dict[str, dict[str, Any]] = {
    "lora": {"lora__rank": 2},
    "kl": {"loss__kl": 0.5, "loss__kl_kind": "k3"},
}


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("child") / "parent"
    train(make_config(steps=2, **FEW), run)
    return run


@pytest.fixture
def parent(parents: Path, tmp_path: Path) -> Path:
    return shutil.copytree(parents, tmp_path / "parent")


def child_of(parent: Path, kind: str, steps: int = 3) -> Any:
    return make_config(steps=steps, model__path=str(parent), **FEW | NEEDS.get(kind, {}))


def stopped_child(parent: Path, kind: str) -> Path:
    child = parent.with_name("child")
    with pytest.raises(StopRequested):
        train(child_of(parent, kind), child, watcher=SendSignal("step", 2, signal.SIGINT))
    return child


@pytest.mark.parametrize(
    ("kind", "names_run"),
    [("lora", False), ("plain", False), ("kl", True)],
    ids=["lora", "plain", "kl in an earlier version"],
)
def test_a_child_goes_on_bit_for_bit_after_its_parent_went_on(
    parent: Path, kind: str, names_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children of earlier versions name the run and hold nothing; the checkpoint may be left."""
    if names_run:
        monkeypatch.setattr(trainer, "pin_first", lambda config: config)
        monkeypatch.setattr(trainer, "hold_first", lambda *_: None)
    train(child_of(parent, kind), parent.with_name("whole"))
    expected = recorded_results(parent.with_name("whole"))
    child = stopped_child(parent, kind)
    began = checkpoint.newest(parent)
    assert run_config(child).model.path == str(parent if names_run else began)
    resume(parent, overrides={"steps": 4, "checkpoint.keep": 3 if names_run else 1})
    assert checkpoint.newest(parent).name == "step-4"
    assert began.exists() == (names_run or kind != "plain")
    resume(child)
    assert_same_results(child, expected)
    evaluate_target(str(child), episodes=2)
    assert origin(str(child)) == run_config(parent).model.path


def test_fine_tuning_keeps_the_checkpoint_that_it_began_with_only_for_an_adapter(
    parent: Path,
) -> None:
    for kind in ("kl", "lora"):
        sft(child_of(parent, kind), parent.with_name(kind), episodes=4, epochs=1)
        assert (checkpoint.newest(parent) / checkpoint.IN_USE).exists() == (kind == "lora")


def test_an_interrupted_fine_tuning_does_not_keep_the_checkpoint_for_itself(parent: Path) -> None:
    mark, config = checkpoint.newest(parent) / checkpoint.IN_USE, child_of(parent, "lora")

    def interrupt(line: str, other: str) -> None:
        if line.startswith("step"):
            assert mark.exists()
            if other == "meanwhile":
                checkpoint.hold(mark.parent)
            raise KeyboardInterrupt

    for other in ("none", "meanwhile", "before"):  # when another run began to hold it
        watch = partial(interrupt, other=other)
        with pytest.raises(KeyboardInterrupt):
            sft(config, parent.with_name("tuned"), episodes=4, epochs=1, watch=watch)
        assert mark.exists() == (other != "none")


def test_a_child_goes_on_after_its_parent_was_rolled_back(parent: Path) -> None:
    child = stopped_child(parent, "kl")
    checkpoint.drop_after(parent, 1)
    names = [path.name for path in (parent / "checkpoints").iterdir()]
    assert sorted(names) == ["held-step-2-0", "step-0"]
    resume(child)
    assert checkpoint.newest(child).name == "step-3"


def test_a_child_whose_first_weights_are_gone_is_refused(parent: Path) -> None:
    child = stopped_child(parent, "kl")
    began = checkpoint.newest(parent)
    (began / checkpoint.IN_USE).unlink()
    resume(parent, overrides={"steps": 3})
    assert not began.exists()
    with pytest.raises(RagenError, match=f"no checkpoint of .* restore {re.escape(str(began))}$"):
        resume(child)


def test_a_checkpoint_that_cannot_be_kept_is_said(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ragen.engines.first_model.hold", refuse)
    watcher = NotedWatcher()
    train(child_of(parent, "kl", steps=1), parent.with_name("child"), watcher=watcher)
    *_, note = watcher.notes
    assert "cannot be kept" in note and "\n" not in note
