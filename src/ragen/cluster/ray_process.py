"""The processes of an engine on Ray: their open calls, their heartbeats, and their loss.

Ray is an extra, so it is imported in the modules ``ray_*`` of this folder and nowhere else.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from ragen.cluster.hosts import Beat
from ragen.cluster.lost import what_happened
from ragen.core.errors import EngineLost, RagenError
from ragen.core.types import Prompt
from ragen.sampling.pool import Answers, Remote

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns about itself
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own default is for background work
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a process for each core, unused
try:
    import ray as ray  # the other modules take it from here
    from ray.exceptions import (
        ActorUnschedulableError,
        LocalRayletDiedError,
        NodeDiedError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RaySystemError,
        RayTaskError,
        WorkerCrashedError,
    )
except ImportError:  # `connect` says so
    ray = None

LOST: tuple[type[Exception], ...] = ()
if ray is not None:
    LOST = (
        ActorUnschedulableError,
        LocalRayletDiedError,
        NodeDiedError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RaySystemError,
        WorkerCrashedError,
    )
"""The errors of a call whose process, or one of whose arguments, is lost."""

BEAT_S = 1.0
"""Seconds between two heartbeats."""


@dataclass(slots=True, eq=False)
class Process(Remote):
    """A process and its open calls; a sampler's process is a `Remote` of the pool.

    Attributes:
        name: Name in messages.
        actor: Ray's handle.
        calls: Start time and phase of each open call.
        alive: The last time at which the process was known to work.
        busy_s: Sum of the seconds of all calls that have ended.
        stacks: Stacks of the threads, if none has moved for a second.
        reason: The reason why this process was ended, if it was.
        address: Address of the machine, known after the first heartbeat.
        beating: The open call for a heartbeat.
    """

    name: str
    actor: Any
    calls: list[tuple[float, str]] = field(default_factory=list)
    alive: float = field(default_factory=time.monotonic)
    busy_s: float = 0.0
    stacks: str = ""
    reason: str = ""
    address: str = ""
    beating: Any = None

    async def call(self, method: str, *arguments: Any, phase: str = "") -> Any:
        """The answer of a method.

        Raises:
            EngineLost: The process is gone.
            RagenError: The method raised it.
        """
        return await self.answer(getattr(self.actor, method).remote(*arguments), phase or method)

    async def answer(self, ref: Any, phase: str) -> Any:
        """The answer of a call that is already made; raises as `call`."""
        call = time.monotonic(), phase
        if not self.calls:
            self.alive = call[0]
        self.calls.append(call)
        try:
            return await ref
        except LOST as error:
            raise self.lost(error) from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, RagenError) else error) from error
        finally:
            self.calls.remove(call)
            self.busy_s += time.monotonic() - call[0]

    @override
    async def submit(self, requests: Sequence[tuple[int, Prompt]], era: int) -> None:
        await self.call("submit", requests, era, phase="sampling")

    @override
    async def collect(self) -> Answers:
        answers: Answers = await self.call("collect", phase="sampling")
        return answers

    @override
    async def drop(self, numbers: Sequence[int]) -> None:
        await self.call("drop", numbers)

    def lost(self, error: Exception) -> EngineLost:
        """The loss of this process, which Ray reports as `error`."""
        text = self.reason or what_happened(self.name, self.address, str(error))
        return EngineLost(text, self.stacks or str(error), self.name)

    def hear(self) -> None:
        """Take the heartbeat that has arrived.

        Raises:
            EngineLost: Ray reports that the process is lost.
        """
        ref, self.beating = self.beating, None
        try:
            beat: Beat = ray.get(ref)
        except RayError as error:
            raise self.lost(error) from error
        self.alive = max(self.alive, time.monotonic() - beat.still_s)
        self.address, self.stacks = beat.address, beat.stacks

    def end_if_hung(self, timeout_s: float) -> None:
        """End the process if a call is open and no thread has moved for `timeout_s` seconds."""
        now, calls = time.monotonic(), list(self.calls)
        if not calls:
            self.alive = now
        elif now - self.alive > timeout_s and not self.reason:
            self.reason = (
                f"{self.name} has not answered for {now - self.alive:.0f} s, in the phase "
                f"{min(calls)[1]}, and was ended"
            )
            ray.kill(self.actor)


class Members:
    """The processes of an engine, and a thread that watches them.

    The thread ends a process that hangs. It calls `on_loss` with the first loss and stops, because
    later losses follow from the first.
    """

    def __init__(self, timeout_s: float, on_loss: Callable[[Exception], None]) -> None:
        self._timeout_s, self._on_loss = timeout_s, on_loss
        self._processes: list[Process] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-health", daemon=True)

    def watch(self) -> None:
        """Start the thread, once all processes are added."""
        self._thread.start()

    def add(self, kind: type, name: str, options: Mapping[str, Any]) -> Process:
        """Start a process; its method `start` is called later."""
        # Besides the thread that works, it has threads for answers and for heartbeats.
        actor = ray.remote(concurrency_groups={"collect": 1, "health": 1})(actor_of(kind)).options(
            **options, max_restarts=0, runtime_env={"env_vars": environment()}
        )
        process = Process(name, actor.remote())
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """End all processes."""
        for each in self._processes:
            ray.kill(each.actor)

    def close(self) -> None:
        """End all processes and the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.kill()

    def _watch(self) -> None:
        tick = min(BEAT_S, self._timeout_s / 4)
        before = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            slept, before = now - before - tick, now
            try:
                self._look(slept if slept > BEAT_S else 0.0)
            except RayError as error:
                text = f"the Ray cluster does not answer: {' '.join(str(error).split())[:200]}"
                return self._on_loss(EngineLost(text, str(error)))
            except Exception as error:  # noqa: BLE001 - the run raises it
                return self._on_loss(error)

    def _look(self, slept: float) -> None:
        """Take the heartbeats that have arrived, and ask for the next ones.

        `slept` is the time in seconds for which this process was suspended or had no core.
        """
        for each in self._processes:
            each.alive += slept
            each.beating = each.beating or each.actor.beat.remote()
        # Ray is asked once, not once for each: with a thousand processes, that takes too long.
        beating = [each.beating for each in self._processes]
        arrived, _ = ray.wait(beating, num_returns=len(beating), timeout=0)
        heard = set(arrived)
        for each in self._processes:
            if each.beating in heard:
                each.hear()
            each.end_if_hung(self._timeout_s)


def actor_of(kind: type) -> type:
    """The actor class of a host, with separate threads for heartbeats and for answers."""
    methods: dict[str, Any] = {
        "beat": ray.method(concurrency_group="health")(_method(kind, "beat"))
    }
    if hasattr(kind, "collect"):
        methods["collect"] = ray.method(concurrency_group="collect")(_method(kind, "collect"))
    else:
        methods["weights"] = ray.method(num_returns=2)(_method(kind, "weights"))
    return type(kind.__name__, (kind,), methods)


def _method(kind: type, name: str) -> Any:
    """A new function that calls a method, because Ray writes its settings on the function."""

    def method(host: Any, *arguments: Any) -> Any:
        return getattr(kind, name)(host, *arguments)

    return method


def environment() -> dict[str, str]:
    """The environment variables that let the processes import what this one can import."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
