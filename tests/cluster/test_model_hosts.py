"""The stacks of a process."""

from __future__ import annotations

import threading

from ragen.cluster.model_hosts import Host


def test_the_stacks_say_where_threads_stand_and_change_when_one_moves() -> None:
    goes, moved, ends = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        goes.wait()
        moved.set()
        ends.wait()

    thread = threading.Thread(target=wait, name="worker")
    thread.start()
    host = Host()
    stacks = host.stacks()
    assert "thread worker:" in stacks and "goes.wait()" in stacks and host.stacks() == stacks
    goes.set()
    moved.wait()
    assert host.stacks() != stacks
    ends.set()
    thread.join()
