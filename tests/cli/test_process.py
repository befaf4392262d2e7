"""Output that nobody takes, and limits of the machine: a code and one line, and no work is lost."""

from __future__ import annotations

import errno
import subprocess
import sys
from importlib import import_module
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


def test_a_library_that_refuses_to_be_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does if ``TORCH_LOGS`` is wrong; an error of its functions stays a bug."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strict_logs.py").write_text('raise ValueError("bad log\\nlevels: 1, 2")\n')
    (tmp_path / "strict_calls.py").write_text('def call():\n    raise ValueError("bad")\n')
    with pytest.raises(ValueError, match="bad") as of_import:
        import_module("strict_logs")
    with pytest.raises(ValueError, match="bad") as of_call:
        import_module("strict_calls").call()
    assert str(refusal(of_import.value)).startswith(
        "strict_logs cannot be imported: bad log; check"
    )
    assert refusal(of_call.value) is None
