"""OpenEnv's servers that a run starts: an application of a module or a file, and an image."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs.adapters import openenv_servers
from ragen.envs.adapters.openenv import OpenEnvEnv
from ragen.envs.checker import check
from ragen.envs.registry import env_class, make
from ragen.envs.tools import write_call
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, random_player
from ragen.rollout.setup import Setup
from ragen.settings.code import resolve_paths

pytest.importorskip("openenv", reason="needs the package openenv")
pytest.importorskip("websockets", reason="needs the extra openenv")
FILE = Path(__file__).parents[2] / "openenv_light.py"
NAME = f"openenv:{FILE}:app"
WALK, SHOP = (f"openenv:{FILE.with_name(f'openenv_{name}.py')}:app" for name in ("walk", "shop"))


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    openenv_servers.end_servers()


def process_of(observation: str) -> int:
    return int(re.findall(r"process: (\d+)", observation)[0])


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists() if sys.platform == "linux" else False


def kill(process: int) -> None:
    """Kill a child, and wait until it listens no more; its parent has yet to notice."""
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


def wait_until_ended(process: int) -> None:
    until = time.monotonic() + 20
    while is_alive(process):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_episodes_in_an_application_of_the_library_are_played_beside_each_other() -> None:
    env = make(WALK)
    assert isinstance(env, OpenEnvEnv) and env.actions == ("left", "right")
    assert env.reset(seed=2)[0].startswith("text: You are at 1.")
    assert env.step("right")[1:3] == (0.0, False)
    assert env.step("right")[1:] == (1.0, True, False, {"success": True, "effective": True})
    setup = Setup(WALK, lambda: make(WALK), env.max_turns, 1, env.max_actions)
    policy = PlayerPolicy(random_player, setup.think, setup.prefill)
    groups = asyncio.run(run_groups(policy, setup, [1, 2], 3, (0, "eval")))
    episodes = [episode for group in groups for episode in group.episodes]
    assert len(episodes) == 6 and all(each.terminated and not each.failed for each in episodes)
    env.close()


def test_instances_share_a_server_which_is_restarted_where_it_ends() -> None:
    env, other = make(NAME), make(NAME)
    process = process_of(env.reset(seed=2)[0])
    assert process_of(other.reset(seed=0)[0]) == process != os.getpid()
    kill(process)
    with pytest.raises(UserCodeError), boundary("step"):
        other.step("left")
    restarted = process_of(other.reset(seed=0)[0])
    assert restarted != process and not is_alive(process)
    env.close()
    other.close()
    openenv_servers.end_servers()
    assert not is_alive(restarted)


def test_the_tools_of_an_mcp_environment_are_the_agents() -> None:
    """They are listed once, and a call is an action; what is no call does not reach the server."""
    env = make(SHOP)
    about = [each["function"] for each in env.tools]
    assert [each["name"] for each in about] == ["price", "pay"] and env.actions is None
    assert about[0]["parameters"]["properties"] == {"fruit": {"type": "string"}}
    assert env.reset(seed=1)[0] == "Pay for 2 kg of plums."
    assert env.step(write_call("price", fruit="plums"))[:4] == ("5", 0.0, False, False)
    for wrong, said in [
        (write_call("price", fruit="x"), "Error: Error calling tool 'price'"),
        (write_call("price"), "Error: 1 validation error for call"),
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
    check(make(SHOP), levels=1)


def test_the_server_ends_with_a_process_that_is_killed() -> None:
    code = f"from ragen import make; env = make({NAME!r}); print(env.reset(seed=0)[0], flush=True)"
    command = [sys.executable, "-c", f"{code}; import time; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        shown = run.stdout.readline() + run.stdout.readline()
        run.kill()
    wait_until_ended(process_of(shown))


def test_a_module_is_named_by_its_import_and_its_code_identifies_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(FILE.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.syspath_prepend(str(FILE.parent))
    assert make("openenv:openenv_light:app").reset(seed=1)[0].startswith("text: You are at 0.")
    described, *code = env_class(NAME).versions[1:]  # type: ignore[attr-defined]
    assert described.startswith("light ") and code == [
        openenv_servers.hash_code(FILE, FILE.read_bytes())
    ]


def test_a_run_names_the_file_of_an_application_by_its_whole_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(FILE.parent)
    for name, whole in (
        ("openenv:openenv_light.py:app", NAME),
        (NAME, NAME),
        ("openenv:http://127.0.0.1:1/a.py:1", "openenv:http://127.0.0.1:1/a.py:1"),
    ):
        assert resolve_paths(merge(None, {"env.name": name})).env.name == whole


def test_an_application_that_does_not_start_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module", "utf-8")
    with pytest.raises(RagenError, match="No module named 'no_such_module'") as error:
        make(f"openenv:{tmp_path / 'broken.py'}:app")
    assert "\n" not in str(error.value)


def test_an_application_that_hangs_is_ended_outside_the_main_thread_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv_servers, "READY_S", 0.5)
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(60)\n", "utf-8")
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make, f"openenv:{tmp_path / 'hangs.py'}:app")
        with pytest.raises(RagenError, match=r"cannot be served: it did not start within 0\.5 s"):
            made.result(30)


def test_what_cannot_be_started_is_told_in_one_line() -> None:
    for target in ("no_such_package.server:app", "localhost:8000"):
        with pytest.raises(RagenError, match=r"cannot be served: .* docker run") as error:
            make(f"openenv:{target}")
        assert "\n" not in str(error.value)
