"""Settings of the whole suite: deterministic examples, no deadlines, one thread, shared runs."""

import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from ragen.networks.machine import use_threads
from tests import shared
from tests.limits import NEVER_ENDS, Hung

# Programs that tests start, with extras.
collect_ignore = ["mcp_tools.py", "openenv_shop.py", "openenv_walk.py"]
collect_ignore_glob = ["envs/adapters/tasksets/*"]

POSIX_MODULES = ("fcntl", "resource")
"""Modules of Python that tests use and Windows lacks."""

settings.register_profile("ragen", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("thorough", settings.get_profile("ragen"), max_examples=100)
settings.load_profile("ragen")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Skip a test that needs what this system lacks, as Windows does `os.fork`."""
    Hung.happened = False
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if Hung.happened:
            pytest.skip(NEVER_ENDS)
        if lacks(error):
            pytest.skip(f"this system lacks it: {error}")
        raise


pytest_runtest_call = pytest_runtest_setup


def lacks(error: BaseException) -> bool:
    """Whether a test, not RAGEN, asked for a name or module of POSIX, or for an agent's process."""
    if str(error).startswith("agents cannot run on this system"):
        return True
    asked = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    asked = [file for file in asked if not file.endswith("sitecustomize.py")]  # without_posix
    module = getattr(error, "obj", None) in (os, signal, socket)
    missing = module or getattr(error, "name", None) in POSIX_MODULES
    return missing and Path(asked[-1]).is_relative_to(Path(__file__).parent)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Use one thread and one library of products, and do not measure whether more would be faster.

    Some tests run commands in forks of this process. OpenMP's threads do not survive a fork, so a
    child that uses several would wait forever. ``RAGEN_TEST_THREADS`` sets another number.
    """
    use_threads(int(os.environ.get("RAGEN_TEST_THREADS", "1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragen.networks.machine._probe", lambda: 1)
        yield


@pytest.fixture(autouse=True)
def small_numbers() -> None:
    """Keep numbers below 1e-38, which runs flush to 0 (`use_threads`): Hypothesis needs them."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True, scope="session")
def few_draws() -> Iterator[None]:
    """Sample baselines that have no exact value with a few episodes a level."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragen.evaluation.baselines.DRAWS", 4)
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let all workers of this run of the suite share one folder, with one cache of baselines."""
    base = tmp_path_factory.getbasetemp()
    shared.ROOT = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["XDG_CACHE_HOME"] = str(shared.ROOT / "cache")


@pytest.fixture(scope="session")
def bandit_run() -> Path:
    """A finished run of Bandit: three steps, a checkpoint and an evaluation of each. Read only."""
    from ragen.config.reading import merge
    from ragen.training.trainer import train
    from tests.bandit_model import settings

    config = merge("bandit", settings(eval__every=1, checkpoint__keep=9))
    return shared.once("bandit-run", lambda folder: train(config, folder))


@pytest.fixture(scope="session")
def lake_run() -> Path:
    """A finished run of FrozenLake with the embedded model: one step of one group. Read only."""
    from ragen.config.reading import merge
    from ragen.training.trainer import train

    keys = {
        "steps": 1,
        "threads": 1,
        "env.max_turns": 3,
        "rollout.num_groups": 1,
        "rollout.group_size": 4,
        "eval.episodes": 2,
    }
    config = merge("frozen-lake", keys)
    return shared.once("lake-run", lambda folder: train(config, folder))


@pytest.fixture(scope="session")
def mixed_run() -> Path:
    """A finished run of a mixture of Bandit and its reverse: three steps. Read only."""
    from ragen.config.reading import merge
    from ragen.training.trainer import train
    from tests.bandit_model import settings

    config = merge(
        "bandit", settings(env__mix={"bandit": 2, "bandit-rev": 1}, rollout__num_groups=4)
    )
    return shared.once("mixed-run", lambda folder: train(config, folder))


@pytest.fixture
def own_bandit_run(bandit_run: Path, tmp_path: Path) -> Path:
    """A copy of `bandit_run` that the test may change."""
    return shared.own(bandit_run, tmp_path)


@pytest.fixture
def set_sigint() -> Iterator[Callable[[Any], None]]:
    """Sets the handler of SIGINT; the process that runs the tests may ignore it."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)
