"""Whichever library computes float32 products, they keep float32's precision."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen.networks import machine
from ragen.networks.precision import bfloat16_products, mkl_products

PRODUCTS: Any = torch.backends
AMD = "vendor_id\t: AuthenticAMD"


def worst_error() -> float:
    """Largest error of mm, addmm, bmm and linear, relative to the sums of absolute products."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for rows, inner, columns in ((3, 64, 5), (128, 128, 256), (512, 576, 96)):
        a = torch.randn(2, rows, inner, generator=generator)
        b = torch.randn(2, inner, columns, generator=generator)
        bias = torch.zeros(columns)
        found = (
            torch.bmm(a, b),
            torch.stack([x @ y for x, y in zip(a, b, strict=True)]),
            torch.stack([torch.addmm(bias, x, y) for x, y in zip(a, b, strict=True)]),
            torch.stack([torch.nn.functional.linear(x, y.t()) for x, y in zip(a, b, strict=True)]),
        )
        exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        worst = max(worst, *(float(((x - exact) / size).abs().max()) for x in found))
    return worst


def test_products_keep_the_precision_of_float32() -> None:
    before = PRODUCTS.mkldnn.matmul.fp32_precision
    assert worst_error() < 1e-6
    with mkl_products():
        assert worst_error() < 1e-6
    assert before == PRODUCTS.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize(
    ("threads", "processor", "capability", "library"),
    [
        (1, AMD, "AVX512", "oneDNN"),
        (2, AMD, "AVX512", "MKL"),
        (1, AMD, "AVX2", "MKL"),
        (1, "vendor_id\t: GenuineIntel", "AVX512", "MKL"),
        (1, "", "DEFAULT", "MKL"),
    ],
)
def test_products_are_onednns_only_where_mkl_is_slow(
    monkeypatch: pytest.MonkeyPatch, threads: int, processor: str, capability: str, library: str
) -> None:
    monkeypatch.setattr(PRODUCTS.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    monkeypatch.setattr(platform, "processor", lambda: processor)
    with mkl_products():  # and what was chosen before is put back
        machine._choose_products(threads)
        chosen = PRODUCTS.mkldnn.matmul.fp32_precision
    with bfloat16_products(torch.bfloat16):
        rounds = worst_error() > 1e-5  # as a processor with AMX does
    assert chosen == ("bf16" if library == "oneDNN" and not rounds else "none")


def test_processes_share_threads_and_each_has_one_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    given = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    counts = [(0, 2), (0, 3), (4, 2), (1, 2), (3, 1)]
    found = [machine.use_threads(count, processes) for count, processes in counts]
    assert found == given == [4, 2, 2, 1, 3]


@pytest.mark.parametrize(("free", "found"), [(4, 4), (2, 2), (1, 1)])
def test_free_cores_are_those_that_do_not_slow_each_other(
    monkeypatch: pytest.MonkeyPatch, free: int, found: int
) -> None:
    """More threads than free cores take turns."""
    threads = [1]

    class Pool(ThreadPoolExecutor):
        def __init__(self, count: int) -> None:
            threads.append(count)
            super().__init__(count)

    monkeypatch.setattr(machine, "_time", lambda _: max(1.0, threads[-1] / free))
    monkeypatch.setattr(machine, "ThreadPoolExecutor", Pool)
    assert machine.free_cores(4) == found
