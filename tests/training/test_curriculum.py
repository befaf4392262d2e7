"""Curricula: when a stage ends, what training and evaluations play, and what the guard reads."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.diagnostics.collapse import STAGE, since_advance
from ragen.diagnostics.detectors import EVALUATED
from ragen.evaluation.branch import stage_of
from ragen.rollout.setup import at_stage
from ragen.storage.reader import read_events, read_metrics
from ragen.storage.stored_episodes import read_episode
from ragen.training.curriculum import STEPS, advances, count_success
from ragen.training.running import LoopState
from ragen.training.trainer import resume, train
from tests.bandit_model import settings
from tests.training.runs import SMALL, make_config, rows


def test_a_stage_ends_after_five_steps_whose_mean_reaches_the_bar() -> None:
    state, ended = LoopState(), []
    for success in (0.2, 0.6, 0.7, 0.7, 0.7, 0.8):
        reached = count_success(state, success)
        ended.append(advances(state, 0.7, num_stages=2))
    assert ended == [False] * 5 + [True], "(0.2 + 0.6 + 3 · 0.7) / 5 = 0.58, then 0.7"
    assert reached == pytest.approx(0.7)
    state.stage = 2
    assert not advances(state, 0.7, num_stages=2), "the full task is the last stage"


def test_training_has_the_levels_of_the_stage_and_evaluation_the_full_task(tmp_path: Path) -> None:
    """A stage whose safe arm pays 0.5, not 0.15; almost any success is enough to end it."""
    easier = {"curriculum__stages": [{"safe_reward": 0.5}], "curriculum__success": 0.01}
    more = SMALL | easier | {"eval__every": 0, "checkpoint__every": 2, "checkpoint__keep": 3}
    run = tmp_path / "run"
    train(make_config(**more | {"steps": STEPS + 1}), run)
    metrics = read_metrics(run)
    assert list(metrics[STAGE].values()) == [1] * STEPS + [2]
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS + 1}")
    resume(run)  # the advance comes again, and its event does not
    (event,) = read_events(run, "curriculum")
    assert event["step"] == STEPS and event["data"]["stage"] == 2
    assert "stage 2 of 2 begins: the full task" in event["text"]
    assert event["data"]["success"] == pytest.approx(metrics["curriculum/success"][STEPS])
    config, paid = make_config(**more), Counter[tuple[bool, float]]()
    for number, phase, step, reward in rows(run, "SELECT id, phase, step, reward FROM episodes"):
        is_easier = phase == "train" and step <= STEPS
        paid[is_easier, reward] += 1
        played = at_stage(config, stage_of(run, read_episode(run, number)))
        assert played.env.params == ({"safe_reward": 0.5} if is_easier else {})
    assert paid[True, 0.5] and paid[False, 0.15]
    assert not paid[True, 0.15] and not paid[False, 0.5]
    state = json.loads((run / "checkpoints" / f"step-{STEPS + 1}" / "state.json").read_text())
    assert state["loop"]["stage"] == 2 and len(state["loop"]["stage_success"]) == 1


def test_a_stage_has_its_own_budgets(tmp_path: Path) -> None:
    """A model without a valid reply uses all turns: one in the stage, three in evaluations."""
    stage = {"max_turns": 1, "max_distance": 1}
    more = {"env__max_turns": 3, "curriculum__stages": [stage], "model__max_length": 512}
    more |= {"rollout__group_size": 2, "eval__episodes": 1}
    config = merge("frozen-lake-still", settings(steps=1, **more))
    train(config, tmp_path / "run")
    turns = set(rows(tmp_path / "run", "SELECT phase, num_turns FROM episodes"))
    assert turns == {("train", 1), ("eval", 3), ("eval greedy", 3)}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"max_turns": 0}], r"env\.max_turns"),
        ([{}, {"name_sets": "professions"}], r"no parameter 'name_sets'.* did you mean 'name_set'"),
    ],
)
def test_a_wrong_stage_is_refused_before_the_run(
    tmp_path: Path, stages: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(RagenError, match=words):
        train(make_config(curriculum__stages=stages), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_finds_a_wrong_parameter_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    stages = ["--curriculum.stages", "[{max_distanc = 1}]"]
    assert main(["train", "frozen-lake-still", *stages, "--dry-run"]) == 2
    assert "did you mean 'max_distance'?" in capsys.readouterr().err


def test_detectors_read_the_present_stage_and_all_evaluations() -> None:
    history = {
        STAGE: {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0},
        "reward/mean": {1: 0.9, 2: 0.9, 3: 0.2, 4: 0.3},
        EVALUATED: {0: 0.1, 2: 0.3},
    }
    assert since_advance(history) == {
        STAGE: {3: 2.0, 4: 2.0},
        "reward/mean": {3: 0.2, 4: 0.3},
        EVALUATED: {0: 0.1, 2: 0.3},
    }
    first = {STAGE: {1: 1.0}, "reward/mean": {1: 0.9}}
    assert since_advance(first) is first
    assert since_advance({}) == {}
