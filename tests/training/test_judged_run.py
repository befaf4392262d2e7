"""Whole runs whose reward comes from a judge alone, in an environment that gives none."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.config.reading import resolve
from ragen.config.sections import JudgeConfig
from ragen.core.errors import RagenError
from ragen.core.metrics import values
from ragen.core.tables import markdown
from ragen.core.types import Completion, Prompt
from ragen.diagnostics.guard import Alarm, GuardState
from ragen.engines.local import LocalEngine
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.models.loading import save_model
from ragen.reports.facts import read_facts
from ragen.reports.report import page
from ragen.rollout.judge import KEY_ENV, Failure, Judge
from ragen.storage.judgements import FILE, Judgements
from ragen.storage.reader import read_metrics
from ragen.training import recovery
from ragen.training.ahead import Ahead
from ragen.training.running import LoopState
from ragen.training.trainer import examine, resume, train
from tests.bandit_model import settings
from tests.faulty import FaultyServer, chat_reply
from tests.records import episode, turn
from tests.scripted_judge import Shown, scripted_judge
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.test_trainer import assert_same_results, recorded_results, train_and_kill

PAGE = (Path(__file__).parents[2] / "docs" / "judge.md").read_text("utf-8")
CODE = """
from ragen.envs.bandit import Bandit


class Taste(Bandit):
    name = "taste"

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 0.0, terminated, truncated, info | {"success": False}


async def echo(episode):
    return 0.5 * ("Phoenix" in episode.turns[-1].completion.text)
"""


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment that never pays; the model of these tests answers with Dragon or Phoenix."""
    monkeypatch.delenv(KEY_ENV, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("taste.py").write_text(CODE, "utf-8")
    return "taste.py:Taste"


@pytest.fixture
def judge() -> Iterator[FaultyServer]:
    def prefers_dragon(turns: Shown, place: int) -> float:
        return float("Dragon" in turns[0]["agent"])

    with scripted_judge(prefers_dragon) as server:
        yield server


def judged(env: str, server: FaultyServer, **more: Any) -> Any:
    values = {"env__name": env, "reward__terms__judge": 1.0, "judge__url": server.url}
    values |= {
        "judge__model": "scripted",
        "judge__rubric": "Dragon is best.",
    }
    return resolve("bandit", settings(**values | more))


def test_the_example_of_the_page_trains(env: str) -> None:
    Path("support.py").write_text(block("python"), "utf-8")
    Path("support.toml").write_text(block("toml"), "utf-8")
    check(make("support.py:Support"))
    config = resolve("support.toml")
    assert config.reward.terms == {"judge": 1.0} and "nothing that a shop" in config.judge.rubric
    assert len(block("toml").splitlines()) <= 25
    with scripted_judge(lambda turns, place: len(turns[0]["agent"]) / 1000) as server:
        local = settings(steps=1, judge__url=server.url, model__max_length=512, eval__episodes=0)
        run = train(resolve("support.toml", local), Path("run")).run
    metrics = read_metrics(run)
    assert metrics["reward/mean"][1] == metrics["reward_terms/judge"][1] > 0
    assert metrics["episodes/failed"][1] == 0 and metrics["gradient/policy_norm"][1] > 0


def test_the_command_of_the_page_asks_a_server_on_this_machine(env: str) -> None:
    """With the example's files as they are; a tiny model takes the place of the recipe's."""
    Path("support.py").write_text(block("python"), "utf-8")
    Path("support.toml").write_text(block("toml"), "utf-8")
    (command,) = re.findall(r"^ragen (train support.toml --judge.url http.*)$", PAGE, re.MULTILINE)
    local = settings(steps=1, model__max_length=512, eval__episodes=0)
    with scripted_judge(lambda turns, place: len(turns[0]["agent"]) / 1000) as server:
        words = command.replace("http://localhost:8001/v1", server.url).split()
        flags = [f"--{key}={json.dumps(value).strip(chr(34))}" for key, value in local.items()]
        assert main([*words, *flags, "--out", "run"]) == 0
    assert {request["model"] for request in server.requests} == {"Qwen/Qwen2.5-7B-Instruct"}
    assert "Authorization" not in server.headers[0]
    assert read_metrics(Path("run"))["reward_terms/judge"][1] > 0


def test_the_command_of_the_page_without_a_server(
    env: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model takes the place of the judge, too, and its answers cannot be read."""
    Path("support.py").write_text(block("python"), "utf-8")
    Path("support.toml").write_text(block("toml"), "utf-8")
    tokenizer = tiny_tokenizer("chatml")
    save_model(tiny_model(tokenizer, max_position_embeddings=8192), tokenizer, Path("judge"))
    monkeypatch.setattr("ragen.rollout.judge.MAX_TOKENS", 8)
    (command,) = re.findall(r"^ragen (train support.toml --judge.url ''.*)$", PAGE, re.MULTILINE)
    words = shlex.split(command.replace("Qwen/Qwen2.5-0.5B-Instruct", "judge"))
    local = settings(steps=1, model__max_length=512, eval__episodes=0, judge__failed_score=0.5)
    flags = [f"--{key}={json.dumps(value).strip(chr(34))}" for key, value in local.items()]
    assert main([*words, *flags, "--out", "run"]) == 0
    assert read_metrics(Path("run"))["reward_terms/judge"][1] == 0.5


def test_training_learns_from_a_judge_alone(tmp_path: Path, env: str, judge: FaultyServer) -> None:
    run = train(
        judged(env, judge, steps=8, update__lr=3e-3, eval__episodes=0), tmp_path / "run"
    ).run
    metrics = read_metrics(run)
    scores = list(metrics["reward_terms/judge"].values())
    assert metrics["reward/mean"] == metrics["reward_terms/judge"]
    assert sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.2
    assert any(metrics["reward/std_in_group"].values()) and any(metrics["gradient/policy_norm"])
    assert sum(metrics["judge/calls"].values()) == len(judge.requests)
    assert sum(metrics["judge/prompt_tokens"].values()) == 100 * len(judge.requests)
    assert all(each > 0 for each in metrics["time/judge_s"].values())
    text = markdown(page(read_facts(run)))
    assert "## Judge" in text and f"| questions | {len(judge.requests)} |" in text


def test_a_resumed_run_repeats_the_judges_numbers_and_asks_nothing_twice(
    tmp_path: Path, env: str, judge: FaultyServer
) -> None:
    config = judged(env, judge, reward__terms={"judge": 1.0, "taste.py:echo": 0.1})
    train(config, tmp_path / "uninterrupted")
    expected, asked = recorded_results(tmp_path / "uninterrupted"), len(judge.requests)
    train_and_kill(config, tmp_path / "run", (Judgements, "add"), 1)
    with closing(sqlite3.connect(tmp_path / "run" / FILE)) as connection:
        ((kept,),) = connection.execute("SELECT count(*) FROM judgements")
    before = len(judge.requests)
    resume(tmp_path / "run")
    assert_same_results(tmp_path / "run", expected)
    assert 0 < kept < asked and len(judge.requests) - before == asked - kept


def test_the_cost_of_a_run_that_was_rolled_back_is_what_was_spent(
    tmp_path: Path, env: str, judge: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated step plays the same episodes, so the judge is not asked again."""

    def once(history: Any, step: int, state: GuardState, detectors: Any) -> list[Alarm]:
        state.checked_step = step
        return [Alarm("grad_spike", 2, 2, 9.0, 1.0)] if (state.rollbacks, step) == (0, 2) else []

    monkeypatch.setattr(recovery, "raise_alarms", once)
    guard = {"guard__responses": {"grad_spike": "rollback"}, "checkpoint__every": 1}
    config = judged(env, judge, steps=3, eval__episodes=0, **guard)
    train(config, tmp_path / "expected")
    expected, asked = recorded_results(tmp_path / "expected"), len(judge.requests)
    facts = read_facts(tmp_path / "expected")
    first, second = facts.attempts.values()
    assert first["judge/calls"][2] > 0 and second["judge/calls"][2] == 0
    assert second["judge/cached"][2] == first["judge/calls"][2]
    text = markdown(page(facts))
    assert f"| questions | {asked} |" in text and f"| prompt tokens | {100 * asked} |" in text
    train_and_kill(config, tmp_path / "run", (LocalEngine, "publish"), 3)
    resume(tmp_path / "run")
    assert_same_results(tmp_path / "run", expected)


def test_a_rollback_during_a_question_asks_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its play is cancelled with it; plays ahead of a step ask while that step trains."""

    class Slow:
        asked = 0

        async def complete(self, prompt: Prompt) -> Completion:
            self.asked += 1
            if self.asked == 1:
                await asyncio.Event().wait()
            text = '{"scores": [{"id": 1, "why": "so", "score": 0.5}]}'
            return Completion(None, None, text, "stop", 0)

    async def engine(*_: Any) -> Any:
        return SimpleNamespace(load=nothing)

    async def nothing(*_: Any) -> None:
        pass

    async def roll_back_meanwhile() -> tuple[list[list[float | Failure]], dict[str, float]]:
        rubric = JudgeConfig(model="some/judge", rubric="Be brief.", mode="absolute")
        judge, groups = Judge(rubric, Slow(), tmp_path), [[episode(turn())]]
        play = asyncio.create_task(judge.scores(groups, 3, [0]))
        while not judge._asked:
            await asyncio.sleep(0)
        play.cancel()
        await asyncio.gather(play, return_exceptions=True)
        run: Any = SimpleNamespace(
            original=resolve("bandit"),
            ahead=Ahead(),
            engine=SimpleNamespace(close=nothing),
            recorder=SimpleNamespace(),
            judge=judge,
        )
        saved: dict[str, Any] = {"engine": {}}
        await recovery.continue_from(run, tmp_path, saved, LoopState(attempt=1), GuardState())
        try:
            return await judge.scores(groups, 3, [0]), values(judge.metrics())
        finally:
            await judge.close()

    monkeypatch.setattr(recovery, "another_engine", engine)
    monkeypatch.setattr(recovery, "find_first", lambda *_: None)
    scores, cost = asyncio.run(roll_back_meanwhile())
    assert scores == [[0.5]] and cost["judge/calls"] == 1


def test_examine_asks_the_judge_and_writes_nothing(
    tmp_path: Path, env: str, judge: FaultyServer
) -> None:
    run = train(judged(env, judge, steps=1, eval__episodes=0), tmp_path / "run").run
    before = (run / FILE).read_bytes()
    assert any(name.startswith("gradient_by_std/") for name in examine(run))
    assert (run / FILE).read_bytes() == before


def test_a_judge_that_cannot_be_read_ends_the_run_in_one_line(tmp_path: Path, env: str) -> None:
    with (
        FaultyServer(lambda *_: chat_reply("All are good.")) as server,
        pytest.raises(RagenError, match="in every episode: the judge scripted gave no score"),
    ):
        train(judged(env, server), tmp_path / "run")


def test_a_judge_that_is_not_there_is_one_line(tmp_path: Path, env: str) -> None:
    with scripted_judge(lambda turns, place: 1.0) as server:
        config = judged(env, server, eval__episodes=0)
    with pytest.raises(RagenError, match="answered no request: ConnectError"):
        train(config, tmp_path / "run")


def test_the_settings_of_a_judge_belong_together() -> None:
    with pytest.raises(RagenError, match=r"set judge\.model and judge\.rubric, and judge\.url"):
        resolve("bandit", {"reward.terms.judge": 1.0})
    given = {"reward.terms.judge": 1.0, "judge.url": "http://x/v1", "judge.model": "m"}
    given |= {"judge.rubric": "Be right.", "rollout.group_size": 1}
    with pytest.raises(RagenError, match=r"set rollout\.group_size to 2 or more"):
        resolve("bandit", given | {"algorithm": "starpo/ppo"})
    assert resolve("bandit", given | {"algorithm": "starpo/ppo", "judge.mode": "absolute"})
