"""The limits of connections: strangers, late clients, malformed requests, few files, and TLS."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from viewer_run import make_run

from ragen.cli.main import main
from ragen.core.errors import RagenError
from ragen.serving import connections
from ragen.serving.connections import Listening, Server, listen, tls_of
from ragen.viewer.server import Viewer
from tests.viewer.test_viewer_server import Capture, serve, wait_until

STRANGER = "127.0.0.2"
HALF = b"GET /api/runs HTTP/1.1\r\nHost: x\r\nX: "


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "lake").parent


@pytest.fixture
def port(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server in this process, which waits for half a second."""
    monkeypatch.setattr(connections, "PATIENCE_S", 0.5)
    with listen("127.0.0.1", 0) as listening:
        number = listening.getsockname()[1]
        viewer = Viewer(root, number, None, listening.admitted)
        server = Server(viewer.app, None, viewer.live.end)
        thread = threading.Thread(target=server.serve_on, args=(listening,))
        thread.start()
        wait_until(lambda: server.started)
        yield number
        viewer.live.end()
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A connection from an address of this machine."""
    try:
        found = socket.create_connection(("127.0.0.1", port), 10, (host, 0))
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    return found


def is_closed(client: socket.socket) -> bool:
    """Whether the server closed a connection; what it sent before is read."""
    client.setblocking(False)
    try:
        while client.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def request_of(port: int, *lines: str, method: str = "GET", path: str = "/api/runs") -> bytes:
    head = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", *lines, "", ""]
    return "\r\n".join(head).encode()


# How many


@contextlib.contextmanager
def accepting(monkeypatch: pytest.MonkeyPatch, each: int, most: int) -> Iterator[Listening]:
    monkeypatch.setattr(connections, "MOST_EACH", each)
    with listen("127.0.0.1", 0) as listening:
        listening.most = most
        yield listening


def opened(listening: Listening, host: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    client = connect(listening.getsockname()[1], host)
    return client, listening.accept()[0]


def admit(listening: Listening, client: socket.socket) -> None:
    listening.admitted.add(client.getsockname())


def test_the_oldest_connection_of_a_stranger_is_closed_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with accepting(monkeypatch, each=9, most=4) as listening:
        user = opened(listening, "127.0.0.1")
        admit(listening, user[0])
        second = opened(listening, "127.0.0.1")
        strangers = [opened(listening, host) for host in (STRANGER, "127.0.0.3", "127.0.0.4")]
        assert [is_closed(each[0]) for each in strangers] == [True, False, False]
        assert not is_closed(user[0]) and not is_closed(second[0])


def test_an_address_closes_its_own_connections_above_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with accepting(monkeypatch, each=2, most=9) as listening:
        other = opened(listening, STRANGER)
        own = [opened(listening, "127.0.0.1")]
        admit(listening, own[0][0])
        own += [opened(listening, "127.0.0.1") for _ in range(3)]
        assert [is_closed(each[0]) for each in own] == [False, True, True, False]
        assert not is_closed(other[0])
        for _, server_end in own:
            server_end.close()
        opened(listening, "127.0.0.1")
        assert not listening.admitted  # A port may be used again, by somebody else.


def test_a_process_without_files_keeps_half_of_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with accepting(monkeypatch, each=99, most=99) as listening:
        monkeypatch.setattr(connections, "LEAST", 2)
        clients = [opened(listening, "127.0.0.1") for _ in range(8)]

        def fails(_: socket.socket) -> None:
            raise OSError(24, "too many open files")

        with monkeypatch.context() as patch, pytest.raises(BlockingIOError):
            patch.setattr(socket.socket, "accept", fails)
            listening.accept()
        assert sum(not is_closed(each[0]) for each in clients) < listening.most == 4


def test_a_thousand_half_requests_leave_the_page_quick_with_256_files(
    root: Path, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource", reason="no limits on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this machine does not permit a thousand connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    with contextlib.ExitStack() as stack:
        try:
            address, process = stack.enter_context(serve(root, "--host", "0.0.0.0"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        url = urlsplit(address)
        assert url.port is not None
        for number in range(1000):
            client = stack.enter_context(connect(url.port, STRANGER))
            with contextlib.suppress(ConnectionError):
                client.sendall(HALF if number % 2 else b"\x16\x03\x01")
        begun = time.monotonic()
        with httpx.Client(base_url=f"http://127.0.0.1:{url.port}", follow_redirects=True) as owner:
            assert owner.get(f"/?{url.query}").status_code == 200
            assert owner.get("/api/runs").status_code == 200
        assert time.monotonic() - begun < 2  # Usually 0.3 s; the machine may be busy.
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 128
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0
        assert process.stderr is not None and process.stderr.read() == ""


# How long


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [HALF, *[b"a"] * 9],
        [b"POST /api/branch HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"{"],
        [b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\na\r\n"] * 9],
    ],
)
def test_a_request_that_does_not_arrive_is_dropped(port: int, parts: list[bytes]) -> None:
    with connect(port) as client:
        begun = time.monotonic()
        for part in parts:
            with contextlib.suppress(ConnectionError):
                client.sendall(part)
            time.sleep(0.1)
        wait_until(lambda: is_closed(client), 5)
        assert time.monotonic() - begun < 3


def test_the_next_request_of_an_admitted_client_has_to_arrive_too(port: int) -> None:
    with connect(port) as client:
        for _ in range(3):  # Each in time, all together not.
            client.sendall(request_of(port))
            time.sleep(0.3)
            assert not is_closed(client)
        client.settimeout(5)
        client.sendall(HALF)
        wait_until(lambda: is_closed(client), 5)


def test_an_answer_that_is_not_read_is_dropped(port: int) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", port))
        client.settimeout(1)
        path = "/static/vendor/uplot.js"
        with contextlib.suppress(OSError):
            client.sendall(request_of(port, path=path) * 200)
        time.sleep(2)
        client.settimeout(5)
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := client.recv(65536):
                received += len(part)
        assert received < 10_000_000


def test_a_stream_of_news_outlives_the_wait(port: int) -> None:
    with connect(port) as client:
        client.sendall(request_of(port, path="/api/events?run=lake"))
        time.sleep(1.5)
        assert not is_closed(client)


# Malformed requests


@pytest.mark.parametrize(
    "text",
    [
        "GET /\r\n\r\n",
        "GET / HTTP/0.9\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "GET / HTTP/1.1\r\nHost: HERE\r\nX: \x00\r\n\r\n",
        "GET /" + "a" * 70_000 + " HTTP/1.1\r\nHost: HERE\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: HERE\r\n" + "X: a\r\n" * 20_000 + "\r\n",
        "POST / HTTP/1.1\r\nHost: HERE\r\nContent-Length: -1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: HERE\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        "POST / HTTP/1.1\r\nHost: HERE\r\nContent-Length: 1, 2\r\n\r\nab",
        "POST / HTTP/1.1\r\nHost: HERE\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
        "POST / HTTP/1.1\r\nHost : HERE\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: HERE\r\n folded\r\n\r\n",
        # The rest comes after an answer has begun.
        "POST / HTTP/1.1\r\nHost: HERE\r\nTransfer-Encoding: chunked\r\n\r\nWAITxyz\r\n",
        "POST / HTTP/1.1\r\nHost: HERE\r\nTransfer-Encoding: chunked\r\n\r\nWAIT5\r\nabcdefgh",
        "POST / HTTP/1.1\r\nHost: HERE\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        "WAIT0\r\n\r\nGET /api/runs HTTP/1.1\r\nHost: x.invalid\r\n\r\n",
        "GET /api/events HTTP/1.1\r\nHost: HERE\r\nContent-Length: 9\r\n\r\nWAITabc",
        "GET / HTTP/1.1\r\nHost: HERE\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nWAIT\x81",
        "CONNECT x:1 HTTP/1.1\r\nHost: HERE\r\n\r\nWAITabc",
        "GET /static/app.js HTTP/1.1\r\nHost: HERE\r\nRange: bytes=" + "0-0," * 3000 + "\r\n\r\n",
    ],
)
def test_a_malformed_request_ends_its_connection_without_a_word(
    port: int, text: str, capfd: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    here = f"127.0.0.1:{port}"
    with connect(port) as client:
        for number, part in enumerate(text.replace("HERE", here).split("WAIT")):
            time.sleep(0.1 * number)
            with contextlib.suppress(ConnectionError):
                client.sendall(part.encode("latin-1"))
        wait_until(lambda: is_closed(client) or "Range" in text, 8)
    assert httpx.get(f"http://{here}/api/runs").status_code == 200
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


def test_a_certificate_encrypts_the_token_and_the_pages(
    root: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    options = ["--tls-cert", str(cert), "--tls-key", str(key)]
    with serve(root, "--host", "0.0.0.0", *options) as (address, process):
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
    certificate: tuple[Path, Path], root: Path, tmp_path: Path, capsys: Capture
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
    assert main(["view", str(root), "--tls-key", str(key)]) == 2
    assert "name it with --tls-cert" in capsys.readouterr().err


# Where


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("", "--host is empty"),
        ("nowhere.invalid", "cannot listen on 'nowhere.invalid'"),
        ("192.0.2.1", "--host is an address or a name of this machine"),
        ("127.0.0.1:80", "cannot listen on '127.0.0.1:80'"),
        ("a" * 99, "cannot listen"),
        ("a..b", "cannot listen"),
        ("a\0b", "cannot listen"),
        ("\udcff", "cannot listen"),
        ("\x1b[31m", "cannot listen on '\\x1b[31m'"),
        ("::g", "cannot listen"),
        ("[", "cannot listen"),
        (" ", "cannot listen"),
    ],
)
def test_a_host_that_is_not_this_machine_is_refused(host: str, message: str) -> None:
    with pytest.raises(RagenError) as error:
        listen(host, 0)
    assert message in str(error.value) and str(error.value).isprintable()


def test_a_port_in_use_is_refused_with_the_remedy() -> None:
    with (
        listen("localhost", 0) as taken,
        pytest.raises(RagenError, match="in use; choose another one with --port"),
    ):
        listen("localhost", taken.getsockname()[1])


def test_all_addresses_of_this_machine_need_the_token(root: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    for host in ("::", "0"):
        with serve(root, "--host", host) as (address, _):
            url = urlsplit(address)
            assert url.query.startswith("token=") and url.hostname == socket.gethostname().lower()
            here = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=5)
            here.request("GET", "/")
            assert here.getresponse().status == 403
            here.close()


def test_a_name_is_served_on_the_first_of_its_addresses_that_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def two(*_: object, **__: object) -> list[object]:
        kind = (socket.SOCK_STREAM, 0, "")
        return [
            (socket.AF_INET6, *kind, ("2001:db8::1", 0, 0, 0)),
            (socket.AF_INET, *kind, ("192.0.2.1", 0)),
            (socket.AF_INET, *kind, ("127.0.0.1", 0)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with listen("box", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
