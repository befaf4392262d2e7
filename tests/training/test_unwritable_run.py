"""What a user is told about a run that cannot be read or written works when it is followed."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.core.stopping import StopRequested
from ragen.reports.export import export
from ragen.storage import checkpoint
from ragen.storage.database import DATABASE, claim, connect
from ragen.training import trainer
from ragen.training.trainer import resume, train
from tests.training.test_trainer import (
    SendSignal,
    assert_same_results,
    make_config,
    recorded_results,
    rows,
)

Capture = pytest.CaptureFixture[str]
STEPS = {"steps": 3, "eval__every": 0, "eval__episodes": 2, "checkpoint__every": 1}
BOUND = 0b110
"""The bits of Linux's capabilities by which root reads and writes whatever it likes."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that was stopped after its second step, and the results of the uninterrupted one."""
    place = tmp_path_factory.mktemp("unwritable")
    train(make_config(**STEPS), place / "whole")
    with pytest.raises(StopRequested):
        train(make_config(**STEPS), place / "begun", watcher=SendSignal("step", 2, signal.SIGINT))
    return place / "begun", recorded_results(place / "whole")


@pytest.fixture
def run(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(runs[0], tmp_path / "run")
    subprocess.run(["chmod", "-R", "u+rwX", tmp_path], check=True)


@pytest.fixture
def expected(runs: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return runs[1]


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
    branch = ["--turn", 0, "--n", 2, "--checkpoint", 1]
    episode = any_episode(run)
    subprocess.run(["chmod", "-R", "a-w", run], check=True)
    with bound_by_permissions():
        for words in (["resume", run], ["branch", run, episode, *branch]):
            error = refused(capsys, *words)
            assert "restore" not in error and "--out" not in error
            advice = re.search(r"make (\S+) writable, or work in a copy \((.*)\)", error)
            assert advice is not None and advice[1] == str(run), error
            subprocess.run(advice[2], shell=True, check=True)
            assert main([*(str(word) for word in (words[0], "COPY", *words[2:]))]) == 0
            if words[0] == "resume":
                assert_same_results(Path("COPY"), expected)
            shutil.rmtree("COPY")
        error = refused(capsys, "eval", run, "--episodes", 2)
        assert error.endswith("keep the results elsewhere with --out DIR\n")
        assert main(["eval", str(run), "--episodes", "2", "--out", "COPY"]) == 0


def test_a_killed_run_that_cannot_be_written_is_read_in_a_copy(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the log that was left needs an index beside it."""
    monkeypatch.chdir(run.parent)
    with closing(connect(run / DATABASE)) as connection:
        connection.execute("INSERT INTO settings (text) SELECT text FROM settings")
        run = shutil.copytree(run, run.with_name("killed"))
    (run / f"{DATABASE}-shm").unlink()
    assert (run / f"{DATABASE}-wal").stat().st_size
    subprocess.run(["chmod", "-R", "a-w", run], check=True)
    with bound_by_permissions():
        error = refused(capsys, "report", run)
        advice = re.search(r"make (\S+) writable, or work in a copy \((.*)\)", error)
        assert advice is not None, error
        subprocess.run(advice[2], shell=True, check=True)
        assert main(["report", "COPY"]) == 0


@pytest.mark.parametrize("mode", [0o555, 0o000, 0o666], ids=["no writing", "nothing", "no entry"])
def test_a_folder_of_checkpoints_without_permissions_is_named(
    run: Path, expected: dict[str, Any], capsys: Capture, mode: int
) -> None:
    folder = run / "checkpoints"
    folder.chmod(mode)
    with bound_by_permissions():
        error = refused(capsys, "resume", run, "--quiet")
        if mode == 0o555:
            assert re.search(r"cannot write the checkpoint \S*/step-\d: permission denied", error)
            assert f"then continue with: ragen resume {run}" in error
        else:
            assert re.search(f"cannot read {folder}.*: permission denied; make", error), error
            assert "another --out" not in error
        folder.chmod(0o755)
        resume(run)
    assert_same_results(run, expected)
    assert not list(folder.glob("damaged*"))


def test_a_file_in_place_of_the_checkpoints_is_named(run: Path, capsys: Capture) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")
    assert "cannot read" in refused(capsys, "resume", run)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_a_checkpoint_that_must_not_be_read_is_not_taken_for_damaged(
    run: Path, expected: dict[str, Any], capsys: Capture, name: str
) -> None:
    path = checkpoint.newest(run) / name
    path.chmod(0)
    with bound_by_permissions():
        for words in (["resume", run], ["play", "bandit", "--player", run]):
            assert f"cannot read {path}: permission denied; make it readable" in refused(
                capsys, *words
            )
        path.chmod(0o644)
        resume(run)
    assert_same_results(run, expected)


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] = (data[-100] + 1) % 256
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_advice_about_a_damaged_checkpoint_names_those_that_are_intact(
    run: Path, expected: dict[str, Any], capsys: Capture, name: str
) -> None:
    newest = checkpoint.newest(run)
    spoil(newest / name)
    spoil(run / "checkpoints" / "step-0" / "model.safetensors")
    branch = ["branch", run, any_episode(run), "--turn", 0, "--n", 2]
    good = run / "checkpoints" / "step-1"
    for words in (branch, ["play", "bandit", "--player", run], ["export", run]):
        error = refused(capsys, *words)
        assert f"{newest / name} is damaged" in error
        assert f"those of steps 1 are intact, the last in {good}: take one" in error
    assert main([*map(str, branch), "--checkpoint", "1"]) == 0
    assert main(["play", "bandit", "--player", str(good)]) == 0
    advice = re.search(r"ragen (resume .*)\n", error)
    assert advice is not None
    assert main([*shlex.split(advice[1]), "--quiet"]) == 0
    assert_same_results(run, expected)
    for path in checkpoint.folders(run):
        spoil(path / name)
    error = refused(capsys, *branch)
    assert f"no other checkpoint of {run} is intact: restore the file" in error


def test_branching_from_a_model_that_was_not_written_down_is_refused(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children of earlier versions name a run, which has gone on."""
    monkeypatch.setattr(trainer, "pin_first", lambda config: config)
    child = run.with_name("COPY")
    train(make_config(**STEPS | {"steps": 1, "model__path": str(run)}), child)
    shutil.rmtree(child / "checkpoints" / "step-0")
    branch = ["branch", child, any_episode(child), "--turn", 0, "--n", 2]
    assert "did not record which checkpoint" in refused(capsys, *branch, "--checkpoint", 0)
    assert main([*map(str, branch), "--checkpoint", "1"]) == 0


def test_export_removes_what_a_killed_export_has_left(run: Path) -> None:
    left, used = run / ".export-step-2.99999", run / ".export-step-2.99998"
    for folder in (left, used):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    others = run / ".export-step-2.old"
    others.mkdir()
    handle = claim(used)
    assert handle is not None
    export(run)
    os.close(handle)
    assert not left.exists() and used.exists() and others.exists()
