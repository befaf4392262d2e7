"""What all processes of an engine share: their signs of life."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any

LOOK_S = 0.25
"""Seconds between two looks at the stacks of a process."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of a process.

    Attributes:
        still_s: Seconds for which no thread has moved.
        stacks: The Python stacks of all threads, once none has moved for a second.
        address: Its machine's address.
        idle: It has no request to answer.

    Example:
        >>> Beat(0.25, "", "10.0.0.2").idle
        False
    """

    still_s: float
    stacks: str
    address: str
    idle: bool = False


class Pulse:
    """Watches the stacks of this process: it works while one of them changes, else it hangs."""

    def __init__(self) -> None:
        self._address = own_address()
        self._seen: Any = None
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self._thread.start()

    def beat(self) -> Beat:
        """A sign of life; it has the stacks once nothing has moved for a second."""
        still_s = time.monotonic() - self._moved
        return Beat(still_s, stacks() if still_s > 1 else "", self._address)

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            seen = {
                ident: _place(frame)
                for ident, frame in sys._current_frames().items()
                if not _is_health(ident)
            }
            if seen != self._seen:
                self._seen, self._moved = seen, time.monotonic()


def _is_health(ident: int) -> bool:
    """The thread only serves signs of life: it is this thread, or answers `beat`."""
    return ident == threading.get_ident() or ident in HEALTH_THREADS


HEALTH_THREADS: set[int] = set()
"""The threads that answer `beat`."""


def _place(frame: FrameType | None) -> tuple[Any, ...]:
    places = []
    while frame is not None:
        places += [frame.f_code, frame.f_lasti]
        frame = frame.f_back
    return tuple(places)


def stacks() -> str:
    """The Python stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


class Host:
    """What all processes of an engine have in common."""

    def __init__(self) -> None:
        self._pulse = Pulse()

    def beat(self) -> Beat:
        """A sign of life."""
        HEALTH_THREADS.add(threading.get_ident())
        return self._pulse.beat()

    def pid(self) -> int:
        """The number of the process."""
        return os.getpid()


def own_address() -> str:
    """This machine's address in its network, or the loopback address if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
        except OSError:
            return "127.0.0.1"
        host: str = probe.getsockname()[0]
        return host
