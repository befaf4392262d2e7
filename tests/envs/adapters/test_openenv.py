"""OpenEnv's protocol against a server on this machine, which may be slow, or be gone."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest

from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.envs.adapters import openenv
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.envs.tools import write_call
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, random_player
from ragen.rollout.setup import Setup, make_setup
from tests.heart import beating

pytest.importorskip("websockets", reason="needs the extra openenv")
SCHEMA = {"action": {"properties": {"move": {"enum": ["left", "right"]}, "metadata": {}}}}


class Server:
    """A walk from 0: 3 is won, -3 lost. The seed says where it begins; `slow` never answers."""

    def __init__(self, schema=SCHEMA, port=0):
        from websockets.sync.server import serve

        self.schema, self.slow, self.sessions, self.pause = schema, False, 0, 0.0
        self.name, self.shown, self.farewell = "walk", "You are at {}.", None
        self._server = serve(
            self.session, "127.0.0.1", port, process_request=self.describe, close_timeout=0.1
        )
        self.port = self._server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._connections = []
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def describe(self, connection, request):
        about = {
            "/metadata": {"name": self.name, "description": "Walk to 3."},
            "/schema": self.schema,
        }
        if request.path in about:
            return connection.respond(HTTPStatus.OK, json.dumps(about[request.path]))
        return None

    def session(self, connection):
        self.sessions += 1
        self._connections.append(connection)
        place = 0
        for message in connection:
            asked = json.loads(message)
            time.sleep(3 if self.slow else self.pause)
            if self.farewell is not None:
                connection.close(1008, self.farewell)
                return
            if asked["type"] == "reset":
                place = asked["data"]["seed"] % 3 - 1
            elif asked["data"].get("move") not in ("left", "right"):
                said = {"type": "error", "data": {"message": "no such move", "code": "V"}}
                connection.send(json.dumps(said))
                continue
            else:
                place += 1 if asked["data"]["move"] == "right" else -1
            done = abs(place) == 3
            observation = {"text": self.shown.format(place), "metadata": {}}
            data = {"observation": observation, "reward": float(place == 3), "done": done}
            connection.send(json.dumps({"type": "observation", "data": data}))

    def drop(self):
        """Cut all sessions, as a server that is killed and started again does."""
        for connection in self._connections:
            connection.close_socket()
        self._connections.clear()

    def stop(self):
        self.drop()
        self._server.shutdown()


@pytest.fixture
def server():
    openenv._about.cache_clear()
    server = Server()
    yield server
    server.stop()


def play(server, timeout_s=5.0, spoil=lambda: None):
    """One episode of random play on each of three levels; `spoil` is called after each."""
    name = f"openenv:{server.url}"
    setup = Setup(
        name, lambda: make(name), turns=20, actions_per_turn=1, actions=20, timeout_s=timeout_s
    )
    policy = PlayerPolicy(random_player, setup.think, setup.prefill)
    episodes = []

    def ended(episode):
        episodes.append(episode)
        spoil()

    asyncio.run(run_groups(policy, setup, [1, 2, 3], 1, (0, "eval"), on_episode=ended))
    return episodes


def test_episodes_are_those_of_the_server(server):
    for episode in play(server):
        place = episode.level_seed % 3 - 1
        for turn in episode.turns:
            assert turn.observation == f"You are at {place}."
            place += 1 if turn.actions_executed == ("right",) else -1
            assert turn.reward == float(place == 3)
        assert (episode.terminated, episode.success) == (abs(place) == 3, place == 3)


def test_environment_keeps_the_contract(server):
    env = make(f"openenv:{server.url}")
    assert (env.rules, env.actions) == ("Walk to 3.", ("left", "right"))
    check(env, levels=2)


def test_a_slow_server_fails_episodes_and_not_the_run(server):
    def spoil():
        server.slow = not server.slow

    reasons = [episode.stop_reason for episode in play(server, 1.5, spoil)]
    assert reasons[1] == "timeout" and "timeout" not in (reasons[0], reasons[2])


def test_a_lost_session_is_opened_again_by_the_next_reset(server):
    env = make(f"openenv:{server.url}")
    env.reset(seed=1)
    server.drop()
    with pytest.raises(Exception, match="close frame"):
        env.step("left")
    with pytest.raises(RuntimeError, match="the session has ended"):
        env.step("left")
    assert env.reset(seed=1)[0] == "You are at 0." and server.sessions == 2
    env.close()


def test_free_text_becomes_the_field_and_json_the_whole_action(server):
    server.schema = {"action": {"properties": {"move": {"type": "string"}, "speed": {}}}}
    name = f"openenv:{server.url}"
    with pytest.raises(RagenError, match=re.escape("env.params.field = one of move, speed")):
        make(name)
    env = make(name, field="move")
    assert env.actions is None
    env.reset(seed=1)
    assert env.step("right")[0] == "You are at 1."
    assert env.step('{"move": "left"}')[0] == "You are at 0."
    with pytest.raises(RuntimeError, match="no such move"):
        env.step("up")
    env.close()


def test_another_server_is_one_line(server):
    for schema, message in (
        ([], "what answers there is not an OpenEnv server"),
        ({"action": {"properties": {"move": True}}}, "what answers there is not an OpenEnv server"),
        (
            {"action": {"properties": {}}, "tools": []},
            "an action has no field, and there are no tools",
        ),
    ):
        server.schema = schema
        openenv._about.cache_clear()
        with pytest.raises(RagenError, match=message):
            make(f"openenv:{server.url}")


def test_the_token_is_masked_in_whatever_the_server_says(server, monkeypatch):
    """It may repeat the token in an observation, with escapes, or as the reason of an end."""
    monkeypatch.setenv("OPENENV_TOKEN", 'a-"secret"')
    monkeypatch.setattr(server, "name", 'walk a-"secret"')
    server.shown = 'You have a-"secret".'
    env = make(f"openenv:{server.url}")
    assert openenv._about(server.url).name == "walk ***"
    assert env.reset(seed=1)[0] == "You have ***."
    server.farewell = 'no a-"secret"'
    with pytest.raises(RuntimeError, match=r"no \*\*\*") as ended:
        env.step("left")
    assert "secret" not in str(ended.value)


def test_no_server_is_one_line():
    for url, message in (
        ("http://127.0.0.1:9", "no OpenEnv server answers there"),
        ("http://host:abc", "no OpenEnv server answers there"),
        ("http://[::1", "the URL of a server is expected"),
    ):
        with pytest.raises(RagenError, match=message) as error:
            make(f"openenv:{url}")
        assert "\n" not in str(error.value)


def test_a_refusal_has_the_servers_reason(monkeypatch):
    refused = httpx.Response(
        403, json={"error": "only localhost"}, request=httpx.Request("GET", "/")
    )
    monkeypatch.setattr(httpx.Client, "request", lambda *_, **__: refused)
    with pytest.raises(RagenError, match=r"HTTP 403: .*only localhost") as error:
        make("openenv:http://localhost:9000")
    assert "\n" not in str(error.value)


def test_episodes_wait_for_the_server_side_by_side_and_the_loop_goes_on(server):
    server.pause = 0.1
    setup = make_setup(merge(None, {"env.name": f"openenv:{server.url}", "env.timeout_s": 2}), None)
    policy = PlayerPolicy(random_player, setup.think, setup.prefill)

    async def play_all():
        groups = await run_groups(policy, setup, range(1, 9), 1, (0, "eval"))
        return [each for group in groups for each in group.episodes]

    began = time.monotonic()
    episodes, gap = asyncio.run(beating(play_all()))
    num_steps = sum(len(turn.actions_executed) for each in episodes for turn in each.turns)
    assert all(each.error is None for each in episodes) and num_steps > 24
    assert time.monotonic() - began < 0.1 * num_steps / 2, "one after the other takes twice that"
    assert gap < 0.1, "no wait stops the loop"
    server.slow = True
    assert {each.stop_reason for each in asyncio.run(play_all())} == {"timeout"}


@pytest.fixture
def served(request):
    """The URL of an application of OpenEnv's own library, which a process of its own serves."""
    pytest.importorskip("openenv", reason="needs the package openenv")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", f"{request.param}:app", "--port", str(port)]
    folder = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        process.kill()


@pytest.mark.parametrize("served", ["openenv_walk"], indirect=True)
def test_episodes_in_an_application_of_the_library_are_played_beside_each_other(served):
    env = make(f"openenv:{served}")
    assert env.actions == ("left", "right")
    assert env.reset(seed=2)[0].startswith("text: You are at 1.")
    assert env.step("right")[1:3] == (0.0, False)
    assert env.step("right")[1:] == (1.0, True, False, {"success": True, "effective": True})
    setup = Setup("walk", lambda: make(f"openenv:{served}"), env.max_turns, 1, env.max_actions)
    policy = PlayerPolicy(random_player, setup.think, setup.prefill)
    groups = asyncio.run(run_groups(policy, setup, [1, 2], 3, (0, "eval")))
    episodes = [episode for group in groups for episode in group.episodes]
    assert len(episodes) == 6 and all(each.terminated and not each.failed for each in episodes)
    env.close()


@pytest.mark.parametrize("served", ["openenv_shop"], indirect=True)
def test_the_tools_of_an_mcp_environment_are_the_agents(served):
    """They are listed once, and a call is an action; what is no call does not reach the server."""
    env = make(f"openenv:{served}")
    about = [each["function"] for each in env.tools]
    assert [each["name"] for each in about] == ["price", "pay"] and env.actions is None
    assert about[0]["parameters"]["properties"] == {"fruit": {"type": "string"}}
    assert env.reset(seed=1)[0] == "Pay for 2 kg of plums."
    assert env.step(write_call("price", fruit="plums"))[:4] == ("5", 0.0, False, False)
    for wrong, said in [
        (write_call("price", fruit="x"), "Error: Error calling tool 'price'"),
        (write_call("steal"), "Error: Unknown tool: 'steal'"),
        ("10", "Error: call a tool; there are price, pay"),
    ]:
        observation, *rest, _ = env.step(wrong)
        assert observation.startswith(said) and rest == [0.0, False, False]
    state = env.get_state()
    paid = env.step(write_call("pay", euros=10))
    assert paid == ("You pay 10.", 1.0, True, False, {"success": True, "effective": True})
    env.set_state(state)
    failed = {"success": False, "effective": True}
    assert env.step(write_call("pay", euros=5))[1:] == (0.0, True, False, failed)
    env.close()
