"""The boundary to user code where it cannot be interrupted, and what stays of it afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from ragen.core.user_code import UserCodeError, boundary, can_interrupt
from tests.limits import needs_timer


def take(seconds: float) -> str:
    """What a call of user code that takes this long is reported as, with a limit of 0.05 s."""
    try:
        with boundary("step", 0.05):
            time.sleep(seconds)
    except UserCodeError as error:
        return f"{error}; {error.timed_out}"
    return "in time"


@needs_timer
def test_beside_the_main_thread_a_time_limit_is_compared_after_the_call() -> None:
    """As in a notebook, where the event loop has the main thread."""
    with ThreadPoolExecutor(1) as thread:
        assert can_interrupt() and not thread.submit(can_interrupt).result()
        assert thread.submit(take, 0.0).result() == "in time"
        late = "user code took longer than 0.05 s in step; True"
        assert thread.submit(take, 0.06).result() == late == take(9.0)


PUTS_BACK = """
import signal, sys
from ragen.core.user_code import UserCodeError, boundary

def present():
    return signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL), sys.stdout

before = present()
try:
    with boundary("step", 9.0):
        assert all(now != then for now, then in zip(present(), before))
        1 / 0
except UserCodeError as error:
    assert error.reason == "ZeroDivisionError: division by zero"
assert present() == before
"""


@needs_timer
def test_a_boundary_puts_back_the_timer_its_handler_and_standard_output() -> None:
    """In a new process, since an open environment of another test would hold the timer."""
    subprocess.run([sys.executable, "-c", PUTS_BACK], check=True)
