"""An environment that does one hostile thing in a step, chosen by its name in `DEEDS`."""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import locale
import multiprocessing
import os
import posix
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ragen.envs.contract import Info
from tests.rogue import Rogue


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Slow(Exception):
    def __str__(self) -> str:
        while True:
            pass


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


def torch_does(do: Callable[[Any], object]) -> Callable[[], object]:
    def deed() -> object:
        import torch

        return do(torch)

    return deed


def close_connection() -> None:
    for fd in range(3, 256):
        try:
            if os.path.exists(f"/proc/self/fd/{fd}"):
                os.close(fd)
        except OSError:
            pass
    time.sleep(60)


def sockets() -> list[int]:
    return [
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
        and os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    ]


def write_to_sockets(data: bytes, count: int = 1) -> None:
    for fd in sockets():
        try:
            for _ in range(count):
                os.write(fd, data)
        except OSError:
            pass


def fork_and_return() -> None:
    os.fork()


def terminate() -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM


def use_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    process.terminate()
    process.join(20)
    assert process.exitcode == -signal.SIGTERM


def exit_in_thread() -> None:
    def target() -> None:
        with suppress(BaseException):
            os._exit(0)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def fork_and_hang() -> None:
    for _ in range(5):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)


def start_thread(daemon: bool) -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=daemon).start()


def swallow() -> None:
    try:
        sys.exit(3)
    except SystemExit:
        os._exit(3)


PROCESS: dict[str, tuple[Callable[[], object], str]] = {
    "sys.exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "os._exit": (lambda: os._exit(0), r"os\._exit|posix\._exit"),
    "posix._exit": (lambda: posix._exit(0), "_exit"),
    "posix.kill": (lambda: posix.kill(os.getpid(), signal.SIGTERM), "kill"),
    "os._exit after exit": (swallow, "_exit"),
    "os.abort": (lambda: os.abort(), "abort"),
    "all files closed": (lambda: os.closerange(3, 1000), "closerange"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "kill"),
    "SIGINT": (lambda: os.kill(os.getpid(), signal.SIGINT), "kill"),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "kill"),
    "own group": (lambda: os.killpg(os.getpgrp(), signal.SIGKILL), "killpg"),
    "every process": (lambda: os.kill(-1, signal.SIGKILL), "kill"),
    "raise_signal": (lambda: signal.raise_signal(signal.SIGINT), "raise_signal"),
    "pthread_kill": (
        lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM),
        "pthread_kill",
    ),
    "interrupt_main": (lambda: _thread.interrupt_main(), "interrupt_main"),
    "exec": (lambda: os.execv(sys.executable, [sys.executable, "-c", "pass"]), "execv"),
    "execlp": (lambda: os.execlp("true", "true"), "execv"),
}
"""What would end the process: refused, by a reason that names it."""

RAISED: dict[str, tuple[Callable[[], object], str]] = {
    "KeyboardInterrupt": (throw(KeyboardInterrupt), "KeyboardInterrupt"),
    "BaseException": (throw(Whole("all")), "Whole: all"),
    "GeneratorExit": (throw(GeneratorExit), "GeneratorExit"),
    "CancelledError": (throw(asyncio.CancelledError), "CancelledError"),
    "StopIteration": (throw(StopIteration), "StopIteration"),
    "MemoryError": (throw(MemoryError), "MemoryError"),
    "no text": (throw(Mute), r"str\(\) failed"),
    "group": (throw(ExceptionGroup("many", [ValueError("a"), KeyError("b")])), "many"),
    "base group": (throw(BaseExceptionGroup("all", [Whole("x"), SystemExit(1)])), "Whole: x"),
    "recursion": (recurse, "RecursionError"),
    "surrogate in error": (throw(ValueError("\ud800")), r"ValueError: \\ud800"),
    "escape in error": (throw(ValueError("\x1b[2Jclear")), r"\\x1b"),
    "long error": (throw(ValueError("x" * 10**7)), "x+"),
}

UNDONE: dict[str, Callable[[], object]] = {
    "chdir": lambda: os.chdir("/"),
    "umask": lambda: os.umask(0),
    "SIGINT handler": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    "SIGTERM handler": lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    "SIGALRM handler": lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL),
    "alarm": lambda: signal.alarm(1),
    "profiling timer": lambda: signal.setitimer(signal.ITIMER_PROF, 0.001),
    "signal mask": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]),
    "stdout replaced": lambda: setattr(sys, "stdout", None),
    "stderr replaced": lambda: setattr(sys, "stderr", None),
    "stdin replaced": lambda: setattr(sys, "stdin", None),
    "stdout closed": lambda: sys.stdout.close(),
    "stderr closed": lambda: sys.stderr.close(),
    "fd 1 closed": lambda: os.close(1),
    "all streams closed": lambda: [os.close(fd) for fd in (0, 1, 2)],
    "fd 2 replaced": lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2),
    "recursion limit": lambda: sys.setrecursionlimit(500),
    "warnings": lambda: warnings.simplefilter("error"),
    "environ": lambda: os.environ.update(RAGEN_HOSTILE="1"),
    "excepthook": lambda: setattr(threading, "excepthook", print),
    "random": lambda: random.seed(1),
    "numpy": lambda: np.random.seed(1),  # noqa: NPY002
    "floating point": lambda: np.seterr(all="raise"),
    "torch seed": torch_does(lambda torch: torch.manual_seed(1)),
    "torch threads": torch_does(lambda torch: torch.set_num_threads(3)),
    "torch dtype": torch_does(lambda torch: torch.set_default_dtype(torch.float64)),
    "torch gradients": torch_does(lambda torch: torch.set_grad_enabled(False)),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "locale by name": lambda: locale.setlocale(category=locale.LC_ALL, locale="C"),
    "handler by name": lambda: signal.signal(signalnum=signal.SIGTERM, handler=signal.SIG_IGN),
    "mask by name": lambda: signal.pthread_sigmask(how=signal.SIG_BLOCK, mask=[signal.SIGTERM]),
    "stream by name": lambda: os.dup2(fd=os.open(os.devnull, os.O_WRONLY), fd2=1),
    "thread": lambda: start_thread(daemon=False),
    "daemon thread": lambda: start_thread(daemon=True),
    "fork": fork_and_return,
    "process": use_process,
    "event loop": lambda: asyncio.run(asyncio.sleep(0.001)),
    "child that is terminated": terminate,
    "exit in a thread of its own": exit_in_thread,
    "prints": lambda: sys.stdout.write("printed by the environment\n"),
}
"""What a call changes and the run depends on: the episode goes on."""

ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "surrogate": ({"observation": "a\ud800"}, "lone surrogate"),
    "10 MB": ({"observation": "x" * 10**7}, r"env\.max_chars"),
    "bytes": ({"observation": b"x"}, "text is expected|JSON serializable"),
    "huge reward": ({"reward": 10**400}, "finite number"),
    "infinite reward": ({"reward": float("inf")}, "finite number"),
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
    "huge info": ({"info": {"x": "y" * 2 * 10**6}}, "at most 1,000,000"),
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

WORKER: dict[str, tuple[Callable[[], object], str]] = {
    "segmentation fault": (lambda: ctypes.string_at(0), r"signal 11"),
    "C exit": (lambda: ctypes.CDLL(None)._exit(0), r"exit code 0"),
    "C kill": (lambda: ctypes.CDLL(None).raise_(9), "raise_"),
    "killed from outside": (
        lambda: (subprocess.run(["kill", "-9", str(os.getpid())], check=False), time.sleep(9)),
        "signal 9",
    ),
    "stopped": (
        lambda: (subprocess.run(["kill", "-STOP", str(os.getpid())], check=False), time.sleep(9)),
        "longer than",
    ),
    "ignores SIGTERM": (
        lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), sum(range(10**12))),
        "longer than",
    ),
    "memory": (lambda: bytearray(2**40), "MemoryError"),
    "memory in steps": (lambda: [bytearray(2**26) for _ in range(10**4)], "MemoryError"),
    "fork bomb": (fork_and_hang, "longer than"),
    "connection closed": (close_connection, "closed its connection|ended|longer than"),
    "garbage": (lambda: write_to_sockets(b"garbage\n"), "connection"),
    "forged answer": (lambda: write_to_sockets(b'[99,"answer",null]\n'), "connection"),
    "endless bytes": (lambda: write_to_sockets(b"x" * 2**20, 100), "more than"),
    "half a line": (lambda: (write_to_sockets(b'["x'), time.sleep(60)), "longer than"),
    "exit in a thread": (
        lambda: (threading.Thread(target=os._exit, args=(5,)).start(), time.sleep(9)),
        "longer than",
    ),
    "deep recursion in C": (
        lambda: (sys.setrecursionlimit(10**9), ctypes.string_at(1)),
        "signal 11",
    ),
}
"""What only a worker process survives, by the reason."""

DEEDS: dict[str, Callable[[], object]] = {
    **{name: deed for name, (deed, _) in (PROCESS | RAISED | WORKER).items()},
    **UNDONE,
    "slow text": throw(Slow),
}


class Hostile(Rogue):
    """The corridor of `Rogue`, which does `deed` in each step on levels divisible by `every`."""

    def __init__(self, deed: str = "", every: int = 1) -> None:
        super().__init__(every=every)
        self.deed = deed

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.level % self.every:
            return observation, reward, terminated, truncated, info
        if self.deed in DEEDS:
            DEEDS[self.deed]()
        answer: dict[str, Any] = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "info": info,
        }
        if self.deed in ANSWERS | TAKEN and self.where == 1:
            answer |= (ANSWERS | TAKEN)[self.deed][0]
        return tuple(answer.values())


HOSTILE = f"{Path(__file__)}:Hostile"
__all__ = ["HOSTILE", "Hostile", "Info"]
