"""Files and folders written as a whole or not at all, and the message when that fails."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ragen.core.errors import RagenError

if TYPE_CHECKING:
    from pydantic import BaseModel

Line = TypeVar("Line", bound="BaseModel")

OTHER_OUT = "free space there or choose another place with --out"
"""The remedy of commands with an option ``--out``."""


def cannot(do: str, path: object, error: Exception, remedy: str = "") -> RagenError:
    """The error for a file that cannot be read or written (`do`), with the system's reason."""
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number).lower() if number else str(error)
    return RagenError(f"cannot {do} {path}: {reason}{remedy and f'; {remedy}'}")


def parse_json(text: str) -> Any:
    """The value of a JSON text; nesting that is too deep raises a `ValueError`, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise an `OSError` where a library in Rust reports one in another class.

    safetensors and tokenizers do so, with the number in the text.
    """
    try:
        yield
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


@contextmanager
def file_errors(do: str, path: object, remedy: str = "") -> Iterator[None]:
    """Report an `OSError` in the body by `cannot`, unless it is no file's: too many are open."""
    try:
        with system_errors():
            yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise cannot(do, path, error, remedy) from None


def read_text(path: Path, most: int = 2**20, is_stream: bool = False) -> str:
    """The text of a UTF-8 file of at most `most` bytes, without a byte-order mark.

    A pipe or a device may never end: it is refused unless `is_stream`.
    """
    with file_errors("read", path):
        kind = path.stat().st_mode
        if not (is_stream or stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise RagenError(f"cannot read {path}: it is a pipe or a device; name a file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    if len(content) > most:
        raise RagenError(f"cannot read {path}: it is larger than {most / 2**20:g} MiB")
    try:
        return content.decode("utf-8-sig")  # some editors write a byte-order mark
    except UnicodeDecodeError:
        raise RagenError(f"{path} is not UTF-8 text; save it as UTF-8") from None


def read_json_lines(
    path: Path, kind: type[Line], most: int, expected: str, is_stream: bool = False
) -> list[tuple[str, Line]]:
    """The objects of a JSONL file with their file and line; empty lines are skipped.

    `kind` forbids extra keys, and none may come twice: what a user writes is never dropped.
    `expected` shows the form of a line. The other parameters are those of `read_text`.
    """
    from pydantic import ValidationError  # here, because the commands' help needs no pydantic

    assert kind.model_config.get("extra") == "forbid"
    found = []
    # `splitlines` would also split at characters that JSON allows inside a string.
    for number, line in enumerate(read_text(path, most, is_stream).split("\n"), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            found.append((where, kind.model_validate_json(line)))
            json.loads(line, object_pairs_hook=_once)
        except ValidationError as error:
            first = error.errors()[0]
            place, reason = (
                ".".join(map(str, first["loc"])) or "the line",
                first["msg"].removeprefix("Value error, "),
            )
            if first["type"] == "extra_forbidden":
                reason = "this key is not understood, so it would have no effect; remove it"
            raise RagenError(f"{where}: {place}: {reason}; expected {expected}") from None
        except (ValueError, RecursionError) as error:
            raise RagenError(f"{where}: {error}; expected {expected}") from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"the key {twice!r} comes twice")
    return dict(pairs)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, with its suffix; it replaces `path` once it is complete.

    A device such as ``/dev/stdout`` is written directly.
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
        with system_errors():
            yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        temporary.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    windows = sys.platform == "win32"  # where folders are not opened, nor what is only read flushed
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
