"""Every benchmark starts."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def test_benchmarks_stay_few_and_short() -> None:
    assert len(SCRIPTS) == 13
    assert sum(len(script.read_text("utf-8").splitlines()) for script in SCRIPTS) <= 3275


def test_every_script_prints_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in this process, where torch is already loaded."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.syspath_prepend(str(FOLDER))
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [str(script), "--help"])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(script), run_name="__main__")
        assert not stopped.value.code
        assert capsys.readouterr().out.startswith(f"usage: {script.name}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would run the benchmark")
def test_gpu_benchmark_without_a_gpu_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in this process, where torch is already loaded."""
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    runpy.run_path(str(FOLDER / "gpu.py"), run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert "no GPU" in line and "--tiny" in line
