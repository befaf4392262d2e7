"""The one boundary to code that users bring: environments, estimators, losses, detectors, rewards.

Such code may raise, hang, or leave through `sys.exit`. Here every such failure becomes one
exception that holds the traceback as text. Nowhere else in the package is `Exception` caught.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class UserCodeError(Exception):
    """User code raised, hung or returned nonsense; the text is the traceback or the reason.

    `timed_out` says that the code took longer than its time limit.
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
    """Run user code in the body of a ``with`` statement; `call` is its name in the message.

    Python code is interrupted after `timeout_s`; ``None`` sets no limit.

    Raises:
        UserCodeError: The code raised or took too long.

    Example:
        >>> try:
        ...     with boundary("step", timeout_s=0.01):
        ...         while True:
        ...             pass
        ... except UserCodeError as failure:
        ...     print(failure)
        user code took longer than 0.01 s in step
    """
    try:
        with _time_limit(timeout_s):
            yield
    except UserCodeError:
        raise
    except _TimedOutError:
        raise timeout_error(call, timeout_s) from None
    except (Exception, SystemExit) as error:
        raise UserCodeError("".join(traceback.format_exception(error))) from error


def timeout_error(call: str, timeout_s: float | None) -> UserCodeError:
    """The error of a call that did not return in time."""
    return UserCodeError(f"user code took longer than {timeout_s:g} s in {call}", timed_out=True)


class _TimedOutError(BaseException):
    """Raised by the timer inside user code; `except Exception` does not catch it."""


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Interrupt Python code that runs longer, by the process's timer.

    Signals reach only the main thread of a POSIX process. Elsewhere a call has no limit, and an
    environment that hangs is stopped by `env.isolate`.
    """
    main = threading.current_thread() is threading.main_thread()
    if seconds is None or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def on_alarm(_signal: int, _frame: FrameType | None) -> None:
        raise _TimedOutError

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
