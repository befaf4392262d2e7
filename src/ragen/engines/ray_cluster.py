"""A Ray cluster: the connection to it, and the room that it reserves for an engine's processes."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch

from ragen.config.sections import EngineConfig
from ragen.core.errors import MachineAway, RagenError
from ragen.engines.memory import processes_of
from ragen.engines.ray_process import ray

if ray is not None:
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

CONNECT_S = 10.0
"""Seconds that the head of a cluster may take to answer."""

MOST_ASKED = 64
"""Rooms for further samplers for which the cluster is asked at the same time, at most: it looks for
those that it lacks again and again."""


class Rooms:
    """The room that a cluster has reserved for the processes of an engine, by their names.

    A sampler shares its GPU with a learner if there are too few GPUs for both. An engine that
    replaces another one gets rooms of the same kind as `before`.

    Attributes:
        shares_gpus: Whether learners and samplers share GPUs.
        uses_gpus: Whether they use GPUs.

    Raises:
        MachineAway: The cluster is too small for the processes of `before`.
        RagenError: The cluster is too small, or others use it.
    """

    shares_gpus: bool
    uses_gpus: bool

    def __init__(self, settings: EngineConfig, before: Rooms | None = None) -> None:
        self._settings = settings
        self._further: dict[int, Any] = {}  # of each sampler beyond `engine.samplers`
        self._asked: dict[Any, Any] = {}  # what is ready once it is there: room for another one
        self._places: dict[str, tuple[Any, int]] = {}  # of each process: a group, and a part of it
        self._group = placement_group(self._plan(before), strategy="PACK")
        try:
            done, _ = ray.wait([self._group.ready()], timeout=settings.timeout_s)
        except BaseException:
            remove_placement_group(self._group)
            raise
        if not done:
            remove_placement_group(self._group)
            free = ray.available_resources()
            raise RagenError(
                f"the cluster gave no room for {self._who} within engine.timeout_s = "
                f"{settings.timeout_s:g} s ({free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} "
                "GPUs are free): end what else runs there, or ask for less"
            )

    @property
    def _who(self) -> str:
        *most, last = processes_of(self._settings)
        return f"{', '.join(most)} and {last}"

    def _plan(self, before: Rooms | None) -> list[dict[str, float]]:
        """The parts to reserve; also notes the part of each process.

        Raises:
            MachineAway, RagenError: As `Rooms`.
        """
        settings = self._settings
        learners, samplers = settings.learners, settings.samplers
        each = settings.tensor_parallel  # workers of a sampler
        have = ray.cluster_resources()
        gpus = int(have.get("GPU", 0))
        apart, shared = learners + each * samplers, max(learners, samplers)
        too_small: type[RagenError] = RagenError if before is None else MachineAway
        if before is None:
            self.uses_gpus = gpus > 0
            self.shares_gpus = each == 1 and 0 < gpus < apart
        else:
            self.uses_gpus, self.shares_gpus = before.uses_gpus, before.shares_gpus
        if self.uses_gpus and gpus < (shared if self.shares_gpus else apart):
            raise too_small(
                f"the cluster has {gpus} GPUs, and each of {learners} learners needs one and each "
                f"of {samplers} samplers {each}: lower engine.learners, engine.samplers or "
                "engine.tensor_parallel, or add machines"
            )
        self._sampler_room = {"CPU": float(each)} | ({"GPU": float(each)} if self.uses_gpus else {})
        if self.shares_gpus:
            bundles = [{"CPU": 2.0, "GPU": 1.0}] * shared
            self._parts = [*range(learners), *range(samplers)]
        else:
            bundles = [{"CPU": 1.0} | ({"GPU": 1.0} if self.uses_gpus else {})] * learners
            bundles += [self._sampler_room] * samplers
            self._parts = list(range(learners + samplers))
        self._parts += range(len(bundles), len(bundles) + settings.players)
        bundles += [{"CPU": 1.0}] * settings.players
        cpus, need = have.get("CPU", 0), sum(bundle["CPU"] for bundle in bundles)
        if cpus < need:
            which = "engine.learners, engine.players" if settings.players else "engine.learners"
            raise too_small(
                f"the cluster has {cpus:g} CPUs, and {self._who} need {need:g}: lower {which} or "
                "engine.samplers, or add machines"
            )
        return bundles

    def learner(self, place: int) -> dict[str, Any]:
        """Ray's options for the process of a learner."""
        return self._options(f"learner {place}", (self._group, self._parts[place]), self._gpu_share)

    def sampler(self, place: int) -> dict[str, Any]:
        """Ray's options for the process of a sampler."""
        name, workers = f"sampler {place}", self._settings.tensor_parallel
        if place in self._further:
            gpus = self._sampler_room.get("GPU", 0.0)
            return self._options(name, (self._further[place], 0), gpus, workers)
        part = self._parts[self._settings.learners + place]
        return self._options(name, (self._group, part), workers * self._gpu_share, workers)

    def player(self, place: int) -> dict[str, Any]:
        """Ray's options for the process of a player."""
        part = self._parts[self._settings.learners + self._settings.samplers + place]
        return self._options(f"player {place}", (self._group, part), 0.0)

    @property
    def _gpu_share(self) -> float:
        return (0.5 if self.shares_gpus else 1.0) if self.uses_gpus else 0.0

    def _options(
        self, name: str, place: tuple[Any, int], gpus: float, cpus: int = 1
    ) -> dict[str, Any]:
        self._places[name] = place
        strategy = PlacementGroupSchedulingStrategy(place[0], placement_group_bundle_index=place[1])
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    def nodes(self) -> dict[str, str]:
        """The node on which each process has its room; empty if the room is gone."""
        places = self._places.copy()  # another thread may add to it
        groups = {id(group): group for group, _ in places.values()}
        # The cluster is asked once: each further sampler has a group of its own.
        every = placement_group_table() if len(groups) > 1 else {}
        tables = {
            key: every.get(group.id.hex(), {}) if every else placement_group_table(group)
            for key, group in groups.items()
        }
        return {name: _node_in(tables[id(group)], part) for name, (group, part) in places.items()}

    def threads(self, name: str) -> int:
        """See `threads_of`."""
        return self.threads_of([name])[name]

    def threads_of(self, names: Iterable[str]) -> dict[str, int]:
        """The number of threads of each of these processes, which are learners or samplers.

        The threads of its node are divided among all processes there that work at the same time. On
        the driver's node these are the threads of this process, on any other node all of its CPUs.
        """

        def works(name: str) -> str:
            """With whom it works: learners and samplers at the same time only if steps overlap."""
            kind = name.split()[0]
            return "overlapping" if self._settings.max_staleness and kind != "player" else kind

        nodes = self.nodes()
        together = Counter((node, works(name)) for name, node in nodes.items())
        threads = {each["NodeID"]: each["Resources"].get("CPU", 1.0) for each in ray.nodes()}
        threads[ray.get_runtime_context().get_node_id()] = torch.get_num_threads()
        return {
            name: max(1, int(threads.get(nodes[name], 1.0)) // together[nodes[name], works(name)])
            for name in names
        }

    # Samplers beyond `engine.samplers`.

    def further(self) -> list[int]:
        """The places of further samplers, up to `engine.most_samplers`, that have got room."""
        settings = self._settings
        lacking = settings.most_samplers - settings.samplers - len(self._further)
        while len(self._asked) < min(lacking, MOST_ASKED):
            group = placement_group([self._sampler_room])
            self._asked[group.ready()] = group
        if not self._asked:
            return []
        done, _ = ray.wait([*self._asked], num_returns=len(self._asked), timeout=0)
        free = (each for each in count(settings.samplers) if each not in self._further)
        places = [next(free) for _ in done]
        self._further |= {
            place: self._asked.pop(ready) for place, ready in zip(places, done, strict=True)
        }
        return places

    def is_further(self, place: int) -> bool:
        """Whether the sampler in this place is beyond `engine.samplers`."""
        return place in self._further

    def clear(self, place: int) -> None:
        """Give back the room of a sampler that is not replaced in its place."""
        del self._places[f"sampler {place}"]
        remove_placement_group(self._further.pop(place))

    def close(self) -> None:
        """Give back all room."""
        for group in self._groups():
            remove_placement_group(group)

    def _groups(self) -> Iterator[Any]:
        yield self._group
        yield from self._further.values()
        yield from self._asked.values()


def _node_in(table: Mapping[str, Any], part: int) -> str:
    node: str = table.get("bundles_to_node_id", {}).get(part, "")
    return node


def connect(address: str, num_processes: int) -> bool:
    """Connect to a cluster, or start one on this machine; returns whether to end Ray later.

    Raises:
        RagenError: Ray is missing, or the cluster cannot be reached.
    """
    if ray is None:
        raise RagenError(
            "engine.name = \"ray\" needs Ray: pip install 'ragen-rl[ray]', or leave engine.name out"
        )
    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        cores = max(os.cpu_count() or 1, 2 * num_processes)  # may be more processes than cores
        settings |= {"include_dashboard": False, "num_cpus": cores}
    else:
        _refuse_silent(address)
    try:
        ray.init(address or "local", **settings)
    except (ConnectionError, ValueError, RuntimeError, OSError, TimeoutError) as error:
        text = " ".join(str(error).split())[:200]
        if address:
            raise RagenError(
                f"engine.address = {address!r}: there is no Ray cluster that answers ({text}); "
                "start one with `ray start --head`, or leave engine.address out"
            ) from error
        raise RagenError(
            f"Ray could not be started on this machine: {text}; leave engine.name out to train in "
            "one process"
        ) from error
    return True


def _refuse_silent(address: str) -> None:
    """Refuse an address at which nothing listens, because Ray itself would try for minutes.

    Raises:
        RagenError: Nothing listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # auto, local, or a name that Ray knows
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:  # ValueError: it is not a name
        raise RagenError(
            f"engine.address = {address!r} cannot be reached: {error}; start a cluster with "
            "`ray start --head`, or leave engine.address out"
        ) from error
