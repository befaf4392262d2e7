"""The processes of an engine on Ray: their calls, and their loss.

Ray is an extra, so it is imported in the modules ``ray_*`` of this folder and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ragen.cluster.lost import what_happened
from ragen.core.errors import EngineLost, RagenError
from ragen.core.types import Prompt
from ragen.learning.ranks import TIMEOUT_S
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

LOOK_S = 2.0
"""Seconds after which an open call's process is asked where its threads stand, again and again."""


@dataclass(slots=True, eq=False)
class Process(Remote):
    """A process of an engine; a sampler's process is a `Remote` of the pool.

    A process is ended if no thread moves for `timeout_s` during an open call. `busy_s` is the sum
    of the seconds of all calls that have ended.
    """

    name: str
    actor: Any
    timeout_s: float = TIMEOUT_S
    busy_s: float = 0.0

    async def call(self, method: str, *arguments: Any, phase: str = "") -> Any:
        """The answer of a method.

        Raises:
            EngineLost: The process is gone, or hung and was ended.
            RagenError: The method raised it.
        """
        return await self.answer(getattr(self.actor, method).remote(*arguments), phase or method)

    async def answer(self, ref: Any, phase: str) -> Any:
        """The answer of a call that is already made; raises as `call`."""
        answer, start = asyncio.ensure_future(ref), time.monotonic()
        answer.add_done_callback(_look_at)  # asyncio complains of an error that nobody reads
        stacks, moved = "", start
        try:
            while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
                found = await self._stacks()
                if found and found != stacks:
                    stacks, moved = found, time.monotonic()
                elif time.monotonic() - moved > self.timeout_s:
                    raise self._ended(phase, time.monotonic() - moved, stacks)
            return answer.result()
        except LOST as error:
            raise self.lost(error) from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, RagenError) else error) from error
        finally:
            answer.cancel()
            self.busy_s += time.monotonic() - start

    async def _stacks(self) -> str:
        """The stacks of the process's threads, or nothing if it does not answer in time."""
        try:
            found: str = await asyncio.wait_for(self.actor.stacks.remote(), self.timeout_s)
        except TimeoutError:
            return ""
        return found

    def _ended(self, phase: str, seconds: float, stacks: str) -> EngineLost:
        """End the process, which hangs; returns its loss."""
        self.kill()
        text = f"{self.name} has not answered for {seconds:.0f} s, in the phase {phase}"
        return EngineLost(f"{text}, and was ended", stacks, self.name)

    def lost(self, error: Exception) -> EngineLost:
        """The loss of this process, which Ray reports as `error`."""
        return EngineLost(what_happened(self.name, str(error)), str(error), self.name)

    def kill(self) -> None:
        """End the process."""
        ray.kill(self.actor)

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


def _look_at(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()


def start(kind: type, name: str, options: Mapping[str, Any]) -> Process:
    """Start a process of a `Host` class; its own method `start` is called later."""
    # Besides the thread that works, it has threads for answers and for its stacks.
    actor = ray.remote(concurrency_groups={"collect": 1, "health": 1})(actor_of(kind)).options(
        **options, max_restarts=0, runtime_env={"env_vars": environment()}
    )
    return Process(name, actor.remote())


def actor_of(kind: type) -> type:
    """The actor class of a host, with separate threads for its stacks and for answers."""
    methods: dict[str, Any] = {
        "stacks": ray.method(concurrency_group="health")(_method(kind, "stacks"))
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
