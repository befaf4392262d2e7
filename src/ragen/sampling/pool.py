"""The samplers of an engine as one policy.

A conversation stays with the sampler that holds its keys and values. Any other request goes to one
with few open requests. If a process is lost, the engine fails all waiting requests (`fail`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol, TypeVar

from ragen.core.metrics import Metrics, last, mean
from ragen.core.pictures import Picture
from ragen.core.types import Completion, Prompt
from ragen.sampling.slots import TAIL, Tokens
from ragen.sampling.weighted_policy import Stats, quiet

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answers:
    """The requests that a sampler has finished since it was last asked.

    `finished` has the number of each with its completion or its error. `busy_s` counts the seconds
    of work since the sampler began, `stats` the tokens of its present `era`.
    """

    finished: Sequence[tuple[int, Completion | Exception]]
    busy_s: float
    era: int
    stats: Stats


class Remote(Protocol):
    """A sampler in another process; every method raises `EngineLost` if it is lost."""

    async def submit(self, requests: Sequence[tuple[int, Prompt]], era: int) -> None:
        """Queue numbered requests; a later era begins without the memory of the earlier one."""

    async def collect(self) -> Answers:
        """Wait until something is finished."""

    async def drop(self, numbers: Sequence[int]) -> None:
        """Give up requests."""


@dataclass(slots=True, eq=False)
class Request:
    """A numbered prompt with the future of its completion."""

    number: int
    prompt: Prompt
    answer: asyncio.Future[Completion]


@dataclass(slots=True, eq=False)
class Member:
    """A sampler of the pool.

    `open` has its requests by number. `busy_s` counts its seconds of work up to its last report;
    metrics have counted `counted_s` of them. `stats` are of the present era. The task `receiver`
    takes its answers.
    """

    remote: Remote
    open: dict[int, Request] = field(default_factory=dict)
    busy_s: float = 0.0
    counted_s: float = 0.0
    stats: Stats = field(default_factory=Stats)
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


def sent_once(requests: Sequence[tuple[int, Prompt]]) -> list[tuple[int, Prompt]]:
    """The requests with one object for each distinct picture, which a message has only once."""
    held = dict[Picture, Picture]()

    def one(prompt: Prompt) -> Prompt:
        return replace(prompt, pictures=tuple(held.setdefault(p, p) for p in prompt.pictures))

    return [(number, one(prompt)) for number, prompt in requests]


class SamplerPool:
    """A `Policy` over samplers in other processes, which remembers `most_known` conversations.

    `era` counts how often the samplers had to drop their keys and values.
    """

    def __init__(self, remotes: Iterable[Remote], most_known: int) -> None:
        self.era = 1
        self._members = [Member(remote) for remote in remotes]
        self._numbers = count()
        self._fresh: list[Request] = []  # not sent yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = False
        self._error: Exception | None = None
        self._measured = time.monotonic()
        self._most_known = most_known
        self._known: dict[tuple[int, Tokens], dict[Tokens, Member]] = {}  # by length and tail
        self._order: dict[Tokens, None] = {}  # what is known, the oldest first

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample one completion: the next tokens of `prompt.token_ids`.

        Raises:
            EngineLost: A process of the engine is lost.
            NotFiniteError: The logits are not finite.
        """
        if self._error is not None:
            raise self._error
        answer = asyncio.get_running_loop().create_future()
        request = Request(next(self._numbers), prompt, answer)
        self._fresh.append(request)
        if not self._settling:
            self._settling = True
            self._start(self._settle())
        try:
            return await request.answer
        finally:
            self._withdraw(request)

    def forget(self) -> None:
        """Begin another era; later requests are answered without memory."""
        self.era += 1
        for member in self._members:
            member.stats = Stats()
        self._known.clear()
        self._order.clear()

    def fail(self, error: Exception) -> None:
        """Let all waiting requests fail, and all later ones."""
        self._error = self._error or error
        waiting, self._fresh = self._fresh, []
        for member in self._members:
            waiting += member.open.values()
            member.open = {}
        for request in waiting:
            if not request.answer.done():
                request.answer.set_exception(self._error)

    def metrics(self) -> Metrics:
        """Metrics since the last call: samplers, their idle share, their caches' share of hits."""
        now, stats = time.monotonic(), Stats()
        span, self._measured = now - self._measured, now
        idle = []
        for member in self._members:
            stats.prefilled += member.stats.prefilled
            stats.reused += member.stats.reused
            idle.append(1 - min(1.0, (member.busy_s - member.counted_s) / span))
            member.counted_s = member.busy_s
        return stats.metrics() | {
            "engine/samplers": last(len(idle)),
            "engine/sampler_idle_fraction": mean(sum(idle) / len(idle)),
        }

    # From a request to its answer.

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.fail(error)

    async def _settle(self) -> None:
        """Send the new requests, once no episode adds another one right away."""
        try:
            await quiet(self._fresh)
        finally:
            self._settling = False
        requests, self._fresh = self._fresh, []
        for member, share in self._shares(requests):
            member.open |= {request.number: request for request in share}
            numbered = [(each.number, each.prompt) for each in share]
            if any(prompt.pictures for _, prompt in numbered):
                numbered = sent_once(numbered)
            self._start(member.remote.submit(numbered, self.era))
            if member.receiver is None:
                member.receiver = self._start(self._receive(member))

    def _shares(self, requests: Sequence[Request]) -> Iterable[tuple[Member, Sequence[Request]]]:
        """Each sampler's requests; equal prompts stay neighbours, so that most are read once."""
        shares: dict[Member, list[Request]] = {}
        rest = []
        for request in requests:
            member = self._knowing(request.prompt.token_ids or ())
            if member is None:
                rest.append(request)
            else:
                shares.setdefault(member, []).append(request)
        loads = [len(each.open) + len(shares.get(each, ())) for each in self._members]
        for member, share in zip(self._members, divided(rest, loads), strict=True):
            if share:
                shares.setdefault(member, []).extend(share)
        return shares.items()

    async def _receive(self, member: Member) -> None:
        try:
            while member.open:
                answers = await member.remote.collect()
                member.busy_s = answers.busy_s
                if answers.era == self.era:
                    member.stats = answers.stats
                for number, answer in answers.finished:
                    request = member.open.pop(number, None)
                    if request is not None and not request.answer.done():
                        self._answer(member, request, answer)
        finally:
            member.receiver = None

    def _answer(self, member: Member, request: Request, answer: Completion | Exception) -> None:
        if isinstance(answer, Exception):
            request.answer.set_exception(answer)
            return
        if request.prompt.token_ids and answer.token_ids:
            self._remember(request.prompt.token_ids + answer.token_ids, member)
        request.answer.set_result(answer)

    def _withdraw(self, request: Request) -> None:
        """Give up a request for which nobody waits any more, unless it has been answered."""
        if request.answer.done() and not request.answer.cancelled():
            return
        if request in self._fresh:
            self._fresh.remove(request)
        for member in self._members:
            if member.open.pop(request.number, None) is not None:
                self._start(member.remote.drop([request.number]))

    # Which sampler knows which conversation.

    def _remember(self, tokens: Tokens, member: Member) -> None:
        if tokens in self._order:
            return
        self._order[tokens] = None
        self._known.setdefault((len(tokens), tokens[-TAIL:]), {})[tokens] = member
        if len(self._order) > self._most_known:
            self._forget(next(iter(self._order)))

    def _forget(self, tokens: Tokens) -> None:
        del self._order[tokens]
        key = len(tokens), tokens[-TAIL:]
        del self._known[key][tokens]
        if not self._known[key]:
            del self._known[key]

    def _knowing(self, tokens: Tokens) -> Member | None:
        """The sampler that knows the longest beginning of `tokens`; the beginning is forgotten."""
        for length in range(len(tokens), 0, -1):
            known = self._known.get((length, tokens[max(0, length - TAIL) : length]))
            if known is not None and (member := known.get(tokens[:length])) is not None:
                self._forget(tokens[:length])
                return member
        return None
