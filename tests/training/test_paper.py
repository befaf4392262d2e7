"""Recipes of the paper: values, names, and first steps with a small stand-in model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragen.config.reading import merge, recipes
from ragen.learning.learner import MAX_GRAD_NORM, VALUE_CLIP, WEIGHT_DECAY
from ragen.models.loading import save_model
from ragen.storage.reader import read_metrics
from ragen.training.trainer import train
from tests.tiny import tiny_model, tiny_tokenizer

PAPER = sorted(name for name in recipes() if name.startswith("paper/"))
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"

SMALL = {
    "steps": 1,
    "threads": 1,
    "rollout.num_groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 4,
    "eval.episodes": 1,
    "eval.every": 0,
}
"""Settings that make a recipe small."""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 with a byte-level tokenizer and a chat template like Qwen2.5's."""
    tokenizer = tiny_tokenizer("qwen2.5")
    folder = tmp_path_factory.mktemp("qwen")
    save_model(tiny_model(tokenizer, max_position_embeddings=8192), tokenizer, folder)
    return folder


def test_each_environment_of_the_paper_has_a_recipe() -> None:
    assert PAPER == ["paper/bandit", "paper/frozen-lake", "paper/sokoban"]


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipes_hold_the_published_values(name: str) -> None:
    config = merge(name)
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
    assert env.params == {}  # the environments' defaults: .15; slip 1/3; 6×6, one box


def test_a_paper_recipe_trains_a_step_with_a_small_model(stand_in: Path, tmp_path: Path) -> None:
    # 4 episodes, of which the filter keeps one group of 2: one update.
    config = merge("paper/bandit", {**SMALL, "model.path": str(stand_in), "model.max_length": 4096})
    result = train(config, tmp_path / "run")
    metrics = read_metrics(result.run)
    assert list(metrics["loss/policy"]) == [1]
    assert metrics["progress/updates"] == {1: 1}
    assert metrics["gradient/policy_norm"][1] > 0
    assert metrics["prompt/turns_dropped"] == {1: 0}
    assert result.after is not None and result.after.random > 0


def test_the_longest_episode_fits_into_max_length() -> None:
    """A first prompt has under 450 tokens of English and map, a later message under 120."""
    for name in PAPER:
        config = merge(name)
        turns = config.env.max_turns
        assert 450 + (turns - 1) * 120 + turns * 400 <= config.model.max_length
