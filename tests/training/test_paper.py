"""The papers' recipes: their values, how they are named, and their first steps with a stand-in."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ragen.cli.main import main
from ragen.config.reading import recipes, resolve
from ragen.core.errors import RagenError
from ragen.engines.learner import MAX_GRAD_NORM, VALUE_CLIP, WEIGHT_DECAY
from ragen.models.loading import save_model
from ragen.storage.database import new_run_folder
from ragen.storage.reader import read_metrics
from ragen.training.progress import hint, watcher_for
from ragen.training.trainer import train
from tests.tiny import tiny_model, tiny_tokenizer

PAPER = sorted(name for name in recipes() if name.startswith("paper/"))
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"

SMALL = {
    "steps": 2,
    "threads": 1,
    "rollout.num_groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 12,
    "eval.episodes": 2,
    "eval.every": 1,
}
"""All that is smaller than in the recipe, and the room for prompts that are spelt byte by byte."""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture and a template like Qwen's, on a byte-level tokenizer."""
    tokenizer = tiny_tokenizer("qwen2.5")
    folder = tmp_path_factory.mktemp("qwen")
    save_model(tiny_model(tokenizer, max_position_embeddings=8192), tokenizer, folder)
    return folder


def test_there_is_one_for_each_environment_of_the_paper() -> None:
    assert PAPER == ["paper/bandit", "paper/frozen-lake", "paper/sokoban"]


@pytest.mark.parametrize("name", PAPER)
def test_they_hold_the_published_values(name: str) -> None:
    config = resolve(name)
    rollout, update, env = config.rollout, config.update, config.env
    assert (config.algorithm, config.prompt.style, config.model.path) == (
        "starpo-s/ppo",
        "paper",
        QWEN,
    )
    assert (rollout.num_groups, rollout.group_size, rollout.max_tokens) == (8, 16, 400)
    assert (update.minibatch_episodes, update.lr, update.critic_lr) == (32, 1e-6, 1e-5)
    assert (WEIGHT_DECAY, update.beta2, MAX_GRAD_NORM, VALUE_CLIP) == (0.01, 0.999, 1.0, 0.5)
    assert (config.steps, config.eval.every, config.eval.episodes) == (200, 10, 256)
    assert (config.eval.temperature, config.model.dtype) == (0.5, "bfloat16")
    assert (config.filter.rule, config.filter.value, config.loss.kl) == ("top_k", 0.25, 0.0)
    budgets = (1, 1, 1) if name == "paper/bandit" else (5, 5, 10)
    assert (env.max_turns, env.actions_per_turn, env.max_actions) == budgets
    assert env.params == {}  # .15; slip 1/3; 6×6, one box: the environments'


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "paper/sokoban" else [])
        for name in PAPER
    ],
)
def test_two_steps_with_a_small_model_of_the_same_architecture(
    name: str, stand_in: Path, tmp_path: Path
) -> None:
    # 4 episodes, of which one group of 2 is learnt from: one update a step.
    config = resolve(name, {**SMALL, "model.path": str(stand_in), "model.max_length": 4096})
    result = train(config, tmp_path / "run")
    metrics = read_metrics(result.run)
    assert list(metrics["loss/policy"]) == [1, 2]
    assert metrics["progress/updates"] == {1: 1, 2: 2}
    assert metrics["gradient/policy_norm"][2] > 0
    assert metrics["prompt/turns_dropped"] == {1: 0, 2: 0}
    assert result.after is not None and result.after.random > 0


def test_the_longest_episode_has_room() -> None:
    """A first prompt is under 450 tokens of English and map, a later message under 120."""
    for name in PAPER:
        config = resolve(name)
        turns = config.env.max_turns
        assert 450 + (turns - 1) * 120 + turns * 400 <= config.model.max_length


def test_runs_lie_side_by_side(tmp_path: Path) -> None:
    assert new_run_folder(tmp_path, "paper/bandit").name == "paper-bandit-1"
    assert new_run_folder(tmp_path, "paper/bandit") == tmp_path / "paper-bandit-2"


def test_names_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("paper/bandit").recipe == "paper/bandit"
    with pytest.raises(RagenError, match="did you mean 'paper/sokoban'"):
        resolve("paper/sokobann")
    with pytest.raises(RagenError, match="unknown recipe 'mine/of'"):
        resolve("mine/of")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "of.toml").write_text("steps = 3\n")
    assert resolve("mine/of.toml").steps == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("sokoban --model there", "for other models: paper/sokoban\n"),
        ("bandit-rev --model there", "for other models: paper/bandit --env bandit-rev\n"),
        ("frozen-lake-still --model a/b", "paper/frozen-lake --env frozen-lake-still\n"),
        ("sokoban", ""),
        ("sokoban --model there --prompt.style paper", ""),
        ("paper/sokoban --model there", ""),
    ],
)
def test_a_recipe_of_the_embedded_model_names_the_one_for_real_models(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments.split(), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == bool(words)


def test_it_is_said_when_a_run_begins_and_not_when_it_goes_on(tmp_path: Path) -> None:
    config = resolve("sokoban", {"model.path": "there"})
    for terminal in (True, False):
        console = Console(record=True, file=io.StringIO(), force_terminal=terminal, width=120)
        watcher = watcher_for(console)
        with pytest.raises(RagenError, match="there"):
            train(config, tmp_path / "run", watcher=watcher)
        assert "paper/sokoban" in console.export_text()
        watcher.begin(tmp_path, config, 3)
        watcher.end()
        assert "paper/sokoban" not in console.export_text()


def test_a_run_is_no_other_model(tmp_path: Path) -> None:
    config = resolve("sokoban", {"model.path": str(tmp_path)})
    assert hint(config)
    (tmp_path / "config.toml").touch()
    assert hint(config) is None
