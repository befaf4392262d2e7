"""The same environment, played natively and by an agent through the gateway: the same tokens.

The agent is RAGEN's own loop over messages: it plays the environment, sends the conversation as
chat completions over HTTP, and knows no tokens. So the two ways differ in nothing but the gateway.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ragen.algorithms.samples import join
from ragen.chat.chat import Chat
from ragen.config.reading import merge
from ragen.core.types import Completion, Episode, Prompt
from ragen.gateway.agents import Outcome
from ragen.gateway.server import Gateway
from ragen.gateway.session import Session
from ragen.rollout.agent import play_task
from ragen.rollout.episode import play_episode
from ragen.rollout.setup import EpisodeSpec, Setup, make_setup
from ragen.sampling.local_sampler import Sampler
from tests.tiny import tiny_model, tiny_tokenizer

SPECS = [
    EpisodeSpec(10_000 + group, group, member, (0, "t")) for group in range(2) for member in (0, 1)
]


class Messages:
    """A policy that sends the messages of a prompt to the gateway, as any library would."""

    def __init__(self, base_url: str, key: str) -> None:
        self._url, self._key = f"{base_url}/chat/completions", key

    async def complete(self, prompt: Prompt) -> Completion:
        body = {
            "model": "policy",
            "messages": list(prompt.messages),
            "max_tokens": prompt.max_tokens,
        }
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)

        def ask() -> Any:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)

        choice = (await asyncio.to_thread(ask))["choices"][0]
        finish = "length" if choice["finish_reason"] == "length" else "stop"
        return Completion(None, None, choice["message"]["content"], finish, 0)


class PlayingAgent:
    """An agent that plays the environment of a set-up natively, by messages."""

    def __init__(self, setup: Setup, spec: EpisodeSpec) -> None:
        self._setup, self._spec = replace(setup, chat=None, prefilled=False), spec
        self._gateway = Gateway()
        self.played: Episode | None = None

    async def work(self, task: Mapping[str, Any], session: Session, timeout_s: float) -> Outcome:
        with self._gateway.session(session) as key:
            policy = Messages(self._gateway.base_url, key)
            self.played = await play_episode(policy, self._setup, self._spec)
        return Outcome({"reward": self.played.reward, "success": self.played.success}, None, False)

    def close(self) -> None:
        self._gateway.close()


async def both(policy: Sampler, setup: Setup, tasks: Setup, spec: EpisodeSpec) -> list[Episode]:
    policy.forget()
    native = await play_episode(policy, setup, spec)
    policy.forget()
    agent: Any = PlayingAgent(setup, spec)
    try:
        through = await play_task(policy, policy, replace(tasks, agent=agent), spec)
    finally:
        agent.close()
    return [native, through]


@pytest.mark.parametrize(
    ("env", "template"),
    [("countdown", "chatml"), pytest.param("bandit", "llama3", marks=pytest.mark.slow)],
)
def test_the_gateway_gives_the_tokens_of_native_play(
    env: str, template: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer(template)
    chat = Chat(tokenizer, think=True)
    sampler = Sampler(tiny_model(tokenizer), chat, slots=4, max_length=2048)
    given = {"rollout.max_tokens": 12, "model.max_length": 2048, "env.max_turns": 4}
    if env == "countdown":
        given |= {"env.max_actions": 4, "env.actions_per_turn": 1}
    setup = make_setup(merge(None, {"env.name": env, **given}), chat)
    tasks_file = tmp_path / "tasks.jsonl"
    tasks_file.write_text('{"n": 1}\n{"n": 2}\n')
    config = merge(
        None,
        {"env.name": "agent:true", "env.params.tasks": str(tasks_file), **given},
    )
    tasks = make_setup(config, chat)
    turns: dict[EpisodeSpec, int] = {}

    def native_seed(spec: EpisodeSpec, token_ids: object, times: int) -> int:
        turns[spec] = turns.get(spec, -1) + 1
        return spec.request_seed(turns[spec])

    monkeypatch.setattr(EpisodeSpec, "call_seed", native_seed)
    for spec in SPECS:
        native, through = asyncio.run(both(sampler, setup, tasks, spec))
        assert native.turns and not native.failed, native.error
        exchanges = [
            [(turn.prompt.token_ids, turn.completion) for turn in each.turns]
            for each in (native, through)
        ]
        assert exchanges[0] == exchanges[1]
        samples = [
            join([(t.prompt, t.completion) for t in each.turns], 0, 0) for each in (native, through)
        ]
        assert samples[0] == samples[1]
        assert len(samples[1]) == 1
        assert [turn.thought_span for turn in native.turns] == [
            turn.thought_span for turn in through.turns
        ]
        assert (native.reward, native.success) == (through.reward, through.success)
        links = [turn.call.link for turn in through.turns if turn.call is not None]
        assert links == ["first call"] + ["verbatim"] * (len(native.turns) - 1)
