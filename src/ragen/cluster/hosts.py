"""The heartbeats of an engine's processes."""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat of a process.

    Attributes:
        still_s: Seconds for which no thread has moved.
        stacks: The Python stacks of all threads, if none has moved for a second.
        address: Address of the process's machine.

    Example:
        >>> Beat(0.25, "", "10.0.0.2").still_s
        0.25
    """

    still_s: float
    stacks: str
    address: str


class Host:
    """A process of an engine, which sends heartbeats."""

    def __init__(self) -> None:
        self._address = own_address()
        self._places: Any = None
        self._moved = time.monotonic()

    def beat(self) -> Beat:
        """A heartbeat; the process works if a stack has changed since the last one."""
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # this thread only sends heartbeats
        places = {
            ident: [(each.f_code, each.f_lasti) for each, _ in traceback.walk_stack(frame)]
            for ident, frame in frames.items()
        }
        now = time.monotonic()
        if places != self._places:
            self._places, self._moved = places, now
        still_s = now - self._moved
        return Beat(still_s, stacks() if still_s > 1 else "", self._address)


def stacks() -> str:
    """The Python stacks of all threads of this process but the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def own_address() -> str:
    """This machine's address in its network, or the loopback address if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
        except OSError:
            return "127.0.0.1"
        host: str = probe.getsockname()[0]
        return host
