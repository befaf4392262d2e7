"""The signs of life of a process."""

from __future__ import annotations

import threading

from ragen.cluster.hosts import Host


def test_a_process_is_still_until_a_thread_moves_and_says_where_it_stands() -> None:
    goes, moved, ends = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        goes.wait()
        moved.set()
        ends.wait()

    thread = threading.Thread(target=wait, name="worker")
    thread.start()
    host = Host()
    host.beat()
    host._moved -= 5  # as if five seconds had passed
    beat = host.beat()
    assert beat.still_s > 5 and "thread worker:" in beat.stacks and "goes.wait()" in beat.stacks
    goes.set()
    moved.wait()
    beat = host.beat()
    assert beat.still_s < 5 and not beat.stacks
    ends.set()
    thread.join()
