"""A thread that notices when nothing happens any more, even while the event loop is blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

TICK = 1.0
"""Seconds between two looks, where the limit is not shorter still."""


class Watchdog:
    """Calls `stalled` once, in a thread of its own, when no beat came for `limit` seconds.

    It counts its own waking time, not the clock: a process that was suspended has not stalled.
    Code that holds the interpreter's lock for ever holds this thread up too.

    Args:
        limit: Seconds without a beat; 0 watches nothing.
        stalled: What is called, with the seconds.

    Example:
        >>> import time
        >>> seen = []
        >>> with Watchdog(0.04, seen.append):
        ...     time.sleep(0.5)
        >>> [seconds >= 0.04 for seconds in seen]
        [True]
    """

    def __init__(self, limit: float, stalled: Callable[[float], None]) -> None:
        self._limit, self._stalled = limit, stalled
        self._over = threading.Event()
        self._silent, self._told = 0.0, False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """Something was done."""
        self._silent, self._told = 0.0, False

    def _watch(self) -> None:
        tick = min(TICK, self._limit / 4)
        while not self._over.wait(tick):
            self._silent += tick
            if self._silent >= self._limit and not self._told:
                self._told = True
                self._stalled(self._silent)

    def __enter__(self) -> Self:
        if self._limit:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._limit:
            self._thread.join()
