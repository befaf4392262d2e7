"""The one boundary to code that users bring: environments, estimators, losses, detectors, rewards.

Such code may raise or hang. Here each such failure becomes one exception that holds the traceback
as text. Nothing else is watched: code that ends the process, changes its folder or starts threads
does so. `env.isolate` gives an environment a process of its own.
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
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any, TypeVar

from ragen.core.errors import last_line, printable

# The functions of `signal` look up enums, which takes 2 µs each.
_signal: Any = sys.modules["_signal"]
_getsignal, _set_handler = _signal.getsignal, _signal.signal
_set_timer: Any = getattr(_signal, "setitimer", None)
SIGALRM = getattr(signal, "SIGALRM", signal.SIGINT)

T = TypeVar("T")

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
        """The last line, which says what went wrong."""
        last = last_line(str(self))
        return last if len(last) <= REASON_CHARS else f"{last[:REASON_CHARS]} …"


def timeout_error(call: str, timeout_s: float) -> UserCodeError:
    """The error of a call that did not return in time."""
    return UserCodeError(f"user code took longer than {timeout_s:g} s in {call}", timed_out=True)


def can_interrupt() -> bool:
    """True if a time limit can interrupt a call here: in the main thread of a POSIX process.

    Elsewhere, as in a notebook, the limit is compared with the call's seconds once it has returned.
    """
    return _set_timer is not None and threading.current_thread() is threading.main_thread()


class _TimedOutError(BaseException):
    """Raised by the timer inside user code; `except Exception` does not catch it."""


def seconds_left(most: float | None = None) -> float | None:
    """Seconds that the call of user code in progress may still take, at most `most`.

    ``None`` is no limit. Code that waits in a thread, where nothing can interrupt it, waits no
    longer and then raises `TimeoutError`.
    """
    around = _INNERMOST.get(get_ident())
    left = inf if around is None else max(around.deadline - perf_counter(), 0.0)
    least = min(left, inf if most is None else most)
    return None if least == inf else least


class Stopwatch:
    """Adds up the seconds spent in calls of user code."""

    def __init__(self) -> None:
        self.seconds = 0.0


class boundary:  # noqa: N801 - it is used like a function
    """Run user code in the body of a ``with`` statement; `call` is its name in the message.

    A call that takes longer than `timeout_s` fails; ``None`` sets no limit. Python code is
    interrupted at that point where `can_interrupt`. `stopwatch` adds up the time. What the code
    prints goes to standard error, since standard output holds the results of a command. A boundary
    can be entered again after it was left.

    Raises:
        UserCodeError: The code raised or took too long.
        KeyboardInterrupt: The user pressed Ctrl-C.
    """

    __slots__ = ("_around", "_began", "_call", "_stopwatch", "_timeout_s", "deadline")
    deadline: float

    def __init__(
        self, call: str, timeout_s: float | None = None, stopwatch: Stopwatch | None = None
    ) -> None:
        self._call = call
        self._timeout_s = inf if timeout_s is None else timeout_s
        self._stopwatch = stopwatch

    def __enter__(self) -> None:
        # A step of a small environment takes 6 µs, so this looks at little.
        thread = get_ident()
        around = self._around = _INNERMOST.get(thread)
        if around is None:
            _PRINTS.redirect()
        self._began = perf_counter()
        deadline = self._began + self._timeout_s
        self.deadline = deadline if around is None else min(deadline, around.deadline)
        _INNERMOST[thread] = self
        if self.deadline < _TIMER.fires_at or _getsignal(SIGALRM) is not _ON_ALARM:
            _TIMER.set(self.deadline)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self.deadline = inf  # First: from here on the timer does not raise.
        seconds = perf_counter() - self._began
        around = self._around
        if around is None:
            del _INNERMOST[get_ident()]
            _PRINTS.put_back()
            if not _TIMER.num_holders:
                _TIMER.remove()
        else:
            _INNERMOST[get_ident()] = around
            if around.deadline < _TIMER.fires_at:
                _TIMER.set(around.deadline)
        if self._stopwatch is not None:
            self._stopwatch.seconds += seconds
        if error is not None or seconds > self._timeout_s:
            self._raise(error, seconds)

    def _raise(self, error: BaseException | None, seconds: float) -> None:
        """Raise the error of a failed call; on return, Python raises the exception as it is."""
        if error is None:  # it could not be interrupted
            raise timeout_error(self._call, self._timeout_s)
        waited = isinstance(error, TimeoutError) and perf_counter() >= self._began + self._timeout_s
        if waited or isinstance(error, _TimedOutError):
            if self._around is None or seconds >= self._timeout_s:
                raise timeout_error(self._call, self._timeout_s) from None
        elif not isinstance(error, UserCodeError | KeyboardInterrupt):
            raise UserCodeError(_text_of(error)) from error


def _text_of(error: BaseException) -> str:
    """The traceback as text; making it calls the exception's own methods."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - whatever it is, the exception itself is reported
        return f"user code raised {type(error).__name__}, which cannot be shown as text"


async def awaited(call: str, answer: Awaitable[T], timeout_s: float) -> T:
    """Wait for what an asynchronous function of the user returns; `call` is its name in messages.

    It shares the event loop with the run, so that only its failures and its time are guarded. One
    that never awaits cannot be interrupted.

    Raises:
        UserCodeError: It raised or took too long.
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


_INNERMOST: dict[int, boundary] = {}
"""The innermost call of user code in progress, by thread."""


class _Prints:
    """Standard output during calls of user code, of any thread: it is standard error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._before: Any = None

    def redirect(self) -> None:
        with self._lock:
            if not self._calls:
                self._before, sys.stdout = sys.stdout, sys.stderr
            self._calls += 1

    def put_back(self) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls:
                sys.stdout = self._before


class _Timer:
    """The process's timer, which is set for the deadline of the call in progress.

    It is set once per time limit, not once per call: a call that ends does not clear it, and its
    handler does nothing if no deadline has passed. So the handler has to stay, as long as there are
    `num_holders` (`hold_timer`).
    """

    def __init__(self) -> None:
        self.fires_at = inf
        self.num_holders = 0
        self._before: Any = None

    def set(self, deadline: float) -> None:
        """Fire at `deadline`, where this thread can be interrupted."""
        if deadline == inf or not can_interrupt():
            return
        if _getsignal(SIGALRM) is not _ON_ALARM:
            self._before = _set_handler(SIGALRM, _ON_ALARM)
        self.fires_at = deadline
        _set_timer(signal.ITIMER_REAL, max(deadline - perf_counter(), 1e-6))

    def remove(self) -> None:
        """Clear the timer and put back the handler that was there before it."""
        if self._before is not None and can_interrupt():
            _set_timer(signal.ITIMER_REAL, 0)
            _set_handler(SIGALRM, self._before)
            self.fires_at, self._before = inf, None

    def on_alarm(self, _number: int, frame: FrameType | None) -> None:
        self.fires_at = inf
        inside = _INNERMOST.get(get_ident())
        if inside is None or inside.deadline == inf:
            return
        if inside.deadline > perf_counter():
            self.set(inside.deadline)
        elif frame is not None and frame.f_code in _OWN_CODE:
            self.set(perf_counter() + 1e-3)  # raised here, it would leave the boundary
        else:
            raise _TimedOutError


_OWN_CODE = tuple(each.__code__ for each in (boundary.__enter__, boundary.__exit__, _Timer.set))
_PRINTS = _Prints()
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
