"""Playing ahead of training: the buffer between rollout and update.

A synchronous run has no buffer: it plays a step and then trains on it (`collection.play_step`).
With ``engine.max_staleness = k`` a buffer holds the steps that are played meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragen.core.metrics import Metrics, largest, last, mean, total
from ragen.core.types import Group
from ragen.training.mixture import Start


@dataclass(frozen=True, slots=True)
class Played:
    """The groups of a step, played in this `stage` of the curriculum in `seconds`.

    `version` is the policy version with which the step begins to train. `stale` has the indices of
    groups that are too old to train on. A step that was not played ahead has neither.
    """

    groups: Sequence[Group]
    stage: int
    seconds: float
    version: int = 0
    stale: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Entry:
    """A step in the buffer: where its groups start, and its play."""

    starts: Sequence[Start]
    play: asyncio.Task[Played]


@dataclass(slots=True)
class Buffer:
    """The next steps, whose groups are played while another step trains.

    The life of an entry, which is step n + k of a run with ``engine.max_staleness = k``::

        queued ──▶ playing ──▶ finished ──▶ trained
           └──────────┴────────────┴──────▶ dropped

    - **queued**: when step n begins to train, the starts of step n + k are chosen. It has its own
      levels and seeds; shares of a mixture and the stage of the curriculum follow from the results
      so far. In a run's first step, the steps 0 to k are queued together.
    - **playing**: its episodes ask the `gate` for a slot, behind all earlier entries. So they
      take what earlier entries leave, and begin at the earliest with the weights that step n begins
      with. Weights that are published meanwhile are taken by open completions, too.
    - **finished**: all groups are there and wait for their turn (``engine/queue``).
    - **trained**: the loop has taken it as its next step. Up to k publications came since it was
      queued, so a group's oldest completion is at most k versions behind. A group that is further
      behind, because its sampler loaded weights late, is left out of the step (`Played.stale`).
    - **dropped**: the weights or levels change otherwise, by a rollback or a new engine, or the run
      is over. All entries are cancelled; the run queues and plays their steps again.

    `max_staleness` is k. `slots` is the number of episodes played at once, in all entries together.
    """

    max_staleness: int
    slots: int
    entries: deque[Entry] = field(default_factory=deque)
    gate: asyncio.Semaphore | None = None

    def planned(self) -> Counter[str]:
        """Groups of the entries by environment."""
        return Counter(start.setup.env for entry in self.entries for start in entry.starts)

    def add(
        self,
        starts: Sequence[Start],
        play: Callable[[asyncio.Semaphore], Coroutine[Any, Any, Played]],
    ) -> None:
        """Queue a step, whose groups `play` plays."""
        self.gate = self.gate or asyncio.Semaphore(self.slots)
        self.entries.append(Entry(starts, asyncio.create_task(play(self.gate))))

    async def take(self) -> Played:
        """The oldest entry's groups, once they are played."""
        return await self.entries.popleft().play

    async def drop(self) -> None:
        """Cancel all entries, because the weights or the levels will change."""
        tasks = [entry.play for entry in self.entries]
        self.entries.clear()
        self.gate = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stale(self, groups: Sequence[Group], version: int) -> frozenset[int]:
        """The indices of the groups that are too old to train weights of this version on."""
        ages = [staleness(group, version) for group in groups]
        return frozenset(index for index, age in enumerate(ages) if age > self.max_staleness)

    def metrics(self, played: Played, kept: Sequence[int]) -> Metrics:
        """Metrics of a step at its end; `kept` are the indices of the groups it trained on."""
        metrics = {
            "engine/stale_groups": total(len(played.stale)),
            "engine/queue": last(sum(entry.play.done() for entry in self.entries)),
            "engine/play_s": total(played.seconds),
        }
        if old := [staleness(played.groups[index], played.version) for index in kept]:
            metrics["engine/staleness_mean"] = mean(sum(old) / len(old))
            metrics["engine/staleness_max"] = largest(max(old))
        return metrics


def staleness(group: Group, version: int) -> int:
    """Publications by which the oldest completion of a group is behind this policy version."""
    versions = [
        turn.completion.policy_version for episode in group.episodes for turn in episode.turns
    ]
    return version - min(versions, default=version)
