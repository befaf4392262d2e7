"""An event loop of an environment's own, for libraries that are asynchronous.

It runs in a thread, since the caller's may have a running loop, and ends with `close`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn


class OwnLoop:
    """A loop that is kept from call to call, since connections belong to one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._renew_threads()
        self._thread = threading.Thread(target=self._loop.run_forever, name="own loop", daemon=True)
        self._thread.start()

    def __reduce__(self) -> NoReturn:
        # Without this, `copy.deepcopy` leaves half a loop behind, which complains when it is freed.
        raise TypeError("an event loop cannot be copied")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine."""
        answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return answer.result()
        except BaseException:  # a time limit, too: the coroutine must not go on
            answer.cancel()
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
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._threads.shutdown()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
