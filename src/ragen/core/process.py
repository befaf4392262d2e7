"""What user code may do to the process, and how it is undone or refused.

A few functions of the standard library are replaced, once, by ones that look who calls. While user
code is being called in this thread and this process (`CALLS`), a call that would end or signal the
process raises `ProcessEndError`, and a call that changes what the run depends on is undone after
the user code has returned. All other callers get the function itself. So a call of user code pays
nothing for what it does not do. Calls from C are not seen. A thread that user code has started may
change what it likes, but it cannot end the process either. `env.isolate` is for all of these.
"""

from __future__ import annotations

import _thread
import gc
import locale
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class ProcessEndError(BaseException):
    """User code tried to end or to signal the process; ``except Exception`` does not catch it."""


class Call:
    """A call of user code in progress: the process that it began in, and what to undo after it."""

    __slots__ = ("outermost", "pid", "undo")
    outermost: Call
    pid: int
    undo: dict[object, Callable[[], object]]

    def undo_later(self, what: object, undo: Callable[[], object]) -> None:
        """Undo a change after the call; the value before the first change is restored."""
        self.undo.setdefault(what, undo)


CALLS: dict[int, Call] = {}
"""The innermost call of user code in progress, by thread."""
STARTED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""The threads that user code has started."""
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")
    if hasattr(signal, name)
)
"""The signals that request a stop: from Ctrl-C, `kill`, a closed terminal, a limit of CPU time."""
REAL: dict[str, Callable[..., Any]] = {}
"""The replaced functions themselves, such as ``posix._exit`` by the name ``_exit``."""


def present_call() -> Call | None:
    """The outermost call that the caller is part of; ``None`` in a child that it has forked."""
    call = CALLS.get(threading.get_ident())
    return call.outermost if call is not None and call.outermost.pid == os.getpid() else None


def _is_user_thread() -> bool:
    """Whether user code has started this thread."""
    return threading.current_thread() in STARTED


def _replace(owner: Any, name: str, before: Callable[..., None], in_threads: bool = False) -> None:
    """Let `before` look at every call of a function by user code; platforms may lack it.

    `in_threads` says whether it also looks at the calls of threads that user code has started.
    """
    real = getattr(owner, name, None)
    if real is None:
        return

    @wraps(real)
    def function(*args: Any, **kwargs: Any) -> Any:
        call = present_call()
        if call is not None or (in_threads and _is_user_thread()):
            before(call, *args, **kwargs)
        return real(*args, **kwargs)

    REAL[name] = real
    for each in (owner, sys.modules.get(getattr(real, "__module__", None) or "")):
        if getattr(each, name, None) is real:  # `os._exit` is also `posix._exit`
            setattr(each, name, function)


def _refuse(name: str, aims_here: Callable[..., bool]) -> Callable[..., None]:
    def before(_: Call | None, *args: Any, **__: Any) -> None:
        if aims_here(*args):
            raise ProcessEndError(f"user code called {name}, which would have ended the run")

    return before


def _is_own_process(pid: int, number: int = 0) -> bool:
    return number != 0 and pid in (os.getpid(), 0, -1, -os.getpgrp())


def _is_own_group(group: int, number: int = 0) -> bool:
    return number != 0 and group in (0, os.getpgrp())


def _keep_folder(call: Call, *_: Any, **__: Any) -> None:
    if "folder" not in call.undo:
        folder = os.open(".", os.O_RDONLY)  # also a folder that was removed can be gone back to

        def go_back() -> None:
            os.fchdir(folder)
            os.close(folder)

        call.undo_later("folder", go_back)


def _keep_streams(call: Call, fds: Iterable[int]) -> None:
    """Keep those standard streams that are about to be closed or replaced."""
    for fd in {0, 1, 2}.intersection(fds):
        if ("stream", fd) in call.undo:
            continue
        with suppress(OSError):  # it was closed before
            call.undo_later(("stream", fd), partial(_put_back, _copy_of(fd), fd))


def _copy_of(fd: int) -> int:
    """A copy with a higher number than those of the streams, which may be closed, too."""
    if fcntl is None:
        return os.dup(fd)
    return int(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))


def _put_back(copy: int, fd: int) -> None:
    REAL["dup2"](copy, fd)
    REAL["close"](copy)


def _keep_handler(call: Call, signalnum: int, handler: Any = None) -> None:
    before = signal.getsignal(signalnum)
    main = threading.current_thread() is threading.main_thread()  # elsewhere the call raises
    if main and before is not None:  # None: it was not installed by Python
        call.undo_later(("handler", signalnum), partial(REAL["signal"], signalnum, before))


def _keep_mask(call: Call, *_: Any, **__: Any) -> None:
    before = REAL["pthread_sigmask"](signal.SIG_BLOCK, [])
    call.undo_later("mask", partial(REAL["pthread_sigmask"], signal.SIG_SETMASK, before))


def _keep_wakeup(call: Call, *_: Any, **__: Any) -> None:
    before = REAL["set_wakeup_fd"](-1)
    REAL["set_wakeup_fd"](before)
    call.undo_later("wakeup", partial(REAL["set_wakeup_fd"], before))


def _keep_timer(call: Call, which: int = signal.ITIMER_REAL, *_: Any, **__: Any) -> None:
    which = which if which in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF) else signal.ITIMER_REAL
    call.undo_later(("timer", which), partial(REAL["setitimer"], which, 0))


def _keep_umask(call: Call, *_: Any) -> None:
    before = REAL["umask"](0o077)
    REAL["umask"](before)
    call.undo_later("umask", partial(REAL["umask"], before))


def _keep_depth(call: Call, *_: Any) -> None:
    call.undo_later("depth", partial(REAL["setrecursionlimit"], sys.getrecursionlimit()))


def _keep_locale(call: Call, *_: Any, **__: Any) -> None:
    before = REAL["setlocale"](locale.LC_ALL)
    call.undo_later("locale", partial(REAL["setlocale"], locale.LC_ALL, before))


def _keep_warnings(call: Call, action: str = "error", *_: Any, **__: Any) -> None:
    """Warnings as errors would end the run; other filters are what libraries set on import."""
    if action == "error" and "warnings" not in call.undo:
        kept = warnings.catch_warnings()
        kept.__enter__()
        call.undo_later("warnings", partial(kept.__exit__, None, None, None))


def _start_as_daemon(_: Call, thread: threading.Thread) -> None:
    """At its end, Python waits for other threads, however long they take."""
    thread.daemon = True
    STARTED.add(thread)


_REFUSED: tuple[tuple[Any, str, Callable[..., bool]], ...] = (
    (os, "_exit", lambda *_: True),
    (os, "abort", lambda *_: True),
    (os, "closerange", lambda low, high: low < high),  # the program's own files are among them
    (os, "execv", lambda *_: True),
    (os, "execve", lambda *_: True),
    (os, "kill", _is_own_process),
    (os, "killpg", _is_own_group),
    (signal, "raise_signal", lambda *_: True),
    (signal, "pthread_kill", lambda _, number=0: number != 0),
    (_thread, "interrupt_main", lambda *_: True),
)
_UNDONE: tuple[tuple[Any, str, Callable[..., None]], ...] = (
    (os, "chdir", _keep_folder),
    (os, "fchdir", _keep_folder),
    (os, "close", lambda call, fd: _keep_streams(call, [fd])),
    (os, "dup2", lambda call, fd, fd2, *_, **__: _keep_streams(call, [fd2])),
    (os, "umask", _keep_umask),
    (signal, "signal", _keep_handler),
    (signal, "pthread_sigmask", _keep_mask),
    (signal, "set_wakeup_fd", _keep_wakeup),
    (signal, "setitimer", _keep_timer),
    (signal, "alarm", lambda call, *_: _keep_timer(call)),
    (sys, "setrecursionlimit", _keep_depth),
    (locale, "setlocale", _keep_locale),
    (warnings, "simplefilter", _keep_warnings),
    (warnings, "filterwarnings", _keep_warnings),
    (warnings, "resetwarnings", _keep_warnings),
    (threading.Thread, "start", _start_as_daemon),
)


_masks: dict[int, set[Any]] = {}
"""The signals blocked before a fork by user code, by thread."""


def _before_fork() -> None:
    """Hold signals back until the child has its own handlers; the program's would take them."""
    if present_call() is not None or _is_user_thread():
        _masks[threading.get_ident()] = REAL["pthread_sigmask"](signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        REAL["pthread_sigmask"](signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Let a process that user code has forked end by a signal, and without the program's notice."""
    STARTED.clear()
    thread = threading.get_ident()
    if thread not in _masks:
        return
    REAL["set_wakeup_fd"](-1)  # shared: the program would take the child's signals for its own
    theirs = CALLS[thread].outermost.undo if thread in CALLS else {}  # handlers of user code
    for number in SIGNALS:
        if callable(signal.getsignal(number)) and ("handler", number) not in theirs:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            REAL["signal"](number, default)
    _after_fork()


def watch() -> None:
    """Replace the functions; later calls do nothing."""
    if REAL:
        return
    for owner, name, aims_here in _REFUSED:
        _replace(owner, name, _refuse(f"{owner.__name__}.{name}", aims_here), in_threads=True)
    for owner, name, keep in _UNDONE:
        _replace(owner, name, keep)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork,
            after_in_child=_after_fork_in_child,
        )


class Prints:
    """The standard output of user code: standard error, which it cannot close.

    Standard output holds the results of a command.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def close(self) -> None:
        """Close nothing."""

    def detach(self) -> None:
        """Detach nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def leave_loop() -> tuple[Any, Any] | None:
    """Hide the running event loop and its task, so that user code can run its own loop."""
    asyncio = sys.modules.get("asyncio")
    loop = None if asyncio is None else asyncio._get_running_loop()
    if asyncio is None or loop is None:
        return None
    task = asyncio.tasks.current_task(loop)
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    return loop, task


def enter_loop(loop: Any, task: Any) -> None:
    """Put back what `leave_loop` returned."""
    asyncio: Any = sys.modules["asyncio"]
    asyncio._set_running_loop(loop)
    if task is not None:
        asyncio.tasks._enter_task(loop, task)


def arithmetic() -> tuple[Any, int, bool] | None:
    """What torch computes with: the default type, the number of threads, whether with gradients."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()


def restore_arithmetic(before: tuple[Any, int, bool] | None) -> None:
    """Put back what `arithmetic` returned; ``None`` where user code has loaded torch."""
    torch = sys.modules["torch"]
    dtype, threads, gradients = before or (torch.float32, torch.get_num_threads(), True)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


_theirs: dict[str, tuple[Any, Any]] = {}
"""What user code left of the states below, and what the run had then."""


@dataclass(slots=True)
class _Ours:
    """What the run has while user code has its own, and how many bodies it has it in."""

    bodies: int = 0
    states: dict[str, Any] = field(default_factory=dict)
    hooks: Any = None


_ours = _Ours()


@contextmanager
def own_states() -> Iterator[None]:
    """Give user code its own global random generators and environment variables in the body.

    The run gets its own back, after the last body where several overlap. RAGEN itself draws from
    neither (`core.seeding`), so it is enough to do this once per rollout: reading the generators
    takes longer than a step of most environments. User code resumes its last state, unless the
    program has changed the state in between.
    """
    if not _ours.bodies:
        _give()
    _ours.bodies += 1
    try:
        yield
    finally:
        _ours.bodies -= 1
        if not _ours.bodies:
            _take_back()


def _give() -> None:
    states = _states()
    _ours.states = {name: take() for name, (take, _) in states.items()}
    _ours.hooks = sys.excepthook, sys.unraisablehook, threading.excepthook, gc.isenabled()
    for name, (left, seen) in _theirs.items():
        if name in states and seen == _ours.states[name]:
            states[name][1](left)


def _take_back() -> None:
    for name, (take, put) in _states().items():
        if name in _ours.states:
            _theirs[name] = take(), _ours.states[name]
            put(_ours.states[name])
    sys.excepthook, sys.unraisablehook, threading.excepthook, collects = _ours.hooks
    (gc.enable if collects else gc.disable)()


def _states() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """How each state is taken, as a value that can be compared, and put back."""
    import random

    states: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "random": (random.getstate, random.setstate),
        "environ": (lambda: dict(os.environ), _put_environ),
    }
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:

        def take() -> tuple[Any, ...]:
            name, key, *rest = numpy.random.get_state()
            return name, key.tobytes(), *rest

        def put(state: tuple[Any, ...]) -> None:
            name, key, *rest = state
            numpy.random.set_state((name, numpy.frombuffer(key, numpy.uint32), *rest))

        states["numpy"] = take, put
        states["floats"] = numpy.geterr, lambda state: numpy.seterr(**state)
    if torch is not None:
        states["torch"] = (
            lambda: torch.get_rng_state().numpy().tobytes(),
            lambda state: torch.set_rng_state(
                torch.frombuffer(bytearray(state), dtype=torch.uint8)
            ),
        )
    return states


def _put_environ(wanted: dict[str, str]) -> None:
    if dict(os.environ) != wanted:
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        os.environ.update(wanted)
