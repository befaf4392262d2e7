"""A chat endpoint on loopback with scripted replies and failures."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

GOOD = "<think>right it is</think><answer>" + " || ".join(["Right"] * 5) + "</answer>"
"""A reply that solves the corridor of `tests.rogue.Rogue` in one turn."""


@dataclass(frozen=True)
class Answer:
    """A response of the server, optionally delayed, or a closed connection.

    If `length` exceeds the length of the body, the response ends early.
    """

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    drops_connection: bool = False
    length: int | None = None


def chat_reply(content: Any = GOOD, finish: str = "stop", **message: Any) -> Answer:
    """A valid chat completion in OpenAI's format."""
    choice = {"index": 0, "message": {"content": content, **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return Answer({"object": "chat.completion", "choices": [choice], "usage": usage})


def api_error(status: int, text: str, code: str | None = None, **headers: str) -> Answer:
    """An error in OpenAI's format; underscores in header names become hyphens."""
    error = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer({"error": error}, status, named)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(
            sys.exception(), ConnectionError
        ):  # a client may close the connection at any time
            super().handle_error(request, client_address)


class FaultyServer:
    """A context manager that runs the server; `script` maps a request (number, body) to its answer.

    Attributes:
        requests: Request bodies in order of arrival.
        headers: Request headers in the same order.
        paths: The paths of the requests in the same order.
        max_concurrent: Largest number of requests handled at the same time.
    """

    def __init__(self, script: Callable[[int, dict[str, Any]], Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.max_concurrent = 0
        self._inside = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"]))
                if len(sent) < int(self.headers["Content-Length"]):
                    raise ConnectionAbortedError  # the client has closed it within its request
                body = json.loads(sent)
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer._inside += 1
                    outer.max_concurrent = max(outer.max_concurrent, outer._inside)
                try:
                    self._answer(script(number, body))
                finally:
                    with outer._lock:
                        outer._inside -= 1

            def _answer(self, answer: Answer) -> None:
                time.sleep(answer.wait_s)
                if answer.drops_connection:
                    self.close_connection = True
                    return
                text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
                data = text.encode()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(answer.length or len(data)))
                self.end_headers()
                self.wfile.write(data)
                if answer.length:
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Listener(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        """The value of `--base-url`."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
