"""A run whose disk fills at each of its writes, one after the other.

    LD_PRELOAD=full_disk.so python -m tests.full_disk full_disk.so SCRATCH EVERY

Each trial is `ragen train` in a copy of this process, which has the libraries loaded, and then what
its message advises. Prints a JSON line for each trial that went wrong, and last the counts.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ragen.cli.main import main
from ragen.storage.checkpoint import folders
from tests.bandit_model import settings
from tests.training.test_trainer import recorded_results

FEW = {"steps": 2, "eval__episodes": 2, "checkpoint__keep": 1, "rollout__group_size": 2}


def arguments(out: Path) -> list[str]:
    """The command line of a run of two steps."""
    keys = (
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings(**FEW).items()
    )
    return ["train", "bandit", *keys, "--out", str(out), "--quiet"]


class Disk:
    """The library that is loaded before all others."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.calls.restype = ctypes.c_long
        self._library.first_failed.restype = ctypes.c_char_p

    def command(self, words: list[str], under: Path, n: int, stays: bool) -> dict[str, Any]:
        """Run a command in a copy of this process, whose n-th write fails."""
        out = under.with_name("said")
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                handle = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                self._library.arm(os.fsencode(under), n, stays)
                code = main(words)
                calls, failed = self._library.calls(), self._library.first_failed().decode()
                self._library.arm(b"", 0, 0)
                under.with_name("calls").write_text(json.dumps([calls, failed]))
            finally:
                if code == 70:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        calls, failed = json.loads(under.with_name("calls").read_text())
        said = out.read_text(errors="replace")
        return {"code": code, "said": said, "calls": calls, "failed": failed}


def wrong(disk: Disk, run: Path, n: int, stays: bool, expected: dict[str, Any]) -> dict[str, Any]:
    """One trial; returns what happened, under ``wrong`` what should not have."""
    shutil.rmtree(run, ignore_errors=True)
    found = disk.command(arguments(run), run, n, stays) | {"n": n, "stays": stays}
    complaints = []
    lines = found["said"].splitlines()
    if found["code"] not in (0, 2) or "Traceback" in found["said"]:
        complaints.append("traceback")
    if found["code"] == 2 and len(lines) != 1:
        complaints.append(f"{len(lines)} lines")
    has_checkpoint = bool(folders(run))
    if found["code"] == 2 and ("ragen resume" in found["said"]) != has_checkpoint:
        complaints.append("advice")
    again = ["resume", str(run), "--quiet"] if has_checkpoint else arguments(run)
    if not has_checkpoint:
        shutil.rmtree(run, ignore_errors=True)
    resumed = disk.command(again, run, 0, False)
    if resumed["code"] != 0:
        complaints.append(f"resume: {resumed['said']}")
    else:
        actual = recorded_results(run)
        complaints += [f"{name} differs" for name in expected if actual[name] != expected[name]]
        left = sorted(
            path.name for path in run.rglob("*") if path.name.startswith((".", "damaged"))
        )
        complaints += left
    return found | {"wrong": complaints, "kept": has_checkpoint}


def trials(disk: Disk, scratch: Path, every: int) -> Iterator[dict[str, Any]]:
    """A trial for every so many writes, with a disk that is full for one of them and for good."""
    torch.set_num_threads(1)
    run = scratch / "run"
    whole = disk.command(arguments(run), run, 0, False)
    assert whole["code"] == 0, whole
    expected = recorded_results(run)
    for stays in (False, True):
        for n in range(1, whole["calls"] + 1, every):
            yield wrong(disk, run, n, stays, expected)


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for trial in trials(Disk(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])):
        counts.update(["trials", f"code {trial['code']}"])
        counts.update({"kept": trial["kept"], "wrong": bool(trial["wrong"])})
        if trial["wrong"]:
            sys.stdout.write(f"{json.dumps(trial)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{json.dumps(counts)}\n")
