"""Connections of the viewer: malformed requests, TLS, and addresses to listen on."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ragen.core.errors import RagenError
from ragen.viewer.server import Viewer
from ragen.web.server import Server, listen, tls_of
from tests.viewer.test_viewer_server import Capture, serve, wait_until


def test_malformed_requests_and_too_many_connections_are_refused_without_a_word(
    tmp_path: Path, capfd: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    with listen("127.0.0.1", 0) as listening, contextlib.ExitStack() as stack:
        port = listening.getsockname()[1]
        viewer = Viewer(tmp_path, port)
        server = Server(viewer.app, None, viewer.ended.set, most=3)
        thread = threading.Thread(target=server.serve_on, args=(listening,))
        thread.start()
        wait_until(lambda: server.started)

        def answer(text: str) -> str:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            client.sendall(text.replace("HERE", f"127.0.0.1:{port}").encode("latin-1"))
            return client.recv(65536).decode().partition("\r\n")[0]

        for text in (
            "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            "GET / HTTP/1.1\r\nHost: HERE\r\nX: \x00\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: HERE\r\nContent-Length: 1, 2\r\n\r\nab",
            "GET / HTTP/1.1\r\nHost: HERE\r\nX: " + "a" * 70_000,
        ):
            assert answer(text).startswith(("HTTP/1.1 400", "HTTP/1.1 431"))
        stack.close()
        get = "GET /api/runs HTTP/1.1\r\nHost: HERE\r\n\r\n"
        wait_until(lambda: not server.server_state.connections)
        assert [answer(get)[:12] for _ in range(3)] == ["HTTP/1.1 200"] * 2 + ["HTTP/1.1 503"]
        server.should_exit = True
        viewer.ended.set()
        thread.join(10)
        assert not thread.is_alive()
    assert capfd.readouterr() == ("", "") and not caplog.records


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return cert, key


@pytest.mark.slow
def test_a_certificate_encrypts_the_token_and_the_pages(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """The server's process ends at once, even with a client that does not read."""
    cert, key = certificate
    options = ["--tls-cert", str(cert), "--tls-key", str(key)]
    with serve(tmp_path, "--host", "0.0.0.0", *options) as (address, process):
        url = urlsplit(address)
        assert url.scheme == "https" and url.query.startswith("token=")
        trusting = ssl.create_default_context(cafile=str(cert))
        here = f"https://localhost:{url.port}"
        with httpx.Client(base_url=here, verify=trusting, follow_redirects=True) as owner:
            assert owner.get("/api/runs").status_code == 403
            answer = owner.get(f"/?{url.query}")
            assert answer.status_code == 200 and len(answer.history) == 1
            assert "; secure" in answer.history[0].headers["set-cookie"].lower()
            own = {"x-ragen": "1", "content-type": "application/json", "origin": here}
            assert owner.post("/api/branch", headers=own, content="{}").status_code == 400
            own["origin"] = here.replace("https", "http")
            assert owner.post("/api/branch", headers=own, content="{}").status_code == 403
            with socket.create_connection(("127.0.0.1", url.port or 0), 5) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert b"HTTP" not in plain.recv(999)
            assert owner.get("/api/runs").status_code == 200
        with (
            socket.create_connection(("127.0.0.1", url.port or 0), 5) as plain,
            trusting.wrap_socket(plain, server_hostname="localhost"),  # It does not read.
        ):
            process.send_signal(signal.SIGINT)
            assert process.wait(15) == 0
            assert process.stderr is not None and process.stderr.read() == ""


def test_files_that_are_no_certificate_are_refused(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    locked, both, other = (tmp_path / name for name in ("locked.pem", "both.pem", "other.pem"))
    encrypt = f"openssl ec -in {key} -aes128 -passout pass:secret -out {locked}"
    subprocess.run(encrypt.split(), check=True, capture_output=True)
    generate = f"openssl ecparam -genkey -name prime256v1 -noout -out {other}"
    subprocess.run(generate.split(), check=True, capture_output=True)
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    assert isinstance(tls_of(both, None), ssl.SSLContext)
    pairs = [(cert, None), (key, key), (cert, cert), (cert, locked), (cert, other)]
    for pair in [*pairs, (tmp_path, key), (tmp_path / "none", key)]:
        with pytest.raises(RagenError, match="unencrypted key") as error:
            tls_of(*pair)
        assert "\n" not in str(error.value)


# Where


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    for host, message in (
        ("", "--host is empty"),
        ("nowhere.invalid", "cannot listen on 'nowhere.invalid'"),
        ("192.0.2.1", "--host is an address or a name of this machine"),
        ("a\0b", "cannot listen"),
        ("\udcff", "cannot listen"),
        ("\x1b[31m", "cannot listen on '\\x1b[31m'"),
    ):
        with pytest.raises(RagenError) as error:
            listen(host, 0)
        assert message in str(error.value) and str(error.value).isprintable()
