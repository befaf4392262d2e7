"""The one boundary to code that users bring: environments, estimators, losses, detectors, rewards.

Such code may raise, hang, or try to end the process. Here every such failure becomes one exception
that holds the traceback as text, and what the code changed of the process is put back (`process`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable
from math import inf
from threading import get_ident
from time import perf_counter, process_time
from types import FrameType, TracebackType
from typing import Any, TypeVar

from ragen.core import process
from ragen.core.errors import last_line, printable
from ragen.core.process import (
    CALLS,
    REAL,
    Call,
    Prints,
    arithmetic,
    enter_loop,
    leave_loop,
    restore_arithmetic,
)

# The functions of `signal` look up enums, 2 µs each, and `process` replaces them for user code.
_signal: Any = sys.modules["_signal"]
_getsignal, _set_handler = _signal.getsignal, _signal.signal
_set_timer: Any = getattr(_signal, "setitimer", None)

T = TypeVar("T")

TEXT_S = 1.0
"""Seconds that an exception of user code may take to become a text."""
TEXT_CHARS = 20_000
"""Length that is kept of a traceback, from its end."""
REASON_CHARS = 500
"""Length that is kept of a reason."""


class UserCodeError(Exception):
    """User code raised, hung or returned nonsense; the text is the traceback or the reason.

    `timed_out` says that the code took longer than its time limit.
    """

    def __init__(self, text: str, timed_out: bool = False) -> None:
        super().__init__(printable(text[-TEXT_CHARS:]))
        self.timed_out = timed_out

    @property
    def reason(self) -> str:
        """The last line: what went wrong, without where."""
        last = last_line(str(self))
        return last if len(last) <= REASON_CHARS else f"{last[:REASON_CHARS]} …"


def timeout_error(call: str, timeout_s: float) -> UserCodeError:
    """The error of a call that did not return in time."""
    return UserCodeError(f"user code took longer than {timeout_s:g} s in {call}", timed_out=True)


class _TimedOutError(BaseException):
    """Raised by the timer inside user code; `except Exception` does not catch it."""


class Stopwatch:
    """Adds up the seconds spent in calls of user code.

    With `counts_cpu` it adds up in `cpu_s`, too, for how many of them this process computed.
    """

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0
        self.counts_cpu = False


class boundary(Call):  # noqa: N801 - it is used like a function
    """Run user code in the body of a ``with`` statement; `call` is its name in the message.

    Python code is interrupted after `timeout_s`; ``None`` sets no limit. `stopwatch` adds up the
    time. A boundary can be entered again after it was left. Signals reach only the
    main thread of a POSIX process. Elsewhere a call has no limit, and an environment that hangs is
    stopped by `env.isolate`.

    What the code prints goes to standard error. After it, the standard streams, what torch computes
    with and all that `process` watches are what they were. A child process that the code has forked
    ends here.

    Raises:
        UserCodeError: The code raised, took too long, or tried to end the process.
        KeyboardInterrupt: The user pressed Ctrl-C; an interrupt that the code raises itself is an
            exception as any other.

    Example:
        >>> try:
        ...     with boundary("step", timeout_s=0.01):
        ...         while True:
        ...             pass
        ... except UserCodeError as failure:
        ...     print(failure)
        user code took longer than 0.01 s in step
    """

    __slots__ = (
        *("_arithmetic", "_around", "_began", "_call", "_cpu", "_interrupted", "_interruptible"),
        *("_limit", "_loop", "_stopwatch", "_streams", "_thread", "_timeout_s", "deadline"),
    )

    def __init__(
        self, call: str, timeout_s: float | None = None, stopwatch: Stopwatch | None = None
    ) -> None:
        self._call = call
        self._timeout_s = inf if timeout_s is None else timeout_s
        self._stopwatch = stopwatch

    def __enter__(self) -> None:
        # A step of a small environment takes 6 µs, so this is one function and looks at little.
        thread = self._thread = get_ident()
        around: Any = CALLS.get(thread)
        self._around = around
        if self._stopwatch is not None and self._stopwatch.counts_cpu:
            self._cpu = process_time()
        self._began = perf_counter()
        self._limit = deadline = self._began + self._timeout_s
        if around is None:
            self._begin()
        else:
            self.outermost = around.outermost
            deadline = min(deadline, around.deadline)
        self.deadline = deadline
        CALLS[thread] = self
        if deadline < _TIMER.fires_at or _getsignal(SIGALRM) is not _ON_ALARM:
            _TIMER.set(deadline)

    def _begin(self) -> None:
        """Note how the process is."""
        self.outermost = self
        self.pid = os.getpid()
        self.undo = {}
        self._interrupted = False
        self._arithmetic = arithmetic()
        self._loop = leave_loop()
        out, err = sys.stdout, sys.stderr
        if type(out) is Prints:  # which the call of another thread has put there
            self._streams = None
        else:
            self._streams = sys.stdin, out, err
            sys.stdout = sys.stderr = _PRINTS if _PRINTS.stream is err else _prints_to(err)
        # Only Python's own handler raises a KeyboardInterrupt in the middle of user code, and only
        # one that takes its place can tell Ctrl-C from an exception that the code raises itself.
        self._interruptible = (
            _getsignal(signal.SIGINT) is signal.default_int_handler and _is_main_thread()
        )
        if self._interruptible:
            _set_handler(signal.SIGINT, self._interrupt)
        if not REAL:
            process.watch()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self.deadline = inf  # First: from here on the timer does not raise.
        outermost, around = self.outermost, self._around
        if os.getpid() != outermost.pid:
            REAL["_exit"](0)
        failure = None if error is None else self._failure_of(error)
        if around is not None:
            CALLS[self._thread] = around
            if around.deadline < _TIMER.fires_at:
                _TIMER.set(around.deadline)
        else:
            del CALLS[self._thread]
            self._end()
        now = perf_counter()
        if self._stopwatch is not None:
            self._stopwatch.seconds += now - self._began
            if self._stopwatch.counts_cpu:
                self._stopwatch.cpu_s += process_time() - self._cpu
        if now > self._limit and error is None and _is_main_thread():
            failure = timeout_error(self._call, self._timeout_s)  # it kept the timer's signal away
        if failure is not None:
            raise failure from (None if failure.timed_out else error)

    def _end(self) -> None:
        """Put back what the code changed.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C meanwhile, whatever the code made of it.
        """
        if self._loop is not None:
            enter_loop(*self._loop)
        if self.undo:
            for undo in reversed(self.undo.values()):
                undo()
            _TIMER.fires_at = inf  # the code may have changed the timer
        if self._streams is not None:
            sys.stdin, sys.stdout, sys.stderr = self._streams
        if arithmetic() != self._arithmetic:
            restore_arithmetic(self._arithmetic)
        if not _TIMER.num_holders:
            _TIMER.remove()
        if self._interruptible:
            _set_handler(signal.SIGINT, signal.default_int_handler)
            if self._interrupted:
                raise KeyboardInterrupt

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _failure_of(self, error: BaseException) -> UserCodeError | None:
        """What to raise for an exception; ``None`` lets it pass."""
        kind = type(error)
        if issubclass(kind, UserCodeError):
            return None
        if kind is not _TimedOutError:
            return UserCodeError(self._text_of(error))
        if self._around is None or perf_counter() >= self._limit:
            return timeout_error(self._call, self._timeout_s)
        return None  # the time limit of a call around this one

    def _text_of(self, error: BaseException) -> str:
        """The traceback as text; making it calls the exception's own methods."""
        if self._timeout_s < inf:
            self.deadline = perf_counter() + TEXT_S
            _TIMER.set(self.deadline)
        try:
            return "".join(traceback.format_exception(error))
        except BaseException:  # noqa: BLE001 - whatever it is, the exception itself is reported
            return "user code raised an exception that cannot be shown as text"
        finally:
            self.deadline = inf


async def awaited(call: str, answer: Awaitable[T], timeout_s: float) -> T:
    """Wait for what an asynchronous function of the user returns; `call` is its name in messages.

    It shares the event loop with the run, so that only its failures and its time are guarded. One
    that never awaits cannot be interrupted.

    Raises:
        UserCodeError: It raised, took too long, or tried to end the process.

    Example:
        >>> async def divide() -> float:
        ...     return 1 / 0
        >>> try:
        ...     asyncio.run(awaited("divide", divide(), 1.0))
        ... except UserCodeError as failure:
        ...     print(failure.reason)
        ZeroDivisionError: division by zero
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await answer
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the run cancels the task; otherwise user code has cancelled what it awaits
        if limit.expired():
            raise timeout_error(call, timeout_s) from None
        raise UserCodeError("".join(traceback.format_exception(error))) from error


IMPORT_S = 60.0
"""By how long an import may exceed a time limit, which takes effect after it."""
INSTALLED = f"-packages{os.sep}"
"""Part of the paths of installed packages: of site-packages or dist-packages."""
SIGALRM = getattr(signal, "SIGALRM", signal.SIGINT)
_PRINTS = Prints(None)


def _prints_to(stream: Any) -> Any:
    global _PRINTS  # noqa: PLW0603 - made anew only where the stream is another one
    if stream is None:
        return None
    _PRINTS = Prints(stream)
    return _PRINTS


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Timer:
    """The process's timer, which is set for the deadline of the call in progress.

    It is not cleared after a call: it is set once per time limit, not once per call, and does
    nothing where no deadline has passed. That is why its handler has to stay, as long as there are
    `num_holders` (`hold_timer`).
    """

    def __init__(self) -> None:
        self.fires_at = inf
        self.num_holders = 0
        self._before: Any = None

    def set(self, deadline: float) -> None:
        """Fire at `deadline`, where this thread can be interrupted."""
        if deadline == inf or _set_timer is None or not _is_main_thread():
            return
        if _getsignal(SIGALRM) is not _ON_ALARM:
            self._before = _set_handler(SIGALRM, _ON_ALARM)
        self.fires_at = deadline
        _set_timer(signal.ITIMER_REAL, max(deadline - perf_counter(), 1e-6))

    def remove(self) -> None:
        """Clear the timer and put back the handler that was there before it."""
        if self._before is not None and _is_main_thread():
            _set_timer(signal.ITIMER_REAL, 0)
            _set_handler(SIGALRM, self._before)
            self.fires_at, self._before = inf, None

    def on_alarm(self, _number: int, frame: FrameType | None) -> None:
        self.fires_at = inf
        inside: Any = CALLS.get(get_ident())
        if inside is None or inside.deadline == inf:
            return
        if inside.deadline > perf_counter():
            self.set(inside.deadline)
        elif frame is not None and frame.f_code in _OWN_CODE:
            self.set(perf_counter() + 1e-3)  # raised here, it would leave the boundary
        elif perf_counter() < inside.deadline + IMPORT_S and _is_importing(frame):
            self.set(perf_counter() + 1e-2)
        else:
            raise _TimedOutError


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an installed package is being imported.

    A half-imported one may end the process later: torch, imported again, is a segmentation fault.
    """
    while frame is not None:
        is_half = getattr(frame.f_globals.get("__spec__"), "_initializing", False)
        if is_half and INSTALLED in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


_OWN_CODE = tuple(
    each.__code__ for each in (boundary.__enter__, boundary.__exit__, boundary._text_of)
)
_TIMER = _Timer()
_ON_ALARM = _TIMER.on_alarm


def hold_timer() -> None:
    """Keep the timer's handler between calls, until as many calls of `release_timer`."""
    _TIMER.num_holders += 1


def release_timer() -> None:
    """Put the handler back that was there before, where nobody else holds the timer."""
    _TIMER.num_holders -= 1
    if not _TIMER.num_holders:
        _TIMER.remove()


def _forget_timer() -> None:
    """A forked process has no timer."""
    _TIMER.fires_at = inf


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_timer)
