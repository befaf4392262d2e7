"""Agents in their processes: many at once, what they return, how they fail, and what is left."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ragen.core.errors import RagenError
from ragen.gateway import agents as module
from ragen.gateway.agents import Agents, Outcome, environment
from tests.limits import needs_posix

pytestmark = needs_posix

HERE = Path(__file__).parent
SCRIPTED = HERE / "scripted.py"
URL = "http://127.0.0.1:9/v1"


class Played:
    """Agents in a loop of their own, which goes on between the calls of `play`."""

    def __init__(self, target: str, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.agents = Agents(target, **settings)

    def play(self, *tasks: dict[str, Any], timeout_s: float = 30.0) -> list[Outcome]:
        """Play these tasks at the same time."""

        async def all_of_them() -> list[Outcome]:
            runs = [self.agents.run(task, URL, "key", timeout_s) for task in tasks]
            return await asyncio.gather(*runs)

        return self.loop.run_until_complete(all_of_them())

    def value(self, **task: Any) -> Any:
        [outcome] = self.play(task)
        assert outcome.error is None
        return outcome.value

    def error(self, **task: Any) -> str:
        [outcome] = self.play(task)
        assert outcome.error is not None
        assert (outcome.value, outcome.timed_out) == (None, False)
        return outcome.error

    def pid(self) -> int:
        """The process in which a new episode plays."""
        return int(self.value(do="wait", seconds=0, name="")[1])

    def close(self) -> None:
        self.agents.close()
        self.loop.close()


def _of(name: str) -> Callable[[], Iterator[Played]]:
    def fixture() -> Iterator[Played]:
        played = Played(name, processes=1)
        yield played
        played.close()

    return fixture


tasks = pytest.fixture(scope="module", name="tasks")(_of(f"{SCRIPTED}:main"))
threads = pytest.fixture(scope="module", name="threads")(_of(f"{SCRIPTED}:plain"))
commands = pytest.fixture(scope="module", name="commands")(_of(f"sh {HERE / 'command.sh'}"))


@pytest.fixture(params=["tasks", "threads"])
def functions(request: pytest.FixtureRequest) -> Played:
    played: Played = request.getfixturevalue(request.param)
    return played


def is_running(pid: int) -> bool:
    """True if the process runs; a zombie that nobody waits for does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.01)


def test_many_episodes_play_at_once_in_one_process(functions: Played) -> None:
    functions.pid()
    begun = time.monotonic()
    outcomes = functions.play(*({"do": "wait", "seconds": 0.2, "name": n} for n in range(20)))
    assert time.monotonic() - begun < 2.0  # one after the other: 4 s
    assert [outcome.value[0] for outcome in outcomes] == list(range(20))
    assert len({outcome.value[1] for outcome in outcomes}) == 1


def test_an_agent_gets_its_task_its_address_and_its_key(functions: Played) -> None:
    assert functions.value(do="arguments", café="\u2028") == [
        {"do": "arguments", "café": "\u2028"},
        URL,
        "key",
    ]


def test_a_json_value_is_returned(threads: Played) -> None:
    for name, value in {
        "number": 0.5,
        "scalar": {"reward": 0.5},
        "nothing": None,
        "dict": {"reward": 1, "success": False, "answer": "café"},
        "tuple": [1, [2, {"a": None}]],
    }.items():
        assert threads.value(do=name) == value


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nan", "returned nan, which is no JSON value"),
        (
            "set",
            "returned a value of type list, which is no JSON value (set is not JSON serializable)",
        ),
        ("surrogate", "returned a value of type str, which is no JSON value"),
        ("huge", "returned more than 1,000,000 bytes"),
        ("deep", "returned a value of type list, which is no JSON value"),
    ],
)
def test_anything_else_is_an_error_in_one_line(threads: Played, name: str, said: str) -> None:
    error = threads.error(do=name)
    assert said in error
    assert "\n" not in error


def test_an_agent_that_raises_or_exits_fails_alone(functions: Played) -> None:
    before = functions.pid()
    raised = functions.error(do="raise")
    assert raised.startswith("Traceback") and raised.endswith("ValueError: this game is\nlost")
    assert "agent_host" not in raised
    assert functions.error(do="exit").endswith("SystemExit: enough")
    assert functions.error(do="interrupt").endswith("KeyboardInterrupt")
    assert functions.pid() == before


def test_a_process_that_dies_fails_what_it_was_playing(functions: Played) -> None:
    before = functions.pid()
    died, other = functions.play({"do": "die"}, {"do": "wait", "seconds": 20, "name": 1})
    for outcome in (died, other):
        assert outcome.error == "last words\nthe agent's process ended with exit code 3"
        assert not outcome.timed_out
    assert functions.pid() != before
    assert "ended by signal 9" in functions.error(do="killed")


def test_a_coroutine_that_takes_too_long_is_cancelled(tasks: Played) -> None:
    before = tasks.pid()
    late, other = (
        {"do": "wait", "seconds": 60, "name": "late"},
        {"do": "wait", "seconds": 0.01, "name": "other"},
    )
    outcomes = tasks.play(late, other, timeout_s=0.2)
    assert outcomes[0] == Outcome(None, "the agent took longer than 0.2 s", True)
    assert outcomes[1].value == ["other", before]
    assert tasks.value(do="ended")[-1] == "late"
    assert tasks.pid() == before


def test_an_episode_that_the_run_cancels_is_cancelled(tasks: Played) -> None:
    before = tasks.pid()

    async def cancelled() -> None:
        run = tasks.agents.run({"do": "wait", "seconds": 60, "name": "by us"}, URL, "key", 60.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run, 0.1)

    tasks.loop.run_until_complete(cancelled())
    assert tasks.value(do="ended")[-1] == "by us"
    assert tasks.pid() == before


@pytest.mark.slow
def test_a_process_that_does_not_answer_gets_no_new_episodes() -> None:
    played = Played(f"{SCRIPTED}:main", processes=2)
    play = played.agents.run

    async def episodes() -> list[Outcome]:
        await asyncio.gather(*(play({"do": "number"}, URL, "key", 9.0) for _ in range(2)))
        late = asyncio.ensure_future(play({"do": "busy"}, URL, "key", 0.1))
        await asyncio.sleep(0.2)
        outcomes = [
            *await asyncio.gather(*(play({"do": "number"}, URL, "key", 0.5) for _ in range(2)))
        ]
        late.cancel()
        return outcomes

    try:
        outcomes = played.loop.run_until_complete(episodes())
    finally:
        played.close()
    assert [outcome.value for outcome in outcomes] == [0.5, 0.5]


@pytest.mark.slow
def test_a_coroutine_that_cannot_be_cancelled_costs_its_process(
    tasks: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tasks.pid()
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    [outcome] = tasks.play({"do": "busy"}, timeout_s=0.1)
    assert outcome.timed_out and "must await what takes time" in str(outcome.error)
    wait_for_end(before)
    assert tasks.pid() != before


@pytest.mark.slow
def test_a_thread_that_takes_too_long_costs_its_process_once_the_others_end(
    threads: Played,
) -> None:
    before = threads.pid()

    async def episodes() -> tuple[Outcome, Outcome, Outcome]:
        run = threads.agents.run
        slow = asyncio.ensure_future(run({"do": "wait", "seconds": 0.5}, URL, "key", 9.0))
        late = await run({"do": "busy"}, URL, "key", 0.1)
        new = await run({"do": "wait", "seconds": 0}, URL, "key", 9.0)
        return late, new, await slow

    late, new, slow = threads.loop.run_until_complete(episodes())
    assert late == Outcome(None, "the agent took longer than 0.1 s", True)
    assert slow.value[1] == before
    assert new.value[1] == threads.pid() != before
    assert not is_running(before)


def test_what_an_agent_starts_ends_with_its_process(threads: Played) -> None:
    forked, child = threads.value(do="fork"), threads.value(do="child")
    assert is_running(forked) and is_running(child)
    # The forked process holds a copy of all that this one had open, and yet its end is seen.
    assert "exit code 4" in threads.error(do="fork", then="die")
    wait_for_end(forked)
    wait_for_end(child)


@pytest.mark.slow
def test_a_forked_process_that_returns_answers_nothing(threads: Played) -> None:
    before = threads.pid()
    assert threads.value(do="fork and return") == before
    assert threads.pid() == before


def test_output_is_kept_from_its_end_and_never_ours(
    functions: Played, capfd: pytest.CaptureFixture[str]
) -> None:
    assert functions.value(do="flood") is None
    error = functions.error(do="die")
    assert "flood" in error and "last words" in error and len(error) < 5000
    assert capfd.readouterr() == ("", "")


def test_standard_input_is_closed(functions: Played) -> None:
    assert functions.value(do="input")[0] == ""


def test_secrets_stay_here() -> None:
    secrets = {
        **dict.fromkeys(("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GH_PAT"), "s"),
        **dict.fromkeys(("RAGEN_HOME", "PGPASSWORD", "SSH_AUTH_SOCK", "wandb_api_key"), "s"),
        **dict.fromkeys(("OPENAI_BASE_URL", "ANTHROPIC_CUSTOM_HEADERS", "MY_CREDENTIALS"), "s"),
        "DATABASE_URL": "postgres://me:hunter2@host/db",
    }
    rest = {"PATH": "/bin", "HOME": "/root", "LANG": "C.UTF-8", "HTTPS_PROXY": "http://proxy:80"}
    rest |= {"TOKENIZERS_PARALLELISM": "false", "no_proxy": "intranet"}
    assert environment(secrets | rest, sees_secrets=True).items() >= secrets.items()
    kept = environment(secrets | rest)
    assert not kept.keys() & secrets.keys()
    assert {name: kept[name] for name in rest} == rest | {
        "no_proxy": "intranet,localhost,127.0.0.1,::1"
    }


def test_an_agent_sees_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "LEAKED")
    played = Played(f"{SCRIPTED}:main", processes=1)
    try:
        seen = played.value(do="environment")
    finally:
        played.close()
    assert "LEAKED" not in seen.values()
    assert not [name for name in seen if "API_KEY" in name or name.startswith("OPENAI_BASE")]
    assert seen["OPENAI_AGENTS_DISABLE_TRACING"] == "1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input", {"do": "input"}),
        ("text", "four is good"),
        ("infinite", "1e999"),
        ("closed", None),
        ("flood", [1, 2]),
        ("environment", [URL, "key", "http://127.0.0.1:9", "key"]),
    ],
)
def test_a_command_answers_with_its_last_line(commands: Played, name: str, value: Any) -> None:
    assert commands.value(do=name) == value


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fail", "sh ended with exit code 3\noh no"),
        ("killed", "sh ended by signal 9"),
        ("long", "the agent returned more than 1,000,000 bytes of JSON"),
    ],
)
def test_a_command_that_fails_says_why(commands: Played, name: str, said: str) -> None:
    assert commands.error(do=name) == said


def test_a_task_too_large_for_the_environment_is_on_standard_input(commands: Played) -> None:
    assert commands.value(do="count", text="x" * 300_000) > 300_000


def test_a_command_ends_with_all_that_it_has_started(commands: Played) -> None:
    left = commands.value(do="leave")
    wait_for_end(left)
    begun = time.monotonic()
    [outcome] = commands.play({"do": "hang"}, timeout_s=0.2)
    assert outcome.timed_out and time.monotonic() - begun < 2.0
    wait_for_commands()


def sleeping() -> list[str]:
    """The processes that a command has started and left."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if folder.joinpath("cmdline").read_bytes() == b"sleep\x0061.25\x00":
                found.append(folder.name)
    return found


def wait_for_commands() -> None:
    """They were killed; the kernel ends a process soon after that, and not at once."""
    for pid in sleeping():
        wait_for_end(int(pid))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py:main", "there is no file nowhere.py"),
        (f"{SCRIPTED}:nobody", "has no function 'nobody'"),
        (f"{SCRIPTED}:text", "has no function 'text'"),
        (f"{SCRIPTED}:no_arguments", "no_arguments must take (task, base_url, api_key)"),
        ("no_such.module:main", "cannot be loaded: ModuleNotFoundError: No module named 'no_such"),
        ("no-such-command --fast", "there is no command 'no-such-command'"),
    ],
)
def test_an_agent_that_does_not_exist_is_refused_in_one_line(target: str, said: str) -> None:
    played = Played(target, processes=1)
    try:
        for _ in range(2):
            with pytest.raises(RagenError) as refusal:
                played.play({}, {})
            assert said in str(refusal.value) and "\n" not in str(refusal.value)
    finally:
        played.close()


@pytest.mark.parametrize("target", ["", "  ", "node 'agent.js", "a\0b"])
def test_a_target_that_cannot_exist_is_refused_at_once(target: str) -> None:
    with pytest.raises(RagenError):
        Agents(target)


def test_an_interpreter_that_does_not_exist_is_refused() -> None:
    played = Played(f"{SCRIPTED}:main", python="/no/python", processes=2)
    with pytest.raises(RagenError, match="/no/python does not start"):
        played.play({})
    played.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os\nprint('no card')\nos._exit(7)\n", "exit code 7: no card"),
        ("raise OSError('no\\ncard')\n", "OSError: no"),
        ("import sys\nsys.exit('usage')\n", "SystemExit: usage"),
        ("def main(:\n", "SyntaxError"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_one_error(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    played = Played(f"{tmp_path / 'broken.py'}:main", processes=3)
    try:
        with pytest.raises(RagenError, match="the agent cannot run: ") as refusal:
            played.play(*({} for _ in range(9)))
    finally:
        played.close()
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_finds_its_neighbours_and_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("word = 'hello'\n")
    (tmp_path / "json.py").write_text(
        "from neighbour import word\n\ndef main(*arguments):\n    return word\n"
    )
    played = Played(f"{tmp_path / 'json.py'}:main", processes=1)
    try:
        assert played.value() == "hello"
    finally:
        played.close()


def test_sets_have_the_same_order_in_each_process() -> None:
    played = Played(f"{SCRIPTED}:main", processes=2)
    try:
        first, second = played.play({"do": "hash"}, {"do": "hash"})
    finally:
        played.close()
    assert first.value[0] == second.value[0]
    assert first.value[1] != second.value[1]


@pytest.mark.slow
def test_episodes_are_spread_and_nothing_is_left() -> None:
    before = (set(os.listdir("/proc/self/fd")), threading.enumerate())
    played = Played(f"{SCRIPTED}:main", processes=2)
    outcomes = played.play(*({"do": "wait", "seconds": 0.1} for _ in range(8)))
    pids = [outcome.value[1] for outcome in outcomes]
    assert sorted(pids.count(pid) for pid in set(pids)) == [4, 4]

    async def closed() -> Outcome:
        run = asyncio.ensure_future(played.agents.run({"do": "busy"}, URL, "key", 9.0))
        await asyncio.sleep(0.1)
        played.agents.close()
        return await run

    outcome = played.loop.run_until_complete(closed())
    assert outcome.error == "the agents of this run were ended"
    assert not any(map(is_running, pids))
    with pytest.raises(RagenError):
        played.play({"do": "number"})
    played.close()
    assert (set(os.listdir("/proc/self/fd")), threading.enumerate()) == before


@pytest.mark.slow
def test_a_second_loop_gets_processes_of_its_own() -> None:
    agents = Agents(f"{SCRIPTED}:main", processes=1)
    pids = []

    def play() -> None:
        outcome = asyncio.run(agents.run({"do": "wait", "seconds": 0}, URL, "key", 9.0))
        pids.append(outcome.value[1])

    with ThreadPoolExecutor(1) as pool:  # as in a notebook
        pool.submit(play).result()
    play()
    assert not is_running(pids[0])
    agents.close()  # after its loop has ended
    assert not is_running(pids[1])


RUN = """
import asyncio, signal, sys
from ragen.gateway.agents import Agents

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it

async def main():
    agents = Agents(sys.argv[1], processes=1)
    run = asyncio.ensure_future(agents.run({"do": sys.argv[2], "seconds": 60}, "", "", 99.0))
    while not agents._workers or not agents._workers[0].playing:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print(agents._workers[0]._process.pid, flush=True)
    await run

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "do"),
    [
        (f"{SCRIPTED}:main", "busy"),
        (f"sh {HERE / 'command.sh'}", "hang"),
    ],
)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_nothing_outlives_a_run_that_is_ended(target: str, do: str, name: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, target, do],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert run.stdout is not None
    host = int(run.stdout.readline())
    run.send_signal(getattr(signal, name))
    run.wait()
    run.stdout.close()
    wait_for_end(host)
    wait_for_commands()


@pytest.mark.slow
def test_commands_end_when_their_host_is_killed(commands: Played) -> None:
    commands.value(do="input")

    async def killed() -> Outcome:
        run = asyncio.ensure_future(commands.agents.run({"do": "hang"}, URL, "key", 60.0))
        await asyncio.sleep(1.0)
        os.kill(commands.agents._workers[0]._process.pid, signal.SIGKILL)
        return await run

    assert "signal 9" in str(commands.loop.run_until_complete(killed()).error)
    wait_for_commands()


def test_the_host_needs_python_3_9_and_nothing_else() -> None:
    tree = ast.parse(Path(module.agent_host.__file__).read_text("utf-8"), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert str(name).partition(".")[0] in sys.stdlib_module_names
