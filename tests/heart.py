"""A heart that beats in the event loop, and so shows when something stops it."""

import asyncio
import time
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T")
BEAT_S = 0.002


FEW = 10
"""Pauses that a busy machine may cause."""


async def beating(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result of some work, and the longest time in seconds between two beats meanwhile.

    The `FEW` longest do not count.
    """
    beats = [time.monotonic()]

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            beats.append(time.monotonic())

    heart = asyncio.create_task(beat())
    try:
        result = await work
    finally:
        heart.cancel()
    beats.append(time.monotonic())
    return result, sorted(after - before for before, after in pairwise(beats))[-1 - FEW]
