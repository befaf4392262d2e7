"""Environments of verifiers through RAGEN: their examples, their messages and their rubrics."""

import asyncio
import re
import threading
from pathlib import Path

import pytest

from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.config.extensions import ENV, load
from ragen.core.errors import RagenError
from ragen.core.types import Completion
from ragen.envs.adapters.adapted import version_of
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.envs.tools import write_call
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup
from tests.chat.test_histories import check as check_samples
from tests.scripted_policy import ScriptedPolicy
from tests.tool_templates import tool_tokenizer

vf = pytest.importorskip("verifiers", reason="needs the extra verifiers")
NAME = f"verifiers:{Path(__file__).parents[2] / 'verifiers_envs.py'}"


def said(env):
    """The texts of the conversation as the rubric sees them."""
    return [message["content"] for message in env._messages]


def questions(env, levels):
    return [env.reset(seed=level)[0] for level in levels]


def test_one_turn_is_scored_by_the_rubric():
    env = make(NAME, system_prompt="Add the numbers.")
    assert env.goal == "Answer (verifiers_envs)", "the same prompt on every machine"
    assert env.reset(seed=10_000)[0] == "1 + 5" and env.rules == "Add the numbers."
    assert (env.actions, env.max_turns, env.max_actions) == (None, 1, 1)
    shown, *rest = env.step("6")
    assert shown == "Your answer has the reward 1."
    assert rest == [1.0, True, False, {"success": True, "effective": True}]
    env.reset(seed=10_000)
    assert env.step("7")[1:] == (0.0, True, False, {"success": False, "effective": True})


def test_levels_are_examples_of_the_training_and_of_the_evaluation_dataset():
    env = make(NAME, evaluated=3)
    assert questions(env, (123, 124, 125, 126)) == ["0 + 50", "1 + 50", "2 + 50", "0 + 50"]
    assert questions(env, (10_000, 10_001, 10_008, 2**31)) == ["0 + 5", "1 + 5", "0 + 5", "0 + 5"]


def test_an_only_dataset_is_divided_and_one_example_serves_both():
    env = make(NAME)  # of 0 … 7, the first of every four is for evaluation
    assert questions(env, (123, 124, 125)) == ["0 + 5", "4 + 5", "0 + 5"]
    assert questions(env, range(10_000, 10_006)) == [f"{i} + 5" for i in (1, 2, 3, 5, 6, 7)]
    assert questions(make(NAME, size=1), (123, 10_000)) == ["0 + 5", "0 + 5"]


@pytest.mark.parametrize(
    ("parser", "answer", "seen"),
    [
        ("plain", "6", "6"),
        ("think", "6", "<think>\n</think>\n6"),
        ("xml", "6", "<think>\n\n</think>\n<number>\n6\n</number>"),
        ("xml", "<number>6</number>", "<number>6</number>"),
    ],
)
def test_the_rubric_sees_the_answer_in_the_form_of_its_parser(parser, answer, seen):
    env = make(NAME, parser=parser)
    env.reset(seed=10_000)
    assert env.step(answer)[1] == 1.0
    assert said(env)[-1] == seen


def number_of(env, level):
    """The hidden number of a level of `guess`."""
    env.reset(seed=level)
    return env._state["number"]


def test_turns_are_those_of_the_environment_and_the_reward_comes_at_the_end():
    env = make(NAME, kind="guess", max_turns=4)
    assert (env.max_turns, make(NAME, kind="guess").max_turns) == (4, 20)
    level = next(level for level in range(123, 200) if number_of(env, level) == 3)
    env.reset(seed=level)
    first, *rest = env.step("1")
    assert first.endswith(", higher.") and rest[:3] == [0.0, False, False]
    assert env.step("7")[0].endswith(", lower.")
    assert env.step("3") == (
        *("Yes!", pytest.approx(1 / 3), True, False),
        {"success": False, "effective": True},
    )
    assert said(env)[1::2] == ["1", "7", "3"] and said(env)[-1] == "Yes!"


def test_tools_are_called_and_the_rubric_sees_the_calls():
    env = make(NAME, kind="tools", max_turns=4)
    price, times = (each["function"] for each in env.tools)
    assert price["description"] == "The price of one kilo of a fruit in cents."
    assert price["parameters"]["properties"]["fruit"]["description"] == "Its name."
    assert times["parameters"]["required"] == ["first", "second"]
    assert env.reset(seed=10_000)[0] == "1 + 5" and env.max_turns == 4
    assert env.step(write_call("price", fruit="apples"))[:3] == ("250", 0.0, False)
    assert env.step(write_call("times", first=250, second=6))[:3] == ("1500", 0.0, False)
    assert env.step("1500")[1:3] == (1.0, True)
    asked, result = env._messages[1:3]
    assert (asked.role, asked.tool_calls[0].name, result.role) == ("assistant", "price", "tool")
    assert result.tool_call_id == asked.tool_calls[0].id
    env.reset(seed=10_000)
    assert env.step("1500")[1:3] == (0.0, True), "an answer without a call"


def test_wrong_calls_have_the_environments_own_results():
    env = make(NAME, kind="tools")
    env.reset(seed=10_000)
    for call, result in (
        (write_call("price", fruit="plums"), "'plums'"),
        (write_call("no_such"), "'no_such'"),
        (write_call("times", first=1), "missing 1 required positional argument"),
    ):
        shown, *rest = env.step(call)
        assert result in shown and rest[:3] == [0.0, False, False]
    strict = make(NAME, kind="strict")
    strict.reset(seed=10_000)
    assert strict.step(write_call("price", fruit="plums"))[1:3] == (0.0, True)


def test_tools_are_shown_by_a_models_template_and_their_results_are_never_trained():
    env = make(NAME, kind="tools")
    chat = Chat(tool_tokenizer("hermes"), think=False, tools=env.tools)
    call = chat.calls.write([write_call("price", fruit="apples")])
    policy = ScriptedPolicy([call, "1500"] * 2, lambda text: (*chat.encode_text(text), chat.end))
    setup = Setup(
        *(NAME, lambda: make(NAME, kind="tools"), 4, 1, 4),
        **{"think": False, "prefilled": False, "chat": chat, "tools": env.tools},
        max_length=9999,
    )
    (group,) = asyncio.run(run_groups(policy, setup, [10_000], 2, (0, "eval"), concurrency=1))
    samples, episodes = to_samples([group])
    check_samples(episodes, samples)
    assert [each.success for each in episodes] == [True, True] and len(samples) == 2
    assert "The price of one kilo" in chat.spell(episodes[0].turns[0].prompt.token_ids)
    assert episodes[0].turns[0].results == ("250",)


def test_randomness_follows_from_the_seeds():
    env = make(NAME, kind="guess")
    numbers = [number_of(env, level) for level in range(123, 163)]
    assert numbers == [number_of(env, level) for level in range(123, 163)]
    assert set(numbers) == set(range(1, 8))
    cheers = set()
    for noise in range(9):
        env.reset(seed=123, options={"noise_seed": noise})
        cheers.add(env.step("7" if numbers[0] < 7 else "1")[0].partition(",")[0])
    assert cheers == {"Well", "Hm", "No"}


@pytest.mark.parametrize("kind", ["sums", "half", "tools"])
def test_environments_keep_the_contract(kind):
    check(make(NAME, kind=kind, evaluated=4))


def test_an_environment_that_does_not_repeat_itself_fails_the_check():
    with pytest.raises(RagenError):
        check(make(NAME, kind="restless"))


def test_an_episode_that_is_left_is_cleaned_up_and_its_threads_end():
    others = set(threading.enumerate())  # of other tests
    env = make(NAME, kind="guess")
    guess = type(env._loaded.environment)
    wrong = "7" if number_of(env, 123) < 7 else "1"
    before = guess.cleaned
    env.step(wrong)  # which takes a thread
    env.close()
    assert guess.cleaned == before + 1
    assert not set(threading.enumerate()) - others
    env.reset(seed=123)
    env.step(wrong)
    env.close()


def test_an_answer_that_the_rubric_cannot_read_has_the_reward_0():
    env = make(NAME, kind="half")
    env.reset(seed=10_000)
    assert env.step("six")[1:3] == (0.0, True)  # int("six") raises


def test_a_judge_that_cannot_be_reached_fails_the_episode():
    class Six:
        async def complete(self, prompt):
            return Completion(None, None, "<answer>6</answer>", "stop", 0)

    setup = Setup(
        NAME,
        lambda: make(NAME, kind="judged"),
        turns=1,
        actions_per_turn=1,
        actions=1,
        style="paper",
        think=False,
        prefilled=False,
    )
    (group,) = asyncio.run(run_groups(Six(), setup, [10_000], 1, (0, "eval")))
    assert "a reward function raised RuntimeError('Judge model API error" in group.episodes[0].error


def test_a_failure_in_the_environment_is_raised():
    env = make(NAME, kind="guess")
    env.reset(seed=123)
    with pytest.raises(ValueError, match="invalid literal for int"):
        env.step("seven")


def test_an_episode_whose_end_no_stop_condition_sees_is_given_up():
    env = make(NAME, kind="unending")
    env.reset(seed=123)
    with pytest.raises(RuntimeError, match="its stop conditions ignore the end of an episode"):
        for guess in range(1, 8):
            env.step(str(guess))


def test_what_is_unknown_or_cannot_be_played_is_refused_in_one_line():
    for name, params, message in (
        (NAME, {"kind": "mcp"}, "is a MCPEnv, which keeps its MCP servers running in a thread"),
        (NAME, {"kind": "comparing"}, "scores episodes by comparing them"),
        (NAME, {"size": 0}, "has no examples"),
        (NAME, {"parser": "no_such"}, "cannot be made: KeyError: 'no_such'"),
        ("verifiers:no-such-env", {}, "no module 'no_such_env' is installed here: install the p"),
        ("verifiers:", {}, "no module '' is installed here"),
        ("verifiers:json", {}, "json has no environment named 'load_environment'"),
    ):
        with pytest.raises(RagenError, match=re.escape(message)) as error:
            make(name, **params)
        assert "\n" not in str(error.value)


def test_package_and_code_identify_the_environment():
    package, _, code = load(NAME, ENV).source.partition(", ")
    assert package == version_of("verifiers") and code.startswith("blake2b:")
