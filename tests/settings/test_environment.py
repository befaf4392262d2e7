"""Settings that an environment brings, without a recipe and with a recipe for another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.config import Config
from ragen.config.reading import dump, merge
from ragen.models.names import PROMPT_STYLE, base_folder, is_embedded, taught_style
from ragen.settings.environment import num_tokens
from ragen.settings.resolve import NEUTRAL, SMALL, resolve
from ragen.settings.target import config_for
from ragen.storage.database import CONFIG

Capture = pytest.CaptureFixture[str]
FILES = Path(__file__).parents[1]
ECHO = f"{FILES / 'free_text.py'}:Echo"
ROGUE = f"{FILES / 'rogue.py'}:Rogue"
OTHER = {"env": ECHO, "model": "a/b"}
BUDGETS = (2, 1, 2)

WORDY = """
from tests.free_text import Echo

class Wordy(Echo):
    name, prompt_style, rules = "wordy", "compact", "Say it. " * 500

    def __init__(self, words: int = 1) -> None:
        self.words = words

    @property
    def max_turns(self):
        return self.words

    def state_key(self):
        return "look " * self.words
"""


def budgets(config: Any) -> tuple[int, int, int]:
    return config.env.max_turns, config.env.actions_per_turn, config.env.max_actions


def noted(recipe: str | Path | None, values: dict[str, Any]) -> tuple[Config, str | None]:
    """The settings, and the line about what the environment brought to them."""
    notes: list[str] = []
    config = resolve(recipe, values, notes.append)
    return config, notes[0] if notes else None


@pytest.fixture
def taught(tmp_path: Path) -> str:
    """A model whose config says that it reads compact prompts."""
    folder = shutil.copytree(base_folder("bandit"), tmp_path / "taught")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {PROMPT_STYLE: "compact"}))
    return str(folder)


def test_without_a_recipe_an_environment_brings_its_budgets_and_lengths() -> None:
    config, note = noted(None, OTHER)
    assert budgets(config) == BUDGETS and config.prompt.style == "paper"
    assert {key: NEUTRAL[key] for key in NEUTRAL} == {
        "algorithm": config.algorithm,
        "steps": config.steps,
        "filter.value": config.filter.value,
    }
    lengths = config.rollout.max_tokens, config.model.max_length
    assert lengths[0] == 400 and 2 * 400 < lengths[1] < 1400
    assert note == (
        f"budgets from {ECHO}: max_turns 2, actions_per_turn 1, max_actions 2, "
        f"max_tokens 400, max_length {lengths[1]}"
    )
    mine, note = noted(None, {**OTHER, "env.max_turns": 7, "rollout.max_tokens": 90})
    assert budgets(mine) == (7, 1, 2) and mine.rollout.max_tokens == 90
    assert note is not None and "max_turns" not in note and "max_tokens" not in note
    assert 7 * 90 < mine.model.max_length < 7 * 400


def test_lengths_follow_from_the_environment_s_own_texts(tmp_path: Path) -> None:
    (tmp_path / "wordy.py").write_text(WORDY, "utf-8")
    wordy = {"env": f"{tmp_path / 'wordy.py'}:Wordy", "model": "a/b"}
    shown = {n: resolve(None, {**wordy, "env.params.words": n}) for n in (1, 3, 300)}
    assert all(config.prompt.style == "compact" for config in shown.values()), "as it asks"
    assert [config.env.max_turns for config in shown.values()] == [1, 3, 300], "a property"
    assert [config.rollout.max_tokens for config in shown.values()] == [64] * 3
    assert shown[1].model.max_length == 256, "compact prompts do not show the rules"
    assert shown[300].model.max_length == 8192, "an episode may be longer than any context"
    paper = resolve(None, {**wordy, "env.params.words": 3, "prompt.style": "paper"})
    assert paper.model.max_length > 2000, "the paper's prompts do"
    window = resolve(None, {**wordy, "env.params.words": 300, "prompt.window": 1})
    assert window.model.max_length < 1000, "a prompt shows one turn of 300 words"


def test_a_model_that_was_taught_compact_prompts_gets_them_and_a_high_learning_rate(
    taught: str,
) -> None:
    assert is_embedded(taught) and taught_style(taught) == "compact"
    config = resolve(None, {"env": ECHO, "model": taught})
    assert config.prompt.style == "compact" and config.update.lr == SMALL["update.lr"]
    assert config_for(taught, {"env": ECHO}).prompt.style == "compact"
    own = resolve(None, {"env": "sokoban", "model": taught})
    assert own.env.params == {}, "not what the embedded model of Sokoban was taught"


def test_an_adapter_reads_what_its_base_was_taught(taught: str, tmp_path: Path) -> None:
    """Also the adapter that `ragen sft` saves, which has a tokenizer of its own."""
    adapter = tmp_path / "adapter"
    shutil.copytree(taught, adapter, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": taught}))
    assert is_embedded(str(adapter)) and taught_style(str(adapter)) == "compact"
    config = resolve(None, {"env": ECHO, "model": str(adapter)})
    assert config.prompt.style == "compact" and config.update.lr == SMALL["update.lr"]


@pytest.mark.parametrize("file", ["config.json", "config.toml"])
def test_base_is_the_embedded_model_also_where_a_folder_has_this_name(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / file).write_text(json.dumps({PROMPT_STYLE: "compact"}))
    assert resolve(None, {"env": "sokoban"}) == merge("sokoban")


def test_an_environment_of_the_embedded_models_brings_its_recipe() -> None:
    assert resolve(None, {"env": "sokoban", "seed": 3}) == merge("sokoban", {"seed": 3})


def test_budgets_parameters_and_lengths_of_a_recipe_stay_with_its_environment() -> None:
    config, note = noted("bandit", {"env": ECHO})
    assert budgets(config) == BUDGETS and config.rollout.max_tokens != 24
    assert (config.recipe, config.update.lr) == ("bandit", merge("bandit").update.lr)
    assert note is not None
    assert note.startswith(f"recipe bandit is for another environment; budgets from {ECHO}: max_")
    lake = resolve("frozen-lake-still", {"env.name": ROGUE})
    assert lake.env.params == {} and budgets(lake) == (5, 5, 10)
    large, note = noted("sokoban", {"env": "sokoban-large"})
    assert large.env.params == {"observation": "named"} and large.rollout.max_tokens == 72
    assert resolve("bandit", {"env": "bandit"}) == merge("bandit")


def test_a_recipe_that_names_no_environment_keeps_its_values(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('prompt.style = "paper"\nenv.max_turns = 9\nmodel.path = "a/b"\n', "utf-8")
    config, note = noted(mine, {"env": ECHO})
    assert budgets(config) == (9, 1, 2)
    assert note is not None and note.startswith(f"budgets from {ECHO}: actions_per_turn 1, ")


def test_an_evaluation_in_an_environment_without_a_recipe_has_its_budgets(tmp_path: Path) -> None:
    for target in ("random", "a/b", "base"):
        assert budgets(config_for(target, {"env": ECHO})) == BUDGETS, target
    (tmp_path / CONFIG).write_text(dump(merge("bandit")), "utf-8")
    notes: list[str] = []
    config, note = config_for(str(tmp_path), {"env": ECHO}, None, notes.append), notes.pop()
    assert budgets(config) == BUDGETS and config.rollout.max_tokens == 24, "its own prompts"
    assert note == f"budgets from {ECHO}: max_turns 2, actions_per_turn 1, max_actions 2"
    assert config_for(str(tmp_path), {}, None, notes.append) and not notes


@pytest.mark.parametrize("misdeed", ["raise", "raise in reset", "hang in reset"])
def test_the_failure_of_an_environment_is_left_to_the_run(misdeed: str) -> None:
    values = {"env.params.misdeed": misdeed, "env.timeout_s": 0.05, "model": "a/b"}
    config = resolve(None, {"env": ROGUE, **values})
    assert config.env.name == ROGUE and config.model.max_length >= 256


def test_train_says_which_budgets_it_takes(capsys: Capture) -> None:
    assert main(["train", "--env", ECHO, "--model", "a/b", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"ragen: {noted(None, OTHER)[1]}\n"
    assert "max_turns = 2" in printed.out
    assert main(["train"]) == 2
    assert "name a recipe (ragen help recipes), or an environment" in capsys.readouterr().err


def test_tokens_are_estimated_from_characters() -> None:
    assert [num_tokens(text) for text in ("", "word", "wording", "P _\n_ G", "12")] == [
        *(0, 1, 2, 5, 2),
    ]
