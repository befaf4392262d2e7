"""Access only for the viewer's own pages: another site in a browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

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
    (tmp_path / "favicon.ico").touch()  # else its loss may be reported after the test
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_another_site_can_read_nothing(visitors: Any, elsewhere: str) -> None:
    visitor = visitors(address=elsewhere)
    page = visitor.page
    for name in ("127.0.0.1", "localhost"):
        page.goto(elsewhere.replace("127.0.0.1", name))
        received = page.evaluate("window.done")
        for request in ("fetch", "blind", "post", "simple post"):
            assert not received[request]
        assert received["events"] is None and received["script"] is None
        assert received["frames"] == 0
        frame_url = page.frames[1].url
        assert frame_url.startswith("chrome-error:") or not frame_url  # The frame stayed empty.
    visitor.complaints.clear()  # The browser reports the refusals.
