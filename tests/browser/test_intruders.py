"""Access only for the viewer's own pages: other sites in a browser, and raw requests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

PATIENCE_S = 3.0
"""How long a raw request waits for an answer, in seconds."""

SITE = """<!doctype html><title>other site</title><script>
const got = {};
const at = (path) => VIEWER + path;
const note = (name) => [(value) => (got[name] = value), () => (got[name] = null)];
const text = (answer) => answer.text();
window.done = Promise.all([
  fetch(at("/api/runs")).then(text).then(...note("fetch")),
  fetch(at("/api/runs"), { mode: "no-cors" }).then(text).then(...note("blind")),
  fetch(at("/api/branch"), {
    method: "POST", headers: { "X-Ragen": "1", "Content-Type": "application/json" }, body: "{}",
  }).then(text).then(...note("post")),
  fetch(at("/api/branch"), { method: "POST", mode: "no-cors", body: "{}" })
    .then(text).then(...note("simple post")),
  new Promise((end) => {
    const source = new EventSource(at("/api/events"));
    source.onmessage = source.onopen = () => end((got.events = "open"));
    source.onerror = () => end((got.events = null));
  }),
  new Promise((end) => {
    const script = document.createElement("script");
    script.src = at("/api/runs");
    script.onload = () => end((got.script = "loaded"));
    script.onerror = () => end((got.script = null));
    document.head.append(script);
  }),
  new Promise((end) => {
    const frame = document.createElement("iframe");
    frame.src = at("/");
    frame.onload = () => setTimeout(() => end((got.frames = frame.contentWindow.length)), 300);
    document.documentElement.append(frame);
  }),
]).then(() => got);
</script>"""


@pytest.fixture
def elsewhere(viewer: str, tmp_path: Path) -> Iterator[str]:
    """The address of another site on this machine that attempts to read from the viewer."""
    (tmp_path / "index.html").write_text(SITE.replace("VIEWER", json.dumps(viewer)))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_another_site_can_read_nothing(visitors: Any, elsewhere: str, name: str) -> None:
    visitor = visitors(address=elsewhere)
    page = visitor.page
    page.goto(elsewhere.replace("127.0.0.1", name))
    received = page.evaluate("window.done")
    for request in ("fetch", "blind", "post", "simple post"):
        assert not received[request]
    assert received["events"] is None and received["script"] is None and received["frames"] == 0
    frame_url = page.frames[1].url
    assert frame_url.startswith("chrome-error:") or not frame_url  # The frame stayed empty.
    visitor.complaints.clear()  # The browser reports the refusals.


def raw_answer(viewer: str, request: bytes) -> bytes:
    """The answer of the server to these bytes, until it closes the connection or a timeout."""
    address = urlsplit(viewer)
    answer = b""
    with (
        socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as sock,
        suppress(TimeoutError, ConnectionError),
    ):
        sock.sendall(request)
        while part := sock.recv(65536):
            answer += part
    return answer


def get(viewer: str, target: str, *headers: str) -> bytes:
    host = urlsplit(viewer).netloc
    lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    return raw_answer(viewer, "\r\n".join([*lines, "", ""]).encode("latin-1"))


@pytest.mark.parametrize(
    "target",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/static//etc/passwd",
        "/static/..\\server.py",
        "/static/%00",
        "//etc/passwd",
        "/api/run?run=../../etc",
        "/api/run?run=%2fetc",
        "/api/run?run=..%5c..%5cetc",
        "/api/run?run=lake%00",
        "/api/run?run=./lake/../../",
        "/api/episode?run=lake&episode=99999999999999999999999999",
        "/api/episodes?run=lake&limit=-1",
        "/api/episodes?run=lake&cursor=%00%ff",
        "/api/metrics?run=lake&names=" + "x," * 5000,
    ],
)
def test_hostile_paths_and_parameters_are_refused_without_a_leak(viewer: str, target: str) -> None:
    answer = get(viewer, target)
    status = int(answer.split(b" ", 2)[1])
    assert status in (200, 400, 403, 404), answer[:200]
    body = answer.partition(b"\r\n\r\n")[2]
    assert b"root:" not in body and b"import" not in body and b"Traceback" not in body


@pytest.mark.parametrize(
    "request_text",
    [
        "GET /api/runs HTTP/1.1\r\nConnection: close\r\n\r\n",
        "GET /api/runs HTTP/1.0\r\n\r\n",
        "GET /api/runs HTTP/1.1\r\nHost: attacker.invalid\r\nConnection: close\r\n\r\n",
        "GET /api/runs HTTP/1.1\r\nHost: HERE\r\nHost: x.invalid\r\nConnection: close\r\n\r\n",
        "GET /api/runs HTTP/1.1\r\nHost: HERE.attacker.invalid\r\nConnection: close\r\n\r\n",
        "GET /api/runs HTTP/1.1\r\nHost: HERE@attacker.invalid\r\nConnection: close\r\n\r\n",
        "GET http://attacker.invalid/api/runs HTTP/1.1\r\nHost: attacker.invalid\r\n\r\n",
        "GET /api/runs HTTP/1.1\r\nHost: HERE\r\nOrigin: null\r\nConnection: close\r\n\r\n",
        "GET /api/runs HTTP/1.1\r\nHost: HERE\r\nX: " + "a" * 200_000 + "\r\n\r\n",
        "POST /api/branch HTTP/1.1\r\nHost: HERE\r\nX-Ragen: 1\r\nContent-Type: application/json"
        "\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n" + "a" * 3_000_000,
        "POST /api/branch HTTP/1.1\r\nHost: HERE\r\nX-Ragen: 1\r\nContent-Type: application/json"
        "\r\nContent-Length: 99999999999\r\n\r\n{}",
        "\x00\x01\x02\r\n\r\n",
    ],
)
def test_malformed_and_foreign_requests_are_refused(viewer: str, request_text: str) -> None:
    here = urlsplit(viewer).netloc
    answer = raw_answer(viewer, request_text.replace("HERE", here).encode("latin-1"))
    assert b"200 OK" not in answer and b"lake" not in answer
    assert b"200 OK" in get(viewer, "/api/runs")  # The server still serves its own page.
