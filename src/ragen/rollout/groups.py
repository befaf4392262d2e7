"""Playing many episodes at once, each in its own coroutine and at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from ragen.core.errors import RagenError
from ragen.core.types import Episode, Group
from ragen.rollout.episode import play_episode
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.policies import ManySamplers, Policy
from ragen.rollout.setup import EpisodeSpec, Setup

T = TypeVar("T")


class Gate(asyncio.Semaphore):
    """Lets in as many episodes at once as a policy's samplers have slots, `slots` for each sampler.

    Samplers may come and go (`ManySamplers`), so they are counted each time an episode begins or
    ends. After a loss, the episodes that are in continue, and others wait until there are slots.
    """

    def __init__(self, policy: Policy | PlayerPolicy, slots: int) -> None:
        self._samplers = policy if isinstance(policy, ManySamplers) else None
        self._slots = slots
        self._places = self._wanted
        super().__init__(self._places)

    @property
    def _wanted(self) -> int:
        """The number of places there should be: at least those of one sampler, which will join."""
        number = 1 if self._samplers is None else self._samplers.num_samplers
        return self._slots * max(1, number)

    async def acquire(self) -> Literal[True]:
        """Wait for a place."""
        self._grow()
        while self._places > self._wanted and not self.locked():
            await super().acquire()  # this free place is gone with its sampler
            self._places -= 1
        return await super().acquire()

    def release(self) -> None:
        """Give a place back."""
        if self._places > self._wanted:
            self._places -= 1
        else:
            super().release()
            self._grow()

    def _grow(self) -> None:
        """Add the places of samplers that have come."""
        for _ in range(self._wanted - self._places):
            super().release()
            self._places += 1


async def run_groups(
    policy: Policy | PlayerPolicy,
    setup: Setup | Sequence[Setup],
    levels: Sequence[int],
    group_size: int,
    path: tuple[int | str, ...],
    concurrency: int | asyncio.Semaphore = 64,
    on_episode: Callable[[Episode], None] | None = None,
    first_group: int = 0,
) -> list[Group]:
    """Play `group_size` episodes on each level and return them as groups, in level order.

    `setup` is that of all groups, or one for each. Groups are numbered from `first_group` on.
    `path` is the run's seed and the purpose of the episodes, such as ``(seed, "train", step)``. At
    most `concurrency` episodes are played at once, or as many as a semaphore that is shared with
    other collections lets in; they begin in (group, member) order. A player's episodes are played
    one by one. `on_episode` is called as each episode ends.

    Raises:
        RagenError: The player cannot play this environment.
    """
    specs = [
        EpisodeSpec(level, group, member, path)
        for group, level in enumerate(levels, first_group)
        for member in range(group_size)
    ]
    if not isinstance(setup, Setup):
        setup = [each for each in setup for _ in range(group_size)]
    episodes = await run_episodes(policy, setup, specs, concurrency, on_episode)
    starts = range(0, len(episodes), group_size)
    return [Group(tuple(episodes[start : start + group_size])) for start in starts]


async def run_most(
    policy: Policy,
    setups: Sequence[Setup],
    levels: Sequence[int],
    group_size: int,
    path: tuple[int | str, ...],
    gate: asyncio.Semaphore,
    on_episode: Callable[[Episode], None] | None,
    min_members: int,
    close_after_s: float,
) -> tuple[list[Group], list[dict[int, asyncio.Task[Episode]]]]:
    """`run_groups` without waiting for the last episodes of a group.

    From `close_after_s` seconds after the first episode began, all groups close as soon as each has
    `min_members` episodes that have ended. The tasks of the others, by group and member, continue:
    the caller awaits or cancels them. `gate` limits how many episodes are played at once.

    Raises:
        RagenError: As `run_groups`; then no task is left.
    """
    begun = asyncio.Event()
    groups = [
        [
            asyncio.create_task(
                run_one(
                    *(policy, setup, EpisodeSpec(level, number, member, path)),
                    *(gate, on_episode, begun.set),
                )
            )
            for member in range(group_size)
        ]
        for number, (setup, level) in enumerate(zip(setups, levels, strict=True))
    ]
    every = [task for group in groups for task in group]
    enough, ended, short = asyncio.Event(), [0] * len(groups), len(groups)

    def count(number: int, task: asyncio.Task[Episode]) -> None:
        """Count an episode that has ended: to look at all of them each time would take too long."""
        nonlocal short
        ended[number] += 1
        short -= ended[number] == min(min_members, group_size)
        if not short or task.cancelled() or task.exception() is not None:
            enough.set()

    for number, group in enumerate(groups):
        for task in group:
            task.add_done_callback(partial(count, number))
    try:
        await begun.wait()
        await asyncio.wait(every, timeout=close_after_s, return_when=asyncio.FIRST_EXCEPTION)
        if not all(task.done() for task in every):
            await enough.wait()
        for task in every:
            if task.done():
                task.result()
    except BaseException:
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)
        raise
    finished = [Group(tuple(task.result() for task in group if task.done())) for group in groups]
    rests = [{n: task for n, task in enumerate(group) if not task.done()} for group in groups]
    return finished, rests


async def run_one(
    policy: Policy,
    setup: Setup,
    spec: EpisodeSpec,
    gate: asyncio.Semaphore,
    on_episode: Callable[[Episode], None] | None,
    on_begin: Callable[[], None] = lambda: None,
) -> Episode:
    """Play one episode, once the `gate` lets it in."""
    async with gate:
        on_begin()
        episode = await play_episode(policy, setup, spec)
    if on_episode is not None:
        on_episode(episode)
    return episode


async def run_episodes(
    policy: Policy | PlayerPolicy,
    setup: Setup | Sequence[Setup],
    specs: Sequence[EpisodeSpec],
    concurrency: int | asyncio.Semaphore = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play the episodes of `specs` and return them in that order; see `run_groups`.

    `setup` is that of all episodes, or one for each.
    """
    setups = [setup] * len(specs) if isinstance(setup, Setup) else setup
    if isinstance(policy, PlayerPolicy):
        concurrency = 1  # a player never waits, so episodes side by side would only take memory
    gate = asyncio.Semaphore(concurrency) if isinstance(concurrency, int) else concurrency

    async def play(setup: Setup, spec: EpisodeSpec) -> Episode:
        async with gate:
            episode = await play_episode(policy, setup, spec)
        if on_episode is not None:
            on_episode(episode)
        return episode

    return await together(play(*pair) for pair in zip(setups, specs, strict=True))


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines at once and return their results in order; the first error ends the rest.

    Raises:
        RagenError: The first that was raised; other exceptions are bugs and come as a group.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in work]
    except ExceptionGroup as errors:
        mistakes, bugs = errors.split(RagenError)
        if mistakes is None or bugs is not None:
            raise
        raise mistakes.exceptions[0] from None
    return [task.result() for task in running]
