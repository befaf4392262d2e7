"""Environments in worker processes: one that hangs, leaks or dies harms nothing else.

A worker process plays one environment at a time and answers one call after the other. The caller
waits for each answer; a rollout does so in a thread for each episode. Messages are JSON,
never pickles, which could run code here. The contract requires JSON values of infos and snapshots
anyway. A worker is the leader of a process group, which is killed with it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ragen.config.keys import BUDGETS
from ragen.core.errors import RagenError
from ragen.core.stopping import SIGNALS
from ragen.core.user_code import UserCodeError, boundary, timeout_error
from ragen.envs import answers
from ragen.envs.answers import to_json
from ragen.envs.contract import Baselines, Env, Info, Options, Reading, Schema, State
from ragen.envs.registry import build_env, env_factory, modules_of

START_S = 60.0
"""Seconds that a worker may take to start; the time limit of calls does not apply."""
EPISODES = 500
"""Environments that a worker makes before it is replaced, which frees what they leaked. A rollout
makes one for each episode."""
ANSWER_BYTES = 128 * 2**20
"""Maximum number of bytes in an answer; a worker that sends more is killed. The largest pictures
take half of it."""
MEMORY_GB = 4.0
"""Memory in GiB that a worker may use."""
TEXTS = (
    *("name", "goal", "rules", "actions", "tools", "prompt_style"),
    *("reads_thoughts", "draws", "shows_pictures"),
)
"""The attributes of an environment of which its proxy keeps a copy, besides the budgets."""


class Workers:
    """The worker processes of one run; they are started when needed and reused.

    Where the platform can fork, Python's fork server starts a worker in milliseconds, with the
    environment's package imported if it was known at the server's start. A worker imports the main
    module, so a script that trains with isolated environments must guard its entry
    point with ``if __name__ == "__main__":``.

    `env` and `params` are as in `ragen.envs.registry.make`. A worker is killed if a call takes
    longer than `timeout_s` seconds. On Linux, a worker may use `MEMORY_GB` GiB of memory of its
    own; if it needs more, Python raises `MemoryError` in it.
    """

    def __init__(
        self,
        env: str,
        params: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            self._context.set_forkserver_preload([__name__, *modules_of(env)])
        self._job = (env, dict(params), timeout_s)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self.can_close = True  # until an environment hangs in `close`

    def make(self) -> Env:
        """An environment in a worker, until closed; raises `UserCodeError` if making it fails."""
        worker = self.take()
        try:
            return IsolatedEnv(self, worker)
        except UserCodeError:
            self.give_back(worker)
            raise

    def take(self) -> _Worker:
        """An idle or new worker; raises `UserCodeError` if it does not start in `START_S`."""
        try:  # a single call, because the sessions of a server do this in threads
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self._context, self._job)
        self._all.add(worker)
        return worker

    def give_back(self, worker: _Worker) -> None:
        """Keep a worker for the next environment, unless it has died or made `EPISODES` of them."""
        worker.episodes += 1
        if worker.alive and worker.episodes < EPISODES:
            self._idle.append(worker)
        else:
            worker.stop()
            self._all.discard(worker)

    def close(self) -> None:
        """Stop all workers."""
        while self._all:
            self._all.pop().stop()
        self._idle.clear()


def _start_fork_server() -> None:
    """Start the fork server with `SIGNALS` blocked, because a signal to the group is for the run.

    If one ended the server, its workers would end, and their environments would be blamed.
    """
    from multiprocessing import forkserver, resource_tracker  # Windows has no fork server

    resource_tracker.ensure_running()  # first, because its start unblocks some of the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    def __init__(self, context: Any, job: tuple[str, dict[str, Any], float]) -> None:
        self.alive = True
        self.episodes = 0
        self._timeout_s = job[2]
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *job), daemon=True)
        try:
            if context.get_start_method() == "forkserver":
                _start_fork_server()
            self._process.start()
        except (OSError, EOFError) as error:
            self.alive = False
            self._connection.close()
            raise UserCodeError(f"no process can be started for the environment: {error}") from None
        finally:
            theirs.close()
        self._answer("starting", START_S)

    def ask(self, call: str, *arguments: Any) -> Any:
        if not self.alive:
            raise UserCodeError(f"the environment's process had ended before {call}")
        try:
            self._connection.send_bytes(json.dumps([call, arguments]).encode())
        except OSError:
            raise self._died(call) from None
        return self._answer(call, self._timeout_s)

    def _answer(self, call: str, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                self.stop()
                raise timeout_error(call, timeout_s)
            kind, value = json.loads(self._connection.recv_bytes(ANSWER_BYTES))
        except (OSError, EOFError):
            raise self._died(call) from None
        if kind == "answer":
            return value
        raise UserCodeError(str(value)) from (RagenError(value) if kind == "refusal" else None)

    def _died(self, call: str) -> UserCodeError:
        self._process.join(1.0)
        code = self._process.exitcode
        self.stop()
        how = f"closed its connection or sent more than {ANSWER_BYTES:,} bytes"
        if code is not None:
            how = f"ended (signal {-code})" if code < 0 else f"ended (exit code {code})"
        return UserCodeError(f"the environment's process {how} in {call}")

    def stop(self) -> None:
        """Kill the process and those that it has started, whatever they are doing."""
        if self.alive:
            self.kill()
            self.alive = False
            self._process.join()
            self._process.close()
            self._connection.close()

    def kill(self) -> None:
        """Send the signal that ends the processes, and do not wait for their end."""
        with suppress(ValueError):  # the thread that waited for its answer has closed it meanwhile
            self._process.kill()
            if hasattr(os, "killpg") and self._process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):  # not begun yet, or ended
                    os.killpg(self._process.pid, signal.SIGKILL)


def _forward(call: str, read: Callable[[Any], Any] = lambda answer: answer) -> Any:
    def method(env: IsolatedEnv, *arguments: Any) -> Any:
        return read(env._worker.ask(call, *arguments))

    return method


def _made(kind: type[Baselines | Reading]) -> Callable[[Any], Any]:
    return lambda fields: None if fields is None else kind(*fields)


class IsolatedEnv(Env):
    """A proxy of an environment in a worker: its methods are calls over the connection.

    `TEXTS` and budgets are copied after the environment is made, reset or restored. Every method
    but `close` raises `UserCodeError` if the environment raises or takes too long, or if its
    process dies. After its process has died, `reset` makes the environment again in another one.
    """

    waits = "workers"
    rules: str = ""
    actions: tuple[str, ...] | None = None
    tools: tuple[Schema, ...] = ()
    reads_thoughts: bool = False
    draws: bool = False
    shows_pictures: bool = False

    def __init__(self, workers: Workers, worker: _Worker) -> None:
        self._workers, self._worker = workers, worker
        self._closed = False
        self._keep_texts("make")

    def _keep_texts(self, call: str = "texts") -> None:
        vars(self).update(self._worker.ask(call))
        self.actions = None if self.actions is None else tuple(self.actions)
        self.tools = tuple(self.tools)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        if not self._worker.alive:
            self._workers.give_back(self._worker)
            self._worker = self._workers.take()
            try:
                self._keep_texts("make")
            except UserCodeError:  # a later reset begins with another worker
                self._worker.stop()
                raise
        observation, info = self._worker.ask("reset", seed, options)
        self._keep_texts()
        return observation, info

    def set_state(self, state: State) -> None:
        self._worker.ask("set_state", state)
        self._keep_texts()

    step = _forward("step", tuple)
    get_state = _forward("get_state")
    state_key = _forward("state_key")
    solve = _forward("solve")
    baselines = _forward("baselines", _made(Baselines))
    read_thought = _forward("read_thought", _made(Reading))
    pictures = _forward("pictures", answers.pixels_of)
    drawing = _forward("drawing")

    def interrupt(self) -> None:
        """Kill the process; the thread that waits for its answer then finds that it has died."""
        self._worker.kill()

    def random_action(self, generator: np.random.Generator) -> str | None:
        """An action of random play; `generator` advances as it would in this process."""
        action, after = self._worker.ask("random_action", generator.bit_generator.state)
        generator.bit_generator.state = after
        return None if action is None else str(action)

    def __deepcopy__(self, _: dict[int, Any]) -> IsolatedEnv:
        raise TypeError("an environment in a worker process cannot be copied; use get_state")

    def close(self) -> None:
        """Close it and return its worker, ignoring failures; after a hang, stop workers instead."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._workers.can_close:
                self._worker.stop()
            elif self._worker.alive:
                self._worker.ask("close")
        except UserCodeError as failure:
            self._workers.can_close = not failure.timed_out
        self._workers.give_back(self._worker)  # not after an interrupt: an answer may still come


def _serve(
    connection: Connection,
    name: str,
    params: dict[str, Any],
    timeout_s: float,
) -> None:
    """Answer calls until the connection closes; the main function of a worker."""
    _confine()
    try:
        answer, env = '["answer", null]', None
        factory: Callable[[], Env] | None = None
        while True:
            connection.send_bytes(answer.encode())
            call, arguments = json.loads(connection.recv_bytes())
            try:
                # The caller ends a call that takes too long; if it is gone, the boundary does.
                with boundary(call, timeout_s + 5.0):
                    if call == "make":
                        factory = factory or env_factory(name, **params)
                        env = build_env(factory, name)
                        call = "texts"
                    answer = to_json(["answer", _call(env, call, arguments)])
            except UserCodeError as failure:
                cause = failure.__cause__
                refused = isinstance(cause, RagenError)
                kind, text = ("refusal", str(cause)) if refused else ("failure", str(failure))
                answer = json.dumps([kind, text])
    except (OSError, EOFError):  # the run has ended, and with it all that this process has started
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)


def _confine() -> None:
    """Keep this process from harming the run: its prints, its children, its memory."""
    multiprocessing.current_process().daemon = False  # it may start processes; they end with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C and stops its workers
    os.dup2(2, 1)  # standard output is for results, even if C code or another process writes
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
        for number in SIGNALS[1:]:  # drop pending signals, which were for the run's group
            signal.signal(number, signal.SIG_IGN)
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if sys.platform == "linux":
        import resource

        # Not the address space: libraries reserve far more of it than they use.
        most = int(MEMORY_GB * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Kill this process when its parent ends: code in C does not see that the caller is gone.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _call(env: Any, call: str, arguments: list[Any]) -> Any:
    if call == "texts":
        return {name: getattr(env, name) for name in (*TEXTS, *BUDGETS)}
    if call == "reset":
        seed, options = arguments
        return env.reset(seed=seed, options=options)
    if call == "random_action":
        generator = np.random.Generator(np.random.PCG64())
        generator.bit_generator.state = arguments[0]
        return env.random_action(generator), generator.bit_generator.state
    if call == "pictures":
        return answers.picture_fields(answers.pictures(env.pictures()))
    result = getattr(env, call)(*arguments)
    return astuple(result) if isinstance(result, Reading | Baselines) else result
