"""Standard streams that are closed or full, signals, and the limits of the machine.

Each command runs in a process of its own, as its shell would start it. Where a run is needed, it is
checked that its work is kept: a finished one is complete, an interrupted one can be resumed.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from ragen.cli.process import MEMORY, _Stream, refusal
from ragen.config.reading import resolve
from ragen.storage.checkpoint import newest_intact
from ragen.training.trainer import resume, train
from tests.bandit_model import settings

RAGEN = f'"{sys.executable}" -m ragen.cli.main'
LOST = "ragen: cannot write to standard output: "


def shell(line: str, cwd: Path, **variables: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a line of bash, in which RAGEN is the command."""
    done = subprocess.run(
        ["bash", "-c", line.replace("RAGEN", RAGEN)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | variables,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("RAGEN help recipes >&-", 2, f"{LOST}bad file descriptor\n"),
        ("RAGEN help recipes 2>&-", 0, ""),
        ("RAGEN help recipes >&- 2>&-", 2, ""),
        ("RAGEN help recipes <&- >&- 2>&-", 2, ""),
        ("RAGEN help recipes <&-", 0, ""),
        ("RAGEN help recipes >/dev/full", 2, f"{LOST}no space left on device\n"),
        ("RAGEN help recipes 2>/dev/full", 0, ""),
        ("RAGEN help recipes >/dev/full 2>/dev/full", 2, ""),
        ("RAGEN trian >&-", 2, "ragen: unknown command 'trian'; did you mean 'train'?\n"),
        ("RAGEN trian 2>&-", 2, ""),
        ("RAGEN trian 2>/dev/full", 2, ""),
        ("set -o pipefail; RAGEN help keys | true", 141, ""),
        ("RAGEN play bandit --env.timeout_s 5 <&-", 0, ""),
    ],
)
def test_closed_or_full_streams_give_a_code_and_a_line(
    line: str, code: int, error: str, tmp_path: Path
) -> None:
    assert shell(line, tmp_path)[::2] == (code, error)


def test_output_fits_any_encoding(tmp_path: Path) -> None:
    code, out, err = shell("RAGEN help keys", tmp_path, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "") and "\\u2265" in out and out.isascii()


def test_removed_working_directory_is_reported(tmp_path: Path) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; {RAGEN} envs"
    code, out, err = shell(line, tmp_path)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("ragen: cannot find the working directory")


def test_output_waits_for_a_slow_reader_that_must_not_be_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text, found = b"x" * 10**6, bytearray()

    def read() -> None:
        while len(found) < len(text):
            found.extend(os.read(reader, 10_000))

    thread = threading.Thread(target=read)
    stream = io.BufferedWriter(_Stream(writer))
    thread.start()
    stream.write(text)
    stream.flush()
    thread.join()
    assert bytes(found) == text
    os.close(reader)
    stream.write(b"x")
    stream.flush()  # a stream other than standard output drops what nobody reads
    os.close(writer)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        ImportError("libtorch.so: failed to map segment from shared object"),
        ExceptionGroup("", [MemoryError(), RuntimeError("std::bad_alloc")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_ran_out_is_known_in_each_form(error: Exception) -> None:
    assert refusal(error) == MEMORY


def test_error_of_the_program_is_no_refusal() -> None:
    for bug in (KeyError("x"), FileNotFoundError(errno.ENOENT, "x"), RuntimeError("a bug")):
        assert refusal(bug) is None
    assert refusal(ExceptionGroup("", [MemoryError(), ValueError("a bug")])) is None


def train_line(run: Path) -> str:
    """The keys of a run of about a second."""
    keys = (f"--{key} {json.dumps(value)}" for key, value in settings().items())
    return f"train bandit {' '.join(keys)} --out {run}"


def results(run: Path) -> tuple[str, bytes, list[object]]:
    """What two runs of the same settings have in common, after checking that the last is whole."""
    checkpoint, _, damaged = newest_intact(run)
    assert not damaged
    query = "SELECT step, name, value FROM metrics WHERE name NOT LIKE 'time/%'"
    with closing(sqlite3.connect(run / "run.sqlite")) as database:
        metrics = database.execute(f"{query} ORDER BY step, name").fetchall()
    return checkpoint.name, (checkpoint / "model.safetensors").read_bytes(), metrics


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes, list[object]]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(resolve("bandit", settings()), run)
    return results(run)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">/dev/full", ">&- 2>&-", "--json >/dev/full"])
def test_finished_run_is_whole_if_its_result_cannot_be_written(
    tmp_path: Path, streams: str, undisturbed: object
) -> None:
    code, _, err = shell(f"RAGEN {train_line(tmp_path / 'run')} {streams}", tmp_path)
    assert code == 2
    assert "2>" in streams or f"; the run is finished, in {tmp_path / 'run'}" in err
    assert results(tmp_path / "run") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [200_000, 400_000])
def test_command_that_gets_too_little_memory_says_so(tmp_path: Path, kilobytes: int) -> None:
    """With more, libraries in C are loaded, and some end the process where memory runs out."""
    line = f"ulimit -v {kilobytes}; RAGEN {train_line(tmp_path / 'run')}"
    code, _, err = shell(line, tmp_path)
    assert code == 2 and MEMORY in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


CHILD = """
import os, resource, signal, sys
import numpy, torch
import ragen.training.loop as loop
from ragen.cli.main import main

def limit(kind, soft):
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))

make_batch, steps = loop.make_batch, []

def fails_in_the_second_step(*arguments):
    steps.append(1)
    if len(steps) == 2:
        FAULT
    return make_batch(*arguments)

loop.make_batch = fails_in_the_second_step
sys.exit(main(sys.argv[1:]))
"""
"""A command that meets a limit in the second of its run's three steps."""

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "code", "error"),
    [
        ("torch.empty(2**50)", 2, MEMORY),
        pytest.param("numpy.ones(2**50)", 2, MEMORY, marks=SLOW),
        pytest.param("limit(resource.RLIMIT_NOFILE, 5)", 2, "too many files", marks=SLOW),
        pytest.param("limit(resource.RLIMIT_FSIZE, 1000)", 2, "run.sqlite: disk", marks=SLOW),
        pytest.param("os.kill(os.getpid(), signal.SIGHUP)", 129, "after the last", marks=SLOW),
        pytest.param("os.kill(os.getpid(), signal.SIGXCPU)", 152, "after the last", marks=SLOW),
        pytest.param("os.close(1)", 2, LOST, marks=SLOW),
        pytest.param("os.close(2)", 0, "", marks=SLOW),
        pytest.param("os.mkdir('x'); os.chdir('x'); os.rmdir('../x')", 0, "", marks=SLOW),
    ],
)
def test_run_that_meets_a_limit_is_kept_and_resumes_to_the_same_result(
    tmp_path: Path, fault: str, code: int, error: str, undisturbed: object
) -> None:
    run = tmp_path / "run"
    (tmp_path / "child.py").write_text(CHILD.replace("FAULT", fault))
    found, _, err = shell(f'"{sys.executable}" child.py {train_line(run)}', tmp_path)
    assert found == code, err
    if error:
        assert error in err.splitlines()[-1]
    if results(run) != undisturbed:
        assert f"ragen resume {run}" in err.splitlines()[-1] or "run.sqlite" in error, err
        resume(run)
    assert results(run) == undisturbed
