"""What was begun for later steps: their plays, and episodes that groups closed without."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ragen.core.types import Episode, Group
from ragen.rollout.setup import Setup


class Start(NamedTuple):
    """Where a group starts: its environment's set-up and its level."""

    setup: Setup
    level: int


@dataclass(frozen=True, slots=True)
class Played:
    """The groups of a step, played from `starts` in this `stage` of the curriculum in `seconds`."""

    starts: Sequence[Start]
    stage: int
    groups: Sequence[Group]
    seconds: float


@dataclass(frozen=True, slots=True)
class Rest:
    """The episodes of a group that closed without them; they play on, from `start`, in `step`."""

    step: int
    start: Start
    tasks: Sequence[asyncio.Task[Episode]]


@dataclass(slots=True)
class Ahead:
    """A bounded queue between rollout and update; without staleness it is always empty.

    Attributes:
        plans: What each step of `plays` starts from, in order.
        plays: The next steps, the first of them first; each begins when the one before has ended.
        rests: What earlier steps left.
    """

    plans: deque[Sequence[Start]] = field(default_factory=deque)
    plays: deque[asyncio.Task[Played]] = field(default_factory=deque)
    rests: list[Rest] = field(default_factory=list)

    async def drop(self) -> None:
        """Give up all of it: the weights or the levels are to be others."""
        tasks = [*self.plays, *(task for rest in self.rests for task in rest.tasks)]
        self.plans.clear()
        self.plays.clear()
        self.rests.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
