"""Waiting without stopping the run: threads for calls that wait, and a loop for asynchronous code.

The run's own event loop samples and trains, so it stands still for milliseconds up to seconds. What
waits for something else, such as a server, does so here.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from ragen.core.user_code import seconds_left

T = TypeVar("T")

MOST_THREADS = 512
"""Maximum number of calls that wait at the same time."""
NAME = "ragen waits"
"""How the names of these threads begin; they belong to the process, not to an environment."""


def in_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call a function in a thread. The run's loop goes on meanwhile."""
    return asyncio.get_running_loop().run_in_executor(_threads(), function, *arguments)


def begin(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Let a coroutine run in the process's loop for asynchronous code, which has its own thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def wait(work: Future[T]) -> T:
    """The result of what has begun, which is cancelled if it takes longer than the call may.

    Raises:
        TimeoutError: The time limit of the call of user code in progress has passed.
    """
    try:
        return work.result(seconds_left())
    finally:
        work.cancel()


def in_loop() -> bool:
    """True in the thread of the loop for asynchronous code."""
    return threading.current_thread().name == f"{NAME} in a loop"


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, NAME)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, NAME))  # for asyncio.to_thread
    threading.Thread(target=loop.run_forever, name=f"{NAME} in a loop", daemon=True).start()
    return loop


def _forget() -> None:
    """A forked process has none of these threads."""
    _threads.cache_clear()
    _loop.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
