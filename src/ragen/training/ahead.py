"""The plays of later steps, which are under way while a step trains."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ragen.core.types import Group
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


@dataclass(slots=True)
class Ahead:
    """A bounded queue between rollout and update; without staleness it is always empty.

    Attributes:
        plans: The starts of each step of `plays`.
        plays: The plays of the next steps, in their order.
        gate: Admits the episodes of all plays in the order in which they ask for a slot, so that a
            later play takes what an earlier one leaves.
    """

    plans: deque[Sequence[Start]] = field(default_factory=deque)
    plays: deque[asyncio.Task[Played]] = field(default_factory=deque)
    gate: asyncio.Semaphore | None = None

    async def drop(self) -> None:
        """Cancel all of it, because the weights or the levels will change."""
        tasks = [*self.plays]
        self.plans.clear()
        self.plays.clear()
        self.gate = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
