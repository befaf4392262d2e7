"""Chat endpoints that lie, flood, stall or break HTTP: a bounded wait, one clean line, no key."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from typing import Any

import pytest

from ragen.core.errors import RagenError, printable
from ragen.core.types import Completion, Prompt
from ragen.rollout import endpoint
from ragen.rollout.endpoint import ChatEndpoint, Server
from ragen.rollout.endpoint_format import WrongAnswer, error_message, read_reply
from ragen.rollout.policies import NoCompletion

KEY = "sk-test-0123456789abcdef"
PROMPT = Prompt(({"role": "user", "content": "go"},), None, 0, 64, 0.5, 7)
LIMIT_S = 10.0
"""What any behaviour may take, with two tries."""
TIMEOUT_S = 0.2
"""The time limit of a request to a server that does not finish."""
MB = 2**20


class RawServer:
    """Reads a request and sends an answer or what it yields, then closes the connection."""

    def __init__(self, answer: Iterable[bytes] | Callable[[], Iterable[bytes]]) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.num_sent = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    def serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client may go at any time
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            head, _, body = head.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += connection.recv(65536)
            self.heads.append(head)
            for part in self.answer() if callable(self.answer) else self.answer:
                connection.sendall(part)
                self.num_sent += len(part)


@contextmanager
def serving(answer: Iterable[bytes] | Callable[[], Iterable[bytes]]) -> Iterator[RawServer]:
    server = RawServer(answer)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield server
    finally:
        server.listener.close()


def ask(
    url: str, before: Callable[[ChatEndpoint], None] | None = None, timeout_s: float = LIMIT_S
) -> Completion | Exception:
    """What one completion gives; only errors that are meant for users or episodes may occur."""

    async def run() -> Completion:
        policy = ChatEndpoint(Server(url, timeout_s=timeout_s), "some/model")
        if before:
            before(policy)
        try:
            return await policy.complete(PROMPT)
        finally:
            await policy.close()

    try:
        return asyncio.run(run())
    except (RagenError, NoCompletion) as error:
        return error


@pytest.fixture(autouse=True)
def two_tries(short_waits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TRIES", 2)
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    monkeypatch.setenv(endpoint.KEY_ENV, KEY)


def head(status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines.append("Connection: close")  # so that no second try meets a connection that is closing
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1")


def answer(body: Any, status: str = "200 OK", **headers: str) -> list[bytes]:
    """A response whose length is right."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return [head(status, **({"Content_Length": str(len(data))} | headers)) + data]


def reply(content: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}


def error(message: Any, status: str = "400 Bad Request", **headers: str) -> list[bytes]:
    return answer({"error": {"message": message}}, status, **headers)


GO = json.dumps(reply("go")).encode()
BOMB = gzip.compress(GO + b" " * 50 * MB)
NO_JSON, NO_CHOICE = "an answer that is not JSON", "an answer without a choice that has a message"
TOO_LONG = "an answer of more than 4 MB"
LATE, BROKEN = "no answer in 0.2 s", "RemoteProtocolError"

# What the server sends, and words of the error or the exact text of the reply after "=".
ANSWERS: dict[str, tuple[list[bytes] | Callable[[], Iterator[bytes]], str]] = {
    # Sizes.
    "an endless body": (lambda: chain([head()], repeat(b"x" * MB)), TOO_LONG),
    "an endless error": (
        lambda: chain([head("400 Bad")], repeat(b"no " * 1000)),
        "HTTP 400: no no no",
    ),
    # Times.
    "silence": (lambda: wait(b""), LATE),
    # Compression.
    "a gzip bomb": (answer(BOMB, Content_Encoding="gzip"), NO_JSON),
    # Charsets and JSON.
    "invalid UTF-8": (answer(b'{"choices": "\xff\xfe"}'), NO_JSON),
    "deep lists": (answer(b"[" * MB), NO_JSON),
    # Shapes.
    "a choice of null": (answer({"choices": [None]}), NO_CHOICE),
    "content as odd parts": (
        answer(reply([1, None, {"text": 2}, {"text": [{"text": "x"}]}, {"text": "go"}])),
        "=go",
    ),
    "half a surrogate pair": (answer(reply("a\ud83db")), "=a�b"),
    "a deep error": (answer(b"[" * MB, "400 Bad"), "HTTP 400: [[["),
    # What a terminal obeys, and the key.
    "escape codes": (error("\x1b[31mred\x1b]0;title\x07\x9b"), "\\x1b[31mred\\x1b]0;title"),
    "line ends": (error("a\r\nb\u2028c\x85d\x00e"), "a b c d\\x00e"),
    "the key": (error(f"bad {KEY}", "401 No"), "bad ***"),
    "the key in the status line": ([f"HTTP/1.1 {KEY}\r\n\r\n".encode()], BROKEN),
    # Statuses and headers.
    "a wait of 10**9 s": (error("no", "429 No", Retry_After="1000000000"), "HTTP 429"),
    "a length beyond the body": ([head(Content_Length="999") + GO], BROKEN),
    "another server": ([b"SSH-2.0-OpenSSH_9.6\r\n"], BROKEN),
}


def wait(data: bytes) -> Iterator[bytes]:
    yield data
    time.sleep(3)


@pytest.mark.parametrize("name", ANSWERS)
def test_any_answer_gives_a_reply_or_one_clean_line_in_bounded_time(name: str) -> None:
    behaviour, expected = ANSWERS[name]
    start = time.monotonic()
    with serving(behaviour) as server:
        result = ask(server.url, timeout_s=TIMEOUT_S if expected == LATE else LIMIT_S)
        assert time.monotonic() - start < LIMIT_S
        assert server.num_sent < 4 * (endpoint.MAX_BODY + 8 * MB)  # what sockets buffer
    assert KEY not in str(result)
    if isinstance(result, Completion):
        assert "=" + result.text == expected
        return
    text = str(result)
    assert expected in text and not expected.startswith("=")
    assert text == printable(text) and "\n" not in text and len(text) < 600


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.mark.parametrize(
    "url",
    [closed_port(), "http://no-such-host.invalid/v1", "http://1.2.3.4.5:80/v1", "http://ho st/v1"],
    ids=["a closed port", "an unknown name", "a wrong number", "a space"],
)
def test_a_server_that_cannot_be_reached_is_said_without_a_retry(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo

    def fail_at_once(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "127.0.0.1":
            return look_up(host, *arguments, **options)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail_at_once)
    monkeypatch.setattr(endpoint, "SHORT_S", 0.4)
    start = time.monotonic()
    result = ask(url)
    assert isinstance(result, RagenError) and "is it running?" in str(result)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("answers", [[], [b"SSH-2.0-OpenSSH_9.6\r\n"]], ids=["dead", "no HTTP"])
def test_a_server_is_asked_again_for_some_seconds(
    answers: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart takes seconds, which are tenths here; the episodes so far are kept."""
    assert endpoint.SHORT_S < 5
    monkeypatch.setattr(endpoint, "SHORT_S", 0.4)
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.05)
    start = time.monotonic()
    if answers:
        with serving(answers) as server:
            result = ask(server.url)
            assert len(server.heads) > 1
    else:
        result = ask(closed_port(), lambda policy: setattr(policy, "_answered", True))
        assert time.monotonic() - start > 0.05
    said = "is it running?" if answers else "what was played is kept"
    assert isinstance(result, RagenError) and said in str(result)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HTTP_PROXY", "lol://user:secret@host"),
        ("ALL_PROXY", "socks5://user:secret@host:1"),
        ("HTTP_PROXY", "http://user:secret@127.0.0.1:1"),
        ("SSL_CERT_FILE", "/no/such/secret"),
    ],
)
def test_wrong_proxies_and_certificates_of_the_machine_are_one_line(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(answer(GO)) as server:
        result = ask(server.url.replace("127.0.0.1", "localhost"))
    assert isinstance(result, RagenError | Completion) and "secret" not in str(result)


def test_what_a_client_sends_asks_for_no_compression_and_repeats_no_cookie() -> None:
    async def twice(url: str) -> None:
        policy = ChatEndpoint(Server(url), "some/model")
        await policy.complete(PROMPT)
        await policy.complete(PROMPT)
        await policy.close()

    with serving(answer(GO, Set_Cookie="a=b", Connection="close")) as server:
        asyncio.run(twice(server.url))
    assert len(server.heads) == 2
    assert all(b"accept-encoding: identity\r\n" in sent.lower() for sent in server.heads)
    assert not any(b"cookie" in sent.lower() for sent in server.heads)


def test_bodies_of_any_depth_are_read_or_refused() -> None:
    """Near Python's limit of recursion, reading may succeed where writing fails."""
    for depth in [1, 30, *range(900, 1100, 20), 100_000]:
        for opening, closing in (("[", "]"), ('{"text":', "}"), ('[{"error":', "}]")):
            nested = opening * depth + "0" + closing * depth
            assert isinstance(error_message(nested.encode()), str)
            body = f'{{"choices": [{{"message": {{"content": {nested}}}}}]}}'.encode()
            with suppress(WrongAnswer):
                assert read_reply(body, think=True).text == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>\x1b[1mIt works!</html>", "not JSON: <html>\\x1b[1mIt works!</html>; check its"),
        ({"object": "list", "data": []}, 'a message: {"object": "list", "data": []}; check its'),
        (
            {"error": {"message": "no such engine", "code": 404}},
            "(HTTP 404: no such engine); check the address",
        ),
        (GO * 2, "; check its address"),
    ],
)
def test_an_answer_that_is_always_wrong_is_shown(body: Any, words: str) -> None:
    with serving(answer(body)) as server:
        result = ask(server.url)
    assert isinstance(result, RagenError) and words in str(result), result
    assert "is it running?" not in str(result) and "\n" not in str(result)


def test_a_busy_server_is_not_said_to_be_down() -> None:
    with serving(error("too many", "429 Busy")) as server:
        result = ask(server.url)
    assert str(result).endswith("gave no completion: HTTP 429: too many; try again later")
