"""What is installed and what this machine can do: ``ragen doctor``."""

from __future__ import annotations

import importlib.metadata
import platform
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ragen.core.errors import RagenError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gymnasium", "numpy", "pydantic")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `ok` is false if something that RAGEN needs is missing.

    Example:
        >>> Finding("python", "3.11.7", True).ok
        True
    """

    name: str
    value: str
    ok: bool


def examine() -> Iterator[Finding]:
    """Examine Python, the packages, SQLite and matrix products; then run a tiny training."""
    yield Finding("python", f"{platform.python_version()} on {platform.system()}", True)
    for package in PACKAGES:
        yield _package(package)
    yield _full_text_search()
    yield from _torch()
    yield end_to_end()


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name), True)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing: install RAGEN again with pip", False)


def _full_text_search() -> Finding:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("CREATE VIRTUAL TABLE t USING fts5 (x)")
    except sqlite3.OperationalError:
        return Finding("sqlite", "lacks FTS5: use another build of Python", False)
    finally:
        connection.close()
    return Finding("sqlite", f"{sqlite3.sqlite_version} with full-text search", True)


def _torch() -> Iterator[Finding]:
    try:
        import torch

        from ragen.engines.threads import usable_cpus
    except ImportError as error:
        yield Finding("torch loads", str(error).splitlines()[0], False)
        return
    yield Finding("cpus", str(usable_cpus()), True)
    found = torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if found else "none found, the CPU is used"
    yield Finding("cuda", name, True)
    yield Finding("threads", str(torch.get_num_threads()), True)
    yield Finding("float32 matrix product", f"{gemm_gflops():.0f} GFLOP/s", True)


def gemm_gflops(size: int = 1024, repeats: int = 5) -> float:
    """Best rate of a float32 product of two square matrices: 2·size³ operations ÷ its time."""
    import torch

    a, b = torch.rand(size, size), torch.rand(size, size)
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def end_to_end() -> Finding:
    """Two steps of the recipe ``bandit``, from the model to a saved run, which is then removed."""
    name, start = "end to end", time.perf_counter()
    try:
        from ragen.config.reading import resolve
        from ragen.training.trainer import train

        config = resolve("bandit", {"steps": 2, "eval.episodes": 16})
        with tempfile.TemporaryDirectory(prefix="ragen-doctor-") as folder:
            train(config, Path(folder) / "run")
    except (RagenError, ImportError, OSError) as error:
        return Finding(name, " ".join(str(error).split()), False)
    return Finding(name, f"two steps of bandit in {time.perf_counter() - start:.1f} s", True)
