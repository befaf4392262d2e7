"""The process of a command: its standard streams, the signals that end it, and its limits.

A stream may be closed, full, or left by its reader; memory, files and threads may run out. Here
each becomes an exit code and, if the terminal still takes it, one line.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from typing_extensions import Buffer, override

STARTED = time.perf_counter()
"""When the command began; Python itself started some hundredths of a second before."""
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
"""The signals that end a command like Ctrl-C: from `kill`, a closed terminal, a limit of time."""

MEMORY = "memory ran out; set rollout.slots, update.microbatch_tokens or model.max_length lower"
THREADS = "no process or thread could be started; raise the limit (ulimit -u)"
FILES = "too many files are open; raise the limit (ulimit -n)"
REFUSALS = {
    errno.ENOMEM: MEMORY,
    errno.EAGAIN: THREADS,
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.EFBIG: "a file became too large; raise the limit (ulimit -f)",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk does not answer",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENAMETOOLONG: "a name is too long",
    errno.ELOOP: "a link leads to itself",
}
"""What the system refuses, by its error number."""

PHRASES = {
    "can't allocate memory": MEMORY,
    "out of memory": MEMORY,
    "bad_alloc": MEMORY,
    "bad allocation": MEMORY,
    "Cannot allocate memory": MEMORY,
    "failed to map segment": MEMORY,
    "error return without exception set": MEMORY,  # of a module in C that was imported
    "can't start new thread": THREADS,
    "terminated abruptly": "a process of this command was killed; memory may have run out",
}
"""Parts of a library's message, by which a refusal of the system is recognised."""


class OutputLost(Exception):
    """Standard output takes no more; `left` says that its reader has closed the pipe."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"cannot write to standard output: {os.strerror(error.errno or 0).lower()}"
        )
        self.left = error.errno == errno.EPIPE


class _Stream(io.FileIO):
    """Standard output or error, which waits for a slow reader and fails once.

    After its first failure it drops what is written. The failure of standard error is no failure of
    the command.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._lost = False

    @override
    def write(self, data: Buffer) -> int:
        size = memoryview(data).nbytes
        if self._lost:
            return size
        try:
            while (written := super().write(data)) is None:  # a non-blocking stream that is full
                select.select([], [self], [])
        except OSError as error:
            self._lost = True
            if self.fileno() == 1:
                raise OutputLost(error) from None
            return size
        return written


@contextmanager
def standard_streams() -> Iterator[None]:
    """Make standard output raise `OutputLost`, and standard error and input usable if closed.

    Streams that Python code has replaced are left alone.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file, such as the database, would get its number
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(2, sys.stderr)
    try:
        yield
    finally:
        with suppress(OutputLost):  # if it ended the command, it is reported already
            sys.stdout.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def _text(number: int, before: TextIO | None) -> TextIO:
    """A stream with the encoding of the one before; characters outside of it become escapes."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(number)),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",
        line_buffering=number == 2 or os.isatty(number),
    )


@contextmanager
def ending_signals() -> Iterator[list[int]]:
    """Handle `ENDINGS` like Ctrl-C; the yielded list holds those that have arrived."""
    received: list[int] = []

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGXCPU and received.count(number) > 1:
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
    """What the machine refused, in one line; ``None`` if the exception has another cause.

    Example:
        >>> refusal(OSError(errno.EMFILE, "", "a.txt"))
        'too many files are open; raise the limit (ulimit -n) (a.txt)'
        >>> refusal(KeyError("a")) is None
        True
    """
    if isinstance(error, BaseExceptionGroup):
        found = [refusal(each) for each in error.exceptions]
        return found[0] if all(found) else None
    if isinstance(error, MemoryError):
        return MEMORY
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory was removed"
    if isinstance(error, OSError) and error.errno in REFUSALS:
        place = f" ({error.filename})" if error.filename else ""
        return REFUSALS[error.errno] + place
    if isinstance(error, RuntimeError | ImportError | OSError | SystemError):
        return next((words for said, words in PHRASES.items() if said in str(error)), None)
    return None
