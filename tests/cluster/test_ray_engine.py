"""The engine on Ray, with real processes on this machine, which are killed while they work."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragen.cluster import ray_cluster, ray_engine, ray_process
from ragen.cluster.model_hosts import SamplerHost, own_address
from ragen.cluster.ray_cluster import Cluster, connect
from ragen.cluster.ray_engine import RayEngine
from ragen.cluster.ray_process import Process
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.config.sections import EngineConfig
from ragen.core.errors import EngineLost, RagenError
from ragen.core.types import Prompt
from ragen.sampling.weights import Block, checksums
from ragen.storage.database import DATABASE
from ragen.storage.reader import read_events, read_metrics
from ragen.training.progress import Watcher
from ragen.training.trainer import resume, train
from tests.bandit_model import settings

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """One Ray for all tests, with three nodes of one CPU besides the driver's, which has none."""
    import ray
    from ray.cluster_utils import Cluster as Nodes

    of_head = {"num_cpus": 0, "include_dashboard": False}
    nodes = Nodes(initialize_head=True, head_node_args=of_head)
    for _ in range(3):
        nodes.add_node(num_cpus=1)
    connect(nodes.address, 3)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


FEW: dict[str, Any] = {"steps": 4, "eval__episodes": 0, "checkpoint__every": 2}
"""Four steps, with checkpoints after the second and the fourth."""


def config_of(**more: Any) -> Config:
    return merge("bandit", settings(**FEW, **more))


RAY: dict[str, Any] = {"engine__name": "ray"}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    return train(config_of(), tmp_path_factory.mktemp("local") / "run").run


PLAYED = """
    SELECT DISTINCT step, "group", member, level_seed, noise_seed, count(*)
    FROM episodes WHERE phase = 'train' GROUP BY attempt, step, "group", member ORDER BY 1, 2, 3
"""
REPLIES = """
    SELECT DISTINCT step, "group", member, turn, observation, reply, completion_ids, turns.reward
    FROM turns JOIN episodes ON episodes.id = episode_id WHERE phase = 'train' ORDER BY 1, 2, 3, 4
"""


def rows(run: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(run / DATABASE)) as connection:
        return connection.execute(query).fetchall()


def happened(run: Path) -> list[str]:
    """The kinds of the engine's events."""
    return [each["data"]["what"] for each in read_events(run) if each["kind"] == "engine"]


def pids(role: str) -> list[int]:
    """The processes on Ray of this role, such as learn, in the order in which they began."""
    import psutil

    title = re.compile(rf"ray::\w*{role}", re.IGNORECASE)
    below = psutil.Process().children(recursive=True)
    found = [each for each in below if title.match(" ".join(each.cmdline()))]
    return [each.pid for each in sorted(found, key=lambda each: each.create_time())]


class Strike(Watcher):
    """Sends a signal to the newest process of a role once, after a step."""

    def __init__(self, role: str, number: int, after: int) -> None:
        self.role, self.number, self.after = role, number, after

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.after:
            self.after = 0
            os.kill(pids(self.role)[-1], self.number)


def test_a_run_equals_the_local_one_and_resumes_with_other_numbers_of_processes(
    local: Path, tmp_path: Path
) -> None:
    run = train(config_of(**RAY, engine__samplers=2), tmp_path / "run").run
    assert rows(run, PLAYED) == rows(local, PLAYED) and len(rows(run, PLAYED)) == 4 * 8
    assert rows(run, REPLIES) == rows(local, REPLIES)
    resume(run, overrides={"steps": 5, "engine.samplers": 1, "engine.learners": 2})
    found = read_metrics(run)
    assert found["engine/samplers"] == {1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 1.0}
    assert max(found["mismatch/max_abs"].values()) < 1e-3


class LosesNode(Watcher):
    """Kills one of the nodes after the third step, and starts another one."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3 and self.cluster is not None:
            nodes, self.cluster = self.cluster, None
            nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
            nodes.add_node(num_cpus=1)


def test_a_run_whose_node_is_lost_goes_on_from_its_newest_checkpoint(
    cluster: Any, local: Path, tmp_path: Path
) -> None:
    """A node with one of two learners, for which the other one waits, or with the sampler."""
    config = config_of(**RAY, engine__learners=2)
    run = train(config, tmp_path / "run", watcher=LosesNode(cluster)).run
    assert happened(run) == ["lost", "restored"]
    (_, restored) = [each for each in read_events(run) if each["kind"] == "engine"]
    assert restored["data"]["to"] == 2 and restored["data"]["seconds"] > 0
    assert rows(run, PLAYED) == rows(local, PLAYED)


def test_a_run_that_plays_ahead_survives_the_loss_of_a_sampler(local: Path, tmp_path: Path) -> None:
    config = config_of(**RAY, engine__samplers=2, engine__max_staleness=1)
    run = train(config, tmp_path / "run", watcher=Strike("sampl", signal.SIGKILL, 2)).run
    assert "lost" in happened(run)
    assert rows(run, PLAYED) == rows(local, PLAYED)
    assert max(read_metrics(run)["engine/staleness_max"].values()) == 1


DRIVER = """
import json, os, signal, sys
from pathlib import Path
from ragen.config.reading import merge
from ragen.training.progress import Watcher
from ragen.training.trainer import train

class Killed(Watcher):
    def step(self, step, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

train(merge("bandit", json.loads(sys.argv[1])), Path(sys.argv[2]), watcher=Killed())
"""


def test_a_run_whose_driver_is_killed_is_resumed_as_if_it_had_not_been(
    local: Path, tmp_path: Path
) -> None:
    """The driver had started Ray itself, which ends with it."""
    run, keys = tmp_path / "run", settings(**FEW, **RAY)
    driver = subprocess.run([sys.executable, "-c", DRIVER, json.dumps(keys), str(run)], timeout=300)
    assert driver.returncode == -signal.SIGKILL
    resume(run)
    assert rows(run, PLAYED) == rows(local, PLAYED)
    assert rows(run, REPLIES) == rows(local, REPLIES)


def test_a_learner_that_hangs_is_ended_in_time_and_its_loss_says_where() -> None:
    config = config_of(**RAY)

    async def play() -> EngineLost:
        engine = RayEngine(config, config.model.path)
        for each in engine._learners:
            each.timeout_s = 2.0  # a slow machine needs longer than this to start them
        try:
            os.kill(pids("learn")[-1], signal.SIGSTOP)
            with pytest.raises(EngineLost) as caught:
                await engine.publish()
            return caught.value
        finally:
            await engine.close()

    lost = asyncio.run(play())
    words = r"learner 0 has not answered for \d s, in the phase publish, and was ended"
    assert re.fullmatch(words, str(lost)) and lost.process == "learner 0"


class Forgetful(SamplerHost):
    """A sampler in whose memory a number changes after the first publication."""

    def load(self, block: Block, version: int) -> dict[str, int]:
        held = super().load(block, version)
        if version > 1:
            next(self._model.parameters()).data.view(-1)[0] += 1.0
            held = checksums(self._model.named_parameters())
        return held


def test_weights_are_verified_and_a_killed_learner_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line names its machine; what Ray says of it, 300 words, are its details."""
    monkeypatch.setattr(ray_engine, "SamplerHost", Forgetful)

    config = config_of(**RAY)

    async def play() -> EngineLost:
        engine = RayEngine(config, config.model.path)
        try:
            await engine.publish()
            words = (
                r"the weights did not reach sampler 0: after publication 2 it holds others .* in "
            )
            with pytest.raises(RagenError, match=words):
                await engine.publish()
            os.kill(pids("learn")[-1], signal.SIGKILL)
            with pytest.raises(EngineLost) as caught:
                await engine.publish()
            with pytest.raises(EngineLost, match=f"^{re.escape(str(caught.value))}$"):
                await engine.policy.complete(Prompt((), (5, 6), 0, 4, 1.0, 0))
            return caught.value
        finally:
            await engine.close()

    lost = asyncio.run(play())
    words = f"learner 0 on {re.escape(own_address())} (was killed|does not answer)"
    assert re.match(words, str(lost)) and "\n" not in str(lost)
    assert len(str(lost)) < 150 < len(lost.details)


def test_a_learner_that_is_lost_at_the_start_is_named_while_the_other_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = ray_process.start

    def losing(kind: type, name: str, options: Any) -> Process:
        process = start(kind, name, options)
        if name == "learner 1":
            ray_process.ray.kill(process.actor)
        return process

    monkeypatch.setattr(ray_engine, "start", losing)
    config = config_of(**RAY, engine__learners=2)
    with pytest.raises(EngineLost, match=r"^learner 1 "):
        RayEngine(config, config.model.path)


def test_a_process_that_ray_kills_for_its_memory_is_a_lost_one() -> None:
    """`OutOfMemoryError` is none of Ray's actor errors."""

    async def lose() -> Any:
        gone = asyncio.get_running_loop().create_future()
        gone.set_exception(ray_process.OutOfMemoryError("killed: the node running low on memory\n"))
        return await Process("sampler 1", None).answer(gone, "sampling")

    with pytest.raises(EngineLost, match=r"^sampler 1 was killed by Ray, because its machine"):
        asyncio.run(lose())


# The cluster.


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "head..example:10001", f"ray://{'a' * 70}:1", "head:²"]
)
def test_a_cluster_that_is_not_there_is_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_process.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    config = config_of(**RAY)
    with pytest.raises(RagenError, match=r"cannot be reached.*ray start --head") as caught:
        RayEngine(config, config.model.path)
    assert "\n" not in str(caught.value)


def test_a_cluster_that_is_too_small_is_one_line() -> None:
    config = config_of(**RAY, engine__samplers=1000)
    with pytest.raises(RagenError, match=r"lower engine\.learners or engine.samplers") as caught:
        RayEngine(config, config.model.path)
    assert "\n" not in str(caught.value)


CLUSTERS = {
    "a GPU for each": ((1, 1, 1), (2, 8), False, (False, [(1, 1), (1, 1)])),
    "one for both": ((1, 1, 1), (1, 8), False, (True, [(2, 1)])),
    "none": ((1, 2, 1), (0, 8), False, (False, [(1, 0), (1, 0), (1, 0)])),
    "two workers a sampler": ((1, 1, 2), (3, 8), False, (False, [(1, 1), (2, 2)])),
    "two workers a sampler, one GPU too few": ((1, 1, 2), (2, 8), False, None),
    "all GPUs are away": ((1, 1, 1), (0, 8), True, None),
    "one GPU is away": ((1, 1, 1), (1, 8), True, (True, [(2, 1)])),
    "CPUs are away": ((1, 1, 1), (0, 1), False, None),
}
"""Learners, samplers and their workers; GPUs and CPUs of the cluster; whether the engine before had
GPUs; and whether GPUs are shared, with the CPUs and GPUs of each part, or None for an error."""


@pytest.mark.parametrize("about", CLUSTERS)
def test_room_on_gpus(about: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (learners, samplers, workers), (gpus, cpus), had_gpus, expected = CLUSTERS[about]
    sizes = EngineConfig(name="ray", learners=learners, samplers=samplers, tensor_parallel=workers)
    reserved: list[Any] = []
    stand_in = types.SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"GPU": gpus, "CPU": cpus},
        wait=lambda refs, timeout: (refs, []),
    )
    monkeypatch.setattr(ray_cluster, "ray", stand_in)

    def reserve(bundles: list[dict[str, float]], strategy: str) -> Any:
        reserved[:] = [(each["CPU"], each.get("GPU", 0)) for each in bundles]
        return types.SimpleNamespace(ready=lambda: "ready")

    monkeypatch.setattr(ray_cluster, "placement_group", reserve)
    if expected is None:
        with pytest.raises(RagenError, match="or add machines"):
            Cluster(sizes, had_gpus)
    else:
        assert (Cluster(sizes, had_gpus).shares_gpus, reserved) == expected
