"""How many CPU threads are fastest here, by measurement: on a busy machine two may lose to one."""

from __future__ import annotations

import os
import time

import torch
from threadpoolctl import threadpool_limits

PROBE_ROWS = 2048
PROBE_WIDTH = 256
PROBE_ROUNDS = 12


def use_threads(count: int) -> int:
    """Set torch's thread count and return it. NumPy gets one thread: its products are small.

    With a count of 0 it is measured: all of this process's cores if they multiply the embedded
    model's shapes at least 10 % faster than one, else one.
    """
    count = count or _probe()
    torch.set_num_threads(count)
    threadpool_limits(1, "blas")
    return count


def usable_cpus() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _probe() -> int:
    most = min(usable_cpus(), 8)
    if most == 1 or torch.cuda.is_available():
        return most
    seconds = {count: min(_time(count) for _ in range(3)) for count in (1, most)}
    return most if seconds[most] < 0.9 * seconds[1] else 1


def _time(threads: int) -> float:
    torch.set_num_threads(threads)
    a, b = torch.ones(PROBE_ROWS, PROBE_WIDTH), torch.ones(PROBE_WIDTH, PROBE_WIDTH)
    a @ b
    start = time.perf_counter()
    for _ in range(PROBE_ROUNDS):
        a @ b
    return time.perf_counter() - start
