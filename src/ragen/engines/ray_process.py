"""A process on Ray: its open calls, its signs of life, and what its loss looks like.

Ray is an extra, so it is imported in the modules ``ray_*`` of this folder and nowhere else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from typing_extensions import override

from ragen.core.errors import EngineLost, RagenError
from ragen.core.types import Prompt
from ragen.engines.lost import what_happened
from ragen.engines.sampler_pool import Answers, Remote

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

LOST: tuple[type[Exception], ...] = (
    (
        *(RayActorError, RaySystemError, OutOfMemoryError, NodeDiedError, ObjectLostError),
        *(ActorUnschedulableError, WorkerCrashedError, LocalRayletDiedError),
    )
    if ray is not None
    else ()
)
"""What a call raises if its process is gone, or if one of its arguments is gone."""


@dataclass(slots=True, eq=False)
class Process:
    """A process, its open calls, and when it last showed life.

    Attributes:
        name: Its name in messages.
        actor: Its handle.
        calls: The phase and the start time of each open call.
        alive: When it was last known to work.
        busy_s: Seconds that calls were open, counted for the calls that have ended.
        stacks: The stacks of its threads, if it has not moved for a while.
        reason: Why it was ended, if it was.
        address: The address of its machine, once it has shown life.
        beating: The open call for a sign of life.
        numbers: Numbers the calls.
    """

    name: str
    actor: Any
    calls: dict[int, tuple[str, float]] = field(default_factory=dict)
    alive: float = field(default_factory=time.monotonic)
    busy_s: float = 0.0
    stacks: str = ""
    reason: str = ""
    address: str = ""
    beating: Any = None
    numbers: count[int] = field(default_factory=count)

    async def call(self, method: str, *arguments: Any, phase: str = "") -> Any:
        """The answer of a method.

        Raises:
            EngineLost: The process is gone.
            RagenError: The method raised it.
        """
        return await self.answer(getattr(self.actor, method).remote(*arguments), phase or method)

    async def answer(self, ref: Any, phase: str) -> Any:
        """The answer of a call that is already made."""
        number, start = next(self.numbers), time.monotonic()
        if not self.calls:
            self.alive = start
        self.calls[number] = phase, start
        try:
            return await ref
        except LOST as error:
            raise self.lost(error) from error
        except RayTaskError as error:
            raise raised(error) from error
        finally:
            del self.calls[number]
            self.busy_s += time.monotonic() - start

    def lost(self, error: Exception) -> EngineLost:
        """The loss of this process, which Ray reports as `error`."""
        text = self.reason or what_happened(self.name, self.address, str(error))
        return EngineLost(text, self.stacks or str(error), self.name)


def raised(error: Any) -> Exception:
    """The exception of a method in another process, without Ray's wrapper."""
    cause: Exception = error.cause
    return cause if isinstance(cause, RagenError) else error


@dataclass(frozen=True, slots=True)
class RemoteProcess(Remote):
    """A sampler's process as a `Remote`."""

    process: Process

    @override
    async def submit(self, requests: Sequence[tuple[int, Prompt]], era: int) -> None:
        await self.process.call("submit", requests, era, phase="sampling")

    @override
    async def collect(self) -> Answers:
        answers: Answers = await self.process.call("collect", phase="sampling")
        return answers

    @override
    async def drop(self, numbers: Sequence[int]) -> None:
        await self.process.call("drop", numbers)


def actor_of(kind: type) -> type:
    """The actor class of a host, with separate threads for signs of life and for answers."""
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
