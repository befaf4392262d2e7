"""What the suite makes once and shares: folders that all of its workers read.

`once(name, make)` calls `make(folder)` in the first worker that asks, and gives all the folder.
Nobody may change it: copy it with `own`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from filelock import FileLock

ROOT: Path | None = None
"""Where the folders are; `conftest.py` sets it for the workers of one run of the suite."""


@cache
def _own_root() -> Path:
    """Outside pytest, in a process that a test started."""
    return Path(mkdtemp(prefix="ragen-tests-"))


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, which `make` fills the first time. `make` gets a path that is free."""
    root = ROOT or _own_root()
    folder = root / name
    done = root / f"{name}.done"
    with FileLock(root / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            done.touch()
    return folder


def own(folder: Path, place: Path) -> Path:
    """A copy of a shared folder in `place`, which a test may change."""
    return Path(shutil.copytree(folder, place / folder.name))
