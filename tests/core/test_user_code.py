"""The boundary to user code where it cannot be interrupted, and what stays of it afterwards."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragen.core.user_code import UserCodeError, boundary, can_interrupt


def take(seconds: float) -> str:
    """What a call of user code that takes this long is reported as, with a limit of 0.05 s."""
    try:
        with boundary("step", 0.05):
            time.sleep(seconds)
    except UserCodeError as error:
        return f"{error}; {error.timed_out}"
    return "in time"


def test_beside_the_main_thread_a_time_limit_is_compared_after_the_call() -> None:
    """As in a notebook, where the event loop has the main thread."""
    with ThreadPoolExecutor(1) as thread:
        assert can_interrupt() and not thread.submit(can_interrupt).result()
        assert thread.submit(take, 0.0).result() == "in time"
        late = "user code took longer than 0.05 s in step; True"
        assert thread.submit(take, 0.06).result() == late == take(9.0)


def test_a_boundary_puts_back_what_it_takes() -> None:
    before = signal.getsignal(signal.SIGALRM), sys.stdout
    with pytest.raises(UserCodeError, match="ZeroDivisionError"), boundary("step", 1.0):
        assert (signal.getsignal(signal.SIGALRM), sys.stdout) != before
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGALRM), sys.stdout) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
