"""An environment on a server: RAGEN's own client, limits, access, and environments that fail."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from ragen.core.errors import RagenError
from ragen.core.types import Episode
from ragen.envs.adapters import openenv as client
from ragen.envs.adapters.adapted import _named
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.envs.sorting import Sorting
from ragen.envs.tools import write_call
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, random_player
from ragen.rollout.setup import Setup
from ragen.serving import connections, openenv
from ragen.serving.security import AccessControl
from tests.serving.served import TOKEN, Talk, as_process, in_thread, printed_by, wait_until

pytest.importorskip("websockets", reason="needs the extra openenv")
from websockets.exceptions import InvalidStatus

ROGUE = f"{Path(__file__).parents[1] / 'rogue.py'}:Rogue"


@pytest.fixture(autouse=True)
def no_server_is_known() -> None:
    """Another test may have had a server on the same port."""
    client._about.cache_clear()
    _named.cache_clear()


def play(name: str) -> list[Episode]:
    """Two episodes of random play on each of three levels, in the environment's budgets."""
    env = make(name)
    budgets = {"turns": env.max_turns, "actions": env.max_actions}
    setup = Setup(name, lambda: make(name), actions_per_turn=env.actions_per_turn, **budgets)
    policy = PlayerPolicy(random_player, setup.think, setup.prefill)
    groups = asyncio.run(run_groups(policy, setup, [1, 2, 3], 2, (0, "eval")))
    return [episode for group in groups for episode in group.episodes]


def what_happened(episodes: list[Episode]) -> list[Any]:
    """Prompts, actions, observations, rewards and ends."""
    return [
        (
            [(t.prompt.messages, t.observation, t.actions_executed, t.reward) for t in each.turns],
            (each.stop_reason, each.success, each.error, each.final_observation),
        )
        for each in episodes
    ]


# RAGEN's own client


@pytest.mark.parametrize("name", ["frozen-lake", "bandit", "manor"])
def test_the_client_plays_as_in_this_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FrozenLake has random events, Bandit names its actions by level, Manor has long episodes."""
    monkeypatch.setenv("OPENENV_TOKEN", TOKEN)
    with in_thread(name, token=TOKEN) as (url, _):
        assert what_happened(play(f"openenv:{url}")) == what_happened(play(name))
        check(make(f"openenv:{url}"), levels=1)


def test_free_text_and_a_reward_without_success() -> None:
    """A purchase with a part of the score is an end with a positive reward, and no success."""
    generator, partial = np.random.default_rng(0), 0
    with in_thread("webshop") as (url, _):
        there, here = make(f"openenv:{url}"), make("webshop")
        assert there.actions is None
        for level in range(30):
            assert there.reset(seed=level)[0] == here.reset(seed=level)[0]
            for _ in range(9):
                action = here.random_action(generator)
                assert action is not None
                answer, expected = there.step(action), here.step(action)
                assert answer[:4] == expected[:4]
                assert answer[4]["success"] == expected[4]["success"]
                if expected[2]:
                    partial += 0 < expected[1] < 1
                    break
        there.close()
    assert partial > 0


def test_another_environment_at_the_same_url_is_another_one() -> None:
    """What runs and baselines record of it would otherwise pass for the first one's."""
    with in_thread("bandit") as (url, _):
        first = client.OpenEnvEnv.find(url)
        client._about.cache_clear()
        assert client.OpenEnvEnv.find(url) == first
    assert first[1].startswith("bandit ")
    with in_thread("frozen-lake") as (other, _), in_thread("bandit") as (same, _):
        assert client.OpenEnvEnv.find(other) != first == client.OpenEnvEnv.find(same)


# Access


@pytest.mark.parametrize("token", [None, "another-token"])
def test_without_the_token_there_is_one_line(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("OPENENV_TOKEN", token)
    with in_thread("bandit", token=TOKEN) as (url, _):
        with pytest.raises(RagenError, match="refuses the token") as no:
            make(f"openenv:{url}")
        with pytest.raises(InvalidStatus, match="HTTP 401"):
            Talk(url, authorization=f"Bearer {token}")
        assert str(no.value).endswith("put its token into the environment variable OPENENV_TOKEN")
        for path in ("/health", "/metadata", "/schema", "/state", "/nothing"):
            answer = httpx.get(url + path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert httpx.get(f"{url}{path}?token={TOKEN}").status_code == 401


@pytest.mark.parametrize("url", [f"http://x:{TOKEN}@h:1", f"http://h:1/?token={TOKEN}"])
def test_a_token_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(RagenError, match="environment variable OPENENV_TOKEN") as refused:
        make(f"openenv:{url}")
    assert TOKEN not in str(refused.value)


def test_a_server_that_repeats_the_token_reveals_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "Sideways")
    with in_thread("sokoban", token="Sideways") as (url, _):
        env = make(f"openenv:{url}")
        env.reset(seed=1)
        with pytest.raises(RuntimeError, match=r"no action '\*\*\*': there are Up, Down"):
            env._ask("step", {"text": "Sideways"})  # type: ignore[attr-defined]


def test_only_this_machine_and_no_page_of_others_has_access() -> None:
    with in_thread("bandit") as (url, _):
        assert httpx.get(f"{url}/health").json() == {"status": "healthy"}
        assert httpx.get(f"{url}/metadata").json()["name"] == "bandit"
        assert httpx.get(f"{url}/state").json()["max_turns"] == 1
        assert httpx.get(f"{url}/reset").status_code == 404
        assert httpx.put(f"{url}/state").status_code == 405
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            assert httpx.get(f"{url}/health", headers=headers).status_code == 403
        for origin in ("null", "http://127.0.0.1:1"):
            with pytest.raises(InvalidStatus, match="HTTP 403"):
                Talk(url, origin=origin)
        with pytest.raises(InvalidStatus, match="HTTP 403"):
            Talk(url, **{"sec-fetch-site": "same-site"})
        assert Talk(url, origin=url).ask("state")["step_count"] == 0


# Limits


def test_a_session_too_many_is_refused_with_a_message() -> None:
    with in_thread("bandit", most=2) as (url, served):
        first, second = Talk(url), Talk(url)
        assert first.ask("reset", seed=1)["done"] is False and second.ask("state")
        third = Talk(url)
        refused = third.hear()
        assert refused == {"message": "all 2 sessions are taken", "code": "CAPACITY_REACHED"}
        assert third.is_over()
        with pytest.raises(RuntimeError, match="all 2 sessions are taken"):
            make(f"openenv:{url}").reset(seed=1)
        second.socket.close()
        wait_until(lambda: served.num_sessions == 1)
        assert Talk(url).ask("reset", seed=1) == first.ask("reset", seed=1)


def test_a_client_that_is_gone_before_its_session_begins_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with in_thread("bandit") as (url, served):
        address = "127.0.0.1", int(url.rpartition(":")[2])
        for _ in range(8):
            with socket.create_connection(address) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(
                    f"GET /ws HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
                    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                    "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n".encode()
                )
        talk = Talk(url)
        assert talk.ask("reset", seed=1)["done"] is False and served.num_sessions == 1
    assert "Traceback" not in capfd.readouterr().err


def test_an_idle_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "IDLE_S", 0.3)
    with in_thread("bandit") as (url, served):
        idle, busy = Talk(url), Talk(url)
        for _ in range(4):
            busy.ask("reset", seed=1)
            time.sleep(0.1)
        assert idle.hear() == {"message": "the session was idle for 0.3 s", "code": "SESSION_ERROR"}
        assert idle.is_over() and served.num_sessions == 1


def test_a_session_outlives_the_wait_for_requests_and_many_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_S", 0.3)
    with in_thread("bandit") as (url, _):
        talk = Talk(url)
        port = int(url.rpartition(":")[2])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        time.sleep(0.8)
        assert talk.ask("reset", seed=1)["done"] is False
        for each in strangers:
            each.close()


def test_messages_that_are_no_messages() -> None:
    with in_thread("bandit") as (url, served):
        talk = Talk(url)
        for message in ("", "{", b"\x00", '{"type": "reset", "data": 3}', "1e999"):
            talk.socket.send(message)
            assert talk.hear()["code"] in ("INVALID_JSON", "VALIDATION_ERROR")
        talk.socket.send("x" * (connections.MESSAGE_BYTES + 1))
        assert talk.is_over()
        last = Talk(url)
        last.socket.send('{"type": "close"}')
        assert last.is_over()
        wait_until(lambda: served.num_sessions == 0)


# Environments that fail


def test_an_environment_that_raises_or_hangs_fails_its_session_only() -> None:
    """Levels divisible by 2 fail in their first step; the command reports each in a line."""
    params = ("--env.params.every", "2", "--env.timeout_s", "0.5")
    for misdeed, said in (("raise", "by zero"), ("hang", "user code took longer than 0.5 s")):
        with as_process(ROGUE, *params, "--env.params.misdeed", misdeed) as (url, process):
            other = Talk(url)
            other.ask("reset", seed=1)
            talk = Talk(url)
            assert talk.ask("reset", seed=2)["observation"]["text"] == "A...."
            failed = talk.ask("step", text="Right")
            assert failed["code"] == "EXECUTION_ERROR" and said in failed["message"]
            assert "Traceback" not in failed["message"] and talk.is_over()
            assert other.ask("step", text="Right")["observation"]["text"] == ".A..."
            process.send_signal(signal.SIGINT)
            assert process.wait(15) == 0
            assert process.stderr is not None
            (line,) = process.stderr.read().splitlines()
            assert line.startswith("ragen: a session failed: ") and said in line


def test_an_isolated_environment_that_hangs_holds_up_nobody() -> None:
    params = ("--env.params.every", "2", "--env.timeout_s", "60", "--env.isolate", "true")
    with as_process(ROGUE, *params, "--env.params.misdeed", "hang") as (url, process):
        hanging, other = Talk(url), Talk(url)
        hanging.ask("reset", seed=2)
        hanging.socket.send('{"type": "step", "data": {"text": "Right"}}')
        for _ in range(10):
            other.ask("reset", seed=1)
            assert other.ask("step", text="Right")["observation"]["text"] == ".A..."
        with pytest.raises(TimeoutError):
            hanging.socket.recv(timeout=0)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0  # nor the end of the server


def test_a_process_of_an_environment_that_dies_fails_its_session_only() -> None:
    params = ("--env.params.every", "2", "--env.isolate", "true", "--env.params.misdeed", "die")
    with as_process(ROGUE, *params) as (url, _):
        for _ in range(2):
            talk = Talk(url)
            talk.ask("reset", seed=2)
            assert "process ended (signal" in talk.ask("step", text="Right")["message"]
        assert Talk(url).ask("reset", seed=1)["done"] is False


def test_an_environment_that_cannot_be_made_refuses_the_session() -> None:
    made = []

    def once() -> Any:
        made.append(1)
        if len(made) > 1:
            raise KeyError("no more")
        return make("bandit")

    with in_thread("bandit") as (url, served):
        served._setup = Setup("bandit", once)
        assert Talk(url).ask("reset", seed=1)["done"] is False
        refused = Talk(url).hear()
        assert refused == {"message": "KeyError: 'no more'", "code": "FACTORY_ERROR"}
        wait_until(lambda: served.num_sessions <= 1)


# The command


def test_beyond_this_machine_there_is_always_a_token() -> None:
    with printed_by("bandit", "--host", "0.0.0.0") as (command, process):
        secret, _, url = command.partition(" ")
        token = secret.removeprefix("OPENENV_TOKEN=")
        here = f"http://127.0.0.1:{url.rpartition(':')[2]}"
        assert httpx.get(f"{here}/health").status_code == 401
        bearer = {"authorization": f"Bearer {token}"}
        assert httpx.get(f"{here}/health", headers=bearer).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0


def test_a_token_of_the_users_own_is_not_printed() -> None:
    with printed_by("bandit", OPENENV_TOKEN=TOKEN) as (command, _):
        assert command.startswith("OPENENV_TOKEN=$OPENENV_TOKEN ")


def test_an_environment_with_tools_plays_as_in_this_process() -> None:
    """A call, a wrong call, and an answer; a chat template gets the same tools."""
    own = Sorting()
    actions = [
        write_call("compare", first="A", second="B"),
        write_call("compare", first="A", second="Z"),
        "A B C D",
    ]
    with in_thread("sorting") as (url, _):
        served = make(f"openenv:{url}")
        assert served.tools == own.tools and served.actions is None
        assert (served.max_turns, served.actions_per_turn) == (own.max_turns, own.actions_per_turn)
        for level in range(3):
            assert served.reset(seed=level)[0] == own.reset(seed=level)[0]
            assert (served.goal, served.rules) == (own.goal, own.rules)
            for action in actions:
                (*seen, found), (*expected, info) = served.step(action), own.step(action)
                assert seen == expected and found["success"] == info["success"]
            assert seen[2], "an answer ends the episode"
        served.close()


@pytest.mark.parametrize("isolated", [False, True])
def test_there_are_files_for_all_connections(
    isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 8 sessions, and as many as the socket admits besides."""
    asked: list[int] = []
    seen: list[int] = []
    monkeypatch.setattr(openenv, "_make_room", lambda files, most: asked.append(files))

    class Noted:
        def __init__(self, app: AccessControl, *_: Any, **__: Any) -> None: ...

        def serve_on(self, listening: connections.Listening) -> None:
            seen.append(listening.most)

    monkeypatch.setattr(openenv, "Server", Noted)
    setup = Setup("bandit", lambda: make("bandit"), workers=isolated or None)  # type: ignore[arg-type]
    openenv.serve(setup, "127.0.0.1", 0, 8, lambda *_: None, lambda _: None)
    assert asked[0] >= seen[0] + 8 * (4 if isolated else 1) + openenv.RESERVE


@pytest.mark.parametrize(
    ("scheme", "port", "status"), [("https", 443, 200), ("http", 80, 200), ("https", 80, 403)]
)
def test_the_own_port_of_a_scheme_may_be_left_out(scheme: str, port: int, status: int) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("yes")(scope, receive, send)

    client = TestClient(AccessControl(answer, port, None, set()), f"{scheme}://localhost")
    assert client.get("/").status_code == status


def test_a_server_ends_with_its_sessions() -> None:
    with as_process("bandit", OPENENV_TOKEN=TOKEN) as (url, process):
        talk = Talk(url, authorization=f"Bearer {TOKEN}")
        talk.ask("reset", seed=1)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert talk.is_over()
        process.wait(15)
        assert time.monotonic() - begun < 5
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
