"""Engines of several processes: the calls that all get, and the loss of one, in one line."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from ragen.algorithms.batch import Batch
from ragen.core.errors import EngineLost, RagenError, last_line
from ragen.core.metrics import Metrics
from ragen.core.pictures import Picture
from ragen.core.types import Role, TokenRows
from ragen.engines.engine import Engine, assert_sampled

GRACE_S = 30.0
"""Seconds for which a failed call waits for the others. Within this time Ray notices the loss of a
process, even if the processes that talk to it fail first."""

ADDRESS = re.compile(r"\bip(?:v4)?[:=] ?(\d+\.\d+\.\d+\.\d+)", re.IGNORECASE)

NOT_STARTED = "could not be started"
"""The last line of Ray's text says why."""

CAUSES: tuple[tuple[str, str], ...] = (
    ("running low on memory", "was killed by Ray, because its machine ran out of memory"),
    ("node has died", "is gone with its machine, or cut off from it"),
    ("creation task", NOT_STARTED),
    ("`ray.kill`", "was ended"),
    ("worker process has died", "was killed, perhaps for lack of memory, or has crashed"),
    ("unavailable", "does not answer: it was killed, or its machine or the network to it is gone"),
)
"""For each cause, a part of Ray's text and what happened. They are searched in this order, which
matters: Ray's text about a killed process also mentions memory."""


def what_happened(name: str, text: str) -> str:
    """A process's name, its machine (the first address in Ray's `text`), and its fate, in a line.

    Example:
        >>> what_happened("learner 0", "ip: 10.0.0.2 The actor is dead, killed by `ray.kill`")
        'learner 0 on 10.0.0.2 was ended'
    """
    where = ADDRESS.search(text)
    lines = text.split("\n")
    first = next((" ".join(line.split()) for line in lines if line.strip()), "")
    unknown = f"was lost: {first[:200]}" if first else "was lost"
    what = next((words for sign, words in CAUSES if sign in text), unknown)
    if what == NOT_STARTED:
        what = f"{what}: {last_line(text)[:200]}"
    return f"{name} on {where.group(1)} {what}" if where else f"{name} {what}"


async def answers_of(
    calls: Sequence[Coroutine[Any, Any, Any]],
    end: Callable[[Exception], None],
    grace_s: float = GRACE_S,
) -> list[Any]:
    """The answers of processes that compute together; afterwards none of the calls is open.

    If one process fails, the others may wait for it forever. So `end` is called with the failure,
    and ends all of the processes: at once if one is lost, else if some have not answered after
    `grace_s` seconds.

    Raises:
        EngineLost: One of the processes is gone.
        RagenError: One of the processes raised it. It is preferred to the losses that it causes,
            because it says more.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    clock, first = asyncio.get_running_loop().time, asyncio.FIRST_EXCEPTION

    def failures() -> list[Exception]:
        ended = (task.exception() for task in tasks if task.done())
        return [each for each in ended if isinstance(each, Exception)]

    try:
        _, waiting = await asyncio.wait(tasks, return_when=first)
        until = clock() + grace_s
        while waiting and clock() < until and not _has_loss(failures()):
            _, waiting = await asyncio.wait(waiting, timeout=until - clock(), return_when=first)
        if found := failures():  # what fails after `end` was ended by it
            if waiting or _has_loss(found):
                end(_most_telling(found))
            await asyncio.gather(*waiting, return_exceptions=True)
            raise _most_telling(found)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def _has_loss(failures: Sequence[Exception]) -> bool:
    return any(isinstance(each, EngineLost) for each in failures)


def _most_telling(failures: Sequence[Exception]) -> Exception:
    losses = [each for each in failures if isinstance(each, EngineLost)]
    mistakes = [each for each in failures if isinstance(each, RagenError) and each not in losses]
    return [*mistakes, *losses, *failures][0]


class SeveralProcesses(Engine):
    """An `Engine` whose processes compute together, each with a learner, and are lost together."""

    _error: Exception | None = None

    @abstractmethod
    async def _in_all(self, method: str, *arguments: Any) -> list[Any]:
        """The learners' answers to a call that all get, of which the first counts."""

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    @override
    async def score(self, batch: Batch, role: Role) -> Batch:
        scored: Batch = (await self._in_all("score", batch, role))[0]
        return scored

    @override
    async def update(self, batch: Batch, step: int) -> Metrics:
        assert_sampled(batch)
        metrics: Metrics = (await self._in_all("update", batch, step))[0]
        return metrics

    @override
    async def cross_scores(
        self, prompts: TokenRows, thoughts: TokenRows, pictures: Sequence[Picture] = ()
    ) -> Tensor:
        scores_NM: Tensor = (await self._in_all("cross_scores", prompts, thoughts, pictures))[0]
        return scores_NM

    @override
    async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        metrics: Metrics = (await self._in_all("gradient_norms", batch, bucket_B))[0]
        return metrics

    @override
    async def save(self, folder: Path) -> dict[str, Any]:
        state: dict[str, Any] = (await self._in_all("save", folder.resolve()))[0]
        return state
