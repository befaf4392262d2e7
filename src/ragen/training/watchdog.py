"""The watchdog: it notices a run that hangs, says where, and ends the hang."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Self

from ragen.core.errors import RagenError
from ragen.diagnostics.guard import Alarm
from ragen.storage.checkpoint import folders
from ragen.storage.recorder import append_event
from ragen.training.running import Run

STACKS = "stalled.txt"
"""The file to which a run that hangs writes the stacks of its threads."""

STALL_S = 1800.0
"""Seconds without progress after which a run hangs."""


def stall_limit(response: str) -> float:
    """The watchdog's limit for a response of the detector ``stalled``; 0 where nobody looks."""
    return 0.0 if response == "off" else STALL_S


class Watchdog:
    """Calls `report` if no beat comes for `limit` seconds, and `end` if it returns a reason.

    `report` gets the seconds. It is called once until the next beat, and never with a `limit` of 0,
    in a thread of its own. It also runs while the event loop is blocked, but not while other code
    holds the interpreter's lock. The watchdog counts its own waking time instead of reading the
    clock, so that a suspended process does not count as stalled. `reason` is empty until `end`.
    """

    def __init__(
        self, limit: float, report: Callable[[float], str], end: Callable[[], None]
    ) -> None:
        self.reason = ""
        self._limit, self._report, self._end = limit, report, end
        self._over = threading.Event()
        self._silent, self._called = 0.0, False
        self._thread = ThreadPoolExecutor(1, "watchdog")

    def beat(self) -> None:
        """Report progress."""
        self._silent, self._called = 0.0, False

    def _watch(self) -> None:
        tick = min(1.0, self._limit / 4) if self._limit else 1.0
        while not self._over.wait(tick):
            self._silent += tick
            if self._limit and self._silent >= self._limit and not self._called:
                self._called = True
                self.reason = self._report(self._silent)
                if self.reason:
                    self._end()

    def __enter__(self) -> Self:
        self._watching = self._thread.submit(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.shutdown()
        self._watching.result()  # raises the error of the thread


def report_stall(run: Run, seconds: float) -> str:
    """Report where a run hangs; returns why it is to end, or nothing if it may go on.

    Ending it cancels the run's task, so that the run raises `GuardStop`. Code that hangs without
    waiting cannot be cancelled; only a command ends its process then (`Watcher.hangs`).

    The watchdog calls it from its own thread. The database or the terminal may be what hangs, so
    the file with the stacks of all threads is written first, then the database, then the terminal.
    """
    state, file = run.state, run.folder / STACKS
    alarm = Alarm("stalled", state.step, state.step, seconds, 0.0)
    try:
        kept = folders(run.folder)
        last = f"the last checkpoint is {kept[-1].name}" if kept else "there is no checkpoint"
    except RagenError as error:  # the disk may be what hangs
        last = str(error)
    text = f"{alarm}; {last}; all stacks are in {file}"
    try:
        with file.open("a", encoding="utf-8") as stacks:
            stacks.write(f"{alarm}; {last}\n")
            stacks.flush()
            faulthandler.dump_traceback(stacks, all_threads=True)
        append_event(run.folder, state.attempt, state.step, "alarm", text, asdict(alarm))
    except (OSError, RagenError) as error:  # the disk or the database may be what hangs
        text = f"{text}; {error}"
    run.watcher.alarm(state.step, text)
    return text if run.original.guard.response("stalled") == "stop" else ""
