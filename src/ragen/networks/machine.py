"""The resources of this machine: a GPU, the fastest number of threads, free memory.

Functions that need torch import it themselves, because the import takes seconds.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

PROBE_ROWS = 2048
PROBE_WIDTH = 256
PROBE_ROUNDS = 12
CLEARLY_SLOWER = 1.5
"""A probe of several threads is not repeated if it takes this many times as long as one thread."""

CLEARLY_BUSY = 1.3
"""Cores on which a product takes this many times as long as on one core are not all free."""

DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))
"""Device files of GPUs that torch can use, but on Windows: of NVIDIA, of AMD, in Windows' Linux."""

CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""The groups of this process, and where they are mounted on Linux."""


def usable_device() -> str:
    """``cuda`` where torch finds a GPU, else ``cpu``; ``CUDA_VISIBLE_DEVICES=`` hides it."""
    no_driver = sys.platform != "win32" and not any(map(Path.exists, DRIVERS))
    if no_driver and "torch" not in sys.modules:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def use_threads(count: int, processes: int = 1) -> int:
    """Set torch's thread count and return it, and choose the library of its float32 products.

    NumPy gets one thread: its products are small. Two threads may be slower than one on a busy
    machine. So a count of 0 means all cores of this process, at most 8, if they multiply the
    embedded model's shapes at least 10 % faster than one core, else one. Several `processes` share
    `count` threads, or all cores.

    Numbers below 1e-38 become 0 in this process. A sharp attention is full of them, and processors
    compute with them many times slower. The threads of torch's pool inherit this when they start.
    """
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_flush_denormal(True)
    if processes > 1:
        count = max(1, (count or usable_cpus()) // processes)
    count = count or _probe()
    torch.set_num_threads(count)
    threadpool_limits(1, "blas")
    _choose_products(count)
    return count


def _choose_products(threads: int) -> None:
    """Let oneDNN compute float32 products where MKL is slow: on AMD processors with AVX-512.

    There MKL uses AVX2, at half of the processor's rate. With several threads MKL is faster for
    small models, so it stays. torch gives float32 products to oneDNN only if oneDNN may round their
    factors to bfloat16. oneDNN does so only with AMX, which no AMD processor has. One product that
    would show the rounding is computed as a check.
    """
    import torch

    libraries: Any = torch.backends
    products = libraries.mkldnn.matmul
    products.fp32_precision = "none"
    if threads > 1 or not is_amd() or libraries.cpu.get_cpu_capability() != "AVX512":
        return
    products.fp32_precision = "bf16"
    fine = torch.full((64, 64), 1 + 2.0**-12)  # rounded to 1 in bfloat16
    if not torch.equal(fine @ torch.eye(64), fine):
        products.fp32_precision = "none"


def is_amd() -> bool:
    """True on a processor of AMD."""
    info = Path("/proc/cpuinfo")
    processor = info.read_text() if info.is_file() else platform.processor()
    return "AuthenticAMD" in processor


def usable_cpus() -> int:
    """Cores that this process may run on, and whose time its container's quota allows."""
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    return min([allowed, *container_cpus(*CONTROL_GROUPS)])


def _probe() -> int:
    most = min(usable_cpus(), 8)
    if most == 1 or usable_device() == "cuda":
        return most
    alone = min(_time(1) for _ in range(3))
    together = _time(most)
    if together < CLEARLY_SLOWER * alone:
        together = min(together, _time(most), _time(most))
    return most if together < 0.9 * alone else 1


def free_cores(most: int) -> int:
    """The number of cores, at most `most`, that are free: as many threads do not slow each other.

    Threads that multiply at the same time may take up to `CLEARLY_BUSY` times as long as one alone.
    """
    alone = min(_time(1) for _ in range(3))
    for count in range(most, 1, -1):
        with ThreadPoolExecutor(count) as pool:
            together = min(max(pool.map(_time, [1] * count)) for _ in range(3))
        if together < CLEARLY_BUSY * alone:
            return count
    return 1


def _time(threads: int) -> float:
    import torch

    torch.set_num_threads(threads)
    a, b = torch.ones(PROBE_ROWS, PROBE_WIDTH), torch.ones(PROBE_WIDTH, PROBE_WIDTH)
    a @ b
    start = time.perf_counter()
    for _ in range(PROBE_ROUNDS):
        a @ b
    return time.perf_counter() - start


def available(device: str) -> int | None:
    """Free bytes of the GPU, or of this machine in its container; ``None`` if not reported."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    return min([free, *container_rooms(*CONTROL_GROUPS)])


def container_cpus(membership: Path, root: Path) -> Iterator[int]:
    """Cores in the quota of each control group around this process; a part counts as one.

    The arguments are as for `container_rooms`.
    """
    for group in _groups(membership, root, "cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # missing, or "max"
                texts = [(group / name).read_text() for name in names]
                quota, period = map(int, " ".join(texts).split())
                if quota > 0:  # -1: none
                    yield math.ceil(quota / period)


def container_rooms(membership: Path, root: Path) -> Iterator[int]:
    """Bytes left in each control group around this process; cached files are free.

    `membership` is a file with lines like ``0::/a/b`` (version 2) or ``4:memory:/a/b`` (version 1),
    `root` is where the groups are mounted; in a container often only the innermost is visible.
    """
    for group in _groups(membership, root, "memory"):
        for most, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):  # missing, or "max"
                room = int((group / most).read_text()) - int((group / used).read_text())
                stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                yield max(0, room + int(stat.get(cached, 0)))


def _groups(membership: Path, root: Path, controller: str) -> Iterator[Path]:
    """The control groups that may limit this process by a controller, the innermost first."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, names, place = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        # Version 1 mounts a folder for each set of controllers, and links a single name to it.
        for top in dict.fromkeys((root / names, root / controller) if names else (root,)):
            inner = top / place.strip("/")
            yield from (each for each in (inner, *inner.parents) if each.is_relative_to(top))
