"""Settings of the whole suite: deterministic examples, no deadlines, one thread."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from ragen.engines.machine import use_threads

# Programs that tests start, with extras.
collect_ignore = ["mcp_tools.py", "openenv_shop.py", "openenv_walk.py"]

settings.register_profile("ragen", deadline=None, derandomize=True)
settings.load_profile("ragen")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Use one thread and one library of products, and do not measure whether more would be faster.

    Some tests run commands in forks of this process. OpenMP's threads do not survive a fork, so a
    child that uses several would wait forever. ``RAGEN_TEST_THREADS`` sets another number.
    """
    use_threads(int(os.environ.get("RAGEN_TEST_THREADS", "1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragen.engines.machine._probe", lambda: 1)
        yield


@pytest.fixture
def set_sigint() -> Iterator[Callable[[Any], None]]:
    """Sets the handler of SIGINT; the process that runs the tests may ignore it."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``PYTHONPATH`` with RAGEN installed from its wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(Path(__file__).parents[1], folder / "source", ignore=ignore)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "./source", "--no-deps", "--no-build-isolation", "-w", "."]
    subprocess.run(build, cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", "site", wheel], cwd=folder, check=True
    )
    return folder / "site"
