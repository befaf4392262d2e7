"""A child: a process of this machine that answers calls over its standard streams.

The parent sends numbered calls, one at a time. The child answers each with a result or an error,
and may send news before. Messages are pickles, because both ends are this program. If the parent
ends, in whatever way, the child ends, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import IO, Any, Literal

from ragen.core.errors import EngineLost, RagenError

BOOT = (
    "import sys; _, module, *sys.path = sys.argv; "
    "from ragen.cluster.child import main; main(module)"
)
"""The program of a child, which finds the same modules as its parent and does not run its script.
"""
END_S = 10.0
"""Seconds that a child may take to end before it is killed."""
CANCEL, END = "cancel", "end"
"""Calls without an answer: give up the open call; end."""

Kind = Literal["news", "answer", "error", "bug"]
Message = tuple[int, str, Any]
"""A call's number, its method and its arguments."""


@dataclass(slots=True, eq=False)
class Call:
    """An open call: its answer to come, and what receives its news."""

    number: int
    answer: Future[Any] = field(default_factory=Future)
    tell: Callable[[Any], object] = lambda news: None


class Child:
    """The parent's end. A thread reads the answers, so that a loss is noticed at once.

    `module` is where the child finds its `ChildHost`.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._calls = dict[int, Call]()
        self._count = 0
        self._lost: EngineLost | None = None
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, module, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which ends its children
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._sent: IO[bytes] = self._process.stdin
        self._thread = threading.Thread(
            target=self._receive, args=(self._process.stdout,), name=name, daemon=True
        )
        self._thread.start()

    def begin(
        self, method: str, *arguments: Any, tell: Callable[[Any], object] | None = None
    ) -> Call:
        """Send a call; `tell` receives its news in the event loop that runs now.

        The answer of a call to a lost child is `EngineLost`.
        """
        call = Call(self._count)
        self._count += 1
        if tell is not None:
            loop = asyncio.get_running_loop()
            call.tell = lambda news: loop.call_soon_threadsafe(tell, news)
        with self._lock:
            self._calls[call.number] = call
            lost = self._lost
        if lost is not None:
            call.answer.set_exception(lost)
        else:
            self._send(call.number, method, *arguments)
        return call

    async def wait(self, call: Call) -> Any:
        """The answer of a call, which is given up if its waiter is cancelled.

        Raises:
            EngineLost: The child is gone.
            RagenError, OSError: The method raised it.
        """
        try:
            return await asyncio.wrap_future(call.answer)
        except asyncio.CancelledError:
            if self._calls.pop(call.number, None) is not None:
                self._send(call.number, CANCEL)
            raise

    def kill(self) -> None:
        """Kill it; open calls raise `EngineLost`."""
        self._process.kill()

    def end(self) -> None:
        """Let it end, or kill it after `END_S`; may be called repeatedly."""
        self._send(-1, END)
        with suppress(OSError):
            self._sent.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def _send(self, number: int, method: str, *arguments: Any) -> None:
        with suppress(BrokenPipeError, ValueError):  # it is lost, which the thread will notice
            self._sent.write(pickle.dumps((number, method, arguments)))
            self._sent.flush()

    def _receive(self, answers: IO[bytes]) -> None:
        with suppress(EOFError, pickle.UnpicklingError), answers:
            while True:
                number, kind, value = pickle.load(answers)
                if kind == "news":
                    if (call := self._calls.get(number)) is not None:
                        call.tell(value)
                elif (call := self._calls.pop(number, None)) is not None:
                    self._answer(call, kind, value)
        self._lose()

    def _answer(self, call: Call, kind: Kind, value: Any) -> None:
        if kind == "answer":
            call.answer.set_result(value)
        elif kind == "error":
            call.answer.set_exception(value)
        else:
            call.answer.set_exception(RuntimeError(f"in {self.name}:\n{value}"))

    def _lose(self) -> None:
        """Fail all calls, open ones and later ones."""
        self._process.kill()  # it may have closed its output without ending
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if code == -9:  # by SIGKILL, a name that Windows lacks
            how = "killed, perhaps for lack of memory"
        error = EngineLost(f"{self.name} has ended ({how})", process=self.name)
        with self._lock:
            self._lost = error
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.answer.set_exception(error)


class Host:
    """The child's end: its coroutine methods are the calls, and `tell` sends news of the open one.

    The host is closed when the parent lets the child end.
    """

    tell: Callable[[Any], None]

    def close(self) -> None:
        """Free what it holds."""


def main(module: str) -> None:
    """Answer calls with the class `ChildHost` of a module until the parent lets this process end.

    The end of the parent is noticed from the start, while modules are loaded, too.
    """
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # user code may read and print
    os.dup2(2, 1)
    if sys.platform == "linux":  # code in C may hold the interpreter's lock when the parent ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with asyncio.Runner() as runner:
        waiting = asyncio.Queue[Message]()
        loop = runner.get_loop()
        threading.Thread(target=_receive, args=(calls, loop, waiting), daemon=True).start()
        gc.disable()  # as `ragen train` does while it loads modules
        make = import_module(module).ChildHost
        gc.freeze()
        gc.enable()
        with closing(make()) as host:
            runner.run(_serve(host, waiting, answers))


def _receive(
    calls: IO[bytes], loop: asyncio.AbstractEventLoop, waiting: asyncio.Queue[Message]
) -> None:
    message: Message = (-1, "", ())
    try:
        while message[1] != END:
            message = pickle.load(calls)
            loop.call_soon_threadsafe(waiting.put_nowait, message)
    except (EOFError, pickle.UnpicklingError):  # the parent is gone
        os._exit(1)


async def _serve(host: Host, waiting: asyncio.Queue[Message], answers: IO[bytes]) -> None:
    def send(number: int, kind: Kind, value: Any) -> None:
        try:
            answers.write(pickle.dumps((number, kind, value)))
            answers.flush()
        except BrokenPipeError:  # the parent is gone
            os._exit(1)

    async def answer(number: int, method: str, arguments: Any) -> None:
        host.tell = lambda news: send(number, "news", news)
        try:
            send(number, "answer", await getattr(host, method)(*arguments))
        except (RagenError, OSError) as error:
            send(number, "error", error)
        except Exception:  # noqa: BLE001 - the parent raises it
            send(number, "bug", traceback.format_exc())

    task = None
    while (message := await waiting.get())[1] != END:
        if message[1] == CANCEL:
            if task is not None:
                task.cancel()
            continue
        if task is not None:
            await asyncio.wait([task])
        task = asyncio.create_task(answer(*message))
