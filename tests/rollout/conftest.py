"""What the tests of endpoints share."""

import pytest

from ragen.rollout import endpoint, judge


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let endpoints repeat after milliseconds, and not see this machine's keys."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    for name in (endpoint.KEY_ENV, judge.KEY_ENV):
        monkeypatch.delenv(name, raising=False)
