"""A child answers calls, tells of its loss, and ends with its parent."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragen.cluster.child import Child
from ragen.core.errors import EngineLost, MismatchError
from tests.cluster import echo_host
from tests.limits import needs_posix


def echo() -> Child:
    return Child("process 2 of 2", echo_host.__name__)


@pytest.fixture
def child() -> Iterator[Child]:
    made = echo()
    yield made
    made.end()


def ask(child: Child, method: str, *arguments: Any) -> Any:
    return child.begin(method, *arguments).answer.result(30)


def test_a_call_is_answered_after_its_news(child: Child) -> None:
    async def count() -> tuple[list[int], str]:
        news = list[int]()
        answer = await child.wait(child.begin("count", 3, tell=news.append))
        return news, answer

    assert asyncio.run(count()) == ([0, 1, 2], "counted")
    assert ask(child, "echo", {"a": (1, 2.5)}) == {"a": (1, 2.5)}


def test_errors_come_back_as_they_are_and_bugs_with_their_traceback(child: Child) -> None:
    with pytest.raises(MismatchError, match="token 7 was sampled") as refused:
        ask(child, "refuse")
    assert refused.value.difference == 1.0
    with pytest.raises(RuntimeError, match=r"in process 2 of 2:[\s\S]*KeyError: 'a bug'"):
        ask(child, "break_down")
    assert ask(child, "read_and_print") == "nothing to read", "streams carry the messages only"


def test_a_cancelled_call_is_given_up_before_the_next(child: Child) -> None:
    async def cancel() -> int:
        begun = asyncio.Event()
        call = child.begin("wait", tell=lambda news: begun.set())
        waiting = asyncio.create_task(child.wait(call))
        await begun.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        given_up: int = await child.wait(child.begin("given_up"))
        return given_up

    assert asyncio.run(cancel()) == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param("killed", "killed, perhaps for lack of memory", marks=needs_posix),
        ("ended", "exit code 5"),
    ],
)
def test_a_lost_child_fails_its_open_and_later_calls(child: Child, how: str, words: str) -> None:
    for method, arguments in (("die", [how]), ("echo", [1])):
        with pytest.raises(EngineLost) as lost:
            ask(child, method, *arguments)
        assert str(lost.value) == f"process 2 of 2 has ended ({words})"
        assert lost.value.process == "process 2 of 2"


def test_a_child_that_is_let_end_closes_what_it_holds(tmp_path: Path) -> None:
    made = echo()
    ask(made, "keep", str(tmp_path / "kept"))
    made.end()
    made.end()
    assert not (tmp_path / "kept").exists()
    with pytest.raises(EngineLost):
        ask(made, "echo", 1)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Whether it waits for calls, answers one, or is still loading modules."""
    pids = multiprocessing.get_context("fork").SimpleQueue()

    def parent() -> None:
        idle, busy, loading = echo(), echo(), echo()
        pids.put([ask(each, "keep", str(tmp_path / str(n))) for n, each in enumerate((idle, busy))])
        busy.begin("wait")
        pids.put(loading._process.pid)
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    children = [*pids.get(), pids.get()]
    assert all(map(is_running, children))
    process.kill()
    process.join()
    until = time.monotonic() + 10
    while any(map(is_running, children)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(is_running, children))
