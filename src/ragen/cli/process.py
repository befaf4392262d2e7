"""The process of a command: its standard streams, the signals that end it, and its limits.

Memory, files and threads may run out. Here each limit becomes one line.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

STARTED = time.perf_counter()
"""When the command began; Python itself started some hundredths of a second before."""
ENDINGS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGXCPU") if hasattr(signal, name)
)
"""The signals that end a command like Ctrl-C: from `kill`, a closed terminal, a limit of time."""

MEMORY = "memory ran out; set rollout.slots, update.microbatch_tokens or model.max_length lower"
THREADS = "no process or thread could be started; raise the limit (ulimit -u)"
FILES = "too many files are open; raise the limit (ulimit -n)"
OF_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)
OF_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)
REFUSALS = {
    **{number: os.strerror(number).lower() for number in (*OF_FILES, *OF_NAMES)},
    errno.ENOMEM: MEMORY,
    errno.EAGAIN: THREADS,
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.EFBIG: "a file became too large; raise the limit (ulimit -f)",
}
"""The words for each error number of a refusal."""

PHRASES = {
    "n't allocate memory": MEMORY,
    "not allocate memory": MEMORY,
    "out of memory": MEMORY,
    "bad_alloc": MEMORY,
    "bad allocation": MEMORY,
    "failed to map segment": MEMORY,
    "can't start new thread": THREADS,
    "terminated abruptly": "a process of this command was killed; memory may have run out",
}
"""Parts of a library's message, by which a refusal of the system is recognised."""


def open_streams() -> None:
    """Write characters outside of a standard stream's encoding as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Let standard output take no more, so that Python does not complain as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def ending_signals() -> Iterator[list[int]]:
    """Handle `ENDINGS` like Ctrl-C; the yielded list holds those that have arrived."""
    received: list[int] = []

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        if number == getattr(signal, "SIGXCPU", None) and received.count(number) > 1:
            return  # it comes every second
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
            return
        from ragen.core.stopping import cancel_running  # a background job of a script

        if not cancel_running():
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in ENDINGS}
    for number in ENDINGS:
        if before[number] is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, pass_on)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refusal(error: BaseException) -> str | None:
    """The limit of the machine behind an exception, in one line; ``None`` for another cause."""
    if isinstance(error, BaseExceptionGroup):
        found = [refusal(each) for each in error.exceptions]
        return found[0] if all(found) else None
    if isinstance(error, MemoryError):
        return MEMORY
    if isinstance(error, OSError) and error.errno in REFUSALS:
        return REFUSALS[error.errno] + (f" ({error.filename})" if error.filename else "")
    if isinstance(error, RuntimeError | ImportError | OSError | SystemError):
        for said, words in PHRASES.items():
            if said in str(error):
                return words
    if isinstance(error, ImportError) and not (error.name or "").startswith("ragen"):
        return f"{error}; check the installation of {error.name or 'that library'}"
    return None
