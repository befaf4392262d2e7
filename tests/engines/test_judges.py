"""A judge that is a model on this machine: its answers, its limits, and a run that it pays."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.config.sections import JudgeConfig
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Message, Prompt
from ragen.engines import judges
from ragen.engines.judges import LocalModel, check_judge
from ragen.models.hub import read_sizes
from ragen.models.loading import save_model
from ragen.models.memory import plans
from ragen.rollout.policies import NoCompletion
from ragen.storage.database import DATABASE
from ragen.storage.reader import read_metrics
from ragen.training.trainer import train
from tests.bandit_model import settings
from tests.tiny import tiny_model, tiny_tokenizer

QUESTION = "Why was this the best of all?"
RUBRIC = JudgeConfig(model="here", rubric="Dragon is best.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers nobody can read."""
    tokenizer = tiny_tokenizer("chatml")
    path = tmp_path_factory.mktemp("judge")
    save_model(tiny_model(tokenizer, max_position_embeddings=8192), tokenizer, path)
    return path


def asked(text: str) -> Prompt:
    messages: tuple[Message, ...] = ({"role": "user", "content": text},)
    return Prompt(messages, None, 0, 12, 0.0, 1)


def answers(folder: Path, prompts: Sequence[Prompt]) -> list[Completion]:
    async def ask() -> list[Completion]:
        model = LocalModel(str(folder), "float32")
        found = await asyncio.gather(*map(model.complete, prompts))
        await model.close()
        return list(found)

    return asyncio.run(ask())


def test_an_answer_depends_on_its_question_alone(folder: Path) -> None:
    """So a run that is resumed, and asks fewer questions at once, gets the same answers."""
    prompts = [asked(text) for text in ("How good?", "How good was it?")]
    together = answers(folder, prompts)
    alone = [answers(folder, [prompt])[0] for prompt in prompts]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]


def test_a_question_and_its_answer_fit_in_a_sliding_window(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("chatml")
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}
    save_model(tiny_model(tokenizer, **window), tokenizer, tmp_path)
    (found,) = answers(tmp_path, [asked("Why?")])
    assert found.usage is not None
    assert found.usage.prompt_tokens + found.usage.completion_tokens <= 40


def test_an_answer_has_the_rest_of_the_models_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = answers(folder, [asked(QUESTION)])
    assert found.usage is not None and found.token_ids is not None
    read = found.usage.prompt_tokens
    assert found.usage.completion_tokens == len(found.token_ids) <= 12
    monkeypatch.setattr(judges, "MAX_LENGTH", read + 2)
    (cut,) = answers(folder, [asked(QUESTION)])
    assert cut.token_ids == found.token_ids[:2]
    monkeypatch.setattr(judges, "MAX_LENGTH", read)
    with pytest.raises(NoCompletion, match=rf"a question of {read} tokens, of at most {read}"):
        answers(folder, [asked(QUESTION)])


def config_of(folder: Path, **more: object) -> Config:
    terms = {"reward__terms": {"judge": 1.0}, "judge__model": str(folder)}
    rubric = {"judge__rubric": RUBRIC.rubric}
    return merge("bandit", settings(**terms, **rubric, **more))


def test_a_run_is_paid_by_the_scores(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model says is scripted: it likes dragons."""
    complete = LocalModel.complete

    async def says(self: LocalModel, prompt: Prompt) -> Completion:
        shown = json.loads(prompt.messages[1]["content"])["episodes"]
        scores = [
            {"id": each["id"], "why": "so", "score": int("Dragon" in each["turns"][0]["agent"])}
            for each in shown
        ]
        text = json.dumps({"scores": scores})
        return replace(await complete(self, replace(prompt, max_tokens=1)), text=text)

    monkeypatch.setattr(LocalModel, "complete", says)
    config = config_of(folder, steps=1, eval__episodes=0)
    metrics = read_metrics(train(config, tmp_path / "run").run)
    with closing(sqlite3.connect(tmp_path / "run" / DATABASE)) as connection:
        replies = connection.execute("SELECT reply FROM turns").fetchall()
    liked = sum(reply.startswith("Dragon") for (reply,) in replies)
    assert not any(metrics["judge/failed"].values())
    assert metrics["reward_terms/judge"][1] == liked / len(replies) and 0 < liked < len(replies)


def test_its_weights_are_a_part_of_the_memory(folder: Path) -> None:
    config = config_of(folder)
    assert plans(config)[0].of("judge") == 4 * read_sizes(str(folder)).numbers
    assert plans(merge("bandit", settings()))[0].of("judge") == 0


def test_a_model_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RagenError, match="there is no model or run"):
        check_judge(config_of(tmp_path / "none").judge, "bandit")
