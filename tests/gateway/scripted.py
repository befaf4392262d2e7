"""An agent that does what its task says: ``{"do": name, …}``. It has no word of RAGEN."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

ENDED = []
"""The tasks whose coroutines were cancelled."""


class Scalar:
    """What NumPy's and torch's scalars have in common."""

    ndim = 0

    def item(self):
        return 0.5


RETURNED = {
    "number": lambda: 0.5,
    "scalar": lambda: {"reward": Scalar()},
    "nothing": lambda: None,
    "dict": lambda: {"reward": 1, "success": False, "answer": "café"},
    "tuple": lambda: (1, [2, {"a": None}]),
    "nan": lambda: float("nan"),
    "set": lambda: [{1}],
    "surrogate": lambda: "\ud800",
    "huge": lambda: "x" * 2_000_000,
    "deep": lambda: deep(100_000),
}


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


async def main(task, base_url, api_key):
    if task["do"] == "wait":
        try:
            await asyncio.sleep(task["seconds"])
        except asyncio.CancelledError:
            ENDED.append(task["name"])
            raise
        return [task.get("name"), os.getpid()]
    if task["do"] == "ended":
        return ENDED
    return do(task, base_url, api_key)


def plain(task, base_url, api_key):
    if task["do"] == "wait":
        time.sleep(task["seconds"])
        return [task.get("name"), os.getpid()]
    return do(task, base_url, api_key)


def do(task, base_url, api_key):  # noqa: C901
    name = task["do"]
    if name in RETURNED:
        return RETURNED[name]()
    if name == "arguments":
        return [task, base_url, api_key]
    if name == "busy":
        time.sleep(60)
    if name == "raise":
        raise ValueError("this game is\nlost")
    if name == "exit":
        sys.exit("enough")
    if name == "interrupt":
        raise KeyboardInterrupt
    if name == "die":
        sys.stdout.write("last words\n")
        os._exit(3)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "flood":
        for _ in range(200):
            sys.stdout.write("flood " * 2000)
            sys.stderr.write("flood " * 2000)
        sys.stdout.write("\nthe end\n")
    if name == "environment":
        return dict(os.environ)
    if name == "hash":
        return [hash("a word"), os.getpid()]
    if name == "input":
        return [sys.stdin.read(), threading.current_thread() is threading.main_thread()]
    if name == "fork":  # the child holds all that this process has open
        child = os.fork()
        if not child:
            time.sleep(60)
        if task.get("then") == "die":
            os._exit(4)
        return child
    if name == "fork and return":  # in both processes
        os.fork()
        time.sleep(0.05)
        return os.getpid()
    if name == "child":
        return subprocess.Popen(["sleep", "61.25"]).pid
    return None


text = "no function"


def no_arguments():
    return None
