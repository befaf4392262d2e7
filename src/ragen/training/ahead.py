"""What is under way for later steps: the plays of their groups, and late episodes.

An episode is late if its group closed without it (`engine.min_members`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragen.config.config import Config
from ragen.core.types import Episode, Group
from ragen.rollout.groups import Gate
from ragen.rollout.policies import Policy
from ragen.rollout.setup import Setup


class Start(NamedTuple):
    """Where a group starts: its environment's set-up and its level."""

    setup: Setup
    level: int


@dataclass(frozen=True, slots=True)
class Played:
    """The groups of a step, played from `starts` in this `stage` of the curriculum in `seconds`.

    The last groups have the late episodes of earlier groups; `late` are the stages of each.
    """

    starts: Sequence[Start]
    stage: int
    groups: Sequence[Group]
    seconds: float
    late: Sequence[int] = ()

    @property
    def own(self) -> list[Group]:
        """The groups that were played in `stage`: late ones may be of an earlier stage."""
        first = len(self.groups) - len(self.late)
        late = zip(self.groups[first:], self.late, strict=True)
        return [*self.groups[:first], *(group for group, stage in late if stage == self.stage)]


@dataclass(frozen=True, slots=True)
class Rest:
    """The late episodes of a group, which are still played, from `start`.

    `step` and `group` are the group's, and `stage` that of the curriculum. `tasks` are by member.
    """

    step: int
    group: int
    stage: int
    start: Start
    tasks: Mapping[int, asyncio.Task[Episode]]

    @property
    def saved(self) -> dict[str, Any]:
        """What is needed to play them again, as JSON values."""
        env, level = self.start.setup.env, self.start.level
        about = {"step": self.step, "group": self.group, "stage": self.stage}
        return about | {"env": env, "level": level, "members": [*self.tasks]}


class Overlap(NamedTuple):
    """How collections share the samplers, and when groups close without their last episodes.

    `gate` admits the episodes of all collections in the order in which they ask for a slot, so that
    a later collection takes what an earlier one leaves. `rests` gets the late episodes.
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
        plans: The starts of each step of `plays`.
        plays: The plays of the next steps, in their order.
        rests: The late episodes of earlier steps.
        gate: See `Overlap`.
    """

    plans: deque[Sequence[Start]] = field(default_factory=deque)
    plays: deque[asyncio.Task[Played]] = field(default_factory=deque)
    rests: list[Rest] = field(default_factory=list)
    gate: Gate | None = None

    def overlap(self, config: Config, stage: int, policy: Policy) -> Overlap:
        """How the collections of a run overlap, which `policy` samples."""
        engine = config.engine
        self.gate = self.gate or Gate(policy, config.rollout.slots)
        return Overlap(self.gate, stage, engine.min_members, engine.close_after_s, self.rests)

    def saved(self, step: int) -> list[dict[str, Any]]:
        """The late episodes for a checkpoint after `step` steps: a resumed run plays them again.

        Those of later steps are left out, because the resumed run plays these steps again anyway.
        """
        return [rest.saved for rest in self.rests if rest.step < step]

    async def drop(self) -> None:
        """Cancel all of it, because the weights or the levels will change."""
        tasks = [*self.plays, *(task for rest in self.rests for task in rest.tasks.values())]
        self.plans.clear()
        self.plays.clear()
        self.rests.clear()
        self.gate = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
