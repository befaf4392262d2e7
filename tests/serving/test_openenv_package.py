"""The package openenv itself: its generic client here, and its own servers for RAGEN's client."""

from __future__ import annotations

import asyncio
import enum
import importlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cmp_to_key
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen.envs.adapters import openenv as client
from ragen.envs.adapters.adapted import _named
from ragen.envs.checker import check
from ragen.envs.contract import Env
from ragen.envs.registry import make
from tests.serving.served import TOKEN, as_process, in_thread, wait_until

openenv = pytest.importorskip("openenv", reason="needs the package openenv")
core = pytest.importorskip("openenv.core", reason="needs the package openenv")
types = pytest.importorskip("openenv.core.env_server.types")
tool_types = pytest.importorskip("openenv.core.env_server.mcp_types")
NUM_SESSIONS = 64

Seen = list[tuple[str, float | None, bool]]


@pytest.fixture(autouse=True)
def no_server_is_known() -> None:
    client._about.cache_clear()
    _named.cache_clear()


def here(env: Env, level: int) -> Seen:
    """An episode in this process: observation, reward and end of each step."""
    generator = np.random.default_rng(level)
    seen: Seen = [(env.reset(seed=level, options={"noise_seed": level + 1})[0], None, False)]
    names = env.actions or ()
    while len(seen) <= 15 and not seen[-1][2]:
        observation, reward, terminated, truncated, _ = env.step(str(generator.choice(names)))
        seen.append((observation, reward, terminated or truncated))
    return seen


async def there(url: str, level: int, started: asyncio.Barrier) -> Seen:
    """The same episode by OpenEnv's own client, once all clients are connected."""
    generator = np.random.default_rng(level)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with core.GenericEnvClient(base_url=url, headers=headers) as env:
        await started.wait()
        result = await env.reset(seed=level, noise_seed=level + 1)
        names = result.metadata["actions"]
        seen = [(result.observation["text"], result.reward, result.done)]
        while len(seen) <= 15 and not result.done:
            result = await env.step({"text": str(generator.choice(names))})
            seen.append((result.observation["text"], result.reward, result.done))
        assert (await env.state())["step_count"] == len(seen) - 1
        return seen


def test_the_generic_client_plays_the_same_episodes_in_64_sessions_at_once() -> None:
    async def play(url: str) -> list[Seen]:
        started = asyncio.Barrier(NUM_SESSIONS)
        return await asyncio.gather(*(there(url, level, started) for level in range(NUM_SESSIONS)))

    with as_process("sokoban", OPENENV_TOKEN=TOKEN) as (url, _):
        played = asyncio.run(play(url))
    assert played == [here(make("sokoban"), level) for level in range(NUM_SESSIONS)]


def test_the_generic_client_calls_tools() -> None:
    def weigh(env: Any, first: str, second: str) -> bool:
        arguments = {"first": first, "second": second}
        step = {"type": "call_tool", "tool_name": "compare", "arguments": arguments}
        return f"{first} is lighter than" in env.step(step).observation["result"]

    with in_thread("sorting") as (url, _), core.GenericEnvClient(base_url=url).sync() as env:
        env.reset(seed=3)
        (compare,) = env.step({"type": "list_tools"}).observation["tools"]
        parsed = tool_types.Tool(**compare)
        assert parsed.name == "compare" and parsed.input_schema["required"] == ["first", "second"]
        order = sorted("ABCD", key=cmp_to_key(lambda a, b: -1 if weigh(env, a, b) else 1))
        result = env.step({"text": " ".join(order)})
    assert result.done and result.reward == 1 and result.metadata["success"]


def test_the_generic_client_shows_refusals_and_ends() -> None:
    with in_thread("frozen-lake", most=1) as (url, served):
        with core.GenericEnvClient(base_url=url).sync() as env:
            env.reset(seed=1)
            with pytest.raises(RuntimeError, match=r"no action 'up': there are Left.*VALIDATION"):
                env.step({"text": "up"})
            assert env.step({"text": "Up"}).done is False
            other = core.GenericEnvClient(base_url=url).sync()
            with pytest.raises(RuntimeError, match=r"sessions are taken .*CAPACITY_REACHED"):
                other.reset()
            other.close()
        wait_until(lambda: served.num_sessions == 0)
        with pytest.raises(ConnectionError, match="HTTP 40"):
            core.GenericEnvClient(base_url=f"{url}/nowhere").sync().reset()


class Move(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


class Walk(types.Action):
    move: Move


class Place(types.Observation):
    text: str


class Walking(core.env_server.Environment):
    """A walk from 0: 3 is won, -3 lost. The seed says where it begins."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.place, self.steps = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Place:
        self.place, self.steps = (seed or 0) % 3 - 1, 0
        return Place(text=f"You are at {self.place}.")

    def step(self, action: Walk, timeout_s: float | None = None) -> Place:
        self.place, self.steps = self.place + (1 if action.move is Move.RIGHT else -1), 1
        done, reward = abs(self.place) == 3, float(self.place == 3)
        return Place(text=f"You are at {self.place}.", reward=reward, done=done)

    @property
    def state(self) -> Any:
        return types.State(step_count=self.steps)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The URL of an application of the package."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="websockets-sansio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, 30)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def test_the_client_plays_on_a_server_of_the_package() -> None:
    app = core.env_server.create_app(Walking, Walk, Place, max_concurrent_envs=4)
    with serving(app) as url:
        env = make(f"openenv:{url}")
        assert env.actions == ("left", "right")
        check(env, levels=2)
        env = make(f"openenv:{url}")
        assert env.reset(seed=2)[0] == "You are at 1."
        assert env.step("right")[:3] == ("You are at 2.", 0.0, False)
        last = env.step("right")
        assert last[:4] == ("You are at 3.", 1.0, True, False) and last[4]["success"]
        with pytest.raises(RuntimeError, match=r"Invalid message .*'left' or 'right'"):
            env._ask("step", {"move": "up"})  # type: ignore[attr-defined]
        env.close()


def test_the_client_plays_the_echo_environment_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment that `openenv init` writes: the package's template with a name filled in."""
    template = Path(openenv.__file__).parent / "cli" / "templates" / "openenv_env"
    for file in template.rglob("*.py"):
        target = tmp_path / str(file.relative_to(template)).replace("__ENV_NAME__", "echo")
        target.parent.mkdir(exist_ok=True)
        named = file.read_text().replace("__ENV_NAME__", "echo")
        target.write_text(re.sub("__ENV_[A-Z_]+__", "Echo", named))
    monkeypatch.syspath_prepend(str(tmp_path))
    with serving(importlib.import_module("server.app").app) as url:
        env = make(f"openenv:{url}")
        assert env.actions is None
        first = env.reset(seed=1)[0]
        assert first == "echoed_message: Echo environment ready!\nmessage_length: 0"
        echoed, reward, terminated, truncated, _ = env.step("Hello")
        assert echoed == "echoed_message: Hello\nmessage_length: 5"
        assert (reward, terminated, truncated) == (0.5, False, False)  # 0.1 a letter
        env.close()
