"""A model that is not embedded gets the papers' prompts, and room for tokens of ordinary text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ragen
from ragen.cli.main import main
from ragen.config.reading import dump, merge
from ragen.core.errors import RagenError
from ragen.models.loading import save_model
from ragen.models.names import base_folder, is_embedded
from ragen.settings.model import suited
from ragen.settings.target import config_for
from ragen.storage.database import CONFIG
from tests.tiny import tiny_model, tiny_tokenizer

ECHO = f"{Path(__file__).parents[1] / 'free_text.py'}:Echo"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = tiny_tokenizer("chatml")
    folder = tmp_path_factory.mktemp("chatml")
    save_model(tiny_model(tokenizer, max_position_embeddings=8192), tokenizer, folder)
    return str(folder)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A folder like that of a run from the embedded model."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    shutil.copytree(base_folder("sokoban"), checkpoint)
    (checkpoint / "state.json").write_text("{}")
    (tmp_path / "run" / CONFIG).write_text(dump(merge("sokoban")))
    return str(tmp_path / "run")


def test_models_are_embedded_that_read_whole_words(model: str, run: str, tmp_path: Path) -> None:
    copied = shutil.copytree(base_folder("bandit"), tmp_path / "copied")
    for name in ("base", str(base_folder("bandit")), run, f"{run}/checkpoints/step-3", str(copied)):
        assert is_embedded(name), name
    assert not any(map(is_embedded, (model, "Qwen/Qwen2.5-0.5B-Instruct", "random")))
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    assert not is_embedded(str(copied))


def test_an_adapter_is_embedded_if_its_base_is(model: str, tmp_path: Path) -> None:
    for base in (model, str(base_folder("bandit"))):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        assert is_embedded(str(tmp_path)) == (base != model)


@pytest.mark.parametrize("env", ["bandit", "sokoban", "frozen-lake"])
def test_another_model_is_evaluated_with_the_prompts_and_lengths_of_the_papers(
    env: str, model: str
) -> None:
    paper, config = merge(f"paper/{env}"), config_for(model, {"env": env})
    assert config.prompt == paper.prompt and config.rollout.max_tokens == paper.rollout.max_tokens
    assert config.model.max_length == paper.model.max_length
    assert (config.env.max_turns, config.env.params) == (paper.env.max_turns, {})
    assert config_for("random", {"env": env}).prompt.style == "compact"


def test_an_embedded_model_keeps_compact_prompts_and_a_run_its_own(run: str) -> None:
    named = config_for(str(base_folder("sokoban")), {"env": "sokoban"})
    for config in (named, config_for("base", {"env": "sokoban"}), config_for(run, {})):
        assert (config.prompt.style, config.rollout.max_tokens) == ("compact", 56)
        assert config.env.params == {"observation": "named"}


def test_what_the_user_or_the_recipe_says_is_kept(model: str, tmp_path: Path) -> None:
    named = {"env": "sokoban", "env.params.observation": "named"}
    assert config_for(model, named).env.params == {"observation": "named"}
    config = config_for(model, {"env": "sokoban", "prompt.style": "compact"})
    assert (config.prompt.style, config.rollout.max_tokens) == ("compact", 56)
    mine = tmp_path / "mine.toml"
    mine.write_text(f"model.path = {json.dumps(model)}\nrollout.max_tokens = 90\n")
    config = suited(mine)
    assert (config.prompt.style, config.rollout.max_tokens) == ("paper", 90)
    assert config.model.max_length == (90 + 112) * 6
    assert config_for("Qwen/Some-Model", {"env": str(mine)}).rollout.max_tokens == 90


@pytest.mark.parametrize(
    ("given", "reply", "longest"),
    [
        ({"rollout.max_tokens": 1000}, 1000, 1112 * 6),
        ({"model.max_length": 600}, 300, 600),
        ({"env.max_turns": 100}, 400, 8192),  # what the model knows
        ({"env.max_turns": 100, "prompt.window": 1}, 400, 1024),
    ],
)
def test_lengths_follow_from_each_other_the_turns_and_the_model(
    given: dict[str, int], reply: int, longest: int, model: str
) -> None:
    config = config_for(model, {"env": "sokoban", **given})
    assert (config.rollout.max_tokens, config.model.max_length) == (reply, longest)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("sokoban --model a/b", "use paper/sokoban"),
        ("bandit-rev --model a/b", "for a/b leave the recipe out (--env bandit-rev)"),
        (f"bandit --model a/b --env {ECHO}", f"for a/b leave the recipe out (--env {ECHO})"),
        ("bandit --model ./typo", "there is no model or run './typo'"),
    ],
)
def test_a_recipe_of_the_embedded_models_refuses_another_model_in_one_line(
    line: str, remedy: str, capsys: Capture
) -> None:
    for more in ([], ["--dry-run"]):
        assert main(["train", *line.split(), *more]) == 2
        printed = capsys.readouterr().err
        assert remedy in printed and printed.count("\n") == 1
    with pytest.raises(RagenError, match="recipe bandit is for the embedded models"):
        ragen.train("bandit", {"model": "a/b"})


def test_a_recipe_of_the_embedded_models_takes_another_model_with_a_chosen_style(
    model: str, capsys: Capture
) -> None:
    given = {"model.path": model, "prompt.style": "paper", "update.lr": 1e-5}
    config = suited("sokoban", given)
    assert (config.prompt.style, config.rollout.max_tokens) == ("paper", 400)
    assert (config.update.lr, config.rollout.num_groups, config.recipe) == (1e-5, 16, "sokoban")
    for style, warned in (("paper", False), ("compact", True)):
        line = ["train", "sokoban", "--model", model, "--prompt.style", style, "--dry-run"]
        assert main(line) == 0
        printed = capsys.readouterr()
        assert (f'for {model} use "paper"\n' in printed.err) == warned
        assert printed.err.count("\n") == warned and f'\nstyle = "{style}"\n' in printed.out


def test_eval_warns_of_compact_prompts_in_one_line_and_goes_on(
    model: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["eval", model, "--env", "bandit", "--episodes", "2", "--prompt.style", "compact"]
    assert main(line) == 0
    assert capsys.readouterr().err.startswith('ragen: prompt.style = "compact" is for the embedded')
    assert main(["eval", "base", *line[2:]]) == 0
    assert capsys.readouterr().err == ""
