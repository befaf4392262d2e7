"""Whichever library computes float32 products, they keep float32's precision."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen.networks import machine
from ragen.networks.precision import bfloat16_products, mkl_products
from tests.limits import needs_posix

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


@needs_posix
@pytest.mark.parametrize(
    ("membership", "files", "found"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("4:cpuset:/x\n3:cpu,cpuacct:/docker/0\n", {"cpu,cpuacct/cpu.cfs_quota_us": "300000\n"}, 3),
        ("1:cpu:/p\n", {"cpu/p/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_quota_us": "-1\n"}, 2),
        ("0::/../..\n", {}, 64),
        ("", {}, 64),
    ],
)
def test_a_containers_quota_limits_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    membership: str,
    files: dict[str, str],
    found: int,
) -> None:
    for place, text in files.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
        if place.endswith("quota_us"):
            (tmp_path / place).with_name("cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(machine, "CONTROL_GROUPS", (tmp_path / "membership", tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert machine.usable_cpus() == found
