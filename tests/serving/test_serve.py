"""`ragen serve`: an environment plays as in this process, and strangers get nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ragen.core.errors import RagenError
from ragen.envs import answers
from ragen.envs.adapters import openenv as client
from ragen.envs.adapters.adapted import _named
from ragen.envs.checker import check
from ragen.envs.registry import env_factory, make
from ragen.rollout.setup import Setup
from ragen.serving.openenv import EnvServer
from ragen.serving.sessions import Refused, Session, describe
from ragen.web.server import Server, listen
from tests.viewer.test_viewer_server import wait_until

TOKEN = "a-token-of-the-tests"


@contextmanager
def served(name: str, token: str | None = None, **params: Any) -> Iterator[str]:
    """The URL of a server in a thread of this process."""
    client._about.cache_clear()
    _named.cache_clear()
    build = env_factory(name, **params)
    env = build()
    setup = Setup(name, build, env.max_turns, env.actions_per_turn, env.max_actions)
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        app = EnvServer(setup, describe(setup), 8, port, token, lambda line: None).app
        server = Server(app, web_sockets=True)
        thread = threading.Thread(target=server.serve_on, args=(listening,))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.mark.parametrize(
    ("name", "params"),
    [("frozen-lake", {}), ("frozen-lake", {"observation": "picture"}), ("sorting", {})],
)
def test_the_client_plays_as_in_this_process(
    name: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FrozenLake has random events and pictures, Sorting has tools."""
    pytest.importorskip("websockets", reason="needs the extra openenv")
    monkeypatch.setenv("OPENENV_TOKEN", TOKEN)
    with served(name, TOKEN, **params) as url:
        there, here = make(f"openenv:{url}"), make(name, **params)
        assert there.shows_pictures == here.shows_pictures == bool(params)
        assert (there.tools, there.actions) == (here.tools, here.actions)
        for level in range(3):
            seeds: Any = {"seed": level, "options": {"noise_seed": level + 9}}
            assert there.reset(**seeds)[0] == here.reset(**seeds)[0]
            for action in ("Right", "Down", "Right") if here.actions else ("A B C D",):
                expected = here.step(action)
                assert there.step(action)[:4] == expected[:4]
                assert answers.pictures(there.pictures()) == answers.pictures(here.pictures())
                if expected[2]:
                    break
        there.close()
        check(make(f"openenv:{url}"), levels=1)


def test_the_generic_client_of_the_package_plays_too() -> None:
    core = pytest.importorskip("openenv.core", reason="needs the package openenv")
    with served("frozen-lake") as url, core.GenericEnvClient(base_url=url).sync() as env:
        here = make("frozen-lake")
        first = env.reset(seed=1, noise_seed=2).observation["text"]
        assert first == here.reset(seed=1, options={"noise_seed": 2})[0]
        with pytest.raises(RuntimeError, match=r"no action 'up': there are Left.*VALIDATION"):
            env.step({"text": "up"})
        result, expected = env.step({"text": "Up"}), here.step("Up")
        assert (result.observation["text"], result.reward, result.done) == expected[:3]


def test_strangers_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("websockets", reason="needs the extra openenv")
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with served("bandit", TOKEN) as url:
        for token in ("", "another-token"):
            monkeypatch.setenv("OPENENV_TOKEN", token)
            with pytest.raises(RagenError, match="into the environment variable OPENENV_TOKEN"):
                make(f"openenv:{url}")
        for path in ("/health", "/schema", "/nothing", f"/health?token={TOKEN}"):
            assert httpx.get(url + path).status_code == 401
        own = {"authorization": f"Bearer {TOKEN}"}
        for headers in ({}, own | {"origin": "null"}, own | {"sec-fetch-site": "same-site"}):
            with pytest.raises(InvalidStatus, match="HTTP 40"):
                connect(f"ws{url.removeprefix('http')}/ws", additional_headers=headers).__enter__()
    with served("bandit") as url:
        assert httpx.get(f"{url}/metadata").json()["name"] == "bandit"
        assert httpx.put(f"{url}/state").status_code == 405
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            assert httpx.get(f"{url}/health", headers=headers).status_code == 403


def test_a_session_plays_an_episode_and_refuses_what_it_cannot_follow() -> None:
    """Phoenix is the safe arm, which pays 0.15, and the worse one: 0.25 is the risky arm's mean."""
    session = Session(Setup("bandit", env_factory("bandit"), 2, 3, 4))

    def ask(kind: str, **data: Any) -> Any:
        answer = session.answer(json.dumps({"type": kind, "data": data}))
        assert answer is not None and json.loads(json.dumps(answer)) == answer
        return answer["data"]

    assert ask("reset", seed=123)["observation"]["text"] == "Arms: Dragon, Phoenix"
    for message, code in (
        ("[" * 100_000, "INVALID_JSON"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": "up"}}', "VALIDATION_ERROR"),
    ):
        with pytest.raises(Refused) as refused:
            session.answer(message)
        assert refused.value.code == code and ask("state")["step_count"] == 0
    last = ask("step", text="Phoenix")
    assert (last["observation"]["text"], last["reward"]) == ("Phoenix paid 0.15.", 0.15)
    assert last["done"] and last["metadata"] == {"success": False, "truncated": False}
    with pytest.raises(Refused, match="reset first"):
        ask("step", text="Dragon")
