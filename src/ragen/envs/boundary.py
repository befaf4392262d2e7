"""The one boundary to other people's code.

A world may raise, hang, or leave through `sys.exit`. Whatever it does becomes one exception here,
with the traceback as text; nowhere else in the package is `Exception` caught.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class WorldError(Exception):
    r"""A world that raised, hung or returned nonsense; the text is the traceback or the complaint.

    Example:
        >>> WorldError("Traceback (most recent call last):\nKeyError: 1\n").reason
        'KeyError: 1'
    """

    def __init__(self, text: str, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out

    @property
    def reason(self) -> str:
        """The last line: what went wrong, without where."""
        return str(self).strip().rpartition("\n")[2]


@contextmanager
def boundary(call: str, timeout_s: float | None = None) -> Iterator[None]:
    """Call a world's code inside.

    Args:
        call: What is called, for the message.
        timeout_s: Seconds after which Python code is interrupted; ``None`` waits for ever.

    Raises:
        WorldError: The code raised or took too long.

    Example:
        >>> try:
        ...     with boundary("step", timeout_s=0.01):
        ...         while True:
        ...             pass
        ... except WorldError as failure:
        ...     print(failure)
        the world took longer than 0.01 s in step
    """
    try:
        with _alarm(timeout_s):
            yield
    except WorldError:
        raise
    except _TimedOutError:
        raise too_long(call, timeout_s) from None
    except (Exception, SystemExit) as error:
        raise WorldError("".join(traceback.format_exception(error))) from error


def too_long(call: str, timeout_s: float | None) -> WorldError:
    """The failure of a call that did not come back."""
    return WorldError(f"the world took longer than {timeout_s:g} s in {call}", timed_out=True)


class _TimedOutError(BaseException):
    """Raised inside a world's code by the timer; no `except Exception` of the world catches it."""


@contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Interrupt Python code that runs longer, by the process's timer.

    Signals reach the main thread of a POSIX process alone; elsewhere a call is not bounded, and
    `world.isolate` is the way to stop a world that hangs.
    """
    main = threading.current_thread() is threading.main_thread()
    if seconds is None or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise _TimedOutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
