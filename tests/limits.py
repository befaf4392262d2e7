"""What the system may refuse: limits that a test sets, and calls that only POSIX can interrupt."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from time import sleep

import pytest

INTERRUPTS = hasattr(signal, "setitimer")
"""A time limit can end a call that hangs."""
NEVER_ENDS = "nothing can interrupt a call that hangs on this system"
needs_timer = pytest.mark.skipif(not INTERRUPTS, reason=NEVER_ENDS)
needs_posix = pytest.mark.skipif(
    not hasattr(os, "killpg"), reason="needs the groups, signals and locks of POSIX"
)


class Hung(Exception):
    """Stands for a call that would never end; conftest.py skips the test."""

    happened = False


def hang() -> None:
    """Never return; neither where the process is ended, as those of isolated environments are."""
    if not INTERRUPTS and parent_process() is None:
        Hung.happened = True
        raise Hung(NEVER_ENDS)
    while True:
        sleep(0.01)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this."""
    import resource  # Windows, which skips the test, has none

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
