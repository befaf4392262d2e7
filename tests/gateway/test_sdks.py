"""Agents of real libraries play through the dialects, and each reply that comes back is known.

They run in an environment of their own, which `scripts/agents.sh` makes; `RAGEN_TEST_AGENTS` names
its interpreter.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ragen.gateway.messages import Refused
from tests.gateway.scripted_gateway import CODE, TOOLS, TURNS, ScriptedGateway
from tests.gateway.sdk_agents import AGENTS, TASKS

PYTHON = os.environ.get("RAGEN_TEST_AGENTS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="RAGEN_TEST_AGENTS names no interpreter"),
]
GRADES = {"pydantic-ai": [2, 1, 2], "pydantic-ai-responses": [1, 1, 0]}
"""Grades of the first three replies, where they do not come back verbatim."""


def play(agent: str, gateway: ScriptedGateway) -> subprocess.CompletedProcess[str]:
    with gateway.server as server:
        script = Path(__file__).with_name("sdk_agents.py")
        command = [PYTHON, str(script), agent, server.url]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("agent", [each for each in AGENTS if not each.startswith("smolagents")])
def test_each_reply_that_comes_back_is_known(agent: str) -> None:
    gateway = ScriptedGateway()
    done = play(agent, gateway)
    assert (done.returncode, done.stdout) == (0, TURNS[-1].text), done.stderr
    expected = GRADES.get(agent, [0, 0, 0])
    assert gateway.grades == [expected[:number] for number in range(4)]
    for request in gateway.requests:
        assert [tool["function"]["name"] for tool in request.tools] == ["guess"]
        assert request.tools == gateway.requests[0].tools
        assert request.messages[0].text == "You play a game."
    asked = [each.text for each in gateway.requests[-1].messages if each.role == "user"]
    assert asked == list(TASKS)
    results = [each for each in gateway.requests[-1].messages if each.role == "tool"]
    told = [(each.name, each.text) for each in results]
    assert told == [("guess", f"{n} is too low") for n in (4, 5, 10)]


@pytest.mark.parametrize(
    ("agent", "turns"), [("smolagents-tools", TOOLS), ("smolagents-code", CODE)]
)
def test_an_agent_that_rewrites_its_replies_plays_all_the_same(agent: str, turns: tuple) -> None:
    gateway = ScriptedGateway(turns)
    done = play(agent, gateway)
    assert (done.returncode, done.stdout) == (0, "It is 5."), done.stderr
    assert gateway.grades == [[], [None]]


@pytest.mark.parametrize("agent", ["openai-chat", "langgraph", "langgraph-responses", "anthropic"])
def test_a_prompt_that_is_too_long_is_known_by_its_library(agent: str) -> None:
    line = "the maximum context length is 9 tokens"
    gateway = ScriptedGateway(refused=Refused(400, "context_length_exceeded", line))
    told = play(agent, gateway).stderr
    assert ("ContextOverflowError: " if "langgraph" in agent else "BadRequestError: ") in told
    assert line in told
    assert len(gateway.server.requests) == 1, "none asks again"
