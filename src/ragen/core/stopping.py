"""Stopping when asked: signals set a flag; only work that changes nothing is cut short by it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class StopRequested(Exception):
    """The user asked to stop, by the signal of this number."""

    def __init__(self, signal_number: int, text: str = "stopped") -> None:
        super().__init__(text)
        self.signal_number = signal_number

    def with_text(self, text: str) -> StopRequested:
        """The same request with what the user should be told."""
        return StopRequested(self.signal_number, text)


class Stop:
    """A request to stop that is heard where it does no harm.

    Episodes and evaluations may be dropped at any moment: they change no weights. An update, once
    begun, is finished. A second request is the operating system's plain one.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._signal_number = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM while inside (in the main thread of a POSIX process)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self._ask, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    def _ask(self, number: int) -> None:
        self._signal_number = number
        self._asked.set()
        asyncio.get_running_loop().remove_signal_handler(number)

    def check(self) -> None:
        """Raise if a stop was asked for.

        Raises:
            StopRequested: It was.
        """
        if self._asked.is_set():
            raise StopRequested(self._signal_number)

    async def or_finish(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The result of `work`, which is cancelled where a stop is asked for first.

        Raises:
            StopRequested: It was.
        """
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            asked.cancel()
            task.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)
        self.check()
        raise asyncio.CancelledError


def run_async(work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`; inside a running event loop (a notebook), from a thread of its own.

    Raises:
        KeyboardInterrupt: It was interrupted.
    """
    if not in_event_loop():
        try:
            return asyncio.run(work)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def in_event_loop() -> bool:
    """Whether this thread runs an event loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def cancel_running() -> bool:
    """From a signal's handler: end the event loop that runs in this thread; whether there is one.

    An exception that is raised in a handler would end whichever task happens to run, and the others
    would complain of it.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False
    tasks = asyncio.all_tasks(loop)
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
    return True
