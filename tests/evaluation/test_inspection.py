"""`ragen doctor MODEL`: what a model sees, what is trained of it, and what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ragen.cli.doctor_model import show_model
from ragen.cli.main import main
from ragen.core.errors import RagenError
from ragen.core.user_code import UserCodeError
from ragen.evaluation import inspection
from ragen.evaluation.inspection import Inspection, inspect_model
from ragen.models.loading import save_model
from tests.shared import once
from tests.tiny import tiny_model, tiny_tokenizer

Capture = pytest.CaptureFixture[str]


def folder_of(template: str) -> str:
    def make(folder: Path) -> None:
        tokenizer = tiny_tokenizer(template)
        model = tiny_model(
            tokenizer, hidden_size=64, intermediate_size=128, max_position_embeddings=8192
        )
        save_model(model, tokenizer, folder)

    return str(once(f"inspected-{template}", make))


def inspect(template: str, **keys: Any) -> Inspection:
    overrides = {key.replace("__", "."): value for key, value in keys.items()}
    return inspect_model(folder_of(template), {"threads": 1, **overrides})


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampled reply has as few tokens as the short decode, and memory is scarce."""
    for name, value in {"REPLY_S": 0.0, "REPLIES": 2, "TOKENS": 8}.items():
        monkeypatch.setattr(inspection, name, value)
    monkeypatch.setattr("ragen.models.memory.available", lambda device: 2**21)


@cache
def chatml() -> Inspection:
    return inspect("chatml")


def test_the_embedded_model_is_inspected_with_its_compact_prompts() -> None:
    found = inspect_model("base", {"threads": 1})
    assert found.config.env.name == "sokoban" and found.config.prompt.style == "compact"
    assert found.architecture == "Qwen2ForCausalLM" and found.decoder.startswith("fast")
    text = "".join(piece.text for piece in found.prompt)
    assert text.startswith("<|user|>Sokoban\n") and text.endswith("<|assistant|><think>")
    assert found.end == {"<|end|>": 256} and found.pad == {"<|pad|>": 257}
    assert found.reply.text.startswith("<think>") and min(found.tokens_per_s) > 0
    assert (found.reply.problem is None) == bool(found.reply.actions)


@pytest.mark.usefixtures("hurried")
def test_a_parser_that_fails_on_the_sampled_reply_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise UserCodeError("Traceback …\nKeyError: 'x'")

    monkeypatch.setattr(inspection, "read_reply", fail)
    with pytest.raises(RagenError, match=r"^prompt\.tool_parser failed: KeyError: 'x'; run `ragen"):
        inspect("chatml")


def test_an_environment_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragen.envs.worlds.bandit.Bandit.step", lambda env, action: 1 / 0)
    line = r"^the environment 'bandit' failed: ZeroDivisionError: division by zero; run `ragen ch"
    with pytest.raises(RagenError, match=line):
        inspect("chatml", env="bandit")


@pytest.mark.usefixtures("hurried")
def test_trained_pieces_are_the_replies_with_the_tokens_that_end_them() -> None:
    found = chatml()
    (sample,) = found.samples
    assert found.turns == 3 and "extends the tokens so far" in found.why
    replies = "".join(piece.text if piece.trained else "|" for piece in sample)
    assert replies.count("I try ") == replies.count("</answer><|im_end|>") == 3
    assert "user" not in replies and sample[: len(found.prompt)] == found.prompt
    assert found.reply.num_tokens == 8
    assert found.reply.problem == "It was cut off here after 8 of 400 tokens, to save time."
    assert {piece.text for piece in found.prompt if piece.control} == {
        *("<|im_start|>", "<|im_end|>")
    }


@pytest.mark.usefixtures("hurried")
def test_it_is_said_why_turns_do_not_join() -> None:
    found = inspect("qwen3", prompt__history_thoughts="drop")
    assert (len(found.samples), found.turns) == (3, 3) and "left out of the prompts" in found.why


@pytest.mark.usefixtures("hurried")
def test_each_method_of_training_has_a_row_of_memory() -> None:
    found = chatml()
    named = [(row.method, row.adapters, row.dtype) for row in found.memory]
    assert len(set(named)) == len(named) == 8
    for row in found.memory:
        expected = "fits short episodes" if row.certain * 2**30 <= 2**21 else "too large"
        assert row.verdict == expected
    by_name = dict(zip(named, found.memory, strict=True))
    grpo, ppo = by_name["GRPO", False, "float32"], by_name["PPO", False, "float32"]
    assert 0 < grpo.certain < ppo.certain < ppo.peak


@pytest.mark.usefixtures("hurried")
def test_doctor_prints_a_page_that_is_legible_without_colour(capsys: Capture) -> None:
    line = ["doctor", folder_of("chatml"), "--env", "bandit", "--threads", "1"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n<think>\n" in shown and "tokens as above]⟦I try " in shown
    assert "</answer><|im_end|>⟧\nThe turn is one sample: " in shown
    assert "GRPO, LoRA" in shown and "\nnot valid: " in shown
    assert "\x1b" not in shown
    assert main([*line, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["env"]["name"] == "bandit" and record["turns"] == 1


@pytest.mark.usefixtures("hurried")
def test_doctor_shows_what_precedes_a_reply_and_what_is_lost(capsys: Capture) -> None:
    console = Console(width=100)
    found = inspect("channels", env="bandit")
    assert found.header == "<|channel|>final<|message|>" and not found.loses_blanks
    show_model(console, replace(found, loses_blanks=True))
    shown = capsys.readouterr().out
    assert "'<|channel|>final<|message|>', as in the history" in shown
    assert "assistant<|channel|>final<|message|><think>" in shown
    assert "a message loses the white space that it begins with" in " ".join(shown.split())
    show_model(console, chatml())
    shown = capsys.readouterr().out
    assert "as in the history" not in shown and "loses" not in shown


def test_what_cannot_be_inspected_is_refused_in_one_line(capsys: Capture) -> None:
    for line, words in (
        ("doctor random", "there is no model or run 'random'"),
        ("doctor ./none --env bandit", "there is no model or run './none'"),
        ("doctor base --env bandti", "did you mean 'bandit'?"),
        ("doctor base --env bandit --model.max_length 40", "raise model.max_length from 40"),
        ("doctor --env bandit", "name one"),
        ("doctor --seed 1", "name one"),
    ):
        assert main(line.split()) == 2
        printed = capsys.readouterr()
        assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""
