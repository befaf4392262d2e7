"""One line about a lost process, from the texts that Ray 2.60 wrote of real ones."""

from __future__ import annotations

import pytest

from ragen.engines.lost import what_happened

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
    "its machine": (
        HEAD + "The actor died because its node has died. Node Id: 0333bf73\n\tthe actor's node "
        "was terminated unexpectedly: health check failed due to missing too many heartbeats",
        "learner 1 on 10.0.0.2 is gone with its machine, or cut off from it",
    ),
    "the memory monitor": (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
        "10.0.0.2, ID: 2c6586db) was 5.27GB used / 23.54GB limit (0.223778)\nOOM kill reason: "
        "Memory usage 5655670784B exceeded threshold\nObject store memory usage: [- objects: 0\n",
        "learner 1 on 10.0.0.2 was killed by Ray, for its machine runs out of memory",
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
    assert what_happened("learner 1", "", text) == expected


def test_the_machine_is_the_one_that_the_process_has_named() -> None:
    text, _ = TEXTS["ray.kill"]
    assert what_happened("learner 1", "10.0.0.7", text) == "learner 1 on 10.0.0.7 was ended"
    assert what_happened("learner 1", "10.0.0.7", "") == "learner 1 on 10.0.0.7 was lost"
