"""Evaluation: players match their baselines, and the same call gives the same result."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ragen.config.reading import dump, merge
from ragen.core.errors import RagenError
from ragen.core.seeding import EVAL_LEVELS
from ragen.core.user_code import UserCodeError
from ragen.envs.registry import make
from ragen.evaluation import baselines
from ragen.evaluation.baselines import Budget
from ragen.evaluation.evaluation import (
    Evaluation,
    Levels,
    evaluate_envs,
    evaluate_target,
    play_target,
)
from ragen.models.names import resolve_model
from ragen.rollout.setup import make_setup
from ragen.settings.saved import run_config
from ragen.settings.target import config_for
from ragen.storage.database import new_run_folder
from ragen.storage.reader import read_evaluations
from ragen.storage.recorder import Recorder
from tests.bandit_model import bandit_model, settings
from tests.scripted_policy import ScriptedPolicy

ROGUE = f"{Path(__file__).parents[1] / 'rogue.py'}:Rogue"


@pytest.mark.parametrize(
    ("player", "env"), [("random", "bandit"), ("solver", "bandit"), ("solver", "frozen-lake")]
)
def test_players_reach_their_baselines(player: str, env: str) -> None:
    result, _ = evaluate_target(player, {"env": env}, episodes=24, seed=3)
    baseline = result.random if player == "random" else result.optimal
    assert baseline is not None
    assert result.success_low <= baseline <= result.success_high
    expected = result.random_return if player == "random" else result.optimal_return
    assert expected is not None
    # An interval of equal returns is a point; rounding must not exclude that point.
    assert result.mean_return_low - 1e-6 <= expected <= result.mean_return_high + 1e-6 or (
        env != "bandit"
    )
    assert (result.failed, result.valid_fraction, result.first_level) == (0, 1.0, EVAL_LEVELS)


def test_evaluation_equals_values_computed_by_hand() -> None:
    """Two turns of two moves (.25 each) on each level, then invalid replies: no success."""
    setup = make_setup(merge(None, {"env": ROGUE, "env.max_turns": 4}), None)
    reply = "t</think><answer>Right || Left</answer>"
    count = iter(range(8))
    policy = ScriptedPolicy(lambda prompt: reply if next(count) % 4 < 2 else "no")
    result, groups = asyncio.run(evaluate_envs(policy, {ROGUE: setup}, Levels(2, 1, "script", 0)))
    assert (result.success, result.episodes, result.mean_turns) == (0.0, 2, 4.0)
    assert (result.mean_return, result.mean_actions, result.valid_fraction) == (1.0, 4.0, 0.5)
    # Baselines are sampled: the environment gives no exact ones.
    assert result.optimal == 1.0 and 0 < result.random < 0.2
    assert [group.episodes[0].level_seed for group in groups] == [123, 124]
    assert str(result).startswith("T=1: success 0.0% [0.0%, ") and "on 2 levels" in str(result)


def test_an_environment_that_always_fails_is_refused() -> None:
    for misdeed, reason in (("raise", "by zero"), ("no observation", "text is expected")):
        values = {"env": ROGUE, "env.params": {"misdeed": misdeed}}
        with pytest.raises(RagenError, match=f"failed in every episode: .*{reason}.*ragen check"):
            evaluate_target("random", values, episodes=4)


def test_baselines_have_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "CALL_S", 0.05)
    with pytest.raises(UserCodeError, match=r"longer than 0\.05 s in an episode"):
        baselines.compute_baselines(make(ROGUE, misdeed="hang"), Budget(2, 2, 4), [1], draws=1)


def test_failed_episodes_count_as_no_success() -> None:
    values = {
        "env": ROGUE,
        "env.params": {"misdeed": "raise in state_key", "every": 2},
        "env.max_turns": 1,
    }
    result, _ = evaluate_target("solver", values, episodes=4)
    assert (result.failed, result.success, result.episodes) == (2, 0.5, 4)


def test_unknown_targets_and_environments_are_refused() -> None:
    with pytest.raises(RagenError):
        evaluate_target("nobody/knows/this", {"env": "bandit"}, episodes=2)
    with pytest.raises(RagenError, match="did you mean 'bandit'"):
        evaluate_target("random", {"env": "bandti"}, episodes=2)
    for env in (["bandit"], {"sokoban": 1}, 3):
        with pytest.raises(RagenError, match=r"^env\.name = .*: expected text$"):
            evaluate_target("random", {"env.name": env}, episodes=4)


def without_seconds(evaluation: Evaluation) -> dict[str, Any]:
    return {key: value for key, value in evaluation.record().items() if key != "seconds"}


def test_greedy_evaluation_does_not_depend_on_the_seed_and_a_sampled_one_does(
    bandit_run: Path,
) -> None:
    def evaluate(seed: int, temperature: float) -> Evaluation:
        return evaluate_target(str(bandit_run), episodes=6, temperature=temperature, seed=seed)[0]

    first, second = evaluate(0, 0.0), evaluate(9, 0.0)
    assert first.temperature == 0 and "greedy" in str(first)
    for key in ("success", "valid_fraction", "mean_turns", "completion_tokens"):
        assert getattr(first, key) == getattr(second, key)
    first, again, other = (evaluate(seed, 1.0) for seed in (0, 0, 1))
    assert without_seconds(first) == without_seconds(again)
    assert without_seconds(first) != without_seconds(other)
    assert first.valid_fraction > 0.5 and first.completion_tokens > 1


def test_evaluation_of_a_run_equals_the_evaluation_in_training(bandit_run: Path) -> None:
    """`ragen eval RUN` gives the result that the run recorded after its last step."""
    (recorded,) = [
        each
        for each in read_evaluations(bandit_run)
        if (each["step"], each["temperature"]) == (3, 1.0)
    ]
    result, _ = evaluate_target(str(bandit_run), episodes=4, seed=0)
    assert (result.success, result.mean_return) == (recorded["success"], recorded["mean_return"])


def test_a_run_is_evaluated_in_another_environment(bandit_run: Path) -> None:
    values = {"env": "bandit-rev"}
    result, _ = evaluate_target(str(bandit_run), values, episodes=4)
    assert (result.env, result.random, result.optimal) == ("bandit-rev", 0.5, 1.0)
    config = config_for(str(bandit_run), values)
    assert not config.prompt.think and config.rollout.max_tokens == 10
    config = config_for(str(bandit_run), {"env": ROGUE})
    assert (config.env.max_turns, config.env.max_actions) == (5, 10), (
        "the other environment's budgets"
    )
    assert config_for(str(bandit_run), {}).env.max_turns == 1


def test_a_recipe_as_env_sets_budgets_and_the_prompts_of_models(
    bandit_run: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('env.name = "sokoban"\nprompt.style = "paper"\nrollout.max_tokens = 400\n')
    for recipe in ("paper/sokoban", str(mine)):
        config = config_for("Qwen/Qwen2.5-0.5B-Instruct", {"env": recipe})
        assert (config.env.name, config.env.params) == ("sokoban", {}), (
            "not the parameters for the embedded model"
        )
        assert (config.prompt.style, config.rollout.max_tokens) == ("paper", 400)
    config = config_for(str(bandit_run), {"env": "paper/sokoban"})
    assert (config.env.name, config.env.max_turns) == ("sokoban", 5)
    assert (config.prompt.style, config.rollout.max_tokens) == ("compact", 10), "the run's own"


def test_a_run_knows_its_own_environment_by_a_relative_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "from ragen.envs.worlds.bandit import Bandit\n\n\nclass Mine(Bandit):\n    pass\n"
    (tmp_path / "mine.py").write_text(own)
    budgets = {"env.max_turns": 7, "env.max_actions": 7, "env.params.slip": 0.25}
    trained = {"env.name": f"{tmp_path}/mine.py:Mine", **budgets}
    folder = new_run_folder(tmp_path, "mine")
    Recorder.create(folder, dump(merge(None, trained))).close()
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py:Mine", f"{tmp_path}/mine.py:Mine"):
        assert config_for(str(folder), {"env": name}).env == run_config(folder).env


def test_a_model_folder_is_evaluated_and_a_run_plays_one_episode(bandit_run: Path) -> None:
    values = {"env": "bandit"} | {
        key: value for key, value in settings().items() if key.startswith(("prompt", "rollout"))
    }
    result, _ = evaluate_target(str(bandit_model()), values, episodes=4)
    assert result.episodes == 4
    episode = play_target(str(bandit_run), seed=2)
    assert episode.level_seed == 125 and len(episode.turns) == 1


def test_a_name_that_cannot_be_a_hub_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ragen").mkdir()
    for name in ("nobody", "runs/none", "./none", "../none", "a/b/c", "ragen/none"):
        with pytest.raises(RagenError, match="there is no model or run") as failure:
            resolve_model(name, "bandit")
        hides = str(failure.value).endswith("(none of ragen/ while the folder ragen is here)")
        assert hides == (name == "ragen/none")
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct", "bandit") == "Qwen/Qwen2.5-0.5B-Instruct"
