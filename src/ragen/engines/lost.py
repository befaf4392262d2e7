"""A process that is lost: what is said of it in one line, and those that wait for its answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ragen.core.errors import EngineLost, RagenError
from ragen.engines.pool import ProcessLost

GRACE_S = 30.0
"""Seconds for which a call that has failed waits for the others: a process that is lost is noticed
in this time, also if those that talk to it fail before."""

ADDRESS = re.compile(r"\bip(?:v4)?: ?(\d+\.\d+\.\d+\.\d+)", re.IGNORECASE)

CAUSES: tuple[tuple[str, str], ...] = (
    ("running low on memory", "was killed by Ray, for its machine runs out of memory"),
    ("node has died", "is gone with its machine, or cut off from it"),
    ("creation task", "could not be started"),
    ("`ray.kill`", "was ended"),
    ("worker process has died", "was killed, perhaps for lack of memory, or has crashed"),
    ("unavailable", "does not answer: it was killed, or its machine or the network to it is gone"),
)
"""What Ray's text of each cause has in it, and what happened, in the order of the search: a text on
a process that was killed also speaks of memory."""


def what_happened(name: str, address: str, text: str) -> str:
    """The process of this name, its machine, and what happened to it according to Ray's `text`.

    Ray writes pages. `address` is the machine's; where that is not known yet, it is the first one
    in the text.

    Example:
        >>> what_happened("learner 0", "", "ip: 10.0.0.2 The actor is dead, killed by `ray.kill`")
        'learner 0 on 10.0.0.2 was ended'
    """
    found = ADDRESS.search(text)
    where = address or (found.group(1) if found else "")
    lines = text.split("\n")
    first = next((" ".join(line.split()) for line in lines if line.strip()), "")
    unknown = f"was lost: {first[:200]}" if first else "was lost"
    what = next((words for sign, words in CAUSES if sign in text), unknown)
    return f"{name} on {where} {what}" if where else f"{name} {what}"


async def answers_of(
    calls: Sequence[Coroutine[Any, Any, Any]], end: Callable[[], None], grace_s: float = GRACE_S
) -> list[Any]:
    """The answers of processes that compute together; afterwards none of the calls is open.

    Where one fails, the others may wait for it for ever: `end` ends all of the processes, at once
    if one is lost, else if some have not answered after `grace_s` seconds.

    Raises:
        EngineLost: One of them is gone.
        RagenError: One of them raised it, which says more than the losses that it causes.
    """
    failures: list[Exception] = []
    ended = False
    timer: asyncio.TimerHandle | None = None

    def give_up() -> None:
        nonlocal ended
        ended = True
        end()

    async def watched(call: Coroutine[Any, Any, Any]) -> Any:
        nonlocal timer
        try:
            return await call
        except Exception as error:
            if not ended:  # else it is lost because it was ended
                failures.append(error)
                if isinstance(error, ProcessLost):
                    give_up()
            timer = timer or asyncio.get_running_loop().call_later(grace_s, give_up)
            raise

    try:
        answers = await asyncio.gather(*map(watched, calls), return_exceptions=True)
    finally:
        if timer is not None:
            timer.cancel()
    if failures:
        raise _most_telling(failures)
    return answers


def _most_telling(failures: Sequence[Exception]) -> Exception:
    kinds = RagenError, ProcessLost
    known = [each for kind in kinds for each in failures if isinstance(each, kind)]
    failure = (known or failures)[0]
    if isinstance(failure, ProcessLost):
        return EngineLost(str(failure), failure.details)
    return failure
