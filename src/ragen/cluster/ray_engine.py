"""The engine on Ray: learners and samplers in processes, on one machine or many.

There is one recovery. Whatever is lost, all processes are ended, every open and later call raises
`EngineLost`, and the run continues from its newest checkpoint with a new engine
(`ragen.training.recovery.restore`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from typing_extensions import override

from ragen.algorithms.batch import Batch
from ragen.cluster.lost import SeveralProcesses, answers_of
from ragen.cluster.model_hosts import LearnerHost, SamplerHost
from ragen.cluster.ray_cluster import Cluster
from ragen.cluster.ray_process import Process, ray, start
from ragen.config.config import Config
from ragen.core.errors import EngineLost, RagenError
from ragen.core.metrics import Metrics, mean, total
from ragen.engines.engine import Engine
from ragen.rollout.setup import make_chat
from ragen.sampling.pool import SamplerPool
from ragen.sampling.weights import some


class RayEngine(SeveralProcesses):
    """The `Engine` of learners and samplers on Ray.

    `path` is the folder or hub id of the policy's first weights. Weights are published through the
    shared memory of each machine. The engine takes the place of the engine `after`, and is refused
    without GPUs if that one had some.

    Raises:
        EngineLost: A process did not start.
        RagenError: Ray is missing, the cluster cannot be reached or is too small, or the model
            cannot be used.
    """

    cluster: Cluster
    policy: SamplerPool

    def __init__(self, config: Config, path: str, after: Engine | None = None) -> None:
        if Path(path).exists():  # the processes have other working folders
            path = str(Path(path).resolve())
        self._config, self.version = config, 0
        self._published_bytes = 0
        self._measured = time.monotonic()
        needs_gpus = isinstance(after, RayEngine) and after.cluster.uses_gpus
        self.cluster = Cluster(config.engine, needs_gpus)
        self._is_open = True
        self._learners, self._samplers = list[Process](), list[Process]()
        try:
            for name in self.cluster.learners:
                self._learners.append(start(LearnerHost, name, self.cluster.options(name)))
            for name in self.cluster.samplers:
                self._samplers.append(start(SamplerHost, name, self.cluster.options(name)))
            self.policy = SamplerPool(self._samplers, most_known=4 * config.episodes_at_once)
            thread = ThreadPoolExecutor(1)  # in this one, an event loop may be running already
            started = thread.submit(asyncio.run, self._start(path))
            thread.shutdown(wait=False)
            started.result()
        except BaseException:
            self._shut_down()
            raise

    async def _start(self, path: str) -> None:
        """Let all processes load the model, and give the samplers the learner's weights."""
        config, num = self._config, len(self._learners)
        (store,) = await self._all([self._learners[0].call("address")])
        threads = self.cluster.threads()
        starts = [
            each.call("start", threads[each.name], config, path, rank, num, store)
            for rank, each in enumerate(self._learners)
        ]
        starts += [each.call("start", threads[each.name], config, path) for each in self._samplers]
        tokenizer, *_ = await self._all(starts)
        self.chat = make_chat(config, tokenizer)
        await self._push()

    # Calls.

    async def _all(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The answers of processes (`answers_of`), unless the engine fails meanwhile."""
        try:
            return await answers_of(calls, self._fail)
        except EngineLost:
            self._raise_failure()  # the loss for which all processes were ended
            raise

    @override
    async def _in_all(self, method: str, *arguments: Any) -> list[Any]:
        self._raise_failure()
        if self._config.rollout.sampler == "vllm" and self.cluster.shares_gpus:
            await self._rest()
        sent = [ray.put(each) if isinstance(each, Batch) else each for each in arguments]
        calls = [each.call("call", method, *sent, phase=method) for each in self._learners]
        return await self._all(calls)

    async def _rest(self) -> None:
        if self._config.engine.max_staleness == 0:
            await self._all([each.call("rest") for each in self._samplers])

    def _fail(self, error: Exception) -> None:
        """End all processes, so that every open and later call fails."""
        self._error = self._error or error
        self.policy.fail(error)
        self._kill()

    def _kill(self) -> None:
        for each in (*self._learners, *self._samplers):
            each.kill()

    @override
    async def save(self, folder: Path) -> dict[str, Any]:
        return await super().save(folder) | {"version": self.version}

    @override
    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        await self._in_all("load", folder.resolve(), state)
        self.version = int(state["version"])
        await self._push()

    @override
    async def publish(self) -> None:
        self.version += 1
        await self._push()

    async def _push(self) -> None:
        """Give the samplers the learner's weights, and check that they hold them."""
        self._raise_failure()
        sent = [each.actor.weights.remote() for each in self._learners]
        pairs = zip(self._learners, sent, strict=True)
        answers = await self._all([each.answer(about, "publish") for each, (_, about) in pairs])
        (checksums, self._published_bytes), block = answers[0], sent[0][0]
        await self._all([self._load(each, block, checksums) for each in self._samplers])

    async def _load(self, sampler: Process, block: Any, checksums: dict[str, int]) -> None:
        try:
            held = await sampler.call("load", block, self.version, phase="publish")
        except EngineLost:
            raise
        except RagenError as error:
            raise RagenError(f"{sampler.name}: {error}") from error
        if others := [name for name in checksums if held.get(name) != checksums[name]]:
            raise RagenError(
                f"the weights did not reach {sampler.name}: after publication {self.version} it "
                f"holds others than the learner in {some(others)}; suspect the memory or the "
                "network of its machine"
            )

    # The rest.

    @override
    def forget(self) -> None:
        self.policy.forget()

    @override
    def metrics(self) -> Metrics:
        """The idle fractions are shares of the time since the last call."""
        now = time.monotonic()
        span, self._measured = now - self._measured, now
        idle = [1 - min(1.0, each.busy_s / span) for each in self._learners]
        for each in self._learners:
            each.busy_s = 0.0
        return self.policy.metrics() | {
            "engine/learner_idle_fraction": mean(sum(idle) / len(idle)),
            "publish/bytes": total(self._published_bytes),
        }

    @override
    async def close(self) -> None:
        self._shut_down()

    def _shut_down(self) -> None:
        """End all processes, and Ray if this engine started it; may be called repeatedly."""
        if self._is_open:
            self._is_open = False
            self._kill()
            self.cluster.close()
