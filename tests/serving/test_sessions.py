"""OpenEnv's messages, one session at a time, without a network."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ragen.core.user_code import UserCodeError
from ragen.envs.registry import env_factory
from ragen.envs.tools import write_call
from ragen.rollout.setup import Setup
from ragen.serving.sessions import Refused, Session, describe
from tests.rogue import Rogue


def setup_of(name: str, **params: Any) -> Setup:
    return Setup(name, env_factory(name, **params), turns=2, actions_per_turn=3, actions=4)


def asked(session: Session, kind: str, **data: Any) -> Any:
    """The data of the answer to a message."""
    answer = session.answer(json.dumps({"type": kind, "data": data}))
    assert answer is not None and json.loads(json.dumps(answer)) == answer
    return answer["data"]


def test_an_episode_of_bandit() -> None:
    """Phoenix is the safe arm, which pays 0.15, and the worse one: 0.25 is the risky arm's mean."""
    session = Session(setup_of("bandit"))
    first = asked(session, "reset", seed=123, noise_seed=0, episode_id="one")
    about = first["metadata"]
    assert first["observation"] == {"text": "Arms: Dragon, Phoenix", "metadata": about}
    assert (first["reward"], first["done"]) == (None, False)
    assert (about["goal"], about["actions"]) == ("Bandit", ["Dragon", "Phoenix"])
    assert about["rules"].startswith("You are playing a bandit game.")
    last = asked(session, "step", text="Phoenix")
    assert (last["observation"]["text"], last["reward"]) == ("Phoenix paid 0.15.", 0.15)
    assert last["done"] and last["metadata"] == {"success": False, "truncated": False}
    seeds = {"seed": 123, "noise_seed": 0, "episode_id": "one", "step_count": 1}
    budgets = {"max_turns": 2, "actions_per_turn": 3, "max_actions": 4}
    assert asked(session, "state") == seeds | budgets
    assert asked(session, "reset", seed=123)["done"] is False
    assert asked(session, "state")["noise_seed"] == 123  # as in this process, from the level
    assert asked(session, "state")["step_count"] == 0


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        ("", "INVALID_JSON", "not JSON"),
        ("[" * 100_000, "INVALID_JSON", "not JSON"),
        ("[]", "INVALID_JSON", "no"),
        ("{}", "UNKNOWN_TYPE", "reset, step, state or close"),
        ('{"type": ["reset"]}', "UNKNOWN_TYPE", "reset, step, state or close"),
        ('{"type": "mcp", "data": {}}', "UNKNOWN_TYPE", "reset, step, state or close"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR", "seed: "),
        ('{"type": "reset", "data": {"seed": true}}', "VALIDATION_ERROR", "seed: "),
        ('{"type": "reset", "data": {"noise_seed": 1.5}}', "VALIDATION_ERROR", "noise_seed: "),
        ('{"type": "reset", "data": [1]}', "VALIDATION_ERROR", "valid dictionary"),
        ('{"type": "step"}', "VALIDATION_ERROR", "valid dictionary"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR", "text: field required"),
        ('{"type": "step", "data": {"text": 1}}', "VALIDATION_ERROR", "text: "),
        ('{"type": "step", "data": {"text": "Up", "x": 1}}', "VALIDATION_ERROR", "x: extra"),
        ('{"type": "step", "data": {"text": "up"}}', "VALIDATION_ERROR", "no action 'up': there"),
    ],
)
def test_a_message_that_cannot_be_followed_is_refused_and_changes_nothing(
    message: str, code: str, text: str
) -> None:
    session = Session(setup_of("frozen-lake-still"))
    asked(session, "reset", seed=1)
    with pytest.raises(Refused, match=text) as refused:
        session.answer(message)
    assert refused.value.code == code
    assert asked(session, "state")["step_count"] == 0
    asked(session, "step", text="Up")


def test_an_episode_has_to_be_in_progress() -> None:
    session = Session(setup_of("bandit"))
    for _ in range(2):
        with pytest.raises(Refused, match="reset first"):
            asked(session, "step", text="Dragon")
        asked(session, "reset", seed=123, of_another_server=1)
        asked(session, "step", text="Dragon")
    assert session.answer('{"type": "close"}') is None


def test_levels_without_a_seed_differ() -> None:
    session = Session(setup_of("sokoban"))
    assert len({asked(session, "reset")["observation"]["text"] for _ in range(4)}) > 1


def test_a_limit_of_the_environment_itself_truncates() -> None:
    class Limited(Rogue):
        def step(self, action: str) -> Any:
            observation, reward, *_ = super().step(action)
            return observation, reward, False, True, {}

    session = Session(Setup("limited", Limited))
    asked(session, "reset", seed=1)
    last = asked(session, "step", text="Right")
    assert last["done"] and last["metadata"] == {"success": False, "truncated": True}


def test_a_failure_of_the_environment_passes() -> None:
    class Broken(Rogue):
        def step(self, action: str) -> Any:
            raise KeyError("broken")

    session = Session(Setup("broken", Broken))
    asked(session, "reset", seed=1)
    with pytest.raises(UserCodeError, match="KeyError: 'broken'"):
        asked(session, "step", text="Right")


def test_the_schema_lists_the_actions_that_all_levels_have() -> None:
    def text(name: str) -> Any:
        return describe(setup_of(name)).schema["action"]["properties"]["text"]

    assert text("sokoban")["enum"] == ["Up", "Down", "Left", "Right"]
    for name in ("bandit", "countdown"):  # they depend on the level, or are free text
        assert text(name)["type"] == "string" and "enum" not in text(name)


def test_the_description_holds_goal_rules_and_budgets() -> None:
    about = describe(setup_of("sokoban"))
    assert about.metadata["name"] == "sokoban"
    assert about.metadata["description"].startswith("Sokoban\nYou are solving the Sokoban puzzle.")
    defaults = {k: v["default"] for k, v in about.schema["state"]["properties"].items()}
    assert defaults == about.state
    assert (about.state["max_turns"], about.state["actions_per_turn"]) == (2, 3)


def test_openenvs_steps_for_tools() -> None:
    session = Session(setup_of("sorting"))
    (compare,) = asked(session, "step", type="list_tools")["observation"]["tools"]
    assert compare["name"] == "compare" and "scale" in compare["description"]
    assert list(compare["input_schema"]["properties"]) == ["first", "second"]
    call = {"type": "call_tool", "tool_name": "compare", "arguments": {"first": "A", "second": "B"}}
    with pytest.raises(Refused, match="reset first"):
        asked(session, "step", **call)
    asked(session, "reset", seed=1)
    shown = asked(session, "step", **call)["observation"]
    assert shown["tool_name"] == "compare" and shown["error"] is None
    env = env_factory("sorting")()
    env.reset(seed=1)
    assert shown["result"] == env.step(write_call("compare", first="A", second="B"))[0]
    assert asked(session, "state")["step_count"] == 1, "looking at the tools takes no action"
    wrong = asked(session, "step", **call | {"tool_name": "weigh"})["observation"]["result"]
    assert wrong.startswith("Error: there is no tool of that name")
    with pytest.raises(Refused, match="arguments: finite numbers"):
        asked(session, "step", **call | {"arguments": {"first": math.nan}})
    assert asked(session, "step", text="A B C D")["done"]


def test_an_environment_without_tools_says_so() -> None:
    session = Session(setup_of("bandit"))
    assert asked(session, "step", type="list_tools")["observation"]["tools"] == []
    asked(session, "reset", seed=1)
    with pytest.raises(Refused, match="has no tools"):
        asked(session, "step", type="call_tool", tool_name="compare")
