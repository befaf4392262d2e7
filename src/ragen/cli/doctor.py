"""The command ``ragen doctor``: the installed packages, and two steps of training."""

from __future__ import annotations

import platform
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ragen.core.errors import RagenError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gymnasium", "numpy", "pydantic")


def examine() -> Iterator[tuple[str, str, bool]]:
    """The name and result of each of `CHECKS`, and whether it passed."""
    for name, check in CHECKS.items():
        try:
            yield name, check(), True
        except PackageNotFoundError:
            yield name, "missing: install RAGEN again with pip", False
        except sqlite3.OperationalError:
            yield name, "lacks FTS5: use another build of Python", False
        except (RagenError, ImportError, OSError) as error:
            yield name, " ".join(str(error).split()), False


def _sqlite() -> str:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE VIRTUAL TABLE t USING fts5 (x)")
    return f"{sqlite3.sqlite_version} with full-text search"


def _cpus() -> str:
    import torch

    from ragen.networks.machine import usable_cpus

    return f"{usable_cpus()}, of which torch uses {torch.get_num_threads()}"


def _cuda() -> str:
    import torch

    found = torch.cuda.is_available()
    return torch.cuda.get_device_name(0) if found else "none found, the CPU is used"


def _end_to_end() -> str:
    """Two steps of the recipe ``bandit``, from the model to a saved run, which is then removed."""
    from ragen.settings.resolve import resolve
    from ragen.training.trainer import train

    start = time.perf_counter()
    config = resolve("bandit", {"steps": 2, "eval.episodes": 16})
    with tempfile.TemporaryDirectory(prefix="ragen-doctor-") as folder:
        train(config, Path(folder) / "run")
    return f"two steps of bandit in {time.perf_counter() - start:.1f} s"


CHECKS: Mapping[str, Callable[[], str]] = {
    "python": lambda: f"{platform.python_version()} on {platform.system()}",
    **{package: partial(version, package) for package in PACKAGES},
    "sqlite": _sqlite,
    "cpus": _cpus,
    "cuda": _cuda,
    "end to end": _end_to_end,
}
"""Each check by its name in the report; it raises if something is missing that RAGEN needs."""
