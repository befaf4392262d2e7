"""An event loop of an environment's own, for libraries that are asynchronous.

It runs in the caller's thread, and only during calls of the environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class OwnLoop:
    """A loop that is kept from call to call, since connections belong to one loop.

    Example:
        >>> loop = OwnLoop()
        >>> loop.run(asyncio.sleep(0, "slept"))
        'slept'
        >>> loop.close()
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._renew_threads()

    def __reduce__(self) -> NoReturn:
        # Without this, `copy.deepcopy` leaves half a loop behind, which complains when it is freed.
        raise TypeError("an event loop cannot be copied")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine."""
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:  # a time limit, too: a later call must not resume the task
            task.cancel()
            raise

    def end_threads(self) -> None:
        """End the threads of `asyncio.to_thread`."""
        self._threads.shutdown()
        self._renew_threads()

    def _renew_threads(self) -> None:
        self._threads = ThreadPoolExecutor()  # which starts them when they are needed
        self._loop.set_default_executor(self._threads)

    def close(self) -> None:
        """Cancel what still runs in the loop, end the threads and close the loop."""
        self._loop.run_until_complete(_cancel_others())
        self._threads.shutdown()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
