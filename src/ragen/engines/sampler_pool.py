"""The samplers of an engine as one policy: which of them samples what, and what happens to a loss.

A conversation stays with the sampler that holds its keys and values. All else goes to the sampler
with the fewest open requests. What a lost sampler had not answered goes to another one with the
same prompt and seed, and an answer counts only if it comes from the sampler that was asked last:
no completion is lost, and none comes twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from ragen.core.errors import EngineLost
from ragen.core.metrics import Metrics, last, mean
from ragen.core.types import Completion, Prompt
from ragen.engines.sampling import QUIET_ROUNDS, Stats
from ragen.engines.slots import TAIL, Tokens


class ProcessLost(Exception):
    """A process has ended, or was ended because it hung; `details` may be many lines."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


@dataclass(frozen=True, slots=True)
class Answers:
    """What a sampler has finished since it was last asked.

    Attributes:
        finished: The completion of each request, or its error.
        stats: Its token counts since it last forgot its keys and values.
        leaves: It is asked to end, and takes no more requests.

    Example:
        >>> Answers([], Stats(sampled=3)).stats.sampled
        3
    """

    finished: Sequence[tuple[int, Completion | Exception]]
    stats: Stats
    leaves: bool = False


class RemoteSampler(Protocol):
    """A sampler in a process of its own; every method raises `ProcessLost` if that is lost."""

    async def submit(self, requests: Sequence[tuple[int, Prompt]], forgets: bool) -> None:
        """Queue numbered requests; with `forgets`, drop all keys, values and counts before."""

    async def collect(self) -> Answers:
        """Wait until something is finished."""

    async def drop(self, numbers: Sequence[int]) -> None:
        """Stop sampling requests."""


@dataclass(slots=True, eq=False)
class Request:
    """A completion that someone waits for."""

    number: int
    prompt: Prompt
    answer: asyncio.Future[Completion]


@dataclass(slots=True, eq=False)
class Seat:
    """A sampler's place in the pool.

    Attributes:
        name: The sampler's.
        sampler: The sampler.
        open: Its requests by number.
        forgets: Its next message lets it drop its keys and values.
        leaves: It gets no more requests.
        stats: Its last token counts.
        busy_s: Seconds with an open request, before the present ones.
        since: When the first of the present requests came.
        receiver: The task that takes its answers.
    """

    name: str
    sampler: RemoteSampler
    open: dict[int, Request] = field(default_factory=dict)
    forgets: bool = True
    leaves: bool = False
    stats: Stats = field(default_factory=Stats)
    busy_s: float = 0.0
    since: float = 0.0
    receiver: asyncio.Task[None] | None = None


class SamplerPool:
    """A `Policy` over samplers in other processes.

    `most_known` bounds how many conversations it remembers. Without any sampler for `timeout_s`
    seconds, what waits fails. `on_end` is called with a seat that has left the pool and the loss
    of its sampler, or ``None`` after it was asked to leave. `loop` is the event loop in which the
    last completion was asked for.
    """

    def __init__(
        self, most_known: int, timeout_s: float, on_end: Callable[[Seat, ProcessLost | None], None]
    ) -> None:
        self.seats: list[Seat] = []
        self._most_known, self._timeout_s, self._on_end = most_known, timeout_s, on_end
        self._numbers = count()
        self._fresh: list[Request] = []  # not sent yet
        self._known: dict[tuple[int, Tokens], dict[Tokens, Seat]] = {}  # by length and last tokens
        self._order: dict[Tokens, None] = {}  # what is known, the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = False
        self._giving_up: asyncio.TimerHandle | None = None
        self._loss = ProcessLost("no sampler has joined")
        self.loop: asyncio.AbstractEventLoop | None = None
        self._measured = time.monotonic()

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample one completion: the next tokens of `prompt.token_ids`.

        Raises:
            EngineLost: There has been no sampler for too long.
            NotFiniteError: The logits are not finite.
        """
        self._enter(asyncio.get_running_loop())
        request = Request(next(self._numbers), prompt, self._running_loop.create_future())
        self._send_soon([request])
        try:
            return await request.answer
        finally:
            self._withdraw(request)

    def forget(self) -> None:
        """Let every sampler drop its keys and values before its next request."""
        self._known.clear()
        self._order.clear()
        for seat in self.seats:
            seat.forgets, seat.stats = True, Stats()

    def join(self, seat: Seat) -> None:
        """Add a sampler, which has the present weights."""
        self.seats.append(seat)
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        self._send_soon([])

    def leave(self, seat: Seat) -> None:
        """Send a sampler no more requests; it leaves the pool once those it has are answered."""
        seat.leaves = True
        if seat in self.seats and not seat.open:
            self.remove(seat, None)

    def remove(self, seat: Seat, loss: ProcessLost | None) -> None:
        """Take a sampler out, and give its open requests to others; repeating it is allowed."""
        if seat not in self.seats:
            return
        self.seats.remove(seat)
        self._loss = loss or ProcessLost(f"{seat.name} has left")
        self._measure(seat)
        lost, seat.open = list(seat.open.values()), {}
        for tokens in [each for each in self._order if self._seat_of(each) is seat]:
            self._forget(tokens)
        if seat.receiver is not None and loss is not None:
            seat.receiver.cancel()
        self._on_end(seat, loss)
        self._send_soon(lost)

    def metrics(self) -> Metrics:
        """Metrics since the last call: samplers, their idle share, what their caches held."""
        now = time.monotonic()
        span, self._measured = now - self._measured, now
        stats, idle = Stats(), []
        for seat in self.seats:
            self._measure(seat)
            idle.append(1 - min(1.0, seat.busy_s / span))
            seat.busy_s = 0.0
            stats.prefilled += seat.stats.prefilled
            stats.reused += seat.stats.reused
        found = stats.metrics() | {"engine/samplers": last(len(self.seats))}
        if idle:
            found["engine/sampler_idle_fraction"] = mean(sum(idle) / len(idle))
        return found

    def fail(self, error: Exception) -> None:
        """Let all that waits fail."""
        waiting, self._fresh = self._fresh, []
        for seat in self.seats:
            waiting += seat.open.values()
            seat.open = {}
        for request in waiting:
            if not request.answer.done() and not request.answer.get_loop().is_closed():
                request.answer.set_exception(error)

    # From a request to its answer.

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self.loop is not None
        return self.loop

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave behind what belongs to a loop that was torn down."""
        if self.loop is loop:
            return
        self.loop, self._fresh, self._settling, self._giving_up = loop, [], False, None
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
        """Send what has come, once no episode sends another request at once."""
        quiet = 0
        while quiet < QUIET_ROUNDS:
            before = len(self._fresh)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._fresh) == before else 0
        self._settling = False
        requests, self._fresh = self._fresh, []
        if not any(not seat.leaves for seat in self.seats):
            self._fresh = requests
            if self._giving_up is None:
                later = self._running_loop.call_later
                self._giving_up = later(self._timeout_s, self._give_up)
            return
        for seat, share in self._shares(requests):
            self._submit(seat, share)

    def _give_up(self) -> None:
        self._giving_up = None
        text = f"there has been no sampler for {self._timeout_s:g} s: {self._loss}"
        self.fail(EngineLost(text, self._loss.details))

    def _shares(self, requests: Sequence[Request]) -> list[tuple[Seat, list[Request]]]:
        """What each sampler gets.

        What no sampler knows is divided into runs, so that equal prompts, which come one after the
        other, are read once by a sampler.
        """
        seats = [seat for seat in self.seats if not seat.leaves]
        shares: dict[int, list[Request]] = {id(seat): [] for seat in seats}
        unknown = []
        for request in requests:
            seat = self._knowing(request.prompt.token_ids or ())
            if seat is None or seat.leaves:
                unknown.append(request)
            else:
                shares[id(seat)].append(request)

        def load(seat: Seat) -> int:
            return len(seat.open) + len(shares[id(seat)])

        target = -(-(sum(map(load, seats)) + len(unknown)) // len(seats))
        for seat in sorted(seats, key=load):
            room = max(0, target - load(seat))
            shares[id(seat)] += unknown[:room]
            del unknown[:room]
        shares[id(min(seats, key=load))] += unknown
        return [(seat, shares[id(seat)]) for seat in seats if shares[id(seat)]]

    def _submit(self, seat: Seat, requests: Sequence[Request]) -> None:
        if not seat.open:
            seat.since = time.monotonic()  # 0 while nothing is open
        seat.open |= {request.number: request for request in requests}
        forgets, seat.forgets = seat.forgets, False
        self._start(self._send(seat, [(each.number, each.prompt) for each in requests], forgets))
        if seat.receiver is None:
            seat.receiver = self._start(self._receive(seat))

    async def _send(
        self, seat: Seat, requests: Sequence[tuple[int, Prompt]], forgets: bool
    ) -> None:
        try:
            await seat.sampler.submit(requests, forgets)
        except ProcessLost as failure:
            self.remove(seat, failure)

    async def _drop(self, seat: Seat, numbers: Sequence[int]) -> None:
        try:
            await seat.sampler.drop(numbers)
        except ProcessLost as failure:
            self.remove(seat, failure)

    async def _receive(self, seat: Seat) -> None:
        try:
            while seat.open:
                answers = await seat.sampler.collect()
                if seat not in self.seats:
                    return
                if not seat.forgets:
                    seat.stats = answers.stats
                for number, answer in answers.finished:
                    request = seat.open.get(number)
                    if request is not None and not request.answer.done():
                        self._answer(seat, request, answer)
                    seat.open.pop(number, None)
                if not seat.open:
                    self._measure(seat)
                if answers.leaves:
                    self.leave(seat)
        except ProcessLost as failure:
            seat.receiver = None
            self.remove(seat, failure)
        finally:
            seat.receiver = None
        if seat.leaves:
            self.leave(seat)

    def _answer(self, seat: Seat, request: Request, answer: Completion | Exception) -> None:
        if isinstance(answer, Exception):
            request.answer.set_exception(answer)
            return
        if request.prompt.token_ids and answer.token_ids:
            self._remember(request.prompt.token_ids + answer.token_ids, seat)
        request.answer.set_result(answer)

    def _withdraw(self, request: Request) -> None:
        """Stop sampling what nobody waits for any more."""
        if request in self._fresh:
            self._fresh.remove(request)
        for seat in self.seats:
            if seat.open.pop(request.number, None) is not None:
                self._start(self._drop(seat, [request.number]))
                if not seat.open:
                    self._measure(seat)

    def _measure(self, seat: Seat) -> None:
        """Count the busy time up to now."""
        now = time.monotonic()
        if seat.since:
            seat.busy_s += now - seat.since
        seat.since = now if seat.open else 0.0

    # Who knows what.

    def _remember(self, tokens: Tokens, seat: Seat) -> None:
        if tokens in self._order:
            return
        self._order[tokens] = None
        self._known.setdefault((len(tokens), tokens[-TAIL:]), {})[tokens] = seat
        if len(self._order) > self._most_known:
            self._forget(next(iter(self._order)))

    def _seat_of(self, tokens: Tokens) -> Seat:
        return self._known[len(tokens), tokens[-TAIL:]][tokens]

    def _forget(self, tokens: Tokens) -> None:
        del self._order[tokens]
        key = len(tokens), tokens[-TAIL:]
        del self._known[key][tokens]
        if not self._known[key]:
            del self._known[key]

    def _knowing(self, tokens: Tokens) -> Seat | None:
        """The sampler that knows the longest beginning of `tokens`; the beginning is forgotten."""
        lengths = {length for length, _ in self._known if length <= len(tokens)}
        for length in sorted(lengths, reverse=True):
            begin = tokens[:length]
            seat = self._known.get((length, begin[-TAIL:]), {}).get(begin)
            if seat is not None:
                self._forget(begin)
                return seat
        return None
