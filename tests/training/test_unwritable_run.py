"""What a user is told about a run that cannot be read or written works when it is followed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.core.files import system_errors
from ragen.storage import checkpoint
from tests.tiny import tiny_tokenizer
from tests.training.runs import (
    assert_same_results,
    recorded_results,
    rows,
)

Capture = pytest.CaptureFixture[str]
BOUND = 0b110
"""The bits of Linux's capabilities by which root reads and writes whatever it likes."""


@pytest.fixture
def run(own_bandit_run: Path) -> Iterator[Path]:
    """A run that was killed before it had saved its last step."""
    shutil.rmtree(checkpoint.newest(own_bandit_run))
    yield own_bandit_run
    subprocess.run(["chmod", "-R", "u+rwX", own_bandit_run.parent], check=True)


@pytest.fixture(scope="module")
def expected(bandit_run: Path) -> dict[str, Any]:
    """The results of the uninterrupted run."""
    return recorded_results(bandit_run)


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Be bound by permissions, also as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if os.geteuid() == 0:
        assert libc.capget(header, rights) == 0
        before, rights[0] = rights[0], rights[0] & ~BOUND
        assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        if os.geteuid() == 0:
            rights[0] = before
            assert libc.capset(header, rights) == 0


def refused(capsys: Capture, *words: object) -> str:
    """The one line with which a command refuses."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def any_episode(run: Path) -> int:
    ((episode,),) = rows(run, "SELECT min(id) FROM episodes WHERE phase = 'train'")
    return int(episode)


def test_a_run_that_cannot_be_written_goes_on_in_a_copy(
    run: Path, expected: dict[str, Any], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    branch = ["branch", run, any_episode(run), "--turn", 0, "--n", 2]
    subprocess.run(["chmod", "-R", "a-w", run], check=True)
    with bound_by_permissions():
        for words in (branch, ["resume", run]):
            error = refused(capsys, *words)
            assert "restore" not in error and "--out" not in error
            advice = re.search(
                r"make (\S+) writable, or work in a copy on a local disk \((.*)\)", error
            )
            assert advice is not None and advice[1] == str(run), error
        subprocess.run(advice[2], shell=True, check=True)
        assert main(["resume", "COPY"]) == 0
        assert_same_results(Path("COPY"), expected)
        error = refused(capsys, "eval", run, "--episodes", 2)
        assert error.endswith("choose a writable place with --out\n")
        assert main(["eval", str(run), "--episodes", "2", "--out", "EVALUATED"]) == 0


def test_a_checkpoint_that_must_not_be_read_is_not_taken_for_damaged(
    run: Path, capsys: Capture
) -> None:
    with bound_by_permissions():
        for name in ("state.json", "model.safetensors"):
            path = checkpoint.newest(run) / name
            path.chmod(0)
            for words in (["resume", run], ["play", "bandit", "--player", run]):
                error = refused(capsys, *words)
                assert f"cannot read {path}: permission denied; make it readable" in error
            path.chmod(0o644)
    assert checkpoint.newest_intact(run)[2] == {}


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] = (data[-100] + 1) % 256
    path.write_bytes(data)


def test_advice_about_a_damaged_checkpoint_names_the_others(run: Path, capsys: Capture) -> None:
    newest, good = checkpoint.newest(run), run / "checkpoints" / "step-1"
    spoil(newest / "state.json")
    branch = ["branch", run, any_episode(run), "--turn", 0, "--n", 2]
    for words in (branch, ["play", "bandit", "--player", run], ["export", run]):
        error = refused(capsys, *words)
        assert f"{newest / 'state.json'} is damaged" in error
        assert f"restore it, or train this step again: ragen resume {run}" in error
        assert f"or take another checkpoint of {run}, of steps 0, 1" in error
    assert main([*map(str, branch), "--checkpoint", "1"]) == 0
    assert main(["play", "bandit", "--player", str(good)]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_of_the_system_that_tokenizers_report_is_an_oserror() -> None:
    with pytest.raises(OSError, match="No space left on device") as error, system_errors():
        tiny_tokenizer().backend_tokenizer.save("/dev/full")
    assert error.value.errno == 28
    with pytest.raises(ValueError, match="a bug"), system_errors():
        raise ValueError("a bug")
