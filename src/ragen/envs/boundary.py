"""The one boundary to other people's code.

An environment may raise, hang, or leave through `sys.exit`. Whatever it does becomes one exception
here, with the traceback as text; nowhere else in the package is `Exception` caught.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EnvError(Exception):
    r"""An environment raised, hung or returned nonsense; the text is the traceback or reason.

    Example:
        >>> EnvError("Traceback (most recent call last):\nKeyError: 1\n").reason
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
    """Call an environment's code inside.

    Args:
        call: What is called, for the message.
        timeout_s: Seconds after which Python code is interrupted; ``None`` waits for ever.

    Raises:
        EnvError: The code raised or took too long.

    Example:
        >>> try:
        ...     with boundary("step", timeout_s=0.01):
        ...         while True:
        ...             pass
        ... except EnvError as failure:
        ...     print(failure)
        the environment took longer than 0.01 s in step
    """
    try:
        with _alarm(timeout_s):
            yield
    except EnvError:
        raise
    except _TimedOutError:
        raise too_long(call, timeout_s) from None
    except (Exception, SystemExit) as error:
        raise EnvError("".join(traceback.format_exception(error))) from error


def too_long(call: str, timeout_s: float | None) -> EnvError:
    """The failure of a call that did not come back."""
    return EnvError(f"the environment took longer than {timeout_s:g} s in {call}", timed_out=True)


class _TimedOutError(BaseException):
    """Raised by the timer inside an environment's code; `except Exception` does not catch it."""


@contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Interrupt Python code that runs longer, by the process's timer.

    Signals reach the main thread of a POSIX process alone; elsewhere a call is not bounded, and
    `env.isolate` is the way to stop an environment that hangs.
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
