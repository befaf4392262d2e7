"""Whole runs whose reward comes from a judge alone, in an environment that gives none."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.tables import markdown
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.reports.facts import read_facts
from ragen.reports.report import page
from ragen.rollout.judge import KEY_ENV
from ragen.storage.judgements import FILE, Judgements
from ragen.storage.reader import read_metrics
from ragen.training.trainer import resume, train
from tests.bandit_model import settings
from tests.faulty import FaultyServer, chat_reply
from tests.scripted_judge import scripted_judge
from tests.training.runs import assert_same_results, recorded_results, train_and_kill

PAGE = (Path(__file__).parents[2] / "docs" / "judge.md").read_text("utf-8")
CODE = """
from ragen.core.types import Episode
from ragen.envs.worlds.bandit import Bandit


class Taste(Bandit):
    name = "taste"

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 0.0, terminated, truncated, info | {"success": False}


async def echo(episode: Episode):
    return 0.5 * ("Phoenix" in episode.turns[-1].completion.text)
"""


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment that never pays; the model of these tests answers with Dragon or Phoenix."""
    file = tmp_path_factory.mktemp("env") / "taste.py"
    file.write_text(CODE, "utf-8")
    return f"{file}:Taste"


@pytest.fixture(scope="module")
def judge() -> Iterator[FaultyServer]:
    with scripted_judge(lambda turns, place: float("Dragon" in turns[0]["agent"])) as server:
        yield server


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_ENV, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def flags() -> list[str]:
    """Writes the files of the page; the options by which a tiny model takes the recipe's place."""
    Path("support.py").write_text(block("python"), "utf-8")
    Path("support.toml").write_text(block("toml"), "utf-8")
    small = {"rollout__num_groups": 1, "rollout__group_size": 2, "eval__episodes": 0}
    local = settings(steps=1, model__max_length=512, **small)
    return [f"--{key}={json.dumps(value).strip(chr(34))}" for key, value in local.items()]


def judged(env: str, server: FaultyServer, **more: Any) -> Config:
    values = {"env__name": env, "reward__terms": {"judge": 1.0}, "judge__url": server.url}
    values |= {"judge__model": "scripted", "judge__rubric": "Dragon is best."}
    return merge("bandit", settings(**values | more))


@pytest.mark.slow
def test_the_example_of_the_page_trains_with_a_server_on_this_machine(flags: list[str]) -> None:
    check(make("support.py:Support"))
    config = merge("support.toml")
    assert config.reward.terms == {"judge": 1.0} and "nothing that a shop" in config.judge.rubric
    assert len(block("toml").splitlines()) <= 25
    (command,) = re.findall(r"^ragen (train support.toml --judge.url http.*)$", PAGE, re.MULTILINE)
    with scripted_judge(lambda turns, place: len(turns[0]["agent"]) / 1000) as server:
        words = command.replace("http://localhost:8001/v1", server.url).split()
        assert main([*words, *flags, "--out", "run"]) == 0
    assert {request["model"] for request in server.requests} == {"Qwen/Qwen2.5-7B-Instruct"}
    assert "Authorization" not in server.headers[0]
    metrics = read_metrics(Path("run"))
    assert metrics["reward/mean"][1] == metrics["reward_terms/judge"][1] > 0
    assert metrics["episodes/failed"][1] == 0 and metrics["gradient/policy_norm"][1] > 0


def test_a_resumed_run_repeats_the_judges_numbers_and_asks_nothing_twice(
    tmp_path: Path, env: str, judge: FaultyServer
) -> None:
    terms = {"judge": 1.0, f"{env.removesuffix(':Taste')}:echo": 0.1}
    config = judged(env, judge, steps=2, eval__episodes=0, reward__terms=terms)
    before = len(judge.requests)
    train(config, tmp_path / "uninterrupted")
    asked = len(judge.requests) - before
    expected = recorded_results(tmp_path / "uninterrupted")
    metrics = read_metrics(tmp_path / "uninterrupted")
    assert metrics["reward/mean"] != metrics["reward_terms/judge"], "there is another term"
    assert sum(metrics["judge/calls"].values()) == asked
    assert sum(metrics["judge/prompt_tokens"].values()) == 100 * asked
    assert all(each > 0 for each in metrics["time/judge_s"].values())
    text = markdown(page(read_facts(tmp_path / "uninterrupted")))
    assert "## Judge" in text and f"| questions | {asked} |" in text
    train_and_kill(config, tmp_path / "run", (Judgements, "add"), 1)
    with closing(sqlite3.connect(tmp_path / "run" / FILE)) as connection:
        ((kept,),) = connection.execute("SELECT count(*) FROM judgements")
    before = len(judge.requests)
    resume(tmp_path / "run")
    assert_same_results(tmp_path / "run", expected)
    assert 0 < kept < asked and len(judge.requests) - before == asked - kept


def test_a_judge_that_cannot_be_read_ends_the_run_in_one_line(tmp_path: Path, env: str) -> None:
    with (
        FaultyServer(lambda *_: chat_reply("All are good.")) as server,
        pytest.raises(RagenError, match="in every episode: the judge scripted gave no score"),
    ):
        train(judged(env, server, eval__episodes=0), tmp_path / "run")


def test_the_settings_of_a_judge_belong_together() -> None:
    with pytest.raises(RagenError, match=r"set judge\.model and judge\.rubric, and judge\.url"):
        merge("bandit", {"reward.terms.judge": 1.0})
