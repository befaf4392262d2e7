"""What was begun for later steps: their plays, and episodes that groups closed without."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragen.config.sections import EngineConfig
from ragen.core.types import Episode, Group
from ragen.rollout.setup import Setup


class Start(NamedTuple):
    """Where a group starts: its environment's set-up and its level."""

    setup: Setup
    level: int


@dataclass(frozen=True, slots=True)
class Played:
    """The groups of a step, played from `starts` in this `stage` of the curriculum in `seconds`.

    The last `late` groups are the episodes that earlier groups closed without.
    """

    starts: Sequence[Start]
    stage: int
    groups: Sequence[Group]
    seconds: float
    late: int = 0


@dataclass(frozen=True, slots=True)
class Rest:
    """The episodes of a group that closed without them; they play on, from `start`.

    `step` and `group` are the group's, and `stage` that of the curriculum. `tasks` are by member.
    """

    step: int
    group: int
    stage: int
    start: Start
    tasks: Mapping[int, asyncio.Task[Episode]]

    @property
    def saved(self) -> dict[str, Any]:
        """Where they are played, as JSON."""
        env, level = self.start.setup.env, self.start.level
        about = {"step": self.step, "group": self.group, "stage": self.stage}
        return about | {"env": env, "level": level, "members": [*self.tasks]}


class Overlap(NamedTuple):
    """How collections share the samplers, and when groups close without their last episodes.

    `gate` lets the episodes of all collections in, in the order in which they were asked for, so
    that a later collection takes what an earlier one leaves. `rests` take the last episodes.
    """

    gate: asyncio.Semaphore
    stage: int
    min_members: int
    close_after_s: float
    rests: list[Rest]


@dataclass(slots=True)
class Ahead:
    """A bounded queue between rollout and update; without staleness it is always empty.

    Attributes:
        plans: What each step of `plays` starts from, in order.
        plays: The next steps, the first of them first.
        rests: What earlier steps left.
        gate: See `Overlap`.
    """

    plans: deque[Sequence[Start]] = field(default_factory=deque)
    plays: deque[asyncio.Task[Played]] = field(default_factory=deque)
    rests: list[Rest] = field(default_factory=list)
    gate: asyncio.Semaphore | None = None

    def overlap(self, slots: int, engine: EngineConfig, stage: int) -> Overlap:
        """How collections overlap of which `slots` episodes are played at once."""
        self.gate = self.gate or asyncio.Semaphore(slots)
        return Overlap(self.gate, stage, engine.min_members, engine.close_after_s, self.rests)

    def saved(self, step: int) -> list[dict[str, Any]]:
        """What a checkpoint after `step` steps needs so that rests can be played again.

        Those of later steps are played again with these.
        """
        return [rest.saved for rest in self.rests if rest.step < step]

    async def drop(self) -> None:
        """Give up all of it: the weights or the levels are to be others."""
        tasks = [*self.plays, *(task for rest in self.rests for task in rest.tasks.values())]
        self.plans.clear()
        self.plays.clear()
        self.rests.clear()
        self.gate = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
