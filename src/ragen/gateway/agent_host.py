"""The process in which agents play, run by the agents' own interpreter: it has nothing of RAGEN.

``python agent_host.py FD TARGET`` loads the agent once and plays many episodes at the same time:
coroutines in this process's loop, functions in threads, commands in processes of their own.
Messages are lists as lines of JSON on the socket FD. They are ``["play", number, task, base_url,
key]`` and ``["cancel", number]``; the answers are ``[kind, number, text]``, of these kinds:

- ``ready``, or ``refused`` with one line that says why: the first answer, of number 0;
- ``started`` with the number of a command's process;
- ``json`` with what the function returned or the command printed last;
- ``error`` with the traceback, or with what the command wrote to its standard error;
- ``hung``: the episode is to be cancelled, but a thread cannot be stopped.

The process ends, with all that it has started, when the other end of the socket is closed.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

FUNCTION = re.compile(r"(.+\.py|[\w.]+):([A-Za-z_]\w*)")
"""A target that names a function; any other is a command."""
ANSWER_BYTES = 1_000_000
"""Maximum size of what an agent returns, as JSON in UTF-8."""
ERROR_CHARS = 4_000
"""Length that is kept of an error, from its end."""
TASK_CHARS = 100_000
"""Maximum length of a task in a variable of the environment: Linux takes 128 KiB."""
MOST_THREADS = 512
"""Maximum number of calls that coroutines wait for in threads at the same time."""


class Refused(Exception):
    """The agent cannot be loaded; the text is one line."""


class Channel:
    """This process's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.lines = connection.makefile("rb")
        os.register_at_fork(after_in_child=self._forget)

    def send(self, kind: str, number: int, text: str) -> None:
        """Answer a message. A process that the agent has forked ends here instead."""
        if os.getpid() != self._owner:
            os._exit(0)
        with self._lock:
            self._connection.sendall(json.dumps([kind, number, text]).encode() + b"\n")

    def _forget(self) -> None:
        """A copy of the socket in a forked process would hide the end of this one."""
        if self._connection.fileno() >= 0:
            os.close(self._connection.detach())


class Coroutines:
    """Episodes of an asynchronous function: tasks in the loop of the main thread."""

    def __init__(
        self, main: Callable[..., Any], channel: Channel, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._main, self._channel, self._loop = main, channel, loop
        self._tasks: dict[int, asyncio.Task[tuple[str, str]]] = {}

    def play(self, number: int, *arguments: Any) -> None:
        """Begin an episode."""
        self._loop.call_soon_threadsafe(self._begin, number, arguments)

    def cancel(self, number: int) -> None:
        """End an episode early."""
        self._loop.call_soon_threadsafe(self._cancel, number)

    def _begin(self, number: int, arguments: tuple[Any, ...]) -> None:
        task = self._tasks[number] = self._loop.create_task(self._answer(arguments))
        task.add_done_callback(lambda _: self._finish(number))

    def _cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    def _finish(self, number: int) -> None:
        task = self._tasks.pop(number)
        kind, text = ("error", "cancelled") if task.cancelled() else task.result()
        self._channel.send(kind, number, text)

    async def _answer(self, arguments: tuple[Any, ...]) -> tuple[str, str]:
        try:
            return as_json(await self._main(*arguments))
        except BaseException as error:  # noqa: BLE001 - an exit ends the episode, not the process
            return "error", traceback_of(error)


class Threads:
    """Episodes of a plain function, each in a thread."""

    def __init__(self, main: Callable[..., Any], channel: Channel) -> None:
        self._main, self._channel = main, channel
        self._playing: set[int] = set()

    def play(self, number: int, *arguments: Any) -> None:
        """Begin an episode."""
        self._playing.add(number)
        threading.Thread(target=self._episode, args=(number, arguments), daemon=True).start()

    def cancel(self, number: int) -> None:
        """Say that an episode goes on."""
        if number in self._playing:
            self._channel.send("hung", number, "")

    def _episode(self, number: int, arguments: tuple[Any, ...]) -> None:
        try:
            kind, text = self._answer(number, arguments)
        except BaseException as error:  # noqa: BLE001 - an exit ends the episode, too
            kind, text = "error", traceback_of(error)
        self._playing.discard(number)
        self._channel.send(kind, number, text)

    def _answer(self, number: int, arguments: tuple[Any, ...]) -> tuple[str, str]:
        return as_json(self._main(*arguments))


class Commands(Threads):
    """Episodes of a command, each a process that leads a group; a thread waits for its end."""

    def __init__(self, words: list[str], channel: Channel) -> None:
        super().__init__(lambda *_: None, channel)
        self._words = words
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def cancel(self, number: int) -> None:
        """Kill the processes of an episode; its thread then ends."""
        with self._lock:
            self._playing.discard(number)
            if number in self._running:
                kill_group(self._running[number])

    def end(self) -> None:
        """Kill what runs, and keep the lock, so that nothing is started any more."""
        self._lock.acquire()
        for process in self._running.values():
            kill_group(process)

    def _answer(self, number: int, arguments: tuple[Any, ...]) -> tuple[str, str]:
        task, base_url, key = arguments
        line = json.dumps(task)
        variables = {
            **os.environ,
            **({"RAGEN_TASK": line} if len(line) <= TASK_CHARS else {}),
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": re.sub(r"/v1/?$", "", base_url),  # its client adds /v1/messages
            "ANTHROPIC_API_KEY": key,
        }
        # Files and no pipes: a pipe would wait for a command that does not read it, and for what
        # the command has started.
        file = tempfile.TemporaryFile
        with file() as stdin, file() as out, file() as err:
            stdin.write(line.encode() + b"\n")
            stdin.seek(0)
            with self._lock:
                if number not in self._playing:
                    return "error", "cancelled"
                process = self._running[number] = subprocess.Popen(
                    self._words,
                    stdin=stdin,
                    stdout=out,
                    stderr=err,
                    env=variables,
                    start_new_session=True,
                )
            self._channel.send("started", number, str(process.pid))
            code = process.wait()
            with self._lock:
                kill_group(self._running.pop(number))  # what it has left running
            if code:
                how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return "error", f"{self._words[0]} {how}\n{end_of(err, ERROR_CHARS)}".rstrip()
            return as_json(answer_in(end_of(out, ANSWER_BYTES + 1000)))


def answer_in(output: str) -> Any:
    """The last line of a command's output as JSON, or as text if it is none; None without one."""
    line = output.strip().rpartition("\n")[2].strip()
    try:
        value = json.loads(line or "null")
    except (ValueError, RecursionError):
        return line
    return value if as_json(value)[0] == "json" else line  # NaN and 1e999 are no JSON


def end_of(file: IO[bytes], size: int) -> str:
    """The last bytes of a file as text, at most `size`."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read().decode("utf-8", "replace")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)


def as_json(value: Any) -> tuple[str, str]:
    """The answer with a returned value, or the error that it is no JSON value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=number_of)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        said = (
            f"{value!r:.80}"
            if isinstance(value, float)
            else f"a value of type {type(value).__name__}"
        )
        return "error", (
            f"the agent returned {said}, which is no JSON value ({error}); return a number, True, "
            "False, None, text, a list or a dict"
        )
    if size > ANSWER_BYTES:
        return "error", f"the agent returned more than {ANSWER_BYTES:,} bytes of JSON"
    return "json", text


def number_of(value: Any) -> Any:
    """The number in a scalar of NumPy or torch."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def traceback_of(error: BaseException) -> str:
    """The end of an exception's traceback, without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))[-ERROR_CHARS:]


def load(target: str, channel: Channel, loop: asyncio.AbstractEventLoop) -> Coroutines | Threads:
    """The agent of a target; raises `Refused` if there is none."""
    found = FUNCTION.fullmatch(target)
    if found is None:
        words = shlex.split(target)
        if shutil.which(words[0]) is None:
            raise Refused(f"there is no command {words[0]!r}; a function is named agent.py:main")
        return Commands(words, channel)
    where, name = found[1], found[2]
    try:
        module = load_file(where) if where.endswith(".py") else load_module(where)
    except Refused:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it raises, it cannot be loaded
        raise Refused(f"{where} cannot be loaded: {last_line(error)}") from None
    main = getattr(module, name, None)
    if not callable(main):
        raise Refused(f"{where} has no function {name!r}")
    try:
        inspect.signature(main).bind({}, "", "")
    except TypeError as error:
        raise Refused(f"{name} must take (task, base_url, api_key): {error}") from None
    except ValueError:
        pass  # its signature is not known
    if inspect.iscoroutinefunction(main):
        return Coroutines(main, channel, loop)
    return Threads(main, channel)


def load_file(where: str) -> Any:
    """The module of a file, whose folder is searched for modules, as by ``python FILE``."""
    path = os.path.abspath(where)
    if not os.path.isfile(path):
        raise Refused(f"there is no file {where}")
    sys.path.insert(0, os.path.dirname(path))
    stem = os.path.basename(path)[:-3]
    name = f"agent_{stem}" if stem in sys.modules else stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_module(where: str) -> Any:
    """A module by its name; the working folder is searched first, as by ``python -m``."""
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(where)


def last_line(error: BaseException) -> str:
    """An exception and the first line of its message."""
    return traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]


def serve(fd: int, target: str) -> None:
    """Load the agent and play episodes until the other end of the socket is closed."""
    channel = Channel(socket.socket(fileno=fd))
    # Made before the agent is loaded: in Python 3.9, clients keep the loop of their making.
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))
    asyncio.set_event_loop(loop)
    agents: list[Coroutines | Threads] = []

    def listen() -> None:  # in a thread of its own, because an agent may keep the loop busy
        try:
            for line in channel.lines:
                kind, number, *arguments = json.loads(line)
                try:
                    getattr(agents[0], kind)(number, *arguments)
                except Exception as error:  # noqa: BLE001 - such as no room for another thread
                    channel.send("error", number, traceback_of(error))
        finally:
            if agents and isinstance(agents[0], Commands):
                agents[0].end()
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    try:
        agents.append(load(target, channel, loop))
    except Refused as refusal:
        channel.send("refused", 0, str(refusal))
    else:
        channel.send("ready", 0, "")
    loop.run_forever()


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    os.set_inheritable(int(sys.argv[1]), False)
    serve(int(sys.argv[1]), sys.argv[2])
