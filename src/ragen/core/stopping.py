"""Graceful stops: a signal sets a flag, and only work that changes no weights is cancelled."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Answer = TypeVar("Answer")

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")
    if hasattr(signal, name)
)
"""The signals that request a stop: from Ctrl-C, `kill`, a closed terminal, a limit of CPU time."""
HANGUP, CPU_TIME = (getattr(signal, name, None) for name in ("SIGHUP", "SIGXCPU"))
"""The two that Windows lacks."""

_RUNNING: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
"""The loop and the task of `run_async`."""


def _set_handler(
    loop: asyncio.AbstractEventLoop, number: int, handler: Callable[[int], None]
) -> None:
    try:
        loop.add_signal_handler(number, handler, number)
    except NotImplementedError:  # by the loops of Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(handler, number))


def _set_default(loop: asyncio.AbstractEventLoop, number: int) -> None:
    try:
        loop.remove_signal_handler(number)
    except NotImplementedError:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


class StopRequested(Exception):
    """The user requested a stop by the signal of this number."""

    def __init__(self, signal_number: int, text: str = "stopped") -> None:
        super().__init__(text)
        self.signal_number = signal_number


class Stop:
    """A request to stop, which takes effect at a point where no work is lost.

    Episodes and evaluations are cancelled at once: they change no weights. An update that has begun
    is finished. A second signal has its default effect.
    """

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._signal_number = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle `SIGNALS` in the body (in the main thread of a POSIX process)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if HANGUP is not None and before[HANGUP] is signal.SIG_IGN:  # as under nohup
            del before[HANGUP]
        for number in before:
            _set_handler(loop, number, self._request)
        try:
            yield
        finally:
            for number, handler in before.items():
                _set_default(loop, number)
                signal.signal(number, handler)

    def _request(self, number: int) -> None:
        self._signal_number = self._signal_number or number
        self._requested.set()
        if number != CPU_TIME:  # which comes every second
            _set_default(asyncio.get_running_loop(), number)

    def check(self) -> None:
        """Raise if a stop was requested."""
        if self._requested.is_set():
            raise StopRequested(self._signal_number)

    async def or_finish(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The result of `work`, which is cancelled if a stop is requested first."""
        task = asyncio.ensure_future(work)
        request = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait({task, request}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            request.cancel()
            task.cancel()
            await asyncio.gather(task, request, return_exceptions=True)
        self.check()
        raise asyncio.CancelledError


def run_async(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Run `work` to its end; inside a running event loop (a notebook), in its own thread.

    Raises:
        KeyboardInterrupt: The work was cancelled by Ctrl-C.
    """
    answers: list[Answer] = []

    async def keep() -> None:
        task = asyncio.current_task()
        assert task is not None
        _RUNNING.append(here := (task.get_loop(), task))
        try:
            # Of what it returns, `asyncio.run` makes a text, unused, in Python 3.11: seconds for
            # many episodes.
            answers.append(await work)
        finally:
            _RUNNING.remove(here)

    if _running_loop() is None:
        try:
            asyncio.run(keep())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            work.close()  # if it was cancelled before it began, Python would warn
    else:
        with ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(asyncio.run, keep()).result()
            except KeyboardInterrupt:
                cancel_running()
                raise
    return answers[0]


def cancel_running() -> bool:
    """Cancel what `run_async` runs, if anything, from a signal handler.

    An exception in the handler would end only the task or the user code that happens to run.
    """
    for loop, task in _RUNNING:
        with suppress(RuntimeError):  # it has just ended
            loop.call_soon_threadsafe(task.cancel)
    return bool(_RUNNING)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
