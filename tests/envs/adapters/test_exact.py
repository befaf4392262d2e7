"""Episodes in other libraries' environments: tokens as sampled, and only those are trained."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragen.algorithms.samples import to_samples
from ragen.envs.adapters import openenv_servers
from ragen.envs.contract import Env
from ragen.envs.registry import make
from ragen.envs.tools import write_call
from ragen.rollout.chat import Chat
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup
from tests.rollout.test_histories import ROOMY, CyclingPolicy, check
from tests.tiny import tiny_tokenizer
from tests.tool_templates import tool_tokenizer

TESTS = Path(__file__).parents[2]
VERIFIERS = f"verifiers:{TESTS / 'verifiers_envs.py'}"
NEEDS = {
    "minigrid": {"gymnasium:MiniGrid-DoorKey-5x5-v0": {}},
    "reasoning_gym": {"reasoning-gym:leg_counting": {}},
    "textarena": {"textarena:GuessTheNumber-v0": {}, "textarena:TicTacToe-v0": {}},
    "verifiers": {VERIFIERS: {"kind": "guess"}, f"{VERIFIERS} with tools": {"kind": "tools"}},
    "openenv": {f"openenv:{TESTS / 'openenv_light.py'}:app": {}},
    "gymnasium": {"gymnasium:FrozenLake-v1": {}, "gymnasium:Blackjack-v1": {}},
}
CASES = {name: (params, module) for module, each in NEEDS.items() for name, params in each.items()}


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    openenv_servers.end_servers()


def maker(name: str) -> Callable[[], Env]:
    params, module = CASES[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")
    return partial(make, name.removesuffix(" with tools"), **params)


@cache
def about(name: str) -> tuple[Chat, tuple[str, ...], tuple[Any, ...], int]:
    """The chat of an environment, replies that do something, its tools, and its turns."""
    env = maker(name)()
    env.reset(seed=1)
    tokenizer = tool_tokenizer("hermes") if env.tools else tiny_tokenizer("chatml")
    chat = Chat(tokenizer, tools=env.tools)
    if env.tools:
        assert chat.calls is not None
        calls = [write_call("price", fruit=fruit) for fruit in ("apples", "plums")]
        said = [chat.calls.write(calls[:1]), chat.calls.write(calls), "250", "<tool_call>{}"]
    elif env.actions is None:
        said = [f"<answer>{text}</answer>" for text in ("1", "[4]", "7", "left", "é🙂")]
    else:
        several = " || ".join(env.actions[:3])
        said = [f"<answer>{text}</answer>" for text in (*env.actions, several, "no such")]
    turns = min(env.max_turns, 5)
    env.close()
    return chat, tuple(said), env.tools, turns


def replies(name: str) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Replies that act, some of them cut at the limit, and random ids."""
    chat, said, *_ = about(name)
    acting = st.sampled_from([(*chat.encode_text(f"so</think>{text}"), chat.end) for text in said])
    ordinary = st.integers(0, 200).filter(lambda token: token not in chat.control_ids)
    noise = st.lists(ordinary, min_size=1, max_size=8).map(tuple)
    reply = acting | acting | acting.map(lambda ids: ids[:-1]) | noise
    return st.lists(reply, min_size=1, max_size=5)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(data=st.data(), window=st.sampled_from([0, 1, 2]))
def test_every_sampled_token_is_trained_once_and_no_other(
    name: str, data: st.DataObject, window: int
) -> None:
    build = maker(name)
    chat, _, tools, turns = about(name)
    setup = Setup(
        *(name, build, turns, 3, 3 * turns),
        **{"chat": chat, "tools": tools, "window": window, "max_length": ROOMY},
        style=data.draw(st.sampled_from(["compact", "paper"])),
    )
    policy = CyclingPolicy(data.draw(replies(name)), chat.end_ids, chat.decode)
    groups = asyncio.run(run_groups(policy, setup, [1, 10_001], 2, (0, "train", 0), concurrency=1))
    samples, episodes = to_samples(groups)
    assert not any(episode.failed for episode in episodes), [each.error for each in episodes]
    check(episodes, samples)
    if window == 0:
        assert len(samples) == len(episodes)
