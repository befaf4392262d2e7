"""Servers of OpenEnv's protocol that a run starts itself: a module's application, or an image.

A process starts one server for each name, when an environment first needs it. The server ends with
the process. An application that has ended is started again for the next episode.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError, printable
from ragen.core.plugins import hash_code
from ragen.envs.adapters.adapted import SAID_CHARS, error_log, last_error, version_of

READY_S = 60.0
"""Seconds that an application or a container may take until it answers."""
END_S = 10.0
"""Seconds that a server may take to end before it is killed."""
MODULE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*:[A-Za-z_]\w*")
"""The name of an application in a module; that of an image may look the same."""
IMAGE = re.compile(r"[a-z0-9][a-z0-9._/-]*(?::\w[\w.-]*)?(?:@sha256:[0-9a-f]{64})?")
"""The name of an image, with a tag or a digest; it cannot be an option of Docker."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started: its address, whether it still runs, and how it is ended."""

    url: str
    runs: Callable[[], bool]
    end: Callable[[], None]
    process: int = field(default_factory=os.getpid)


_RUNNING: dict[str, Running] = {}


def is_url(target: str) -> bool:
    """True if a target is the address of a server, which is not started here."""
    return "://" in target


def address_of(target: str) -> str:
    """The URL of a target: itself, or the URL of its server, which is started if it does not run.

    Raises:
        RagenError: The server cannot be started.
    """
    if is_url(target):
        return target
    known = _RUNNING.get(target)
    if known is None or not known.runs():
        if known is not None:
            known.end()
        known = _RUNNING[target] = (_serve if _is_application(target) else _contain)(target)
    return known.url


def code_of(target: str) -> tuple[str, ...]:
    """The identity of a target's code, as far as it is known before it runs."""
    if is_url(target):
        return ()
    if not _is_application(target):
        return (f"image {target}",)
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        return (hash_code(Path(module), Path(module).read_bytes()),)
    return (version_of(module),)


@atexit.register
def end_servers() -> None:
    """End all servers that this process has started, and not those of a process that forked it."""
    while _RUNNING:
        running = _RUNNING.popitem()[1]
        if running.process == os.getpid():
            running.end()


def _is_application(target: str) -> bool:
    path = target.rpartition(":")[0]
    if path.endswith(".py"):
        return True
    return bool(MODULE.fullmatch(target)) and bool(importlib.util.find_spec(path.partition(".")[0]))


def _serve(target: str) -> Running:
    """Start the application of a module or a file in a process of this Python."""
    log = error_log()
    process = subprocess.Popen(
        [sys.executable, "-m", "ragen.envs.adapters.openenv_app", target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, which ends the server last
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, log):
            if pipe is not None:
                pipe.close()

    assert process.stdout is not None
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(READY_S, kill)  # outside the main thread, calls have no time limit
    timer.start()
    try:
        port = process.stdout.readline().strip()
        if not port.isdecimal():
            process.wait()
    except BaseException:  # a time limit, too
        end()
        raise
    finally:
        timer.cancel()
    if not port.isdecimal():
        said = last_error(log)
        if is_late.is_set():
            said = f"it did not start within {READY_S:g} s"
        end()
        raise RagenError(f"openenv:{target} cannot be served: {said}")
    return Running(f"http://127.0.0.1:{port}", lambda: process.poll() is None, end)


def _contain(image: str) -> Running:
    """Start a container of an image, by the provider of OpenEnv's own library."""
    if re.fullmatch(r"[\w.-]+:\d{2,5}", image):
        raise RagenError(f"openenv:{image}: a URL is expected, as in openenv:http://{image}")
    if not IMAGE.fullmatch(image):
        raise RagenError(
            f"openenv:{image}: expected a URL, an application as package.module:app or "
            "path/to/file.py:app, or an image"
        )
    try:
        from openenv.core.containers.runtime.providers import LocalDockerProvider
    except ModuleNotFoundError:
        raise RagenError(
            f"openenv:{image}: there is no such module here, and an image needs OpenEnv's own "
            "library: pip install openenv"
        ) from None
    try:
        provider: Any = LocalDockerProvider()
    except RuntimeError as error:
        said = str(error).partition(".")[0]
        raise RagenError(
            f"openenv:{image}: there is no such module here, and no image can be run: {said}; "
            "install and start it, or name the URL of a server"
        ) from None
    try:
        url = provider.start_container(image)
        provider.wait_for_ready(url, READY_S)
    except (RuntimeError, TimeoutError) as error:
        provider.stop_container()
        said = printable(" ".join(str(error).split())[-SAID_CHARS:])
        raise RagenError(f"openenv:{image}: its container did not start: {said}") from None
    # A container that has ended is not noticed: its episodes fail, as those of a URL.
    return Running(url, lambda: True, provider.stop_container)
