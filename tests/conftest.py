"""How the whole suite runs: the same examples each time, no deadline, one thread."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """One thread, and no probe for more.

    Some tests run commands in forks of this process, and OpenMP's threads do not survive a fork: a
    child that asks for several would wait for ever.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragen.engines.threads._probe", lambda: 1)
        yield
