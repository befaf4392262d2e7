"""What the tests of this folder share."""

import os
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from ragen.rollout import endpoint, judge


@pytest.fixture(autouse=True, scope="session")
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let HTTP clients trust one authority; reading all of certifi's takes 0.05 s for each."""
    text, end = Path(certifi.where()).read_text("utf-8"), "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(text[text.index("-----BEGIN") : text.index(end) + len(end)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SSL_CERT_FILE", str(file))
        yield


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let endpoints wait for milliseconds before they try again, and hide this machine's keys."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    for name in (endpoint.KEY_ENV, judge.KEY_ENV):
        monkeypatch.delenv(name, raising=False)
