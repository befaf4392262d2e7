"""A policy whose numbers are not finite: named in one line, never saved, rolled back if asked."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen.algorithms.batch import Batch
from ragen.cli.main import main
from ragen.config.reading import dump
from ragen.core.errors import GuardStop
from ragen.core.metrics import Metrics
from ragen.learning.learner import Learner
from ragen.models.loading import load_policy
from ragen.storage.checkpoint import (
    folders,
    hash_file,
    newest,
    read_state,
    replace_state,
    step_of,
)
from ragen.storage.reader import read_events
from ragen.training import recovery
from ragen.training.trainer import train
from tests.bandit_model import bandit_model
from tests.diagnostics.test_guard_run import PPO, events, steps_of
from tests.training.runs import (
    SendSignal,
    make_config,
)

Break = Callable[..., None]


@pytest.fixture
def break_after(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Spoils weights after updates: those of these numbers, counted over all attempts."""

    bandit_model()  # it is trained by the same function
    original = Learner.update

    def plan(*updates: int, value: float = math.nan, part: str = "model") -> None:
        count = [0]

        def update(learner: Learner, batch: Batch, step: int) -> Metrics:
            metrics = original(learner, batch, step)
            count[0] += 1
            if count[0] in updates:
                with torch.no_grad():
                    for weights in getattr(learner, part).parameters():
                        weights.fill_(value)
            return metrics

        monkeypatch.setattr(Learner, "update", update)

    return plan


BROKEN: dict[str, Any] = {"checkpoint__every": 1, "checkpoint__keep": 9, "steps": 4}
"""The filter keeps one of two groups of four, so a step has one update."""


def is_finite(folder: Path) -> bool:
    model, _ = load_policy(str(folder), "cpu", "float32")
    return all(bool(weights.isfinite().all()) for weights in model.parameters())


@pytest.mark.parametrize(
    ("value", "more"),
    [
        (math.nan, {}),
        pytest.param(math.inf, {"eval__every": 2}, marks=pytest.mark.slow),
        (1e38, {"record__tokens_every": 0, "eval__episodes": 0}),
    ],
    ids=["rollout", "evaluation", "plain"],
)
def test_training_stops_as_it_was_before_the_policy_broke(
    tmp_path: Path, break_after: Break, value: float, more: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    break_after(2, value=value)
    with pytest.raises(GuardStop, match=r"step 2, non_finite: .* kept as it was after step 1;"):
        train(make_config(**BROKEN | more), run)
    assert [step_of(path) for path in folders(run)] == [0, 1]
    assert all(map(is_finite, folders(run)))
    assert events(run) == [(0, 2, "alarm"), (0, 2, "guard")]
    assert "update.lr = 0.001" in read_events(run)[0]["text"]


def test_a_broken_critic_stops_the_run_and_names_its_learning_rate(
    tmp_path: Path, break_after: Break
) -> None:
    break_after(4, part="critic")  # without a filter, a step has two updates
    with pytest.raises(GuardStop, match=r"critic.* not finite; update\.critic_lr = 1e-05 may be"):
        train(make_config(**PPO, **BROKEN, eval__episodes=0), tmp_path / "run")
    assert newest(tmp_path / "run").name == "step-1"


def test_the_remedy_does_not_depend_on_the_name_of_the_model(
    tmp_path: Path, break_after: Break
) -> None:
    """The text of the error holds the model's path, here with the word critic."""
    model = shutil.copytree(bandit_model(), tmp_path / "critic-ablation")
    break_after(1)
    more = {"checkpoint__every": 0, "record__tokens_every": 0, "eval__episodes": 0}
    more |= {"model__path": str(model)}
    with pytest.raises(GuardStop, match=r"critic-ablation are not finite; update\.lr = 0\.001 may"):
        train(make_config(**BROKEN | more), tmp_path / "run")


def test_a_policy_that_breaks_in_a_saved_step_is_never_saved(
    tmp_path: Path, break_after: Break
) -> None:
    """Nor is the checkpoint before it given up, although a run keeps only one."""
    break_after(1)
    with pytest.raises(GuardStop, match="kept as it was after step 0"):
        train(make_config(**BROKEN | {"checkpoint__keep": 1, "steps": 1}), tmp_path / "run")
    assert newest(tmp_path / "run").name == "step-0"


def test_a_broken_policy_is_rolled_back_until_no_rollback_is_left(
    tmp_path: Path, break_after: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(recovery, "MOST_ROLLBACKS", 1)
    break_after(2, 4)  # step 2, and step 3 of the second attempt
    more = {"guard__responses": {"non_finite": "rollback"}, "eval__episodes": 0}
    with pytest.raises(GuardStop, match=r"no rollback is left; the run is kept as it was after st"):
        train(make_config(**BROKEN | more), run)
    # The rows of the broken step are not written, or stand in the attempt that was given up.
    assert next(step for attempt, step in steps_of(run) if attempt == 1) == 2
    assert events(run)[:2] == [(0, 2, "alarm"), (0, 2, "guard")]
    assert newest(run).name == "step-2" and all(map(is_finite, folders(run)))


def test_a_stop_by_the_user_never_saves_a_broken_policy(tmp_path: Path, break_after: Break) -> None:
    break_after(2)
    with pytest.raises(GuardStop):
        config = make_config(**BROKEN, eval__episodes=0)
        train(config, tmp_path / "run", watcher=SendSignal("step", 2, signal.SIGINT))
    assert newest(tmp_path / "run").name == "step-1"


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are finite, so it can be loaded; its logits are not."""
    folder = tmp_path_factory.mktemp("model") / "broken"
    shutil.copytree(bandit_model(), folder)
    model, _ = load_policy(str(folder), "cpu", "float32")
    with torch.no_grad():
        for weights in model.parameters():
            weights.fill_(1e38)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "eval MODEL --episodes 2 --env bandit",
        "eval MODEL --episodes 2 --env bandit --temperature 0",
        "play bandit --player MODEL",
        "train RECIPE --out OUT --quiet",
    ],
)
def test_a_command_names_a_broken_model_in_one_line(
    tmp_path: Path, broken_model: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "mine.toml", tmp_path / "run"
    recipe.write_text(dump(make_config(model__path=str(broken_model))))
    words = {"MODEL": str(broken_model), "RECIPE": str(recipe), "OUT": str(out)}
    assert main([words.get(word, word) for word in command.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith(f"ragen: the logits of '{broken_model}' are not finite")
    assert not out.exists()


def test_a_branch_names_a_broken_checkpoint(
    own_bandit_run: Path, broken_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, last = own_bandit_run, newest(own_bandit_run)
    weights = shutil.copy(broken_model / "model.safetensors", last / "model.safetensors")
    state = read_state(last)
    state["files"]["model.safetensors"] = hash_file(Path(weights))
    replace_state(last, state)
    capsys.readouterr()
    assert main(["branch", str(run), "9", "--turn", "0", "--n", "2"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"ragen: the logits of '{last}' are not finite")
