"""Agents run in processes of their own interpreter (`ragen.gateway.agent_host`), many at once.

An agent is a function ``main(task, base_url, api_key)``, plain or asynchronous, which is loaded
once in each process; or a command, which is started for each episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError, last_line, printable
from ragen.gateway import agent_host
from ragen.networks.machine import usable_cpus

MOST_PROCESSES = 8
"""Maximum number of processes, unless the user names another: each loads the agent's libraries."""
START_S = 120.0
"""Seconds that an agent may take to be loaded."""
GRACE_S = 5.0
"""Seconds that a cancelled coroutine may take to end."""
END_S = 1.0
"""Seconds that a process may take to end by itself."""
KEPT_BYTES = 2**16
"""What is kept of a process's output, from its end."""
SECRET = re.compile(
    r"KEY|TOKEN(?!IZERS)|SECRET|PASS|CRED|AUTH|COOKIE|(^|_)PAT(_|$)|^(RAGEN|OPENAI|ANTHROPIC)_",
    re.IGNORECASE,
)
"""Names of variables that an agent does not see."""
LOGIN = re.compile(r"://[^/@\s]+:[^/@\s]+@")
"""A password in an address."""
SILENCED = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Keeps libraries from calling servers that are not the gateway."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent's episode came to.

    `value` is the JSON value that the agent returned. `error` is ``None`` if it returned, and else
    the end of its traceback or of what it wrote; `timed_out` says that it passed its time limit.
    """

    value: Any
    error: str | None
    timed_out: bool


class Agents:
    """The processes in which an agent plays; they are started, all together, when first needed.

    Args:
        target: ``path/to/file.py:main`` or ``package.module:main``, or else a command line.
        python: The interpreter of the agent, Python 3.9 or newer; ours, if it is empty.
        processes: Their number; 0 is one for each core, at most `MOST_PROCESSES`. Commands need
            one, from which each episode starts its own.
        sees_secrets: The agent gets all variables, also those that look like secrets.

    Raises:
        RagenError: The target is no command line, or this system has no process groups.
    """

    def __init__(
        self, target: str, python: str = "", processes: int = 0, sees_secrets: bool = False
    ) -> None:
        if not hasattr(os, "killpg"):
            raise RagenError("agents cannot run on this system; on Windows, use its Linux (WSL)")
        try:
            is_empty = not shlex.split(target)
        except ValueError as error:
            raise RagenError(f"the agent {target!r} is no command line: {error}") from None
        if is_empty or "\0" in target:
            raise RagenError("no agent is named; name agent.py:main, or a command")
        is_function = agent_host.FUNCTION.fullmatch(target) is not None
        self._target, self._python = target, python or sys.executable
        self._sees_secrets = sees_secrets
        self._processes = processes or min(usable_cpus(), MOST_PROCESSES) if is_function else 1
        self._workers: list[_Worker] = []
        self._numbers = count(1)
        self._refusal, self._has_loaded = "", False

    async def run(
        self, task: Mapping[str, Any], base_url: str, key: str, timeout_s: float
    ) -> Outcome:
        """Let the agent play one episode; its time limit does not include the loading.

        Raises:
            RagenError: The agent cannot be loaded, or the interpreter does not start.
        """
        worker = self._least_busy()
        try:
            outcome = await worker.play(next(self._numbers), [dict(task), base_url, key], timeout_s)
        finally:
            self._tidy()
        self._has_loaded |= outcome is not None
        if outcome is None and self._has_loaded:  # such as a new process, killed for its memory
            return Outcome(None, worker.failure, False)
        if outcome is None:
            self._refusal = self._refusal or f"the agent cannot run: {worker.failure}"
            raise RagenError(self._refusal)
        return outcome

    def close(self) -> None:
        """Kill all processes and what they have started; episodes in progress fail."""
        self._refusal = "the agents of this run were ended"
        for worker in self._workers:
            worker.stop(self._refusal)
        self._workers.clear()

    def _least_busy(self) -> _Worker:
        if self._refusal:
            raise RagenError(self._refusal)
        loop = asyncio.get_running_loop()
        for worker in self._workers:
            worker.is_spent |= worker.loop is not loop
        self._tidy()
        ready = [worker for worker in self._workers if not worker.is_spent]
        while len(ready) < self._processes:
            ready.append(_Worker(self._python, self._target, self._sees_secrets))
            self._workers.append(ready[-1])
        # A coroutine that does not end when it is cancelled may hold up the others.
        return min(ready, key=lambda worker: (len(worker.cancelling), len(worker.playing)))

    def _tidy(self) -> None:
        """Stop the processes that get no more episodes, once their last one has ended."""
        for worker in self._workers:
            if worker.is_spent and not worker.playing:
                worker.stop("the agent's process was replaced")
        self._workers = [worker for worker in self._workers if worker.alive]


class _Worker:
    """One process, our end of its socket, and the end of what it has written."""

    def __init__(self, python: str, target: str, sees_secrets: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.playing: dict[int, asyncio.Future[Outcome]] = {}
        self.cancelling: set[int] = set()
        self.alive, self.is_spent = True, False
        self.failure = ""
        self._ready: asyncio.Future[bool] = self.loop.create_future()
        self._to_send, self._received, self._written = bytearray(), b"", b""
        self._has_commands = agent_host.FUNCTION.fullmatch(target) is None
        self._commands: dict[int, int] = {}
        self._socket, theirs = socket.socketpair()
        host, fd = Path(agent_host.__file__), theirs.fileno()
        try:
            self._process = subprocess.Popen(
                [python, "-u", str(host), str(fd), target],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[fd],
                env=environment(os.environ, sees_secrets),
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as error:
            self._socket.close()
            raise RagenError(f"the agent's interpreter {python} does not start: {error}") from None
        finally:
            theirs.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._socket.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        self.loop.add_reader(self._socket, self._receive)
        self.loop.add_reader(self._output, self._keep_output)

    async def play(self, number: int, message: list[Any], timeout_s: float) -> Outcome | None:
        """Play an episode; ``None`` if the process has not loaded the agent."""
        ended: asyncio.Future[Outcome] = self.loop.create_future()
        self.playing[number] = ended
        try:
            await asyncio.wait([self._ready], timeout=START_S)
            if not self._ready.done():
                self._refuse(f"it took longer than {START_S:g} s")
            if not self._ready.result():
                return None
            self._send(["play", number, *message])
            await asyncio.wait([ended], timeout=timeout_s)
            if ended.done():
                return ended.result()
            late = f"the agent took longer than {timeout_s:g} s"
            self.cancelling.add(number)
            self._send(["cancel", number])
            await asyncio.wait([ended], timeout=GRACE_S)
            if not ended.done():
                self.is_spent = True
                late += "; cancelled, it went on: an async function must await what takes time"
            return Outcome(None, late, True)
        finally:
            del self.playing[number]
            self.cancelling.discard(number)
            if not ended.done():  # the run has cancelled it
                self._send(["cancel", number])

    def stop(self, why: str) -> None:
        """End the process and all that it has started; its episodes fail for this reason."""
        if self.alive:
            # A command's processes are known to its host alone until it has said so.
            self._end(END_S if self._has_commands and self.playing else 0.0)
            self._fail(why)

    def _send(self, message: list[Any]) -> None:
        if self.alive and not self.loop.is_closed():
            self._to_send += json.dumps(message).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        try:
            del self._to_send[: self._socket.send(self._to_send)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, as `_receive` will see
            self._to_send.clear()
        if self._to_send:
            self.loop.add_writer(self._socket, self._flush)
        else:
            self.loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            chunk = self._socket.recv(2**18)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        *lines, self._received = (self._received + chunk).split(b"\n")
        try:
            for line in lines:
                kind, number, text = json.loads(line)
                self._take(str(kind), int(number), str(text))
            fault = ""
        except (TypeError, ValueError, RecursionError):  # the agent wrote to the socket
            fault = "sent what is no answer"
        if self.alive and (fault or not chunk):
            how, written = self._end(END_S)
            said = last_line(written)
            self.failure = f"its process {fault or how}{said and f': {said}'}"
            self._fail(f"{written}\nthe agent's process {fault or how}".strip())

    def _take(self, kind: str, number: int, text: str) -> None:
        ended = self.playing.get(number)
        if kind == "ready":
            self._ready.set_result(True)
        elif kind == "refused":
            self._refuse(text)
        elif kind == "started":
            self._commands[number] = int(text)
        elif kind == "hung":
            self.is_spent = True
        if kind in ("json", "error", "hung"):
            self._commands.pop(number, None)
            if ended is not None and not ended.done():
                ended.set_result(_outcome(kind, text))

    def _refuse(self, why: str) -> None:
        self.failure = printable(why)
        self.stop(self.failure)

    def _end(self, wait_s: float) -> tuple[str, str]:
        """How the process ended, which is killed if it does not end by itself, and its output."""
        self.alive = False
        if not self.loop.is_closed():
            self.loop.remove_reader(self._socket)
            self.loop.remove_writer(self._socket)
            self.loop.remove_reader(self._output)
        self._socket.close()  # so it ends, with what it has started
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        for group in (self._process.pid, *self._commands.values()):
            with suppress(ProcessLookupError, PermissionError):  # all of it has ended
                os.killpg(group, signal.SIGKILL)
        code = self._process.wait()
        self._keep_output()
        self._output.close()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return how, _last(self._written.decode("utf-8", "replace"))

    def _fail(self, why: str) -> None:
        if not self.loop.is_closed():
            for ended in self.playing.values():
                if not ended.done():
                    ended.set_result(Outcome(None, why, False))
            if not self._ready.done():
                self._ready.set_result(False)

    def _keep_output(self) -> None:
        chunk = self._output.read(2**16)
        if chunk:
            self._written = (self._written + chunk)[-KEPT_BYTES:]
        elif chunk is not None and self.alive:  # closed
            self.loop.remove_reader(self._output)


def environment(variables: Mapping[str, str], sees_secrets: bool = False) -> dict[str, str]:
    """The variables of an agent's process: ours without secrets; proxies are not for the gateway.

    Example:
        >>> environment({"PATH": "/bin", "HF_TOKEN": "hf_1", "NO_PROXY": "host"})["NO_PROXY"]
        'host,localhost,127.0.0.1,::1'
    """
    kept = {
        name: value
        for name, value in variables.items()
        if sees_secrets or not (SECRET.search(name) or LOGIN.search(value))
    }
    for name in ("NO_PROXY", "no_proxy"):
        kept[name] = ",".join(filter(None, (kept.get(name), "localhost,127.0.0.1,::1")))
    return {"PYTHONHASHSEED": "0"} | kept | SILENCED  # a set has the same order in each process


def _outcome(kind: str, text: str) -> Outcome:
    if kind != "json":
        return Outcome(None, _last(text), False)
    try:
        return Outcome(json.loads(text), None, False)
    except (ValueError, RecursionError) as error:
        return Outcome(None, f"the agent returned what is no JSON value: {error}", False)


def _last(text: str) -> str:
    return printable(text[-agent_host.ERROR_CHARS :]).strip()
