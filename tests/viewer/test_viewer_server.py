"""The server: allowed requests, headers of every answer, and events for open pages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse
from viewer_run import log_step, make_run

from ragen.cli.main import main
from ragen.config.reading import dump, merge
from ragen.core.errors import RagenError
from ragen.storage.recorder import Recorder
from ragen.viewer import live
from ragen.viewer.security import POLICY
from ragen.viewer.server import Viewer
from ragen.viewer.server import serve as serve_viewer
from ragen.web.server import listen
from tests.cli.test_cli import evaluation

Capture = pytest.CaptureFixture[str]
OWN_HOST = {"host": "localhost:7246"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "lake").parent


@pytest.fixture(scope="module")
def client(root: Path) -> TestClient:
    app = Viewer(root, 7246).app
    return TestClient(app, headers=OWN_HOST, raise_server_exceptions=False)


# Answers


def test_pages_and_answers_have_their_content_types(client: TestClient) -> None:
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    script = client.get("/static/vendor/preact-htm.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert client.get("/api/runs").json()["runs"][0]["run"] == "lake"
    assert client.get("/api/runs").headers["content-type"] == "application/json"
    assert client.head("/api/runs").status_code == client.head("/api/events").status_code == 200
    large = client.get("/api/episodes", params={"run": "lake"})
    assert large.headers["content-encoding"] == "gzip"


def test_errors_are_one_line_of_json_and_no_path_leaves_the_folder(client: TestClient) -> None:
    for path, status, message in (
        ("/api/run", 400, "the parameter 'run' is missing"),
        ("/api/run?run=x", 404, "there is no run 'x' here"),
        ("/api/run?run=..%5c..%5cetc", 404, "there is no run"),
        ("/api/run?run=lake%00", 404, "there is no run"),
        ("/api/events?run=../lake", 404, "there is no run"),
        ("/api/episodes?run=lake&cursor=%00%ff", 400, "the cursor is not valid"),
        ("/api/nothing", 404, "Not Found"),
        ("/static/..%2fserver.py", 404, "Not Found"),
        ("/static/..\\server.py", 404, "Not Found"),
        ("/static/%2fetc/passwd", 404, "Not Found"),
        ("/static/%00", 404, "Not Found"),
        ("/static/vendor", 404, "Not Found"),
        ("//etc/passwd", 404, "Not Found"),
    ):
        response = client.get(path)
        assert (response.status_code, list(response.json())) == (status, ["error"]), path
        assert message in response.json()["error"] and "\n" not in response.json()["error"]


def test_every_answer_has_the_security_headers(client: TestClient) -> None:
    assert "script-src 'self'" in POLICY and "unsafe" not in POLICY
    for path in ("/", "/api/runs", "/api/run", "/nothing", "/static/vendor/uplot.js"):
        for response in (client.get(path), client.get(path, headers={"host": "evil.example"})):
            assert response.headers["content-security-policy"] == POLICY
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert not [name for name in response.headers if name.startswith("access-control")]
    assert client.get("/api/runs").headers["cache-control"] == "no-store"


def test_a_bug_is_answered_without_details(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("ragen.viewer.reading.Runs.ids", broken)
    response = client.get("/api/runs")
    assert response.status_code == 500 and "secret" not in response.text
    assert response.headers["content-security-policy"] == POLICY


# Allowed requests


def test_only_hosts_of_this_machine_are_served(client: TestClient) -> None:
    """With DNS rebinding, a foreign name that resolves to this machine has the viewer's origin."""
    for name in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST", "127.0.0.2"):
        for host in (f"{name}:7246", f"{name}:9000", name):  # the port may be forwarded
            assert client.get("/api/runs", headers={"host": host}).status_code == 200
    for host in (
        *("evil.example:7246", "evil.example", "127.0.0.1.evil.example:7246", "", ":7246"),
        *("0.0.0.0", "localhost:7246.evil.example", "evil.example#localhost:7246", "::1"),
        *("2130706433:7246", "localhost:7246@evil.example", "localhost:x", "localhost.example"),
    ):
        for path in ("/", "/api/runs", "/static/vendor/uplot.js"):
            assert client.get(path, headers={"host": host}).status_code == 403


def test_a_request_with_two_hosts_is_refused(root: Path) -> None:
    client = TestClient(Viewer(root, 7246).app)
    hosts = [("host", "localhost:7246"), ("host", "evil.example")]
    assert client.get("/api/runs", headers=hosts[:1]).status_code == 200
    assert client.get("/api/runs", headers=hosts).status_code == 403


def test_requests_of_another_site_are_refused(client: TestClient) -> None:
    def status(path: str = "/api/runs", **headers: str) -> int:
        return client.get(
            path, headers={n.replace("_", "-"): v for n, v in headers.items()}
        ).status_code

    assert status(origin="http://localhost:7246") == 200
    for origin in ("https://evil.example", "null", "http://localhost:1", "https://localhost:7246"):
        assert status(origin=origin) == 403
    assert status(sec_fetch_site="same-origin") == status(sec_fetch_site="none") == 200
    assert status(sec_fetch_site="cross-site") == status(sec_fetch_site="same-site") == 403
    assert status("/", sec_fetch_site="cross-site") == 200  # Links to the viewer work.


def test_a_page_behind_a_forwarded_port_is_answered(client: TestClient) -> None:
    """Some proxies change the Host to this server's own; the browser knows that the page is ours.

    Another page of this machine is not ours, and a foreign name may be rebound to the proxy.
    """

    def status(host: str, origin: str, site: str) -> int:
        headers = {"host": host, "origin": origin, "sec-fetch-site": site}
        return client.get("/api/runs", headers=headers).status_code

    assert status("localhost:9000", "http://localhost:9000", "same-origin") == 200
    assert status("localhost:7246", "http://localhost:9000", "same-origin") == 200
    assert status("127.0.0.1:7246", "https://[::1]:9000", "same-origin") == 200
    assert status("localhost:9000", "http://localhost:9000", "same-site") == 403
    assert status("localhost:7246", "http://localhost:9000", "none") == 403
    assert status("localhost:7246", "http://evil.example:9000", "same-origin") == 403
    assert status("evil.example:9000", "http://evil.example:9000", "same-origin") == 403


def test_invalid_and_foreign_posts_are_refused(client: TestClient) -> None:
    own = {"x-ragen": "1", "content-type": "application/json"}

    def post(body: bytes, headers: dict[str, str] = own) -> tuple[int, str]:
        response = client.post("/api/branch", content=body, headers=headers)
        return response.status_code, response.json()["error"]

    # Without X-Ragen, which a form cannot set.
    assert post(b"{}", {"content-type": "application/json"})[0] == 403
    assert post(b"{}", {"x-ragen": "1", "content-type": "text/plain"})[0] == 403
    assert post(b"{}", own | {"origin": "https://evil.example"})[0] == 403
    assert post(b"{}", own | {"sec-fetch-site": "same-site"})[0] == 403
    assert post(b" " * 10_001) == (413, "at most 10000 bytes")
    assert post(b"{") == (400, "the body is not JSON")
    assert post(b"[" * 9000) == (400, "the body is not JSON")
    assert post(b"[]") == (400, "the body is not a JSON object")
    assert post(b"{}") == (400, "the key 'run' is missing")
    assert post(b'{"run": "../lake"}')[0] == 404
    assert post(b'{"run": "lake"}')[0] == 400
    assert client.get("/api/branch").status_code == 405
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT"):
        assert client.request(method, "/api/runs", headers=own).status_code == 405


def test_a_token_is_required_beyond_this_machine(root: Path) -> None:
    app = Viewer(root, 7246, token="secret").app
    client = TestClient(app, "http://box:7246", follow_redirects=False)
    for path in ("/", "/api/runs", "/?token=wrong", "/?token=", "/?token=%C3%A9", "/static/app.js"):
        assert client.get(path).status_code == 403
    response = client.get("/?a=1&token=secret")
    assert (response.status_code, response.headers["location"]) == (303, "/?a=1")
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "ragen-7246=secret" in cookie
    assert client.get("/api/runs").status_code == 200  # The client keeps the cookie.
    assert client.get("/api/runs", headers={"origin": "http://evil"}).status_code == 403
    location = client.get("//evil.example/?token=secret").headers["location"]
    assert location.startswith("/") and not location.startswith("//")
    assert TestClient(app, headers={"cookie": "ragen-7246=sec"}).get("/").status_code == 403
    with pytest.raises(WebSocketDenialResponse), client.websocket_connect("/?token=secret"):
        pass


def test_a_token_is_printed_when_the_host_is_not_loopback(root: Path) -> None:
    class Said(Exception):
        pass

    def say(address: str) -> None:
        raise Said(address)

    hosts = {"localhost": False, "127.0.0.1": False, "0.0.0.0": True, "0": True}
    with contextlib.suppress(RagenError):  # a machine may have no IPv6
        listen("::1", 0).close()
        hosts |= {"::1": False, "::": True}
    for host, needs_token in hosts.items():
        with pytest.raises(Said) as said:
            serve_viewer(root, host, 0, say)
        ending = r":\d+/\?token=\S{20,}$" if needs_token else r":\d+/$"
        assert re.search(ending, str(said.value))
        assert (socket.gethostname().lower() in str(said.value).lower()) == needs_token


# A real server


@contextlib.contextmanager
def serve(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start `ragen view` in a separate process; yield its address and the process."""
    command = [sys.executable, "-m", "ragen", "view", str(folder), "--port", "0", *options]
    environment = os.environ | {"CI": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.search(r"https?://\S+", line)
            assert url, line
            yield url[0], process
        finally:
            process.kill()


def listen_to_events(
    address: str, events: list[tuple[str, Any, float]], ready: threading.Event
) -> None:
    """Append the events of a stream until it ends."""
    with (
        contextlib.suppress(httpx.RemoteProtocolError),
        httpx.stream("GET", address, timeout=30) as stream,
    ):
        name = ""
        for line in stream.iter_lines():
            ready.set()
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                events.append((name, json.loads(line.removeprefix("data: ")), time.monotonic()))


@pytest.mark.slow
def test_events_reach_a_listener_within_two_seconds_of_a_commit(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "a").mkdir(parents=True)
    run_events: list[tuple[str, Any, float]] = []
    list_events: list[tuple[str, Any, float]] = []
    with serve(runs, "--no-browser") as (address, process):
        assert address.startswith("http://127.0.0.1:")
        maps = Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text(encoding="utf-8")
        recorder = Recorder.create(runs / "a", dump(merge("bandit")))
        log_step(recorder, 1, 0.5)
        recorder.commit()
        listeners = []
        for path, events in (("api/events?run=a", run_events), ("api/events", list_events)):
            ready = threading.Event()
            thread = threading.Thread(target=listen_to_events, args=(address + path, events, ready))
            thread.start()
            listeners.append(thread)
            assert ready.wait(10)
        time.sleep(2 * live.LOOK_S)
        log_step(recorder, 2, 0.6)
        committed = time.monotonic()
        recorder.commit()
        recorder.event(2, "alarm", "grad_spike: 30", {"detector": "grad_spike"})
        wait_until(lambda: {"step", "alarm"} <= {name for name, _, _ in run_events})
        (step,) = (event for event in run_events if event[0] == "step")
        assert (step[1]["attempt"], step[1]["step"]) == (0, 2) and step[2] - committed < 2
        (alarm,) = (event for event in run_events if event[0] == "alarm")
        assert alarm[1]["text"] == "grad_spike: 30" and alarm[1]["data"]["detector"] == "grad_spike"
        wait_until(lambda: "runs" in {name for name, _, _ in list_events})
        recorder.close()
        wait_until(lambda: bool(run_events) and run_events[-1][0] == "end")
        assert not (runs / "a" / "run.sqlite-wal").exists()
        num_events = len(run_events)
        with Recorder.open(runs / "a") as resumed:  # The stream announces the resumed run.
            wait_until(lambda: [name for name, _, _ in run_events[num_events:]] == ["begin"])
            log_step(resumed, 3, 0.7)
            resumed.commit()
            wait_until(lambda: run_events[-1][0] == "step")
        wait_until(lambda: run_events[-1][0] == "end")
        assert [name for name, _, _ in run_events[num_events:]] == ["begin", "step", "end"]
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)  # Both streams are still open.
        assert process.wait(10) == 0 and time.monotonic() - begun < 3
        assert process.stderr is not None and process.stderr.read() == ""
        for thread in listeners:
            thread.join(10)
            assert not thread.is_alive()


def wait_until(condition: Any, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_an_evaluation_is_announced_when_it_is_written(tmp_path: Path) -> None:
    """It is written after its step, which was announced before."""
    (tmp_path / "a").mkdir()
    recorder = Recorder.create(tmp_path / "a", dump(merge("bandit")))
    news = live.run_news(tmp_path / "a")
    assert next(news) == []
    for step in (0, 1):
        if step:
            log_step(recorder, step, 0.5)
            recorder.commit()
            assert [name for name, _ in next(news)] == ["step"]
        recorder.evaluation(step, evaluation(0.5).record())
        recorder.commit()
        ((name, data),) = next(news)
        assert (name, data["attempt"], data["step"]) == ("step", 0, step)
    assert next(news) == []
    recorder.close()


# The command


def test_invalid_arguments_are_one_line_and_exit_code_2(tmp_path: Path, capsys: Capture) -> None:
    with listen("127.0.0.1", 0) as taken:
        for folder, options, message in (
            (tmp_path / "none", [], "there is no folder"),
            (tmp_path, ["--port", "70000"], "expected a whole number from 0 to 65535"),
            (tmp_path, ["--port", str(taken.getsockname()[1])], "already in use; choose another"),
            (tmp_path, ["--host", ""], "--host is empty"),
            (tmp_path, ["--tls-key", "key.pem"], "name it with --tls-cert"),
        ):
            assert main(["view", str(folder), *options]) == 2
            error = capsys.readouterr().err
            assert error.startswith("ragen: ") and error.count("\n") == 1 and message in error
