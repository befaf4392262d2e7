"""What the tests of this folder share."""

import os
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest


@pytest.fixture(autouse=True, scope="session")
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let HTTP clients trust one authority; reading all of certifi's takes 0.05 s for each."""
    text, end = Path(certifi.where()).read_text("utf-8"), "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(text[text.index("-----BEGIN") : text.index(end) + len(end)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SSL_CERT_FILE", str(file))
        yield
