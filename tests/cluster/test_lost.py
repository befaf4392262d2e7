"""One line about a lost process, from the texts that Ray 2.60 wrote of real ones."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from ragen.cluster.lost import answers_of, what_happened
from ragen.core.errors import EngineLost, RagenError

HEAD = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: LearnerHost\n"
    "\tactor_id: 2976fd01dd760e806459fc6201000000\n\tpid: 9241\n\tip: 10.0.0.2\n"
)
TEXTS: dict[str, tuple[str, str]] = {
    "SIGKILL": (
        HEAD + "The actor is dead because its worker process has died. Worker exit type: "
        "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code "
        "2. End of file. Some common causes include: (1) the process was killed by the OOM killer "
        "due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed.",
        "learner 1 on 10.0.0.2 was killed, perhaps for lack of memory, or has crashed",
    ),
    "ray.kill": (
        HEAD + "The actor is dead because it was killed by `ray.kill`.",
        "learner 1 on 10.0.0.2 was ended",
    ),
    "an import": (
        "The actor died because of an error raised in its creation task, "
        "ray::LearnerHost.__init__() (pid=6543, ip=10.0.0.2, actor_id=0a84f6a1)\n"
        "RuntimeError: The actor with name LearnerHost failed to import on the worker.\n\n"
        "ModuleNotFoundError: No module named 'mine'\n",
        "learner 1 on 10.0.0.2 could not be started: ModuleNotFoundError: No module named 'mine'",
    ),
    "its machine": (
        HEAD + "The actor died because its node has died. Node Id: 0333bf73\n\tthe actor's node "
        "was terminated unexpectedly: health check failed due to missing too many heartbeats",
        "learner 1 on 10.0.0.2 is gone with its machine, or cut off from it",
    ),
    "the memory monitor": (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
        "10.0.0.2, ID: 2c6586db) was 5.27GB used / 23.54GB limit (0.223778)\nOOM kill reason: "
        "Memory usage 5655670784B exceeded threshold\nObject store memory usage: [- objects: 0\n",
        "learner 1 on 10.0.0.2 was killed by Ray, because its machine ran out of memory",
    ),
    "the network": (
        "The actor ef30 is unavailable: The actor is temporarily unavailable: RpcError: RPC error: "
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.2:46213: Failed to "
        "connect to remote host: Connection refused rpc_code: 14.",
        "learner 1 on 10.0.0.2 does not answer: it was killed, or its machine or the network to it "
        "is gone",
    ),
    "what nobody has seen": (
        "\nSystem error: a\tb\nand another line",
        "learner 1 was lost: System error: a b",
    ),
    "nothing": ("", "learner 1 was lost"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_loss_is_one_line(name: str) -> None:
    text, expected = TEXTS[name]
    assert what_happened("learner 1", text) == expected


# Calls of processes that compute together.


class Learners:
    """The calls of two processes that wait for each other; ended ones are lost."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._ended = asyncio.Event()

    def end(self, error: Exception) -> None:
        self.reasons.append(str(error))
        self._ended.set()

    async def fails(self, error: Exception, after_s: float = 0.0) -> Any:
        await asyncio.sleep(after_s)
        raise error

    async def waits(self) -> Any:
        await self._ended.wait()
        raise EngineLost("learner 1 was ended", "page")

    async def answers(self, answer: int) -> int:
        await asyncio.sleep(0.01)
        return answer


def ask(*calls: Any, learners: Learners, grace_s: float = 5.0) -> list[Any]:
    """The answers; no call is open afterwards, and asyncio has nothing to complain about."""
    complaints: list[Any] = []

    async def play() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        try:
            return await asyncio.wait_for(answers_of(calls, learners.end, grace_s), 10)
        finally:
            await asyncio.sleep(0)
            gc.collect(1)  # what is new
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert not complaints

    return asyncio.run(play())


def test_all_answers_come_in_order() -> None:
    learners = Learners()
    assert ask(learners.answers(1), learners.answers(2), learners=learners) == [1, 2]
    assert learners.reasons == []


def test_a_lost_process_ends_those_that_wait_for_it_at_once() -> None:
    learners = Learners()
    lost = EngineLost("learner 0 was killed", "many lines")
    with pytest.raises(EngineLost, match=r"^learner 0 was killed$") as caught:
        ask(learners.waits(), learners.fails(lost), learners=learners)
    assert caught.value.details == "many lines" and learners.reasons == ["learner 0 was killed"]


def test_an_error_that_all_raise_ends_none() -> None:
    learners = Learners()
    calls = [learners.fails(RagenError("no room"), after_s) for after_s in (0.0, 0.02)]
    with pytest.raises(RagenError, match=r"^no room$"):
        ask(*calls, learners=learners)
    assert learners.reasons == []


def test_an_error_of_one_is_raised_and_ends_the_others_that_wait_for_it() -> None:
    learners = Learners()
    with pytest.raises(RagenError, match=r"^no room$"):
        ask(learners.fails(RagenError("no room")), learners.waits(), learners=learners, grace_s=0.1)
    assert learners.reasons == ["no room"]


def test_a_connection_that_breaks_before_its_process_is_known_to_be_lost_is_a_loss() -> None:
    learners = Learners()
    broken = RuntimeError("gloo: connection closed by peer")
    lost = EngineLost("learner 1 was killed")
    with pytest.raises(EngineLost, match=r"^learner 1 was killed$"):
        ask(learners.fails(broken), learners.fails(lost, 0.05), learners=learners)


def test_a_bug_stays_one() -> None:
    learners = Learners()
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        ask(learners.waits(), learners.fails(RuntimeError("a bug")), learners=learners, grace_s=0.1)
    assert learners.reasons == ["a bug"]
