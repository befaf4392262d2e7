"""Programs outside: they fetch tasks, call the policy and post rewards."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ragen.chat.chat import Chat
from ragen.cli.main import main
from ragen.cluster.process_engine import SpreadSampler
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.seeding import TRAIN_LEVELS
from ragen.core.types import Episode
from ragen.envs.registry import make
from ragen.gateway import outside
from ragen.gateway.outside import TOKEN, Outside
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup, make_setup
from tests.scripted_policy import ScriptedPolicy
from tests.tiny import tiny_tokenizer

NAMES = ("talk", "fail", "silent", "late", "twice")
Program = Callable[["Client", Mapping[str, Any]], None]


class Client:
    """What a program does, with the standard library."""

    def __init__(self, invitation: str, token: str = "") -> None:
        self.url = invitation.partition("POST ")[2].partition("/episodes")[0]
        self._token = token

    def post(self, path: str, key: str, host: str = "", **body: object) -> Any:
        headers = {"Authorization": f"Bearer {key}"} | ({"Host": host} if host else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def refusal(self, path: str, key: str, host: str = "") -> int:
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.post(path, key, host)
        return refused.value.code

    def work(self, program: Program) -> int:
        """Work until the run is over; returns the number of episodes."""
        count = 0
        while episode := self.post("/episodes", self._token):
            assert episode["base_url"] == self.url
            program(self, episode)
            count += 1
        return count


def do_task(client: Client, episode: Mapping[str, Any]) -> None:
    """Do what the task says."""
    key, do = episode["key"], episode["task"]["do"]
    if do != "silent":
        hello = [{"role": "user", "content": "Hello."}]
        client.post("/chat/completions", key, model="policy", messages=hello)
    if do == "fail":
        client.post("/reward", key, error="it lost its way")
    elif do != "late":
        client.post("/reward", key, reward=0.5, success=True)
    if do == "twice":
        code = client.refusal("/reward", key)
        assert code == 410


@pytest.fixture(autouse=True)
def _ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "LAST_S", 0.1)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tiny_tokenizer("chatml"), think=False)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("outside") / "tasks.jsonl"
    names = ["held out", *NAMES[:4], "held out, too", *NAMES[4:]]
    path.write_text("\n".join(json.dumps({"do": name}) for name in names))
    return str(path)


def setup_of(chat: Chat, tasks: str) -> Setup:
    given = {
        "env.name": "agent:outside",
        "env.params": {"tasks": tasks, "address": "127.0.0.1:0"},
        "env.timeout_s": 0.4,
        "rollout.max_tokens": 40,
        "prompt.think": False,
    }
    return make_setup(merge(None, given), chat)


def policy_of(chat: Chat) -> ScriptedPolicy:
    return ScriptedPolicy(lambda prompt: "Hi.", lambda text: (*chat.encode_text(text), chat.end))


def play(
    chat: Chat, tasks: str, *names: str, programs: int, members: int = 1
) -> tuple[list[Episode], list[int]]:
    """Episodes of tasks by programs in threads, and how many each program had."""
    setup, counts = setup_of(chat, tasks), list[int]()
    invitation = setup.invite()
    at_work = [
        Thread(target=lambda: counts.append(Client(invitation).work(do_task)))
        for _ in range(programs)
    ]
    for each in at_work:
        each.start()
    levels = [TRAIN_LEVELS + NAMES.index(name) for name in names]
    groups = asyncio.run(run_groups(policy_of(chat), setup, levels, members, (0, "t")))
    setup.close()
    for each in at_work:
        each.join()
    return [episode for group in groups for episode in group.episodes], counts


def test_programs_fetch_tasks_and_each_episode_ends_as_its_page_says(
    chat: Chat, tasks: str
) -> None:
    episodes, counts = play(chat, tasks, *NAMES, programs=3)
    assert [(each.stop_reason, each.reward, each.success) for each in episodes] == [
        ("solved", 0.5, True),
        ("failed", 0.0, False),
        ("error", 0.0, False),
        ("timeout", 0.0, False),
        ("solved", 0.5, True),
    ]
    assert episodes[1].error == "it lost its way"
    assert "no reward was posted in 0.4 s" in (episodes[3].error or "")
    assert (len(counts), sum(counts)) == (3, len(NAMES))


def test_episodes_do_not_depend_on_the_programs_that_play_them(chat: Chat, tasks: str) -> None:
    def seeds(programs: int) -> list[int]:
        found = play(chat, tasks, "talk", "twice", programs=programs, members=2)[0]
        return [each.turns[0].prompt.seed for each in found]

    assert seeds(1) == seeds(3)


def test_a_program_that_leaves_while_it_waits_takes_no_episode() -> None:
    async def script() -> None:
        with closing(Outside("127.0.0.1:0")) as server:
            client = Client(server.invitation)
            port = server.listening.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)) as gone:
                gone.sendall(b"POST /v1/episodes HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await asyncio.to_thread(gone.recv, 9)
                gone.shutdown(socket.SHUT_WR)
                while await asyncio.to_thread(gone.recv, 999):
                    pass  # until the server has noticed and closes its side
            withdrawn = asyncio.create_task(server.offer({"n": 0}, "k0", 9.0))
            await asyncio.sleep(0)
            withdrawn.cancel()
            await asyncio.wait([withdrawn])
            offered = asyncio.create_task(server.offer({"n": 1}, "k1", 0.01))
            fetched = await asyncio.to_thread(client.post, "/episodes", "")
            assert (fetched["task"], fetched["key"]) == ({"n": 1}, "k1")
            assert (await offered).timed_out
            assert [client.refusal("/reward", key) for key in ("", "1-forged")] == [401, 401]

    asyncio.run(script())


def test_other_machines_need_the_token_to_fetch_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(RagenError, match=f"put a token into the environment variable {TOKEN}"):
        Outside("0.0.0.0:0")
    with pytest.raises(RagenError, match="'8000' is no address"):
        Outside("8000")
    with closing(Outside("localhost:0")) as server:
        assert Client(server.invitation).refusal("/episodes", "", host="evil.example") == 403
    monkeypatch.setenv(TOKEN, "a long token")
    with closing(Outside("127.0.0.1:0")) as server:
        client = Client(server.invitation)
        assert server.invitation.endswith(f"and the token in {TOKEN}")
        assert client.refusal("/episodes", "") == client.refusal("/episodes", "wrong") == 401
        with pytest.raises(urllib.error.HTTPError, match="401"):  # of the key, not of the token
            client.post("/chat/completions", "1-forged", host="evil.example")
        Thread(target=server.close).start()
        assert client.post("/episodes", "a long token") is None


def test_one_process_of_several_listens(chat: Chat, tasks: str) -> None:
    """The children of a spread sampler cannot have the same address."""
    own = setup_of(chat, tasks)
    spread = SpreadSampler(policy_of(chat), [None])  # type: ignore[arg-type, list-item]

    async def script() -> list[Episode]:
        client = Client(own.invite())
        working = asyncio.create_task(asyncio.to_thread(client.work, do_task))
        groups = await run_groups(spread, own, [TRAIN_LEVELS] * 2, 1, (0, "t"))
        await asyncio.to_thread(own.close)
        assert await working == 2
        return [each for group in groups for each in group.episodes]

    assert all(each.success for each in asyncio.run(script()))


def test_parameters_that_belong_to_another_kind_of_agent_are_refused(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(RagenError, match="leave python and processes"):
        make("agent:outside", tasks=str(tasks), python="python3")
    with pytest.raises(RagenError, match="address is for an agent outside"):
        make("agent:true", tasks=str(tasks), address="127.0.0.1:1")


def test_the_command_trains_with_an_agent_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"a": 1}\n{"a": 2}\n')
    given = ["gateway", "a/model", "--tasks", str(tasks), "--port", "8123", "--dry-run"]
    assert main([*given, "--rollout.max_tokens", "40"]) == 0
    shown = capsys.readouterr().out
    assert 'name = "agent:outside"' in shown and 'address = "127.0.0.1:8123"' in shown
    assert 'path = "a/model"' in shown
    assert main(["gateway", "a/model", "--dry-run"]) == 2
    assert "an agent needs tasks" in capsys.readouterr().err
