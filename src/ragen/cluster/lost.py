"""The loss of a process: its description in one line, and the calls that wait for an answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ragen.core.errors import EngineLost, RagenError, last_line

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
