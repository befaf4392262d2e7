"""Lets RAGEN and its tests see the modules of Python as on Windows, without what it lacks.

    PYTHONPATH=tests/without_posix ./test.sh -rs

Each process of Python reads this file as it starts. Python's own modules and the libraries see what
this system has, since they were written for it. Paths, the shell and text encoding stay.
"""

import asyncio
import builtins
import os
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / folder) + os.sep for folder in ("src", "tests"))
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
VALUES = {os: {"name": "nt"}, sys: {"platform": "win32"}}
NAMES = {
    os: "O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC WNOHANG "
    "chown chroot environb fchdir fchown fdatasync fork forkpty getegid geteuid getgid getloadavg "
    "getpgid getpgrp getpriority getsid getuid killpg lchown mkfifo mknod nice openpty pathconf "
    "posix_fallocate posix_spawn pread pwrite register_at_fork sched_getaffinity sched_yield "
    "sendfile setegid seteuid setgid setpgid setpriority setsid setuid statvfs sync sysconf "
    "tcgetpgrp ttyname uname wait wait3 wait4",
    signal: "ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO "
    "SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 "
    "SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause "
    "pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait",
    socket: "AF_UNIX",
}  # fmt: skip


def is_ours(variables: dict) -> bool:
    """Whether the code that has these global variables is RAGEN's or of its tests."""
    return str(variables.get("__file__")).startswith(OURS)


def hide(module: ModuleType, names: set[str], values: dict[str, str]) -> None:
    """Let `module` have no such names, and these other values, for our own code."""

    class Hidden(ModuleType):
        def __getattribute__(self, name: str) -> object:
            if name in values and is_ours(sys._getframe(1).f_globals):
                return values[name]
            if name in names and is_ours(sys._getframe(1).f_globals):
                text = f"module {module.__name__!r} has no attribute {name!r}"
                raise AttributeError(text, name=name, obj=module)
            return super().__getattribute__(name)

    module.__class__ = Hidden


def importing(name: str, globals: dict | None = None, *rest: object, **more: object) -> ModuleType:
    """`__import__`, by which our own code finds none of `MODULES`."""
    if name in MODULES and is_ours(globals or {}):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return IMPORT(name, globals, *rest, **more)


IMPORT, builtins.__import__ = builtins.__import__, importing
NAMES[sys.modules["_signal"]] = NAMES[signal]
for module in NAMES | VALUES:
    hide(module, set(NAMES.get(module, "").split()), VALUES.get(module, {}))
del socket.CMSG_LEN  # without which multiprocessing has no fork server
loop = asyncio.SelectorEventLoop
loop.add_signal_handler = asyncio.AbstractEventLoop.add_signal_handler
loop.remove_signal_handler = asyncio.AbstractEventLoop.remove_signal_handler
