"""The local engine in several processes of one machine, each of which plays and trains its share.

The first is this process. All hold the whole weights and take the same optimiser steps, on the sum
of their gradients. Whole groups of episodes are dealt out among them. If one is lost, the engine is
lost, and the run continues from its last checkpoint with a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from typing_extensions import override

from ragen.cluster.child import Child
from ragen.cluster.child_host import OF_PROCESS, ChildHost
from ragen.cluster.lost import GRACE_S, SeveralProcesses, answers_of
from ragen.config.config import Config
from ragen.config.reading import changed
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics
from ragen.core.types import Completion, Episode, Prompt
from ragen.engines.factory import make_policy
from ragen.engines.local import LocalEngine
from ragen.learning.ranks import Ranks, leave
from ragen.models.memory import plans
from ragen.networks.machine import free_cores, usable_cpus, usable_device
from ragen.rollout.groups import run_episodes, together
from ragen.rollout.policies import Policy
from ragen.rollout.setup import EpisodeSpec, Setup, make_setup
from ragen.sampling.weighted_policy import Stats, WeightedPolicy
from ragen.sampling.weights import checksums, some

T = TypeVar("T")


def with_processes(config: Config) -> Config:
    """The config with a number of processes in place of 0.

    It is the number of free cores, as far as memory allows and each process gets a group. A GPU is
    used by one process.
    """
    if config.engine.processes > 0:
        return config
    most = 1 if usable_device() == "cuda" else min(usable_cpus(), config.rollout.num_groups)
    count = free_cores(most)
    while count > 1 and not _fits(changed(config, {"engine.processes": count})):
        count -= 1
    return changed(config, {"engine.processes": count})


def _fits(config: Config) -> bool:
    return all(each.available is None or each.needed <= each.available for each in plans(config))


class SpreadSampler(Policy):
    """The samplers of this process and of its children, among which groups are dealt out."""

    def __init__(self, own: WeightedPolicy, children: Sequence[Child]) -> None:
        self.own, self._children = own, children
        self._era = 0
        self._counts: dict[Child, Stats] = {}

    @override
    async def complete(self, prompt: Prompt) -> Completion:
        return await self.own.complete(prompt)

    async def play(
        self,
        setups: Sequence[Setup],
        specs: Sequence[EpisodeSpec],
        concurrency: int | asyncio.Semaphore,
        on_episode: Callable[[Episode], None] | None,
    ) -> list[Episode]:
        """Play and return the episodes of `specs`, in order, `concurrency` at once in all.

        The first group is this process's, the next that of the next process, and so on in turn.
        """
        assert isinstance(concurrency, int), "only one collection is played at a time"
        # One process can listen for programs outside.
        is_outside = any(each.agent is not None and each.agent.is_outside for each in setups)
        children = [] if is_outside else self._children
        size = 1 + len(children)
        most = -(-concurrency // size)
        order = {group: place for place, group in enumerate(dict.fromkeys(s.group for s in specs))}
        shares: list[list[int]] = [[] for _ in range(size)]
        for place, spec in enumerate(specs):
            shares[order[spec.group] % size].append(place)
        found: dict[tuple[int, int], Episode] = {}

        def ended(episode: Episode) -> None:
            found[episode.group, episode.member] = episode
            if on_episode is not None:
                on_episode(episode)

        work: list[Coroutine[Any, Any, Any]] = []
        for child, share in zip(children, shares[1:], strict=True):
            if share:
                work.append(self._play_in(child, share, setups, specs, most, ended))
        own = shares[0]
        work.append(
            run_episodes(
                self.own, [setups[at] for at in own], [specs[at] for at in own], most, ended
            )
        )
        await together(work)
        return [found[spec.group, spec.member] for spec in specs]

    async def _play_in(
        self,
        child: Child,
        share: Sequence[int],
        setups: Sequence[Setup],
        specs: Sequence[EpisodeSpec],
        most: int,
        ended: Callable[[Episode], None],
    ) -> None:
        kinds = {id(setups[at]): setups[at] for at in share}
        numbers = {known: number for number, known in enumerate(kinds)}
        which = [numbers[id(setups[at])] for at in share]
        sent = [_fields(each) for each in kinds.values()]
        chosen = [specs[at] for at in share]
        call = child.begin("play", sent, which, chosen, most, self._era, tell=ended)
        self._counts[child] = await child.wait(call)

    @property
    def stats(self) -> Stats:
        """The counts of all samplers since the last `forget`."""
        every = [self.own.stats, *self._counts.values()]
        return Stats(
            sum(each.prefilled for each in every),
            sum(each.reused for each in every),
            sum(each.sampled for each in every),
            sum(each.forwards for each in every),
        )

    def metrics(self) -> Metrics:
        """Metrics of all samplers, of which this process's knows which repeat."""
        return self.stats.metrics() if self.own.metrics() else {}

    def forget(self) -> None:
        """Drop all keys and values, those of the children before they play again."""
        self.own.forget()
        self.own.stats = Stats()
        self._era += 1
        self._counts.clear()

    async def close(self) -> None:
        """End the children of an evaluation, and free the memory of the sampler."""
        for each in self._children:
            each.end()
        await self.own.close()


def _fields(setup: Setup) -> dict[str, Any]:
    names = [each.name for each in fields(setup) if each.name not in OF_PROCESS]
    return {name: getattr(setup, name) for name in names}


@contextmanager
def killed_with_errors(children: Sequence[Child]) -> Iterator[None]:
    """Kill the children if the body fails."""
    try:
        yield
    except BaseException:
        for each in children:
            each.kill()
        raise


def load_policy(config: Config, path: str) -> tuple[SpreadSampler | WeightedPolicy, Setup]:
    """The policy of an evaluation (`make_policy`), in all processes of a config, and its set-up."""
    children = start_children(config.engine.processes)
    threads = torch.get_num_threads()
    with killed_with_errors(children):
        begun = [each.begin("start", threads, config, path) for each in children]
        policy, chat = make_policy(config, path)
        setup = make_setup(config, chat)
        for call in begun:
            call.answer.result()
    return (SpreadSampler(policy, children) if children else policy), setup


def start_children(size: int, module: str = ChildHost.__module__) -> list[Child]:
    """The processes beside this one, with all modules loaded; `module` has their `ChildHost`.

    Raises:
        EngineLost: One has ended before.
        RagenError: There is a GPU.
    """
    if size > 1 and usable_device() == "cuda":
        raise RagenError(
            f"engine.processes = {size}: a GPU is used by one process; set it to 1, or hide the "
            "GPU (CUDA_VISIBLE_DEVICES=)"
        )
    children = [Child(f"process {rank} of {size}", module) for rank in range(2, size + 1)]
    with killed_with_errors(children):
        for call in [each.begin("ready") for each in children]:
            call.answer.result()
    return children


def started(children: Sequence[Child], arguments: Sequence[Any], own: Callable[..., T]) -> T:
    """This process's part of several that meet; the children's ``start`` makes theirs.

    Both get their place, as `ragen.learning.ranks.join_here` takes it, a child after `arguments`.

    Raises:
        EngineLost: A child has ended.
        RagenError: A part cannot be made.
    """
    size = 1 + len(children)
    try:
        with killed_with_errors(children), TemporaryDirectory(prefix="ragen-") as folder:
            store = f"file://{folder}/store"
            begun = [
                each.begin("start", *arguments, rank, size, store)
                for rank, each in enumerate(children, 1)
            ]
            try:
                made = own(0, size, store)
            except RuntimeError:  # perhaps since another is lost, which then says more
                futures.wait([call.answer for call in begun], GRACE_S)
                for call in begun:
                    if call.answer.done():
                        call.answer.result()
                raise
            for call in begun:
                call.answer.result()
            return made
    except BaseException:
        leave(Ranks(0, size))
        raise


def refuse_other_weights(
    children: Sequence[Child], found: Sequence[dict[str, int]], own: dict[str, int], when: str
) -> None:
    """Raise `RagenError` if the checksums of the children's weights are not those of this process.

    `when` completes the message.
    """
    for child, held in zip(children, found, strict=True):
        if others := [name for name in own if held.get(name) != own[name]]:
            raise RagenError(
                f"the weights of {child.name} are not those of the first: {when} they differ in "
                f"{some(others)}; suspect this machine's memory"
            )


class ProcessEngine(SeveralProcesses):
    """The `Engine` of several processes on this machine's CPU.

    `path` is the folder or hub id of the policy's first weights, which each process reads.

    Raises:
        EngineLost: A process has ended.
        RagenError: The model cannot be used.
    """

    policy: SpreadSampler

    def __init__(self, config: Config, path: str) -> None:
        if Path(path).exists():
            path = str(Path(path).resolve())
        size, threads = config.engine.processes, torch.get_num_threads()
        self.version = 0
        self._children = start_children(size)
        own = partial(LocalEngine, config, path)
        self._own = started(self._children, (threads, config, path), own)
        self.chat = self._own.chat
        self.policy = SpreadSampler(self._own.policy, self._children)

    @override
    async def _in_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all processes to a call, this one's first."""
        self._raise_failure()
        begun = [(each, each.begin("call", method, *arguments)) for each in self._children]
        own = getattr(self._own, method)(*arguments)
        return await answers_of([own, *(each.wait(call) for each, call in begun)], self._fail)

    def _fail(self, error: Exception) -> None:
        self._error = error
        for each in self._children:
            each.kill()

    @override
    async def publish(self) -> None:
        self._agree((await self._in_all("publish"))[1:])

    def _agree(self, found: Sequence[dict[str, int]]) -> None:
        """Take over the version, and refuse weights of other processes that are not this one's."""
        self.version = self._own.version
        own = checksums(self._own.learner.trained_weights())
        refuse_other_weights(self._children, found, own, f"after publication {self.version}")

    @override
    def forget(self) -> None:
        self.policy.forget()

    @override
    def metrics(self) -> Metrics:
        return self.policy.metrics()

    @override
    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        self._agree((await self._in_all("load", folder.resolve(), state))[1:])

    @override
    async def close(self) -> None:
        for each in self._children:
            each.end()
        await self._own.close()
