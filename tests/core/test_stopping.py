"""Running coroutines from functions that are none, inside and outside an event loop."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from traceback import extract_stack
from typing import Any

import pytest
from typing_extensions import override

from ragen.core.stopping import Stop, StopRequested, run_async


class Long:
    """A result whose text would take long to make."""

    @override
    def __repr__(self) -> str:
        raise AssertionError("nobody reads this")


def test_no_text_is_made_of_a_result() -> None:
    """`asyncio.run` makes one of what it returns, in Python 3.11: 2 ms for each episode."""

    async def work() -> Long:
        return Long()

    async def notebook() -> bool:
        return isinstance(run_async(work()), Long)

    assert isinstance(run_async(work()), Long) and run_async(notebook())


def test_work_that_is_cancelled_before_it_begins_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(everything: Coroutine[Any, Any, None]) -> None:
        everything.close()
        raise asyncio.CancelledError

    work = asyncio.sleep(0)
    monkeypatch.setattr(asyncio, "run", cancelled)
    with pytest.raises(KeyboardInterrupt):
        run_async(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


def test_an_interrupt_in_a_notebook_cancels_the_work(set_sigint: Callable[[Any], None]) -> None:
    """It reaches the thread of the notebook, and the work runs in another one."""
    set_sigint(signal.default_int_handler)
    ends: list[str] = []
    main = threading.get_ident()

    async def work() -> None:
        while "result" not in [frame.name for frame in extract_stack(sys._current_frames()[main])]:
            await asyncio.sleep(0.01)  # until the notebook waits for the work
        try:
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.sleep(1)
            ends.append("finished")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def notebook() -> None:
        run_async(work())

    loop = asyncio.new_event_loop()  # not `asyncio.run`, which handles the signal itself
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(notebook())
    loop.close()
    assert ends == ["cancelled"]


def test_where_the_loop_takes_no_signals_the_first_stops_and_the_second_interrupts(
    monkeypatch: pytest.MonkeyPatch, set_sigint: Callable[[Any], None]
) -> None:
    """As on Windows, which has neither SIGHUP nor SIGXCPU."""
    set_sigint(signal.default_int_handler)
    monkeypatch.setattr("ragen.core.stopping.SIGNALS", (signal.SIGINT, signal.SIGTERM))
    for name in ("HANGUP", "CPU_TIME"):
        monkeypatch.setattr(f"ragen.core.stopping.{name}", None)

    async def work() -> None:
        loop, stop = asyncio.get_running_loop(), Stop()
        for name in ("add_signal_handler", "remove_signal_handler"):
            monkeypatch.setattr(loop, name, getattr(asyncio.AbstractEventLoop(), name))
        with stop.listening():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(StopRequested):
                await stop.or_finish(asyncio.sleep(60))
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    asyncio.run(work())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
