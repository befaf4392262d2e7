"""Whichever write of a run finds the disk full, its work is kept and goes on bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ragen.core.files import system_errors
from tests.tiny import tiny_tokenizer

TESTS = Path(__file__).parent.parent
EVERY = 11
"""Every so many of about 340 writes are tried, each with a disk that stays full and one that does
not. It takes 80 seconds; all of them (``EVERY = 1``) take a quarter of an hour."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs a compiler")
def test_a_disk_that_is_full_for_any_write_loses_nothing(tmp_path: Path) -> None:
    library = tmp_path / "full_disk.so"
    build = ["cc", "-shared", "-fPIC", str(TESTS / "full_disk.c"), "-o", str(library), "-ldl"]
    subprocess.run(build, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.full_disk", str(library), str(tmp_path), str(EVERY)],
        cwd=TESTS.parent,
        env=os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *wrong, counts = map(json.loads, done.stdout.splitlines())
    assert not wrong and counts["trials"] > 40 and counts["code 2"] > 40 and counts["kept"] > 20


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_of_the_system_that_tokenizers_report_is_an_oserror() -> None:
    with pytest.raises(OSError, match="No space left on device") as error, system_errors():
        tiny_tokenizer().backend_tokenizer.save("/dev/full")
    assert error.value.errno == 28
    with pytest.raises(ValueError, match="a bug"), system_errors():
        raise ValueError("a bug")
