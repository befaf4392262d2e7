"""What the tests of endpoints share."""

from pathlib import Path

import certifi
import pytest

from ragen.rollout import endpoint, judge


@pytest.fixture(scope="session")
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one authority; reading all of certifi's takes 0.05 s for each client."""
    text, end = Path(certifi.where()).read_text("utf-8"), "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(text[text.index("-----BEGIN") : text.index(end) + len(end)])
    return file


@pytest.fixture
def short_waits(one_certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let endpoints start at once, repeat after milliseconds, and not see this machine's keys."""
    monkeypatch.setenv("SSL_CERT_FILE", str(one_certificate))
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    for name in (endpoint.KEY_ENV, judge.KEY_ENV):
        monkeypatch.delenv(name, raising=False)
