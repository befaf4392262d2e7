"""Files and folders written as a whole or not at all, and the message when that fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragen.core.errors import RagenError

OTHER_OUT = "free space there or choose another place with --out"
"""The remedy of commands with an option ``--out``."""


def cannot(do: str, path: object, error: Exception, remedy: str = "") -> RagenError:
    """The error for a file that cannot be read or written; `do` is the verb.

    The system's reason is given without its number and path.

    Example:
        >>> str(cannot("write", "a.md", OSError(28, ""), "name another file"))
        'cannot write a.md: no space left on device; name another file'
    """
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number).lower() if number else str(error)
    return RagenError(f"cannot {do} {path}: {reason}{remedy and f'; {remedy}'}")


@contextmanager
def file_errors(do: str, path: object, remedy: str = "") -> Iterator[None]:
    """Report an `OSError` in the body by `cannot`.

    Raises:
        RagenError: The body raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise cannot(do, path, error, remedy) from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` once it is complete.

    It is in the same folder and has the same suffix. A device such as ``/dev/stdout`` is written
    directly.

    Raises:
        OSError: The file cannot be written; an earlier one is unchanged.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(target)
        flush(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to fill; it gets its name, which must be free, once it is complete.

    Raises:
        OSError: The folder cannot be written; nothing is left.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        temporary.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
