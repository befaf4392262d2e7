"""Servers of OpenEnv's protocol that a run starts itself: applications of modules and files.

A process starts one server for each application, when an environment first needs it. The server
ends with the process. One that has ended before is started again for the next episode.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ragen.core.errors import RagenError
from ragen.core.plugins import hash_code
from ragen.envs.adapters.adapted import error_log, last_error, version_of

READY_S = 60.0
"""Seconds that an application may take until it answers."""
END_S = 10.0
"""Seconds that a server may take to end before it is killed."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started by the process `starter`, and its standard error."""

    process: subprocess.Popen[str]
    log: IO[str]
    url: str = ""
    starter: int = field(default_factory=os.getpid)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            if pipe is not None:
                pipe.close()


_RUNNING: dict[str, Running] = {}


def is_url(target: str) -> bool:
    """True if a target is the address of a server, which is not started here."""
    return "://" in target


def address_of(target: str) -> str:
    """The URL of a target, whose server is started if needed; raises `RagenError` if that fails."""
    if is_url(target):
        return target
    known = _RUNNING.get(target)
    if known is None or known.process.poll() is not None:
        if known is not None:
            known.end()
        known = _RUNNING[target] = _serve(target)
    return known.url


def code_of(target: str) -> tuple[str, ...]:
    """The identity of a target's code, as far as it is known before it runs."""
    module = target.rpartition(":")[0]
    if is_url(target):
        return ()
    if module.endswith(".py"):
        return (hash_code(Path(module), Path(module).read_bytes()),)
    return (version_of(module),)


@atexit.register
def end_servers() -> None:
    """End all servers that this process has started; a forked process leaves its parent's alone."""
    while _RUNNING:
        running = _RUNNING.popitem()[1]
        if running.starter == os.getpid():
            running.end()


def _serve(target: str) -> Running:
    process = subprocess.Popen(
        [sys.executable, "-m", "ragen.envs.adapters.openenv_app", target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(log := error_log()),
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, which ends the server last
    )
    running = Running(process, log)
    assert process.stdout is not None
    # Outside the main thread, calls have no time limit.
    timer = threading.Timer(READY_S, process.kill)
    begun = time.monotonic()
    timer.start()
    try:
        port = process.stdout.readline(16).strip()
        if not port.isdecimal():
            process.wait()
            is_late = time.monotonic() - begun >= READY_S
            said = f"it did not start within {READY_S:g} s" if is_late else last_error(log)
            raise RagenError(
                f"openenv:{target} cannot be served: {said}; name the URL of a server, as in "
                "openenv:http://host:8000, or an application as package.module:app or "
                "path/to/file.py:app; an image is started by docker run -p 8000:8000 IMAGE"
            )
    except BaseException:  # a time limit, too
        running.end()
        raise
    finally:
        timer.cancel()
    return Running(process, log, f"http://127.0.0.1:{port}")
