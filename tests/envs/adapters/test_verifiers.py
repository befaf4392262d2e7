"""Environments of verifiers through RAGEN: their own rollouts, through the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ragen.algorithms.samples import to_samples
from ragen.chat.chat import Chat
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.types import Episode, Prompt
from ragen.envs.registry import make
from ragen.envs.tools import tool_schema, write_call
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup, make_setup
from ragen.settings.code import load_code
from tests.chat.test_histories import check as check_samples
from tests.scripted_policy import ScriptedPolicy
from tests.tool_templates import tool_tokenizer

pytest.importorskip("verifiers", "0.4", reason="needs the extra verifiers")
FOLDER = Path(__file__).with_name("tasksets")
SUMS, GUESS, FRUIT, OWN = (
    f"verifiers:{FOLDER / name}.py" for name in ("sums", "guess", "fruit", "own_harness")
)

WITHOUT = str(Path(sys.base_prefix) / "bin/python3")
"""An interpreter without packages."""
CHAT = Chat(tool_tokenizer("hermes"), think=False)
CHAT.expect_tools()

Reply = Callable[[Prompt], str]


Play = Callable[..., list[Episode]]


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Plays an episode of each level, all at once; an environment has one process for all tests."""
    with ExitStack() as stack:

        @cache
        def setup_of(name: str) -> Setup:
            given = {
                "env.name": name,
                "env.params.processes": 1,
                "env.params.success_at": 0.5,
                "env.timeout_s": 60.0,
                "prompt.think": False,
            }
            return stack.enter_context(closing(make_setup(merge(None, given), CHAT)))

        def played(name: str, reply: Reply, levels: list[int], room: int = 9999) -> list[Episode]:
            setup = replace(setup_of(name), max_length=room)
            policy = ScriptedPolicy(reply, lambda text: (*CHAT.encode_text(text), CHAT.end))
            groups = asyncio.run(run_groups(policy, setup, levels, 1, (0, "t")))
            samples, trained = to_samples(groups)
            check_samples(trained, samples)
            return [group.episodes[0] for group in groups]

        yield played


def messages(prompt: Prompt) -> list[str]:
    return [f"{each['role']}: {each['content']}" for each in prompt.messages]


def ends(episodes: list[Episode]) -> list[tuple[str, float, bool]]:
    return [(each.stop_reason, each.reward, each.success) for each in episodes]


def test_a_task_of_one_turn_is_scored_by_its_rewards(play: Play) -> None:
    replies = {"user: 0 + 5": "5", "user: 5 + 5": "11"}
    episodes = play(
        SUMS, lambda prompt: replies.get(messages(prompt)[-1], "Ask a judge."), [123, 124, 10_000]
    )
    assert messages(episodes[0].turns[0].prompt) == ["system: Add the numbers.", "user: 0 + 5"]
    assert ends(episodes) == [("solved", 1.0, True), ("failed", 0.0, False), ("error", 0.0, False)]
    assert "the judge is gone" in (episodes[2].error or "")


def test_a_prompt_that_is_too_long_ends_the_episode_with_its_context(play: Play) -> None:
    (episode,) = play(SUMS, lambda prompt: "5", [123], room=10)
    assert (episode.stop_reason, episode.turns) == ("context", ())


def test_turns_are_those_of_the_environment_up_to_its_own_limit(play: Play) -> None:
    def search(prompt: Prompt) -> str:
        asked = messages(prompt)[-1]
        return {"user: Find my number.": "2", "user: Higher.": "3"}.get(asked, "1")

    levels = [123, 10_000, 124, 10_001]
    assert make(GUESS).max_turns == 4
    numbers = [json.loads(make(GUESS).reset(seed=level)[0])["task"]["number"] for level in levels]
    assert numbers == [1, 2, 6, 3]
    low, first, never, high = play(GUESS, search, levels)
    assert messages(low.turns[1].prompt)[1:] == ["assistant: 2", "user: Lower."]
    assert ends([first, low, high]) == [("solved", r, True) for r in (1.0, 0.5, 0.5)]
    assert ends([never]) == [("failed", 0.0, False)]
    assert [len(each.turns) for each in (low, first, never, high)] == [2, 1, 4, 2]
    assert [turn.call.parent for turn in never.turns if turn.call] == [-1, 0, 1, 2]


def test_an_environment_that_raises_fails_the_episode(play: Play) -> None:
    (episode,) = play(GUESS, lambda prompt: "seven", [123])
    assert episode.stop_reason == "error"
    assert "invalid literal for int() with base 10: 'seven'" in (episode.error or "")


def test_tools_are_called_and_the_task_sees_their_calls(play: Play) -> None:
    calls = {"user: 1 kg of apples?": "price", "user: 6 kg of apples?": "weight"}

    def buy(prompt: Prompt) -> str:
        asked = messages(prompt)[-1]
        if asked in calls:
            return offering.calls.write([write_call(calls[asked], fruit="apples")])
        return "500" if asked.startswith("user") else asked.removeprefix("tool: ")

    offering = CHAT.offering([tool_schema("price", "", {"type": "object"})])
    assert offering.calls is not None
    right, unknown, silent = play(FRUIT, buy, [123, 124, 10_000])
    assert right.turns[0].results == ("250",)
    assert unknown.turns[0].results == ("error: there is no tool 'weight'",)
    assert [each.reward for each in (right, unknown, silent)] == [1.0, 0.5, 0.5]
    assert "The price of one kilo" in CHAT.spell(right.turns[0].prompt.token_ids)


def test_a_call_that_a_server_could_not_answer_is_made_again() -> None:
    """As when a connection that was kept is closed while it is used."""
    from aiohttp import web

    from ragen.envs.adapters.verifiers_host import main

    tries = []

    async def answer(request: web.Request) -> web.Response:
        tries.append(request.headers["X-Api-Key"])
        if len(tries) == 1:
            assert request.transport is not None
            request.transport.close()
        said = {"message": {"role": "assistant", "content": "6"}, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**reply, "choices": [{"index": 0, **said}]})

    async def played() -> dict[str, Any]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await web.SockSite(runner, listening).start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
            outcome = await main(told(SUMS)["training"][0], url, "a key")
            await runner.cleanup()
        return outcome

    assert asyncio.run(played()) == {"reward": 1.0} and tries == ["a key"] * 2


def test_a_harness_of_the_taskset_holds_the_conversation(play: Play) -> None:
    (episode,) = play(OWN, lambda prompt: "Hello.", [123])
    assert messages(episode.turns[0].prompt) == ["user: Greet."]
    assert ends([episode]) == [("solved", 1.0, True)]


def told(name: str, taskset: Any = None, test: Any = None, config: Any = None) -> dict[str, Any]:
    """What the host tells of a taskset, in this process."""
    from ragen.envs.adapters.verifiers_host import tasks_of

    return tasks_of(name.removeprefix("verifiers:"), taskset or {}, test, config or {})


def test_tasks_are_held_out_or_are_those_of_the_settings_for_evaluation() -> None:
    def prompts(found: list[Any]) -> list[str]:
        return [each["task"]["prompt"] for each in found]

    found = told(SUMS)
    assert prompts(found["evaluation"]) == ["0 + 5", "5 + 5"]
    assert prompts(found["training"]) == [f"{i} + 5" for i in (1, 2, 3, 4, 6, 7, 8, 9)]
    found = told(SUMS, {"size": 2}, {"plus": 50})
    assert prompts(found["evaluation"]) == ["0 + 50", "1 + 50"]
    assert prompts(found["training"]) == ["0 + 5", "1 + 5"]
    assert found["evaluation"][0]["env"]["taskset"]["plus"] == 50
    assert len(told(GUESS)["training"]) == 800, "of a taskset without an end"


def test_what_cannot_be_played_is_refused(tmp_path: Path) -> None:
    (tmp_path / "of_before.py").write_text("def load_environment(): ...")
    for message, name, *settings in (
        ("load_environment is of verifiers 0.3", f"{tmp_path}/of_before.py"),
        ("too few tasks", SUMS, {"size": 0}),
        ("the agents assistant, user; RAGEN plays", SUMS, None, None, {"id": "user-sim"}),
    ):
        with pytest.raises(SystemExit, match=message):
            told(name, *settings)


def test_what_the_host_says_is_one_line() -> None:
    for message, params in (
        ("sums.py: taskset.sise: extra inputs are not permitted", {"sise": 3}),
        ("needs verifiers 0.4, here is none: pip install", {"python": WITHOUT}),
        ("the interpreter no/python does not start", {"python": "no/python"}),
    ):
        with pytest.raises(RagenError, match=message) as error:
            make(SUMS, **params)
        assert "\n" not in str(error.value)


def test_packages_and_the_file_identify_the_environment() -> None:
    given = {"env.name": SUMS}
    found = load_code(merge(None, given)).sources
    assert found[SUMS].startswith("blake2b:")
    assert found[f"taskset of {SUMS}"] == f"verifiers {version('verifiers')}"
