"""Samplers that come and go with the machines of a cluster; its nodes are simulated here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ragen.config.reading import resolve
from ragen.config.sections import EngineConfig
from ragen.core.errors import MachineAway, RagenError
from ragen.engines.machine import use_threads
from ragen.engines.ray_cluster import Rooms
from ragen.engines.ray_engine import RayEngine
from ragen.models.names import resolve_model
from tests.engines.test_ray_engine import prompts

pytestmark = pytest.mark.ray

PATIENCE_S = 120.0


@pytest.fixture
def machines() -> Iterator[Any]:
    """A cluster whose first machine has room for a learner and a sampler."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@asynccontextmanager
async def engine_on(cluster: Any, threads: int = 1, **more: Any) -> AsyncIterator[RayEngine]:
    settings = {
        "engine.name": "ray",
        "engine.address": cluster.address,
        "engine.timeout_s": 120,
        "threads": threads,
        **more,
    }
    config = resolve("bandit", settings)
    use_threads(threads)
    engine = RayEngine(config, resolve_model(config.model.path, config.env.name))
    try:
        yield engine
    finally:
        await engine.close()


async def until(engine: RayEngine, holds: Callable[[], bool]) -> None:
    """Sample until something holds."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, engine.take_events()
        answers = await asyncio.gather(*map(engine.policy.complete, prompts(engine.chat, 8)))
        assert all(each.token_ids for each in answers)
        await asyncio.sleep(0.2)


def drain(cluster: Any, node: Any) -> None:
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    deadline = int((time.time() + PATIENCE_S) * 1000)
    accepted, why = cluster.head_node.get_gcs_client().drain_node(
        node.node_id, reason, "taken away", deadline
    )
    assert accepted, why


def test_a_sampler_joins_with_a_machine_and_is_lost_with_it(machines: Any) -> None:
    async def play() -> list[tuple[str, dict[str, Any]]]:
        async with engine_on(machines, **{"engine.most_samplers": 3}) as engine:
            seats = engine.policy.seats
            await until(engine, lambda: len(seats) == 1)
            await engine.publish()
            node = machines.add_node(num_cpus=1)
            await until(engine, lambda: len(seats) == 2)
            await asyncio.gather(*map(engine.policy.complete, prompts(engine.chat, 8)))
            assert all(seat.stats.sampled for seat in seats), "both sample"
            assert {seat.name for seat in seats} == {"sampler 0", "sampler 1"}
            await engine.publish()
            machines.remove_node(node)
            await until(engine, lambda: len(seats) == 1)
            await engine.publish()
            await until(engine, lambda: bool(seats[0].stats.sampled))
            return engine.take_events()

    (_, joined), (text, lost) = asyncio.run(play())
    assert joined["what"] == "joined" and joined["process"] == "sampler 1"
    assert lost["what"] == "lost" and text.startswith("sampler 1 ")
    assert text.endswith(
        "others take what it has not answered, and another one joins where there is room"
    )


def test_samplers_leave_a_machine_that_is_drained_and_find_another_one(machines: Any) -> None:
    async def play() -> list[str]:
        node = machines.add_node(num_cpus=1)
        async with engine_on(machines, **{"engine.most_samplers": 2}) as engine:
            seats = engine.policy.seats
            await until(engine, lambda: len(seats) == 2)
            drain(machines, node)
            await until(engine, lambda: len(seats) == 1)
            machines.remove_node(node)
            machines.add_node(num_cpus=1)
            await until(engine, lambda: len(seats) == 2)
            return [data["what"] for _, data in engine.take_events()]

    assert asyncio.run(play()) == ["joined", "left", "joined"]


def test_threads_are_those_of_the_machine_that_a_process_is_on(machines: Any) -> None:
    """Seven processes are on two machines; the driver's has its two threads, the other six CPUs."""
    import ray

    machines.add_node(num_cpus=6, resources={"other": 1})

    async def threads() -> tuple[dict[str, int], dict[str, int]]:
        more = {"engine.learners": 2, "engine.samplers": 5}
        async with engine_on(machines, threads=2, **more) as engine:
            here = ray.get_runtime_context().get_node_id()
            nodes = engine.rooms.nodes()
            assert len(set(nodes.values())) == 2
            expected = {}
            for name, node in nodes.items():
                beside = [each for each, its in nodes.items() if (its, each[0]) == (node, name[0])]
                expected[name] = max(1, (2 if node == here else 6) // len(beside))
            return {name: engine.rooms.threads(name) for name in nodes}, expected

    found, expected = asyncio.run(threads())
    assert found == expected and len(set(found.values())) > 1


def test_an_engine_that_replaces_another_needs_the_machines_that_it_had(machines: Any) -> None:
    import ray

    node = machines.add_node(num_cpus=1)
    machines.wait_for_nodes()
    ray.init(machines.address, log_to_driver=False)
    two = EngineConfig(name="ray", samplers=2, timeout_s=PATIENCE_S, address=machines.address)
    before = Rooms(two)
    before.close()
    machines.remove_node(node)
    for known, kind in ((None, RagenError), (before, MachineAway)):
        with pytest.raises(kind, match="the cluster has 2 CPUs, and 1 learner and 2 sam") as caught:
            Rooms(two, known)
        assert type(caught.value) is kind
    machines.add_node(num_cpus=1)
    machines.wait_for_nodes()
    after = Rooms(two, before)
    assert all((after.learner(0), after.sampler(0), after.sampler(1)))
    assert len(set(after.nodes().values())) == 2
    after.close()
