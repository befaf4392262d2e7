"""Runs that begin with the policy of another run, which goes on."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.core.stopping import StopRequested
from ragen.finetuning.sft import sft
from ragen.reports.card import origin
from ragen.settings.saved import run_config
from ragen.storage import checkpoint
from ragen.training.trainer import resume, train
from tests.training.runs import (
    SMALL,
    NotedWatcher,
    SendSignal,
    assert_same_results,
    make_config,
    recorded_results,
)

NEEDS: dict[str, dict[str, Any]] = {
    "lora": {"lora__rank": 2},
    "kl": {"loss__kl": 0.5, "loss__kl_kind": "k3"},
}


@pytest.fixture
def parent(own_bandit_run: Path) -> Path:
    return own_bandit_run


def child_of(parent: Path, kind: str, steps: int = 2) -> Config:
    more = SMALL | {"steps": steps, "model__path": str(parent), "checkpoint__keep": 1}
    return make_config(**more | NEEDS.get(kind, {}))


def stopped_child(parent: Path, kind: str) -> Path:
    child = parent.with_name("child")
    with pytest.raises(StopRequested):
        train(child_of(parent, kind), child, watcher=SendSignal("step", 1, signal.SIGINT))
    return child


def test_a_child_goes_on_bit_for_bit_after_its_parent_went_on(parent: Path) -> None:
    """A child that needs its parent's checkpoint keeps it, and is refused without it."""
    train(child_of(parent, "lora"), parent.with_name("whole"))
    child = stopped_child(parent, "lora")
    began = checkpoint.newest(parent)
    assert run_config(child).model.path == str(began)
    resume(parent, overrides={"steps": 4, "checkpoint.keep": 1})
    assert checkpoint.newest(parent).name == "step-4"
    away = began.rename(parent.with_name("away"))
    with pytest.raises(RagenError, match=f"no checkpoint of .* restore {re.escape(str(began))}$"):
        resume(child)
    away.rename(began)
    resume(child)
    assert_same_results(child, recorded_results(parent.with_name("whole")))
    assert origin(str(child)) == run_config(parent).model.path


@pytest.mark.slow
def test_a_child_goes_on_after_its_parent_was_rolled_back(parent: Path) -> None:
    child = stopped_child(parent, "kl")
    checkpoint.drop_after(parent, 1)
    names = [path.name for path in (parent / "checkpoints").iterdir()]
    assert sorted(names) == ["held-step-3-0", "step-0", "step-1"]
    resume(child)
    assert checkpoint.newest(child).name == "step-2"


def test_fine_tuning_keeps_the_checkpoint_that_it_began_with_only_for_an_adapter(
    parent: Path,
) -> None:
    for kind in ("kl", "lora"):
        sft(child_of(parent, kind), parent.with_name(kind), episodes=4, epochs=1)
        assert (checkpoint.newest(parent) / checkpoint.IN_USE).exists() == (kind == "lora")


@pytest.mark.slow
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


def test_a_checkpoint_that_cannot_be_kept_is_said(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ragen.engines.first_model.hold", refuse)
    watcher = NotedWatcher()
    train(child_of(parent, "kl", steps=0), parent.with_name("child"), watcher=watcher)
    *_, note = watcher.notes
    assert "cannot be kept" in note and "\n" not in note
