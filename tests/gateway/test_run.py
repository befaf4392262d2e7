"""Whole episodes of existing agents: processes, the server, the policy, and the run around them."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import time
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen.chat.chat import Chat
from ragen.cluster.process_engine import _fields
from ragen.config.extensions import load
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Group, Prompt
from ragen.envs.adapters.agent import AgentEnv, read_tasks, read_verdict, split_tasks
from ragen.envs.registry import make
from ragen.envs.tools import tool_schema, write_call
from ragen.evaluation.baselines import files_of
from ragen.gateway.server import Gateway
from ragen.gateway.session import Budget, Session
from ragen.rollout.episode import require_room
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, random_player
from ragen.rollout.policies import NoCompletion
from ragen.rollout.setup import Setup, make_chat, make_setup
from ragen.sampling.weighted_policy import WeightedPolicy
from ragen.settings.code import load_code, refuse_changed
from ragen.storage.stored_episodes import episode_rows
from ragen.web.server import make_room
from tests.gateway.agents_at_work import TASKS
from tests.scripted_policy import ScriptedPolicy
from tests.tiny import tiny_tokenizer
from tests.tool_templates import TOOL_TEMPLATES, tool_tokenizer

AGENT = Path(__file__).with_name("agents_at_work.py")


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tiny_tokenizer("chatml"), think=False)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("agent") / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(task) for task in TASKS))
    return str(path)


def setup_of(chat: Chat, tasks: str, timeout_s: float) -> Setup:
    given = {
        "env.name": f"agent:{AGENT}:main",
        "env.params": {"tasks": tasks, "processes": 1},
        "env.max_turns": 3,
        "env.timeout_s": timeout_s,
        "rollout.max_tokens": 40,
        "prompt.think": False,
    }
    return make_setup(merge(None, given), chat)


@pytest.fixture(scope="module")
def setup(chat: Chat, tasks: str) -> Any:
    with closing(setup_of(chat, tasks, 1.0)) as made:
        yield made


def policy_of(chat: Chat) -> ScriptedPolicy:
    def reply(prompt: Prompt) -> str:
        asked = str(prompt.messages[-1]["content"])
        if asked == "Fail.":
            raise NoCompletion("the server is gone")
        return f"You said: {asked}"

    return ScriptedPolicy(reply, lambda text: (*chat.encode_text(text), chat.end))


def play(setup: Setup, chat: Chat, names: list[str]) -> dict[str, Group]:
    """One episode of each task that is named, all at once."""
    wanted = range(10_000, 10_000 + len(TASKS))
    env = make(setup.env, **setup.params)
    levels = {json.loads(env.reset(seed=level)[0])["do"]: level for level in wanted}
    groups = asyncio.run(
        run_groups(policy_of(chat), setup, [levels[name] for name in names], 1, (0, "t"))
    )
    return dict(zip(names, groups, strict=True))


def test_agents_work_at_once_and_each_ends_as_its_page_says(setup: Setup, chat: Chat) -> None:
    names = ["talk", "raise late", "raise early", "silent", "hang", "too many", "no completion"]
    before = dict(os.environ)
    played = {name: group.episodes[0] for name, group in play(setup, chat, names).items()}
    assert os.environ == before  # a verifier, which plays here, sees no key
    ends = {name: (each.stop_reason, each.reward) for name, each in played.items()}
    assert ends == {
        "talk": ("solved", 1.0),
        "raise late": ("failed", 0.0),
        "raise early": ("error", 0.0),
        "silent": ("error", 0.0),
        "hang": ("timeout", 0.0),
        "too many": ("solved", 1.0),
        "no completion": ("request", 0.0),
    }
    talk = played["talk"]
    assert [turn.completion.text for turn in talk.turns] == ["You said: Hello.", "You said: And?"]
    assert [turn.call.parent for turn in talk.turns if turn.call] == [-1, 0]
    assert "lost its way" in (played["raise late"].error or "")
    assert [turn.call.role for turn in played["too many"].others if turn.call] == ["budget"]
    assert len(played["too many"].turns) == 3
    rows = episode_rows(played["too many"], "train")
    assert [row["role"] for row in rows.turns] == ["agent"] * 3 + ["budget"]
    assert rows.episode["num_turns"] == 3


def test_the_same_seed_gives_the_same_seeds_of_calls_in_any_order(setup: Setup, chat: Chat) -> None:
    def seeds() -> list[int]:
        group = play(setup, chat, ["parallel"])["parallel"]
        return sorted(turn.prompt.seed for turn in group.episodes[0].turns)

    assert seeds() == seeds()


def test_the_task_of_an_agent_is_not_its_prompt(setup: Setup) -> None:
    assert setup.start is not None
    require_room(replace(setup, max_length=1))


def test_an_agent_at_work_stays_in_its_process(setup: Setup, chat: Chat) -> None:
    """Other processes that play get the rest of the set-up, and have an agent of their own."""
    play(setup, chat, ["talk"])
    sent = pickle.loads(pickle.dumps(_fields(setup)))
    assert sent["env"] == setup.env and "agent" not in sent


@pytest.mark.parametrize("template", sorted(TOOL_TEMPLATES))
def test_a_policy_does_not_end_a_reply_at_the_token_that_begins_a_call(
    template: str, tasks: str
) -> None:
    """The tools come with the requests, and the policy's own chat has none."""
    config = merge(None, {"env.name": "agent:true", "env.params": {"tasks": tasks}})
    chat = make_chat(config, tool_tokenizer(template))
    offering = chat.offering([tool_schema("guess", "Guess.", {"type": "object"})])
    assert offering.calls is not None
    reply = offering.calls.write([write_call("guess", n=4)])
    ids = (*offering.encode_text(reply), offering.end)
    completion = WeightedPolicy(chat, 999)._completion(ids, (0.0,) * len(ids))
    assert (completion.token_ids, completion.finish_reason) == (ids, "stop")


def test_a_verifier_rewards_the_answers(chat: Chat, tasks: str) -> None:
    with closing(make(f"agent:{AGENT}:main", tasks=tasks, verifier=f"{AGENT}:verify")) as env:
        env.reset(seed=10_000)
        assert env.step(json.dumps({"answer": "right"}))[1:4] == (1.0, True, False)
        env.reset(seed=10_000)
        assert env.step(json.dumps("wrong"))[1:4] == (0.0, True, False)
        env.reset(seed=10_000)
        assert env.step(json.dumps({"reward": 0.5, "success": True}))[4]["success"]


def test_tasks_are_held_out_for_evaluation(tasks: str) -> None:
    env = make(f"agent:{AGENT}:main", tasks=tasks)
    assert isinstance(env, AgentEnv)
    training = {env.reset(seed=10_000 + n)[0] for n in range(100)}
    evaluation = {env.reset(seed=123 + n)[0] for n in range(100)}
    assert training.isdisjoint(evaluation)
    assert len(training) + len(evaluation) == len(TASKS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "has no task"), ("{}\n[1]\n", "line 2: a task is a JSON object"), ("{", "line 1")],
)
def test_a_file_of_tasks_that_cannot_be_read_is_refused(
    text: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(RagenError, match=complaint):
        read_tasks(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt.window", 3),
        ("prompt.summary", "actions"),
        ("prompt.history_thoughts", "drop"),
    ],
)
def test_keys_of_prompts_that_the_agent_writes_are_refused(key: str, value: object) -> None:
    with pytest.raises(RagenError, match=f"{key} = .* has no effect"):
        merge(None, {"env.name": "agent:true", key: value})
    merge(None, {"env.name": "bandit", "prompt.window": 2, key: value})


def test_a_changed_file_of_tasks_is_read_anew_and_noticed(tmp_path: Path) -> None:
    def numbered(count: int) -> str:
        return "".join(f'{{"n": {n}}}\n' for n in range(count))

    (tmp_path / "tasks.jsonl").write_text(numbered(5))
    (tmp_path / "checks.py").write_text("def verify(task, answer):\n    return 1.0\n")
    params = {"tasks": str(tmp_path / "tasks.jsonl"), "verifier": f"{tmp_path}/checks.py:verify"}
    config = merge(None, {"env.name": f"agent:{AGENT}:main", "env.params": params})
    config = load_code(config)
    refuse_changed(config)
    before = files_of(params)
    assert [name for name, _, _ in before] == [params["tasks"], f"{tmp_path}/checks.py"]
    assert len(split_tasks(params["tasks"], "")[1]) == 1
    (tmp_path / "tasks.jsonl").write_text(numbered(15))
    with pytest.raises(RagenError, match=r"tasks.jsonl has changed since the run began"):
        refuse_changed(config)
    assert len(split_tasks(params["tasks"], "")[1]) == 3
    assert files_of(params) != before  # what an evaluation keeps is of the tasks before
    (tmp_path / "tasks.jsonl").write_text(numbered(5))
    (tmp_path / "checks.py").write_text("def verify(task, answer):\n    return 0.0\n")
    load.cache_clear()
    with pytest.raises(RagenError, match=r"checks.py has changed since the run began"):
        refuse_changed(config)


@pytest.mark.parametrize("text", ["/" + "a" * 400, "/a\0b", "", "relative.jsonl"])
def test_a_parameter_that_is_no_whole_path_is_no_file(text: str) -> None:
    assert files_of({"prompt": text}) == []


@pytest.mark.parametrize(
    ("limits", "most", "raised"),
    [((1024, 2**20), 4224, [4224]), ((256, 512), 512, [512]), ((9999, 9999), 4224, [])],
)
def test_a_server_opens_as_many_files_as_it_may(
    limits: tuple[int, int], most: int, raised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    given: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: given.append(new))
    assert make_room(4224) == most
    assert given == [(each, limits[1]) for each in raised]


def test_a_player_is_refused_in_one_line(setup: Setup) -> None:
    with pytest.raises(RagenError, match="an agent calls a language model"):
        asyncio.run(run_groups(PlayerPolicy(random_player), setup, [0], 1, (0,)))


def test_an_answer_without_a_verifier_is_no_reward() -> None:
    assert read_verdict("42") is None and read_verdict(None) is None
    assert read_verdict(0.25) == (0.25, False)


@pytest.mark.slow
def test_the_gateway_costs_little_beside_sampling(
    chat: Chat, tasks: str, record_property: Any
) -> None:
    """128 agents at once with two calls each: the CPU of the run's process, not of the agents."""
    policy = policy_of(chat)
    with closing(setup_of(chat, tasks, 120.0)) as setup:
        env = make(setup.env, **setup.params)
        talk = next(n for n in range(10_000, 10_099) if '"talk"' in env.reset(seed=n)[0])
        asyncio.run(run_groups(policy, setup, [talk], 1, (0, "first")))
        began = time.process_time()
        groups = asyncio.run(run_groups(policy, setup, [talk] * 16, 8, (0, "t"), 128))
        cost_s = (time.process_time() - began) / 256
    record_property("milliseconds", 1000 * cost_s)
    assert all(each.success for group in groups for each in group.episodes)
    assert cost_s < 0.01  # 1.7 to 1.8 ms beside other work


def ask(
    base_url: str, key: str, path: str = "/chat/completions", role: str = "", **body: object
) -> Any:
    given = {"model": "policy", "messages": [{"role": "user", "content": "Hi."}], **body}
    headers = {"Authorization": f"Bearer {key}", "X-Ragen-Role": role}
    request = urllib.request.Request(base_url + path, json.dumps(given).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_key_opens_its_own_episode_while_it_is_played(chat: Chat) -> None:
    async def complete(prompt: Prompt, is_first: bool) -> Completion:
        return await policy_of(chat).complete(prompt)

    async def script() -> None:
        with closing(Gateway()) as gateway:
            session = Session(chat, Budget(9, 40, 999), complete, lambda ids, times: 0)
            with gateway.session(session) as key:
                status, text = await asyncio.to_thread(ask, gateway.base_url, key)
                assert status == 200 and "You said: Hi." in text
                status, text = await asyncio.to_thread(
                    lambda: ask(gateway.base_url, key, stream=True)
                )
                assert status == 200 and text.endswith("data: [DONE]\n\n")
                status, _ = await asyncio.to_thread(
                    lambda: ask(gateway.base_url, key, model="half a pair: \ud800")
                )
                assert status == 200
                named = await asyncio.to_thread(lambda: ask(gateway.base_url, key, model="a/b/c"))
                assert '"model": "a/b/c"' in named[1]
                models = urllib.request.Request(gateway.base_url + "/models")
                with await asyncio.to_thread(urllib.request.urlopen, models) as answer:
                    assert json.load(answer)["data"][0]["id"] == "policy"
                path = "/v1/messages"  # as clients of Anthropic, after any base URL
                status, text = await asyncio.to_thread(
                    lambda: ask(gateway.base_url, key, path, max_tokens=9)
                )
                assert status == 200 and "You said: Hi." in text
                path = "/messages/count_tokens"
                status, text = await asyncio.to_thread(ask, gateway.base_url, key, path)
                assert status == 200 and json.loads(text)["input_tokens"] > 3
                assert (await asyncio.to_thread(ask, gateway.base_url, "1-forged"))[0] == 401
                for role, expected in (("compaction", 200), ("judge", 400)):
                    status, text = await asyncio.to_thread(
                        lambda role=role: ask(gateway.base_url, key, role=role)
                    )
                    assert status == expected
                assert "x-ragen-role is one of agent, compaction, auxiliary" in text
            assert (await asyncio.to_thread(ask, gateway.base_url, key))[0] == 410

    asyncio.run(script())
