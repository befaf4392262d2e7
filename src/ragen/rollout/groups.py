"""Playing many episodes at once, each in its own coroutine and at its own pace."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ragen.core.errors import RagenError
from ragen.core.types import Episode, Group
from ragen.rollout.agent import play_task
from ragen.rollout.episode import play_episode
from ragen.rollout.players import PlayerPolicy
from ragen.rollout.policies import Policy, Seating, seated
from ragen.rollout.setup import EpisodeSpec, Setup
from ragen.storage.journal import Journal

T = TypeVar("T")


@runtime_checkable
class Spread(Protocol):
    """A policy that plays episodes in other processes, too; `own` is this process's."""

    @property
    def own(self) -> Policy:
        """The policy of this process."""
        ...

    async def play(
        self,
        setups: Sequence[Setup],
        specs: Sequence[EpisodeSpec],
        concurrency: int | asyncio.Semaphore,
        on_episode: Callable[[Episode], None] | None,
    ) -> list[Episode]:
        """Play and return the episodes, in order; the arguments are those of `run_episodes`."""
        ...


async def run_groups(
    policy: Policy | PlayerPolicy,
    setup: Setup | Sequence[Setup],
    levels: Sequence[int],
    group_size: int,
    path: tuple[int | str, ...],
    concurrency: int | asyncio.Semaphore = 64,
    on_episode: Callable[[Episode], None] | None = None,
    first_group: int = 0,
    finish: Callable[[Group], Awaitable[Group]] | None = None,
    journal: Journal | None = None,
) -> list[Group]:
    """Play `group_size` episodes on each level and return them as groups, in level order.

    There is one `setup` for all groups, or one for each. `path` is the run's seed and the purpose
    of the episodes, such as ``(seed, "train", step)``. At most `concurrency` episodes are played at
    once, or as many as a semaphore, shared with other collections, lets in. They begin
    in (group, member) order. A player's episodes are played one by one, unless they wait.
    Where no bit of an episode depends on the others (`are_independent`), those that a `journal` has
    are not played again, and those that end are added to it.
    """
    specs = [
        EpisodeSpec(level, group, member, path)
        for group, level in enumerate(levels, first_group)
        for member in range(group_size)
    ]
    kinds = [setup] * len(levels) if isinstance(setup, Setup) else setup
    setups = [each for each in kinds for _ in range(group_size)]
    if journal is not None and not are_independent(policy, setups):
        journal = None
    before = {} if journal is None else journal.begin()
    groups = Growing(len(levels), group_size, first_group, on_episode, journal)
    left = list[tuple[Setup, EpisodeSpec]]()
    for own, spec in zip(setups, specs, strict=True):
        known = before.get((own.env, spec.level_seed, spec.group, spec.member))
        left.append((own, spec)) if known is None else groups.note(known)

    async def finished(group: Awaitable[Group]) -> Group:
        return await (group if finish is None else finish(await group))

    work: list[Coroutine[Any, Any, Any]] = [*map(finished, groups.whole)]
    if left:
        rest = [own for own, _ in left], [spec for _, spec in left]
        work.append(run_episodes(policy, *rest, concurrency, groups.keep))
    return (await together(work))[: len(levels)]


class Growing:
    """The groups of a collection: each of `whole` is done when its last episode has ended."""

    def __init__(
        self,
        number: int,
        size: int,
        first: int,
        on_episode: Callable[[Episode], None] | None,
        journal: Journal | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.whole: list[asyncio.Future[Group]] = [loop.create_future() for _ in range(number)]
        self._size, self._first = size, first
        self._on_episode, self._journal = on_episode, journal
        self._ended: dict[int, dict[int, Episode]] = defaultdict(dict)

    def note(self, episode: Episode) -> None:
        """Count an episode that has ended."""
        ended = self._ended[episode.group]
        ended[episode.member] = episode
        whole = self.whole[episode.group - self._first]
        # The error of another group may have cancelled it.
        if len(ended) == self._size and not whole.done():
            whole.set_result(Group(tuple(ended[member] for member in range(self._size))))
        if self._on_episode is not None:
            self._on_episode(episode)

    def keep(self, episode: Episode) -> None:
        """Count an episode, and write it to the journal; if that fails, its group does.

        Another process's episodes come by a callback, from which nothing could be raised.
        """
        whole = self.whole[episode.group - self._first]
        try:
            if self._journal is not None:
                self._journal.add(episode)
        except RagenError as error:
            if not whole.done():
                whole.set_exception(error)
        else:
            self.note(episode)


async def run_episodes(
    policy: Policy | PlayerPolicy,
    setup: Setup | Sequence[Setup],
    specs: Sequence[EpisodeSpec],
    concurrency: int | asyncio.Semaphore = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play and return the episodes of `specs`, in order; each may have its own set-up.

    Where environments wait, requests arrive in any order, and a policy that is `Seating` answers so
    that no bit depends on it.
    """
    setups = [setup] * len(specs) if isinstance(setup, Setup) else setup
    if isinstance(policy, Spread):
        return await policy.play(setups, specs, concurrency, on_episode)
    waits = prepare(policy, setups)
    if isinstance(policy, PlayerPolicy) and not waits:
        concurrency = 1  # it answers at once: side by side, episodes would only take memory
    gate = asyncio.Semaphore(concurrency) if isinstance(concurrency, int) else concurrency

    async def play(setup: Setup, spec: EpisodeSpec) -> Episode:
        async with gate:
            with seated(policy, (*spec.path, spec.group, spec.member)) as seat:
                if setup.agent is None:
                    episode = await play_episode(seat, setup, spec)
                else:
                    episode = await play_task(policy, seat, setup, spec)
        if on_episode is not None:
            on_episode(episode)
        return episode

    return await together(play(*pair) for pair in zip(setups, specs, strict=True))


def prepare(policy: Policy | PlayerPolicy, setups: Sequence[Setup]) -> bool:
    """Let an idle policy be ordered where environments wait; true if one does."""
    waits = any(each.waits for each in setups)
    if isinstance(policy, Seating) and policy.is_idle:
        policy.ordered = waits
        if policy.in_rounds and any(each.agent is not None for each in setups):
            policy.ordered = False  # an agent may make several calls at once, or none for long
    return waits


def are_independent(policy: Policy | PlayerPolicy, setups: Sequence[Setup]) -> bool:
    """True if some of the episodes can be played later without the others.

    All environments wait, so that any of them are played alike, and the policy is not in rounds.
    """
    if isinstance(policy, Spread):
        policy = policy.own
    prepare(policy, setups)
    in_rounds = isinstance(policy, Seating) and policy.in_rounds
    return all(each.waits for each in setups) and not in_rounds


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
