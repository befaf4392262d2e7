"""What all processes of an engine share: their signs of life, and how they answer requests.

A player loads this module and nothing that needs torch, whose import takes seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from ragen.core.errors import RagenError
from ragen.engines.pool import Answers

T = TypeVar("T")

LOOK_S = 0.25
"""Seconds between two looks at the stacks of a process."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A `RagenError` on its way to another process; pickle would rebuild it from its message only.

    Example:
        >>> str(Failure.of(RagenError("no room")).error())
        'no room'
    """

    kind: type[RagenError]
    text: str
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: RagenError) -> Failure:
        """The failure that carries an error."""
        return cls(type(error), str(error), dict(error.__dict__))

    def error(self) -> RagenError:
        """The error that it carries."""
        error = self.kind.__new__(self.kind, self.text)
        error.__dict__.update(self.attributes)
        return error


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of a process.

    Attributes:
        still_s: Seconds for which no thread has moved.
        stacks: The Python stacks of all threads, once none has moved for a second.
        leaves: The process is asked to end.
        address: Its machine's address.
        idle: It has no request to answer.

    Example:
        >>> Beat(0.25, "", False, "10.0.0.2").leaves
        False
    """

    still_s: float
    stacks: str
    leaves: bool
    address: str
    idle: bool = False


class Pulse:
    """Watches the stacks of this process: it works while one of them changes, else it hangs."""

    def __init__(self) -> None:
        self.leaves = False
        self._address = own_address()
        self._seen: Any = None
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self._thread.start()

    def move(self) -> None:
        """Note that the process works, although its stacks may not change."""
        self._moved = time.monotonic()

    def on_signal(self, *_: Any) -> None:
        """Note that the process is asked to end, for example because its machine is taken away."""
        self.leaves = True

    def beat(self) -> Beat:
        """A sign of life; it has the stacks once nothing has moved for a second."""
        still_s = time.monotonic() - self._moved
        return Beat(still_s, stacks() if still_s > 1 else "", self.leaves, self._address)

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
    """Whether a thread only serves signs of life: this thread, or one that answers `beat`."""
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
    """What all processes of an engine have in common; every answer may be a `Failure`."""

    def __init__(self) -> None:
        self._pulse = Pulse()

    def beat(self) -> Beat:
        """A sign of life."""
        HEALTH_THREADS.add(threading.get_ident())
        return self._pulse.beat()

    def pid(self) -> int:
        """The number of the process."""
        return os.getpid()


def or_failure(work: Callable[[], T]) -> T | Failure:
    """The result of some work, or the `RagenError` that it raises."""
    try:
        return work()
    except RagenError as error:
        return Failure.of(error)


def own_address() -> str:
    """This machine's address in its network, or the loopback address if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
        except OSError:
            return "127.0.0.1"
        host: str = probe.getsockname()[0]
        return host


class Client:
    """A client of a `ServingHost`: the tasks of its open requests, and its finished answers.

    `news` is set when `collect` has something to return. `gone` is true for a lost client.
    """

    __slots__ = ("finished", "gone", "news", "tasks")

    def __init__(self) -> None:
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.finished: list[tuple[int, Any]] = []
        self.news = asyncio.Event()
        self.gone = False


class ServingHost(Host):
    """A process that answers requests of several clients, in an event loop of its own."""

    _work: Callable[[Any], Coroutine[Any, Any, Any]]
    """Answers a request; a subclass sets it when it starts."""

    def __init__(self) -> None:
        super().__init__()
        self._clients: dict[str, Client] = {}
        self._era = 0
        self._busy_s, self._since, self._open = 0.0, 0.0, 0
        self._loop = asyncio.new_event_loop()
        self._bug: BaseException | None = None
        name = type(self).__name__.removesuffix("Host").lower()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def leave_on_sigterm(self) -> None:
        """Let SIGTERM ask it to finish what it has and leave; call this in the main thread."""
        signal.signal(signal.SIGTERM, self._pulse.on_signal)

    def beat(self) -> Beat:
        """A sign of life."""
        return replace(super().beat(), idle=not self._open)

    def submit(self, client: str, requests: Sequence[tuple[int, Any]], era: int) -> None:
        """See `Remote.submit`."""

        async def work() -> None:
            if era > self._era:
                self._era = era
                self._forget()
            asker = self._client(client)
            for number, what in () if asker.gone else requests:
                task = self._loop.create_task(_answer(self, asker, number, what))
                task.add_done_callback(partial(self._ended, asker, number))
                asker.tasks[number] = task

        self._run(work())

    def collect(self, client: str) -> Answers:
        """See `Remote.collect`."""

        async def work() -> Answers:
            asker = self._client(client)
            await asker.news.wait()
            await asyncio.sleep(0)  # lets the other answers of the same forward arrive
            asker.news.clear()
            if self._bug is not None:
                raise self._bug
            finished, asker.finished = asker.finished, []
            return Answers(finished, self._told(), self._pulse.leaves)

        return self._run(work())

    def drop(self, client: str, numbers: Sequence[int]) -> None:
        """See `Remote.drop`."""

        async def work() -> None:
            asker = self._client(client)
            for number in numbers:
                if number in asker.tasks:
                    asker.tasks[number].cancel()
            asker.news.set()  # `collect` returns, and its caller sees whether requests are left

        self._run(work())

    def dismiss(self, client: str) -> None:
        """Give up the requests of a client that is lost, also those that arrive later."""

        async def work() -> None:
            asker = self._client(client)
            asker.gone = True
            for task in asker.tasks.values():
                task.cancel()
            asker.news.set()

        self._run(work())

    def _forget(self) -> None:
        """Begin a new era: forget what the earlier one remembered."""
        raise NotImplementedError

    def _told(self) -> Any:
        """What the process reports to clients about itself; see `Pool`."""
        raise NotImplementedError

    def _client(self, name: str) -> Client:
        return self._clients.setdefault(name, Client())

    def _count(self, more: int) -> None:
        """Add `more` to the count of open requests, and count the time with at least one."""
        now = time.monotonic()
        if self._open:
            self._busy_s += now - self._since
        self._open, self._since = self._open + more, now

    def _ended(self, client: Client, number: int, task: asyncio.Task[None]) -> None:
        del client.tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = error  # `collect` raises it
            for each in self._clients.values():
                each.news.set()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


# A function, not a method: a coroutine method would make Ray run the whole class as asynchronous.
async def _answer(host: ServingHost, client: Client, number: int, what: Any) -> None:
    host._count(1)
    try:
        answer = await host._work(what)
    except RagenError as error:
        answer = Failure.of(error)
    finally:
        host._count(-1)
    client.finished.append((number, answer))  # read the attribute now: `collect` replaces the list
    client.news.set()
