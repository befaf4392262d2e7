"""The benchmarks can be started, and the one for GPUs runs through on any machine."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def test_there_are_some() -> None:
    assert len(SCRIPTS) >= 10


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has loaded torch already."""
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    assert not stopped.value.code
    assert capsys.readouterr().out.startswith(f"usage: {script.name}")


def gpu_benchmark(*arguments: str) -> list[str]:
    """The lines it prints."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=FOLDER.parent,
        env=os.environ | {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as above."""
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    runpy.run_path(str(FOLDER / "gpu.py"), run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert "no GPU" in line and "--tiny" in line


@pytest.mark.slow
def test_every_phase_runs_anywhere() -> None:
    _, *runs = (line for line in gpu_benchmark("--tiny", "--steps", "1", "--json"))
    found = [json.loads(line) for line in runs]
    assert [each["env"] for each in found] == ["bandit", "frozen-lake", *["sokoban"] * 4]
    assert len({each["mode"] for each in found}) == 4
    for each in found:
        assert each["tokens_sampled"] == 2 * 2 * 2 * 8 < each["tokens_trained_on"]
        assert min(each["rollout_s"], each["update_s"], each["update_mfu"]) > 0
        assert 0 <= each["padding_fraction"] < 0.5 and each["mismatch_kl"] < 1e-3
