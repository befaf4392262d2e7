"""Output that nobody takes, and limits of the machine: a code and one line, and no work is lost."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen.cli.main import main
from ragen.cli.process import MEMORY, refusal
from tests.bandit_model import settings

SCRIPT = """
set -o pipefail
RAGEN help keys | true; echo $?
RAGEN help recipes >/dev/full; echo $?
"""


def test_closed_or_full_output_gives_a_code_and_at_most_a_line(tmp_path: Path) -> None:
    script = SCRIPT.replace("RAGEN", f'"{sys.executable}" -m ragen')
    command = ["bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["141", "2"]
    assert done.stderr.splitlines() == ["ragen: no space left on device"]
    assert not list(tmp_path.iterdir())


def test_memory_that_ran_out_is_known_in_each_form() -> None:
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        ImportError("libtorch.so: failed to map segment from shared object"),
        ExceptionGroup("", [MemoryError(), RuntimeError("std::bad_alloc")]),
    ):
        assert refusal(error) == MEMORY
    for bug in (KeyError("x"), FileNotFoundError(errno.ENOENT, "x"), RuntimeError("a bug")):
        assert refusal(bug) is None
    assert refusal(ExceptionGroup("", [MemoryError(), ValueError("a bug")])) is None
    broken = ImportError("libcudart.so.13: cannot open shared object file", name="torch")
    assert refusal(broken) == f"{broken}; check the installation of torch"


def test_run_whose_memory_runs_out_says_how_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch refuses an allocation in the second of three steps."""
    import ragen.training.loop as loop

    make_batch, run, steps = loop.make_batch, tmp_path / "run", []

    def too_large(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 2:
            torch.empty(2**50)
        return make_batch(*arguments)

    values = settings(eval__every=1, checkpoint__keep=9)
    texts = {
        key: value if key == "model.path" else str(value).lower() for key, value in values.items()
    }
    keys = [word for key, text in texts.items() for word in (f"--{key}", text)]
    monkeypatch.setattr(loop, "make_batch", too_large)
    assert main(["train", "bandit", *keys, "--out", str(run), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert MEMORY in line and f"ragen resume {run}" in line
