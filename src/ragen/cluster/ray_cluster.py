"""A Ray cluster: the connection to it, and what it reserves for an engine's processes."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from typing import Any

import torch

from ragen.cluster.ray_process import ray
from ragen.config.sections import EngineConfig
from ragen.core.errors import RagenError
from ragen.learning.ranks import TIMEOUT_S
from ragen.models.memory import ADDRESS_ENV, processes_of

if ray is not None:
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

CONNECT_S = 10.0
"""Seconds that the head of a cluster may take to answer."""


class Cluster:
    """The Ray cluster of an engine: CPUs and GPUs are reserved for each of its processes.

    A sampler shares its GPU with a learner if there are too few GPUs for both. A cluster without
    GPUs computes on CPUs, unless the run `needs_gpus`. Processes are known by their names, which
    are in `learners` and `samplers`.

    Raises:
        RagenError: Ray is missing, or the cluster cannot be reached, is too small, or is used by
            others.
    """

    def __init__(self, settings: EngineConfig, needs_gpus: bool = False) -> None:
        self._settings = settings
        self.learners = [f"learner {index}" for index in range(settings.learners)]
        self.samplers = [f"sampler {index}" for index in range(settings.samplers)]
        self._owns_ray = connect(
            os.environ.get(ADDRESS_ENV, ""), settings.learners + settings.samplers
        )
        self._group: Any = None
        try:
            self._group = placement_group(self._bundles(needs_gpus), strategy="PACK")
            done, _ = ray.wait([self._group.ready()], timeout=TIMEOUT_S)
            if not done:
                free = ray.available_resources()
                raise RagenError(
                    f"the cluster gave no room for {self._who} in {TIMEOUT_S:g} s "
                    f"({free.get('CPU', 0):g} CPUs and "
                    f"{free.get('GPU', 0):g} GPUs are free): end what else runs there, or ask for "
                    "less"
                )
        except BaseException:
            self.close()
            raise

    @property
    def _who(self) -> str:
        return " and ".join(processes_of(self._settings))

    def _bundles(self, needs_gpus: bool) -> list[dict[str, float]]:
        """The CPUs and GPUs of each bundle to reserve; also notes the bundle of each process."""
        learners, samplers = len(self.learners), len(self.samplers)
        each = self._settings.tensor_parallel  # workers of a sampler
        have = ray.cluster_resources()
        gpus = int(have.get("GPU", 0))
        apart, shared = learners + each * samplers, max(learners, samplers)
        self.uses_gpus = needs_gpus or gpus > 0
        self.shares_gpus = self.uses_gpus and each == 1 and gpus < apart
        if self.uses_gpus and gpus < (shared if self.shares_gpus else apart):
            raise RagenError(
                f"the cluster has {gpus} GPUs, and each of {learners} learners needs one and each "
                f"of {samplers} samplers {each}: lower engine.learners, engine.samplers or "
                "engine.tensor_parallel, or add machines"
            )
        names = [*self.learners, *self.samplers]
        if self.shares_gpus:
            bundles = [{"CPU": 2.0, "GPU": 1.0}] * shared
            self._bundle = {name: int(name.split()[1]) for name in names}
        else:
            sizes = [1.0] * learners + [float(each)] * samplers
            bundles = [{"CPU": n} | ({"GPU": n} if self.uses_gpus else {}) for n in sizes]
            self._bundle = {name: index for index, name in enumerate(names)}
        cpus, need = have.get("CPU", 0), sum(bundle["CPU"] for bundle in bundles)
        if cpus < need:
            raise RagenError(
                f"the cluster has {cpus:g} CPUs, and {self._who} need {need:g}: lower "
                "engine.learners or engine.samplers, or add machines"
            )
        return bundles

    def options(self, name: str) -> dict[str, Any]:
        """Ray's options for a process, by its name."""
        workers = self._settings.tensor_parallel if name in self.samplers else 1
        gpus = workers * (0.5 if self.shares_gpus else 1.0) if self.uses_gpus else 0.0
        strategy = PlacementGroupSchedulingStrategy(self._group, self._bundle[name])
        return {"num_cpus": workers, "num_gpus": gpus, "scheduling_strategy": strategy}

    def threads(self) -> dict[str, int]:
        """The number of threads of each process.

        The threads of its node are divided among all processes there that work at the same time:
        learners and samplers do so only if steps overlap. On the driver's node these are the
        threads of this process, on any other node all of its CPUs.
        """
        table = placement_group_table(self._group).get("bundles_to_node_id", {})
        threads = {each["NodeID"]: each["Resources"].get("CPU", 1.0) for each in ray.nodes()}
        threads[ray.get_runtime_context().get_node_id()] = torch.get_num_threads()
        overlaps = self._settings.max_staleness > 0
        places = {
            name: (table.get(bundle, ""), "" if overlaps else name.split()[0])
            for name, bundle in self._bundle.items()
        }
        together = Counter(places.values())
        return {
            name: max(1, int(threads.get(place[0], 1.0)) // together[place])
            for name, place in places.items()
        }

    def close(self) -> None:
        """Give back what is reserved, and end Ray if `connect` says so."""
        if self._group is not None:
            remove_placement_group(self._group)
        if self._owns_ray:
            ray.shutdown()


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
                f"{ADDRESS_ENV} = {address!r}: there is no Ray cluster that answers ({text}); "
                f"start one with `ray start --head`, or unset {ADDRESS_ENV}"
            ) from error
        raise RagenError(
            f"Ray could not be started on this machine: {text}; leave engine.name out to train in "
            "one process"
        ) from error
    return True


def _refuse_silent(address: str) -> None:
    """Refuse an address at which nothing listens, because Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # auto, local, or a name that Ray knows
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:  # ValueError: it is not a name
        raise RagenError(
            f"{ADDRESS_ENV} = {address!r} cannot be reached: {error}; start a cluster with "
            f"`ray start --head`, or unset {ADDRESS_ENV}"
        ) from error
