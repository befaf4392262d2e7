"""An environment that does one hostile thing in a step, chosen by its name or by its level."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tests.rogue import Rogue


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Whole(BaseException):
    pass


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


def throw(error: BaseException | type[BaseException]) -> Callable[[], NoReturn]:
    def deed() -> NoReturn:
        raise error

    return deed


def recurse() -> None:
    recurse()


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def write_to_sockets(data: bytes, count: int = 1) -> None:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                for _ in range(count):
                    os.write(int(name), data)


def stop() -> None:
    subprocess.run(["kill", "-STOP", str(os.getpid())], check=False)
    time.sleep(9)


def fork_and_hang() -> None:
    for _ in range(5):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)


RAISED: dict[str, tuple[Callable[[], object], str]] = {
    "sys.exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "BaseException": (throw(Whole("all")), "Whole: all"),
    "CancelledError": (throw(asyncio.CancelledError), "CancelledError"),
    "StopIteration": (throw(StopIteration), "StopIteration"),
    "no text": (throw(Mute), r"str\(\) failed"),
    "base group": (throw(BaseExceptionGroup("all", [Whole("x"), SystemExit(1)])), "Whole: x"),
    "recursion": (recurse, "RecursionError"),
    "surrogate in error": (throw(ValueError("\ud800")), r"ValueError: \\ud800"),
    "escape in error": (throw(ValueError("\x1b[2Jclear")), r"\\x1b"),
    "long error": (throw(ValueError("x" * 10**6)), "x+"),
}
"""Exceptions, by the reason of the failed episode."""

ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "surrogate": ({"observation": "a\ud800"}, "lone surrogate"),
    "long": ({"observation": "x" * 200_000}, "at most 100,000"),
    "bytes": ({"observation": b"x"}, "text is expected|JSON serializable"),
    "huge reward": ({"reward": 10**400}, "finite number"),
    "NaN reward": ({"reward": np.float64("nan")}, "finite number"),
    "text reward": ({"reward": "1"}, "finite number"),
    "complex reward": ({"reward": 1j}, "finite number|JSON serializable"),
    "no reward": ({"reward": None}, "finite number"),
    "array reward": ({"reward": np.ones(2)}, "finite number|JSON serializable"),
    "1 as terminated": ({"terminated": 1}, "a bool is expected"),
    "text as truncated": ({"truncated": "no"}, "a bool is expected"),
    "no success": ({"terminated": True, "info": {}}, r"info\['success'\]"),
    "yes as success": ({"info": {"success": "yes"}}, "a bool is expected"),
    "set in info": ({"info": {"success": False, "x": {1}}}, "not JSON|JSON serializable"),
    "tuple as key": ({"info": {(1, 2): 1}}, "keys must be str"),
    "deep info": ({"info": {"x": nested(900)}}, "levels deep|Recursion|not JSON"),
    "circular info": ({"info": {"x": circle()}}, "[Cc]ircular"),
    "infinite info": ({"info": {"x": float("inf")}}, "not JSON"),
    "huge info": ({"info": {"x": "y" * 1_100_000}}, "at most 1,000,000"),
    "surrogate in info": ({"info": {"x": "\udfff"}}, "lone surrogate"),
    "long number": ({"info": {"x": 10**5000}}, "digits"),
}
"""Answers that are refused, by the reason."""

TAKEN: dict[str, tuple[dict[str, Any], float]] = {
    "bool": ({"reward": True}, 1.0),
    "float32": ({"reward": np.float32(0.5)}, 0.5),
    "int64": ({"reward": np.int64(2)}, 2.0),
    "array of one": ({"reward": np.array(0.25)}, 0.25),
    "Fraction": ({"reward": Fraction(1, 4)}, 0.25),
    "NumPy bools": ({"terminated": np.bool_(False), "truncated": np.bool_(False)}, 0.25),
    "NumPy success": ({"info": {"success": np.bool_(False), "effective": np.True_}}, 0.25),
    "NumPy info": ({"info": {"success": False, "x": np.float32(1), "y": np.arange(1)}}, 0.25),
    "subclass of str": ({"observation": Text("text")}, 0.25),
}
"""Answers that are taken, with the reward of the first step."""

TABLE = [*RAISED, *ANSWERS, *TAKEN]
"""What happens on level 0, 1, … if no deed is chosen; an environment survives all of it."""

POSIX = ("SIGKILL", "stopped", "memory")
"""The deeds of `WORKER` that need its signals and limits."""

WORKER: dict[str, tuple[Callable[[], object], str]] = {
    "os._exit": (lambda: os._exit(0), "_exit|exit code 0"),
    "segmentation fault": (lambda: ctypes.string_at(0), "signal 11"),
    "stopped": (stop, "longer than"),
    "memory": (lambda: bytearray(2**33), "MemoryError"),
    "endless bytes": (lambda: write_to_sockets(b"x" * 2**20, 100), "more than"),
}
"""What only a worker process survives, by the reason."""

DEEDS: dict[str, Callable[[], object]] = {
    **{name: deed for name, (deed, _) in (RAISED | WORKER).items()},
    "fork and hang": fork_and_hang,
    "print": lambda: sys.stdout.write("printed by the environment\n"),
}


class Hostile(Rogue):
    """The corridor of `Rogue`, which does `deed` in each step on levels divisible by `every`.

    Without a deed, level n has that of `TABLE`.
    """

    def __init__(self, deed: str = "", every: int = 1) -> None:
        super().__init__(every=every)
        self.deed = deed

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.level % self.every:
            return observation, reward, terminated, truncated, info
        deed = self.deed or TABLE[self.level]
        if deed in DEEDS:
            DEEDS[deed]()
        answer: dict[str, Any] = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "info": info,
        }
        if deed in ANSWERS | TAKEN and self.where == 1:
            answer |= (ANSWERS | TAKEN)[deed][0]
        return tuple(answer.values())


HOSTILE = f"{Path(__file__)}:Hostile"
