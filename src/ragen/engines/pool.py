"""A pool of processes that answers requests like one process, and that handles losses.

The pool decides which process gets a request. Requests that a lost process has not answered go to
another one. An answer counts only if it comes from the process that was asked last. So no answer is
lost, and none comes twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar

from ragen.core.errors import EngineLost, RagenError
from ragen.engines.sampling import QUIET_ROUNDS, Stats

T = TypeVar("T")


class ProcessLost(Exception):
    """A process has ended, or was ended because it hung; `details` may be many lines."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


@dataclass(frozen=True, slots=True)
class Answers:
    """What a process has finished since it was last asked, and what it reports about itself.

    Attributes:
        finished: The number of each request with its answer or its error.
        told: What the process reports; see `Pool`.
        leaves: The process is asked to end, and takes no more requests.

    Example:
        >>> Answers([(3, "done")], None).finished[0][1]
        'done'
    """

    finished: Sequence[tuple[int, Any]]
    told: Any
    leaves: bool = False


class Remote(Protocol):
    """A process that answers requests; every method raises `ProcessLost` if it is lost."""

    async def submit(self, requests: Sequence[tuple[int, Any]], era: int) -> None:
        """Queue numbered requests; a later era begins without the memory of the earlier one."""

    async def collect(self) -> Answers:
        """Wait until something is finished."""

    async def drop(self, numbers: Sequence[int]) -> None:
        """Give up requests."""


@dataclass(slots=True, eq=False)
class Request:
    """A request with the future of its answer.

    `at` is the name of the process that should answer; empty if any may. `losses` is the number of
    processes that were lost while they had the request.
    """

    number: int
    work: Any
    answer: asyncio.Future[Any]
    at: str = ""
    losses: int = 0


@dataclass(slots=True, eq=False)
class Seat:
    """The place of a process in the pool.

    Attributes:
        name: The name of the process.
        remote: The process.
        open: Its requests by number.
        leaves: It gets no more requests.
        busy_s: Seconds for which it had worked when it last reported.
        counted_s: The part of `busy_s` that metrics have counted.
        stats: A sampler's token counts in the present era.
        told: What it reported last.
        receiver: The task that takes its answers.
    """

    name: str
    remote: Remote
    open: dict[int, Request] = field(default_factory=dict)
    leaves: bool = False
    busy_s: float = 0.0
    counted_s: float = 0.0
    stats: Stats = field(default_factory=Stats)
    told: Any = None
    receiver: asyncio.Task[None] | None = None


def divided(items: Sequence[T], loads: Sequence[int]) -> list[Sequence[T]]:
    """Divide items among processes, given the load of each, so that each gets consecutive items.

    Example:
        >>> divided("aabb", [0, 0]), divided("abc", [3, 0])
        (['aa', 'bb'], ['', 'abc'])
    """
    target = -(-(sum(loads) + len(items)) // len(loads))
    shares, begin = [items[:0]] * len(loads), 0
    for index in sorted(range(len(loads)), key=loads.__getitem__):
        if begin >= len(items):
            break
        end = begin + max(0, target - loads[index])
        shares[index], begin = items[begin:end], end
    return shares


class Pool:
    """A pool of processes of one kind; `kind` is its name in messages.

    If the pool is empty for `timeout_s` seconds, all waiting requests fail. `on_end` is called with
    a seat that has left the pool and the loss of its process, or with ``None`` if the process was
    asked to leave. `loop` is the event loop of the last request. What a process reports about
    itself has at least ``busy_s``, the seconds for which it has worked. `era` is increased each
    time that the processes have to forget what they remember.
    """

    kind = "process"
    most_losses = 0
    """A request fails once this many processes were lost while they worked on it; 0: no limit."""

    def __init__(
        self, timeout_s: float, on_end: Callable[[Seat, ProcessLost | None], None]
    ) -> None:
        self.seats: list[Seat] = []
        self.era = 1
        self._timeout_s, self._on_end = timeout_s, on_end
        self._numbers = count()
        self._fresh: list[Request] = []  # not sent yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = False
        self._error: Exception | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._loss = ProcessLost(f"no {self.kind} has joined")
        self.loop: asyncio.AbstractEventLoop | None = None
        self._measured = time.monotonic()

    async def ask(self, work: Any, at: str = "") -> Any:
        """The answer of one process, if possible of the one with the name `at`.

        Raises:
            EngineLost: There has been no process for too long.
            RagenError: The process raised it, or too many processes were lost with the request.
        """
        self._enter(asyncio.get_running_loop())
        if self._error is not None:
            raise self._error
        answer = self._running_loop.create_future()
        request = Request(next(self._numbers), work, answer, at)
        self._send_soon([request])
        try:
            return await request.answer
        finally:
            self._withdraw(request)

    def forget(self, era: int = 0) -> None:
        """Begin another era, by default the next; later requests are answered without memory."""
        self.era = era or self.era + 1
        for seat in self.seats:
            seat.stats = Stats()

    def join(self, seat: Seat) -> None:
        """Add a process that is ready."""
        self.seats.append(seat)
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        self._send_soon([])

    def leave(self, seat: Seat) -> None:
        """Send a process no more requests; it leaves the pool once it has answered those it has."""
        seat.leaves = True
        if seat in self.seats and not seat.open:
            self.remove(seat, None)

    def remove(self, seat: Seat, loss: ProcessLost | None) -> None:
        """Take a process out and give its open requests to others; may be called repeatedly."""
        if seat not in self.seats:
            return
        self.seats.remove(seat)
        self._loss = loss or ProcessLost(f"{seat.name} has left")
        lost, seat.open = list(seat.open.values()), {}
        if seat.receiver is not None and loss is not None:
            seat.receiver.cancel()
        for request in lost:
            request.losses += loss is not None
            if request.losses == self.most_losses > 0 and not request.answer.done():
                request.answer.set_exception(self._too_many_losses(request))
        self._on_end(seat, loss)
        self._send_soon(lost)

    def seat_of(self, name: str) -> Seat | None:
        """The seat of this name."""
        return next((seat for seat in self.seats if seat.name == name), None)

    def idle_fraction(self) -> float | None:
        """The share of the time since the last call that processes were idle, on average."""
        now = time.monotonic()
        span, self._measured = now - self._measured, now
        idle = [1 - min(1.0, (seat.busy_s - seat.counted_s) / span) for seat in self.seats]
        for seat in self.seats:
            seat.counted_s = seat.busy_s
        return sum(idle) / len(idle) if idle else None

    def fail(self, error: Exception) -> None:
        """Let all waiting requests fail, and all later ones."""
        self._error = error
        waiting, self._fresh = self._fresh, []
        for seat in self.seats:
            waiting += seat.open.values()
            seat.open = {}
        for request in waiting:
            if not request.answer.done() and not request.answer.get_loop().is_closed():
                request.answer.set_exception(error)

    # What differs between kinds.

    def _shares(self, requests: Sequence[Request]) -> Iterable[tuple[Seat, Sequence[Request]]]:
        """The requests that each process gets."""
        raise NotImplementedError

    def _heard(self, seat: Seat, told: Any) -> None:
        """Take what a process has reported about itself."""
        seat.busy_s, seat.told = told.busy_s, told

    def _answered(self, seat: Seat, request: Request, answer: Any) -> None:
        """Note that a process has answered."""

    def _too_many_losses(self, request: Request) -> RagenError:
        """The error of a request with which `most_losses` processes were lost."""
        raise NotImplementedError

    # From a request to its answer.

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self.loop is not None
        return self.loop

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Enter an event loop and drop what belongs to an earlier one, which was torn down."""
        if self.loop is loop:
            return
        self.loop, self._fresh, self._settling, self._giving_up = loop, [], False, None
        self._error = None
        self._tasks.clear()
        for seat in self.seats:
            numbers, seat.open, seat.receiver = list(seat.open), {}, None
            if numbers:
                self._start(self._drop(seat, numbers))

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._running_loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.fail(error)

    def _send_soon(self, requests: Iterable[Request]) -> None:
        self._fresh += [each for each in requests if not each.answer.done()]
        if self._fresh and not self._settling:
            self._settling = True
            self._start(self._settle())

    async def _settle(self) -> None:
        """Send the new requests, once no episode adds another one right away."""
        quiet = 0
        while quiet < QUIET_ROUNDS:
            before = len(self._fresh)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._fresh) == before else 0
        self._settling = False
        requests, self._fresh = self._fresh, []
        if not self._taking:
            self._fresh = requests
            if self._giving_up is None:
                later = self._running_loop.call_later
                self._giving_up = later(self._timeout_s, self._give_up)
            return
        for seat, share in self._shares(requests):
            if share:
                self._submit(seat, share)

    @property
    def _taking(self) -> list[Seat]:
        """The seats that take requests."""
        return [seat for seat in self.seats if not seat.leaves]

    def _give_up(self) -> None:
        self._giving_up = None
        text = f"there has been no {self.kind} for {self._timeout_s:g} s: {self._loss}"
        self.fail(EngineLost(text, self._loss.details))

    def _submit(self, seat: Seat, requests: Sequence[Request]) -> None:
        seat.open |= {request.number: request for request in requests}
        self._start(self._send(seat, [(each.number, each.work) for each in requests], self.era))
        if seat.receiver is None:
            seat.receiver = self._start(self._receive(seat))

    async def _send(self, seat: Seat, requests: Sequence[tuple[int, Any]], era: int) -> None:
        try:
            await seat.remote.submit(requests, era)
        except ProcessLost as failure:
            self.remove(seat, failure)

    async def _drop(self, seat: Seat, numbers: Sequence[int]) -> None:
        try:
            await seat.remote.drop(numbers)
        except ProcessLost as failure:
            self.remove(seat, failure)

    async def _receive(self, seat: Seat) -> None:
        try:
            while seat.open:
                answers = await seat.remote.collect()
                if seat not in self.seats:
                    return
                self._heard(seat, answers.told)
                for number, answer in answers.finished:
                    request = seat.open.pop(number, None)
                    if request is not None and not request.answer.done():
                        self._answer(seat, request, answer)
                if answers.leaves:
                    self.leave(seat)
        except ProcessLost as failure:
            seat.receiver = None
            self.remove(seat, failure)
        finally:
            seat.receiver = None
        if seat.leaves:
            self.leave(seat)

    def _answer(self, seat: Seat, request: Request, answer: Any) -> None:
        if isinstance(answer, Exception):
            request.answer.set_exception(answer)
            return
        self._answered(seat, request, answer)
        request.answer.set_result(answer)

    def _withdraw(self, request: Request) -> None:
        """Give up a request for which nobody waits any more, unless it has been answered."""
        if request.answer.done() and not request.answer.cancelled():
            return
        if request in self._fresh:
            self._fresh.remove(request)
        for seat in self.seats:
            if seat.open.pop(request.number, None) is not None:
                self._start(self._drop(seat, [request.number]))
