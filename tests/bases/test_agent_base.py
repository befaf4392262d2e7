"""`ragen base --agent`: a small model that can talk to an agent, from guessed conversations."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from ragen.bases import agent_base
from ragen.bases.agent_base import AGENT_TEMPLATE, Conversations, Guesser
from ragen.bases.curriculum import Stage
from ragen.bases.tokenizer import build, words_for
from ragen.chat.chat import Chat
from ragen.chat.tool_calls import hermes
from ragen.cli.main import main
from ragen.core.types import Prompt
from ragen.envs.tools import tool_schema
from ragen.models.names import is_embedded
from ragen.rollout.policies import written_completion
from tests.limits import needs_posix
from tests.records import episode, turn

AGENT = Path(__file__).with_name("packing_agent.py")
TASKS = [
    {"id": number, "city": city, "weather": weather, "answer": answer}
    for number in range(5)
    for city in ("Oslo", "Lima")
    for weather, answer in (("rain", "umbrella"), ("sun", "hat"))
]
Capture = pytest.CaptureFixture[str]


def guesses(tools: list[Any], *said: str) -> list[str]:
    """The replies of 200 seeds to a conversation."""
    roles = ["user", "assistant", "tool"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    guesser = Guesser(["Oslo", "Lima", "Rome"], ["umbrella", "hat"])
    prompts = [Prompt(tuple(messages), None, 0, 9, 1.0, seed, tools=tools) for seed in range(200)]
    return [asyncio.run(guesser.complete(prompt)).text for prompt in prompts]


def test_a_guesser_calls_a_tool_with_what_was_said_and_then_answers() -> None:
    parameters = {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "long": {"type": "boolean"},
    }
    forecast = tool_schema("forecast", "", {"type": "object", "properties": parameters})
    calls = [
        json.loads(*hermes(text)) for text in guesses([forecast], "From Lima to Oslo for 3 days.")
    ]
    assert {call["name"] for call in calls} == {"forecast"}
    drawn = {name: {call["arguments"][name] for call in calls} for name in parameters}
    assert drawn == {
        "place": {"Oslo", "Lima"},
        "days": {3},
        "unit": {"F"},
        "long": {True, False},
    }
    then = Counter(guesses([forecast], "Hello.", "<tool_call>…", "rain"))
    assert 120 < then["umbrella"] + then["hat"] < 170, "three of four"
    final = tool_schema("end", "", {"type": "object", "properties": {"answer": {}}})
    ends = [json.loads(*hermes(text)) for text in guesses([final], "Hello.")]
    assert {call["arguments"]["answer"] for call in ends} == {"umbrella", "hat"}


def test_the_template_of_a_base_renders_tools_and_extends_exactly() -> None:
    tokenizer = build()
    tokenizer.chat_template = AGENT_TEMPLATE
    tools = [tool_schema("forecast", "", {"type": "object", "properties": {}})]
    chat = Chat(tokenizer, think=False).offering(tools)
    assert chat.exact and chat.calls is not None
    assert chat.calls.write(['{"name": "forecast", "arguments": {"a": "é"}}']) == (
        '<tool_call>{"name": "forecast", "arguments": {"a": "é"}}</tool_call>'
    )


def test_the_words_of_tasks_change_places_in_each_spelling() -> None:
    places = ["Oslo", "Lima", "Rome"]
    tokenizer = build(words_for(places, 1))
    chat = Chat(tokenizer, think=False)
    asked = Prompt(({"role": "user", "content": "From Lima to Oslo."},), None, 0, 9, 1.0, 0)
    played = episode(replace(turn(), prompt=asked, completion=written_completion("Oslo")))
    conversations = Conversations([played], chat, 0, [*places, "New York"])
    samples = conversations.samples(Stage("form", 1, (), 40), 0, 0)
    texts = [tokenizer.decode(each.token_ids) for each in samples]
    said = [re.search(r"From (\w+) to (\w+)\..*\|>(\w+)<", text) for text in texts]
    assert all(found and found[2] == found[3] for found in said)
    assert {found.groups()[:2] for found in said if found} == set(permutations(places, 2))


@needs_posix
def test_a_base_is_made_by_the_agent_and_can_be_trained_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent_base, "EPISODES", 8)
    monkeypatch.setattr(agent_base, "STEP_EPISODES", 1)
    Path("tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    given = f"--agent {AGENT}:main --tasks tasks.jsonl --env.params.processes 1"
    assert main(["base", "--out", "one", "--steps", "1", *given.split()]) == 0
    printed = capsys.readouterr().out
    assert "8 of 8 tasks ended without a failure" in printed
    card = Path("one/README.md").read_text("utf-8")
    assert "for the agent packing_agent.py:main" in card and "8 conversations" in card
    assert is_embedded("one")
    assert main(["train", "--model", "one", "--dry-run", *given.split()]) == 0
    capsys.readouterr()
    Path("tasks.jsonl").write_text('{"id": 1}\n{"id": 2}')
    assert main(["base", "--out", "two", *given.split()]) == 2
    error = capsys.readouterr().err
    assert 'give each an "answer"' in error and error.count("\n") == 1
