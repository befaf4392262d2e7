"""The agents of five libraries, as docs/agents.md prints them, and small models made for them."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from ragen import train
from ragen.bases import agent_base
from ragen.bases.agent_base import prepare_agent

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
FILES = {
    text[3:].partition(":")[0]: text
    for text in re.findall(r'```python\n("""\w+\.py: .*?)```', PAGE, re.DOTALL)
}
"""The page's programs by name."""
AGENTS = [name for name in FILES if name.endswith("_agent.py") and name != "my_agent.py"]
PYTHON = os.environ.get("RAGEN_TEST_AGENTS", "")
with_libraries = pytest.mark.skipif(not PYTHON, reason="RAGEN_TEST_AGENTS names no interpreter")


def test_the_page_has_short_agents_without_a_word_of_ragen() -> None:
    assert len(AGENTS) == 5
    for name in AGENTS:
        assert len(FILES[name].splitlines()) <= 30 and "ragen" not in FILES[name].lower()


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's files in the working directory, and the settings of its tasks."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, "utf-8")
    runpy.run_path("trips.py")
    params = {"tasks": "trips.jsonl", "python": PYTHON, "processes": 1}
    return {f"env.params.{name}": value for name, value in params.items()}


@with_libraries
@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_each_library_takes_the_guesses_of_a_survey(
    agent: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_base, "EPISODES", 32)
    lines: list[str] = []
    given |= {"env.name": f"agent:{agent}:main"}
    prepare_agent(given, Path("model"), steps=1, watch=lines.append)
    assert any("32 of 32 tasks ended without a failure" in line for line in lines)


@with_libraries
@pytest.mark.slow
def test_a_model_from_scratch_learns_what_to_ask_for(given: dict[str, Any]) -> None:
    given |= {"env.name": "agent:openai_agent.py:main"}
    prepare_agent(given, Path("model"))
    settings: dict[str, Any] = {"model": "model", "steps": 30, "threads": 1, "eval.episodes": 128}
    settings |= {"rollout.group_size": 8, "update.lr": 1e-3, "update.minibatch_episodes": 16}
    result = train(None, settings | given)
    assert result.after.success_low > result.before.success_high
