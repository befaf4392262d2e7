"""Tools of MCP servers by the official library: over stdio and HTTP, slow, killed, never leaked."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ragen.chat.chat import Chat
from ragen.core.errors import RagenError
from ragen.core.types import Group
from ragen.envs.checker import check
from ragen.envs.registry import make
from ragen.envs.tools import tool, write_call
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import Setup
from tests.scripted_policy import ScriptedPolicy
from tests.tool_templates import tool_tokenizer

pytest.importorskip("mcp", reason="needs the extra mcp")
from ragen.envs.adapters.mcp import McpEnv, McpServer

FILE = Path(__file__).parents[2] / "mcp_tools.py"
STDIO = f"{sys.executable} {FILE}"
PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text("utf-8")


class Fruit(McpEnv):
    """The price of apples, which only the server knows."""

    name, goal, rules = "fruit", "Fruit shop", "What does a kilo of apples cost?"
    servers = (STDIO,)

    def begin(self, level_seed: int, noise_seed: int) -> str:
        return f"Customer {level_seed}"

    def answer(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        solved = text == "250"
        return "Thanks.", float(solved), True, False, {"success": solved}

    @tool
    def own(self) -> str:
        """A tool without a server."""
        return "own"


def over_http(url: str) -> type[Fruit]:
    return type("FruitByHttp", (Fruit,), {"servers": (url,)})


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists() if sys.platform == "linux" else False


def started(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, str(FILE), str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    raise AssertionError("the server did not start")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    process = started(port)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture(params=["stdio", "http"])
def kind(request: pytest.FixtureRequest) -> type[Fruit]:
    return Fruit if request.param == "stdio" else over_http(request.getfixturevalue("url"))


def played(env: Callable[[], Any], replies: Sequence[str], episodes: int, **more: Any) -> Any:
    """Episodes of a scripted policy, through the template, one after the other."""
    tools = env().tools
    chat = Chat(tool_tokenizer("hermes"), think=False, tools=tools)
    assert chat.calls is not None
    policy = ScriptedPolicy(replies, lambda text: (*chat.encode_text(text), chat.end))
    setup = Setup(
        *("fruit", env, 4, 2, 8),
        **{"think": False, "prefilled": False, "chat": chat, "tools": tools, "max_length": 9999},
        **more,
    )
    levels = [10_000 + number for number in range(episodes)]
    groups = asyncio.run(run_groups(policy, setup, levels, 1, (0, "eval"), concurrency=1))
    return [group.episodes[0] for group in groups]


def calls(*actions: str) -> str:
    return "\n".join(f"<tool_call>\n{action}\n</tool_call>" for action in actions)


def test_tools_and_errors_are_the_servers(kind: type[Fruit]) -> None:
    env = kind()
    names = [each["function"]["name"] for each in env.tools]
    assert names == ["own", "price", "count", "process", "sleep", "die"]
    price = env.tools[1]["function"]
    assert price["description"] == "The price of one kilo of a fruit in cents."
    assert price["parameters"]["properties"]["fruit"]["type"] == "string"
    assert env.reset(seed=3)[0] == "Customer 3"
    info = {"success": False, "effective": True}
    assert env.step(write_call("price", fruit="apples")) == ("250", 0.0, False, False, info)
    assert env.step(write_call("own"))[0] == "own"
    for arguments, said in (({"fruit": "plums"}, "there are apples and pears"), ({}, "required")):
        shown, *rest, _ = env.step(write_call("price", **arguments))
        assert shown.startswith("Error: ") and said in shown and rest == [0.0, False, False]
    assert "there is no tool of that name" in env.step(write_call("no_such"))[0]
    assert env.step("250")[1:] == (1.0, True, False, {"success": True, "effective": True})
    env.close()


def test_an_episode_has_a_session_of_its_own_which_is_ended_with_it() -> None:
    others = set(threading.enumerate())  # of other tests
    env = Fruit()
    seen = []
    for _ in range(2):
        env.reset(seed=0)
        assert [env.step(write_call("count"))[0] for _ in range(2)] == ["1", "2"]
        seen.append(int(env.step(write_call("process"))[0]))
    env.close()
    env.close()
    assert seen[0] != seen[1] and not any(map(is_alive, seen))
    for thread in set(threading.enumerate()) - others:
        thread.join(10)  # asyncio's own, which waits for the end of a server, is a moment behind
    assert not set(threading.enumerate()) - others


def test_environments_are_branched_where_servers_repeat_themselves(url: str) -> None:
    env = Fruit()
    env.reset(seed=5)
    env.step(write_call("count"))
    state, twin = env.get_state(), Fruit()
    twin.set_state(state)
    assert twin.step(write_call("count")) == env.step(write_call("count"))
    counting = over_http(url)()  # which counts over all sessions
    counting.reset(seed=5)
    counting.step(write_call("count"))
    with pytest.raises(RagenError, match="does not repeat itself"):
        counting.set_state(counting.get_state())
    for each in (env, twin, counting):
        each.close()


def test_a_server_that_ends_fails_its_episode_and_the_next_connects_again() -> None:
    # Here, since workers import this file.
    from ragen.algorithms.samples import to_samples
    from tests.chat.test_histories import check as check_samples

    fine = [calls(write_call("price", fruit="apples")), "250"]
    failed, solved = played(Fruit, [calls(write_call("die")), *fine], 2)
    assert (failed.stop_reason, solved.stop_reason) == ("error", "solved")
    assert "Connection closed" in failed.error
    check_samples([solved], to_samples([Group((solved,))])[0])
    assert solved.turns[0].results == ("250",)
    assert solved.turns[1].prompt.messages[-1]["role"] == "tool"


def test_a_slow_server_fails_its_episode_and_leaves_no_process() -> None:
    processes: list[int] = []

    class Noting(Fruit):
        def result(self, call: Any) -> str:
            found = super().result(call)
            processes.extend([int(found)] if call.name == "process" else [])
            return found

    slow = calls(write_call("process"), write_call("sleep", seconds=60))
    (failed,) = played(Noting, [slow], 1, timeout_s=4.0)
    assert failed.stop_reason == "timeout" and "took longer than 4 s in step" in failed.error
    assert processes and not any(map(is_alive, processes))


def test_the_documented_environment_is_solved_and_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.partition("#### Tools of MCP servers")[2]
    server, env = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:2]
    monkeypatch.chdir(tmp_path)
    if find_spec("mcp.server.mcpserver") is None:  # mcp 1
        server = server.replace("server import MCPServer", "server import FastMCP as MCPServer")
    Path("shop_server.py").write_text(server, "utf-8")
    Path("orders.py").write_text(env.replace("python shop", f"{sys.executable} shop"), "utf-8")
    orders = make("orders.py:Orders")
    assert orders.reset(seed=10_000)[0] == "What do 6 kg of apples cost?"
    price = orders.step(write_call("price", fruit="apples"))[0]
    assert orders.step(str(6 * int(price)))[1:3] == (1.0, True)
    check(orders, levels=1, steps=4)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("no_such_command --now", "No such file"),
        ([sys.executable, "-c", "import no_such_module"], "No module named 'no_such_module'"),
        ([sys.executable, "-c", "print('hello')"], "Connection closed"),
        ("http://127.0.0.1:9/mcp", "the MCP server http://127.0.0.1:9/mcp: "),
    ],
)
def test_what_is_no_server_is_told_in_one_line(address: Any, said: str) -> None:
    with pytest.raises(RagenError, match=re.escape(said)) as error:
        McpServer(address).tools()
    assert "\n" not in str(error.value)


ENDLESS = """
import json, sys
TOOL = {"name": "price", "description": "", "inputSchema": {"type": "object"}}
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"],
                  "capabilities": {"tools": {}}, "serverInfo": {"name": "endless", "version": "1"}}
    elif asked["method"] == "tools/list":
        result = {"tools": [TOOL], "nextCursor": "2"}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
"""A server whose list of tools has no end."""


def test_a_list_of_tools_has_an_end() -> None:
    with pytest.raises(RagenError, match="lists more than 100 pages of tools"):
        McpServer([sys.executable, "-c", ENDLESS]).tools()


def test_two_tools_of_one_name_and_a_missing_library_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Twice(Fruit):
        servers = (STDIO, McpServer(STDIO))

    with pytest.raises(RagenError, match="has several tools of the name 'count'"):
        Twice().toolbox()
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(RagenError, match=re.escape("pip install 'ragen-rl[mcp]'")):
        Fruit().toolbox()
