"""The engine on Ray: learners and samplers in processes, on one machine or many.

There is one recovery. Whatever is lost, every open and later call raises `EngineLost`, and the run
continues from its newest checkpoint with a new engine (`ragen.training.recovery.restore`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from ragen.algorithms.batch import Batch
from ragen.config.config import Config
from ragen.core.errors import EngineLost, RagenError
from ragen.core.metrics import Metrics, mean, total
from ragen.core.types import Role
from ragen.engines.engine import Engine
from ragen.engines.hosts import Beat
from ragen.engines.lost import GRACE_S, answers_of
from ragen.engines.model_hosts import LearnerHost, SamplerHost
from ragen.engines.ray_cluster import Rooms, connect
from ragen.engines.ray_process import (
    LOST,
    Process,
    RemoteProcess,
    actor_of,
    environment,
    raised,
    ray,
)
from ragen.engines.sampler_pool import SamplerPool
from ragen.engines.weights import some
from ragen.rollout.setup import make_chat

if ray is not None:
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

BEAT_S = 1.0
"""Seconds from one sign of life to the next."""

Weights = tuple[Any, dict[str, int], int]
"""A publication: its block, the checksums of its tensors, and its version."""


class RayEngine(Engine):
    """The `Engine` of learners and samplers on Ray.

    `path` is the folder or hub id of the policy's first weights. Weights are published through the
    shared memory of each machine. An engine that replaces another one, `after`, gets the same kind
    of room.

    Raises:
        EngineLost: A process did not start.
        MachineAway: The cluster lacks a machine that the engine `after` had.
        RagenError: Ray is missing, the cluster cannot be reached or is too small, or the model
            cannot be used.
    """

    rooms: Rooms
    policy: SamplerPool

    def __init__(self, config: Config, path: str, after: Engine | None = None) -> None:
        if Path(path).exists():  # the processes have other working folders
            path = str(Path(path).resolve())
        self._config, self._path, self._settings = config, path, config.engine
        self._timeout_s = config.engine.timeout_s
        self.version = 0
        self._closed = False
        self._error: Exception | None = None
        self._published_bytes = 0
        self._measured = time.monotonic()
        self._health = threading.Thread(target=self._watch, name="engine-health", daemon=True)
        self._learners: list[Process] = []
        self._samplers: list[Process] = []
        self._owns_ray = connect(
            config.engine.address, config.engine.learners + config.engine.samplers
        )
        try:
            self.rooms = Rooms(config.engine, after.rooms if isinstance(after, RayEngine) else None)
        except BaseException:
            if self._owns_ray:
                ray.shutdown()
            raise
        try:
            self._start()
        except BaseException:
            self._shut_down()
            raise
        self._health.start()

    # Starting.

    def _spawn(self, kind: type, name: str, room: dict[str, Any]) -> Process:
        """Begin a process in its room; its `start` is called later."""
        # Besides the thread that works, it has threads for answers and for signs of life.
        actor = ray.remote(concurrency_groups={"collect": 1, "health": 1})(actor_of(kind)).options(
            **room, max_restarts=0, runtime_env={"env_vars": environment()}
        )
        return Process(name, actor.remote())

    def _start(self) -> None:
        config, path, num = self._config, self._path, self._settings.learners
        self._learners = [
            self._spawn(LearnerHost, f"learner {place}", self.rooms.learner(place))
            for place in range(num)
        ]
        self._samplers = [
            self._spawn(SamplerHost, f"sampler {place}", self.rooms.sampler(place))
            for place in range(self._settings.samplers)
        ]
        first = self._learners[0]
        store = self._wait(first, first.actor.address.remote())
        threads = self.rooms.threads()
        started = [
            (each, each.actor.start.remote(config, path, threads[each.name], rank, num, store))
            for rank, each in enumerate(self._learners)
        ]
        started += [
            (each, each.actor.start.remote(config, path, threads[each.name]))
            for each in self._samplers
        ]
        tokenizer, *_ = self._wait_all(started)
        self.chat = make_chat(config, tokenizer)
        sent = [each.actor.weights.remote() for each in self._learners]
        about, *_ = self._wait_all(
            [(each, ref) for each, (_, ref) in zip(self._learners, sent, strict=True)]
        )
        weights = self._publication(sent[0][0], *about)
        loads = [(each, each.actor.load.remote(weights[0], 0)) for each in self._samplers]
        for process, held in zip(self._samplers, self._wait_all(loads), strict=True):
            _check(process.name, held, weights)
        most_known = 4 * config.episodes_at_once
        self.policy = SamplerPool(map(RemoteProcess, self._samplers), most_known)

    def _wait_all(self, asked: Sequence[tuple[Process, Any]]) -> list[Any]:
        """The answers of several calls during the engine's construction.

        A failure is raised without waiting for the other calls, because they may wait for the call
        that failed. A process that talks to a lost process may fail before Ray has noticed the
        loss. So another error of Ray is held back for up to `GRACE_S` seconds, and if a loss is
        noticed meanwhile, the loss is raised instead.
        """
        open_calls = {ref: process for process, ref in asked}
        answers = dict[Any, Any]()
        failure: RayError | None = None
        until = time.monotonic() + self._timeout_s
        while open_calls:
            done, _ = ray.wait([*open_calls], timeout=max(0.0, until - time.monotonic()))
            if failure is not None and not done:
                raise failure
            ref = (done or [*open_calls])[0]
            try:
                process = open_calls.pop(ref)
                answers[ref] = self._wait(process, ref, self._timeout_s if done else 0.0)
            except RagenError:
                raise
            except RayError as error:
                failure = failure or error
                until = min(until, time.monotonic() + GRACE_S)
            if failure is None:
                until = time.monotonic() + self._timeout_s
        if failure is not None:
            raise failure
        return [answers[ref] for _, ref in asked]

    def _wait(self, process: Process, ref: Any, timeout_s: float | None = None) -> Any:
        """The answer of a call during the engine's construction, before there is an event loop."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            answer = ray.get(ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise EngineLost(
                f"{process.name} has not started within engine.timeout_s = {self._timeout_s:g} s; "
                "set it higher if the model takes longer to load"
            ) from error
        except LOST as error:
            raise process.lost(error) from error
        except RayTaskError as error:
            raise raised(error) from error
        process.alive = time.monotonic()
        return answer

    @property
    def _processes(self) -> list[Process]:
        return [*self._learners, *self._samplers]

    # Learners.

    async def _train(self, method: str, *arguments: Any) -> Any:
        """The answer of the first learner to a call that all learners get (`answers_of`)."""
        self._raise_failure()
        if self._config.rollout.sampler == "vllm" and self.rooms.shares_gpus:
            await self._rest()
        calls = [each.call("call", method, *arguments, phase=method) for each in self._learners]
        return (await self._all(calls))[0]

    async def _all(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The answers of all learners (`answers_of`), unless the engine fails meanwhile."""
        try:
            return await answers_of(calls, self._end_learners)
        except EngineLost:
            self._raise_failure()  # the reason for which the learners were ended
            raise

    def _end_learners(self) -> None:
        for each in self._learners:
            ray.kill(each.actor)

    async def _rest(self) -> None:
        if self._settings.max_staleness == 0:
            await asyncio.gather(*(each.call("rest") for each in self._samplers))

    @override
    async def score(self, batch: Batch, role: Role) -> Batch:
        scored: Batch = await self._train("score", ray.put(batch), role)
        return scored

    @override
    async def update(self, batch: Batch, step: int) -> Metrics:
        metrics: Metrics = await self._train("update", ray.put(batch), step)
        return metrics

    @override
    async def cross_scores(
        self, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]
    ) -> Tensor:
        scores: Tensor = await self._train("cross_scores", prompts, thoughts)
        return scores

    @override
    async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        metrics: Metrics = await self._train("gradient_norms", ray.put(batch), bucket_B)
        return metrics

    @override
    async def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimisers into a folder, which the learners have to see."""
        state: dict[str, Any] = await self._train("save", folder.resolve())
        return state | {"version": self.version}

    @override
    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        await self._train("load", folder.resolve(), state)
        self.version = int(state["version"])
        await self._push()

    # Publishing.

    @override
    async def publish(self) -> None:
        """Make the learner's weights those of the samplers.

        Raises:
            EngineLost: A learner is gone.
            RagenError: A sampler does not hold the weights that were sent.
        """
        self._raise_failure()
        self.version += 1
        await self._push()

    async def _push(self) -> None:
        sent = [each.actor.weights.remote() for each in self._learners]
        pairs = zip(self._learners, sent, strict=True)
        (held, size), *_ = await self._all(
            [each.answer(about, "publish") for each, (_, about) in pairs]
        )
        weights = self._publication(sent[0][0], held, size)
        await asyncio.gather(*(self._load(each, weights) for each in self._samplers))

    def _publication(self, block: Any, held: dict[str, int], size: int) -> Weights:
        self._published_bytes = size
        return block, held, self.version

    async def _load(self, process: Process, weights: Weights) -> None:
        block, _, version = weights
        try:
            held = await process.call("load", block, version, phase="publish")
        except EngineLost:
            raise
        except RagenError as error:
            raise RagenError(f"{process.name}: {error}") from error
        _check(process.name, held, weights)

    # Losses.

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._end_learners()
        self.policy.fail(self._error)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    # Signs of life.

    def _watch(self) -> None:
        """Ask every process for a sign of life and end those without one, in a thread."""
        tick = min(BEAT_S, self._timeout_s / 4)
        before = time.monotonic()
        while not self._closed:
            time.sleep(tick)
            now = time.monotonic()
            slept, before = now - before - tick, now
            try:
                processes = self._processes
                for process in processes if slept > BEAT_S else ():
                    process.alive += slept  # this process was suspended, or had no core
                self._look_at(processes, now)
            except RayError as error:
                text = f"the Ray cluster does not answer: {' '.join(str(error).split())[:200]}"
                self._end_watch(EngineLost(text, str(error)))
                return
            except Exception as error:
                self._end_watch(error)
                raise

    def _end_watch(self, error: Exception) -> None:
        """Let the run fail, because without this thread no hung process would be noticed."""
        self._error = error  # even if nothing was sampled yet and there is no event loop
        self._in_loop(self._fail, error)

    def _look_at(self, processes: Sequence[Process], now: float) -> None:
        """Take the signs of life that have come, and ask for the next ones."""
        for process in processes:
            if process.beating is None:
                process.beating = process.actor.beat.remote()
        # Ray is asked once, not once for each: with a thousand processes, that takes too long.
        asked = [process.beating for process in processes]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=0) if asked else ([], [])
        beats = _beats(done) if done else {}
        for process in processes:
            self._note(process, beats.get(process.beating), now)

    def _note(self, process: Process, beat: Beat | RayError | None, now: float) -> None:
        if beat is not None:
            process.beating = None
            if isinstance(beat, RayError):
                self._in_loop(self._fail, process.lost(beat))
                return
            process.address = beat.address
            rests = beat.idle and not process.calls
            process.alive = now if rests else max(process.alive, now - beat.still_s)
            process.stacks = beat.stacks
        calls = list(process.calls.values())
        if not calls:
            process.alive = now
        elif now - process.alive > self._timeout_s and not process.reason:
            phase = min(calls, key=lambda call: call[1])[0]
            process.reason = (
                f"{process.name} has not answered for {now - process.alive:.0f} s, in the phase "
                f"{phase}, and was ended"
            )
            ray.kill(process.actor)

    def _in_loop(self, function: Any, *arguments: Any) -> None:
        loop = self.policy.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    # The rest.

    @override
    def forget(self) -> None:
        self.policy.forget()

    @override
    def metrics(self) -> Metrics:
        """Metrics of the last collection and the last publication.

        The idle fractions are shares of the time since the last call.
        """
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
        if self._closed:
            return
        self._closed = True
        if self._health.is_alive():
            self._health.join()
        for process in self._processes:
            ray.kill(process.actor)
        self.rooms.close()
        if self._owns_ray:
            ray.shutdown()


def _beats(done: Sequence[Any]) -> dict[Any, Beat | RayError]:
    """The signs of life that have come, or what Ray raises for a process."""
    try:
        return dict(zip(done, ray.get(done), strict=True))
    except RayError:
        return {ref: _beat(ref) for ref in done}


def _beat(ref: Any) -> Beat | RayError:
    try:
        beat: Beat = ray.get(ref)
    except RayError as error:
        return error
    return beat


def _check(name: str, held: dict[str, int], weights: Weights) -> None:
    """Check that a sampler of this name holds what was sent; `held` are its checksums."""
    _, sent, version = weights
    if others := [each for each in sent if held.get(each) != sent[each]]:
        raise RagenError(
            f"the weights did not reach {name}: after publication {version} it holds others than "
            f"the learner in {some(others)}; suspect the memory or the network of its machine"
        )
