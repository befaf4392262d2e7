"""The server of the gateway: an agent's requests by their keys, in every dialect.

It runs beside the run's own loop, in the process's loop for asynchronous code (`core.waiting`), on
a loopback address. So requests are read and answers written while the policy samples; what changes
an episode happens in the run's loop. A key belongs to one episode. A request after its end is
refused with a status that no library tries again.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ragen.core.types import CallRole
from ragen.core.waiting import begin
from ragen.gateway.dialects import DIALECTS
from ragen.gateway.messages import Refused, Reply
from ragen.gateway.session import Session, ended
from ragen.web.server import Server, listen, make_room

T = TypeVar("T")

MODEL = "policy"
"""The name of the model. Libraries treat names such as ``o3`` or ``gpt-5`` as special cases."""
ROLE = "x-ragen-role"
"""The header by which an agent declares the role of a call."""
ROLES: Mapping[str, CallRole | None] = {
    "": None,
    "agent": "agent",
    "compaction": "compaction",
    "auxiliary": "auxiliary",
}
"""The roles that it may declare."""
BODY_BYTES = 2**24
"""Maximum number of bytes in a request."""
MOST = 4096
"""Connections at the same time: agents of some hundred episodes, each with several clients."""
OTHER_FILES = 128
"""Files that the process opens beside these connections."""
END_S = 5.0
"""Seconds that the server may take to end."""


class _Open:
    """An episode that is being played, and the loop of its run."""

    def __init__(self, session: Session) -> None:
        self.session, self._loop = session, asyncio.get_running_loop()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the run's loop and wait for it in this one."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def lost(self, reply: Reply) -> None:
        """Tell the session that a client has left before a reply was sent to it."""
        self._loop.call_soon_threadsafe(self.session.lost, reply)


class Gateway:
    """The server for the episodes of a run. It has its address at once, and serves when needed."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.listening = listen(host, port)
        address, port = self.listening.getsockname()[:2]
        self.base_url = f"http://{address}:{port}/v1"
        self._secret = secrets.token_bytes(32)
        self._count = 0
        self._open: dict[str, _Open] = {}
        self._server: Server | None = None
        self._serving: Future[None] | None = None

    def serve(self) -> None:
        """Begin to answer requests."""
        most = make_room(MOST + OTHER_FILES) - OTHER_FILES
        self._server = Server(self.application(), most=most)
        self._serving = begin(self._server.serve(sockets=[self.listening]))

    @contextmanager
    def session(self, session: Session) -> Iterator[str]:
        """Answer the requests of an episode; gives its key."""
        if self._server is None:
            self.serve()
        self._count += 1
        number = str(self._count)
        key = f"{number}-{self._sign(number)}"
        self._open[key] = _Open(session)
        try:
            yield key
        finally:
            del self._open[key]
            session.close()

    def close(self) -> None:
        """End the server and free its address."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            self._serving.result(END_S)
        self.listening.close()

    def _sign(self, number: str) -> str:
        return hmac.new(self._secret, number.encode(), "blake2b").hexdigest()[:32]

    def application(self) -> ASGIApp:
        """The application that is served."""
        return Starlette(routes=self.routes())

    def routes(self) -> list[Route]:
        """The routes of all dialects."""
        routes = list[Route]()
        for start in ("/v1", "/v1/v1"):  # clients of Anthropic put /v1 after any base URL
            routes += [Route(start + path, self._reply, methods=["POST"]) for path in DIALECTS]
            count = Route(f"{start}/messages/count_tokens", self._count_tokens, methods=["POST"])
            routes += [count, Route(f"{start}/models", self._models)]
        return routes

    def episode_of(self, http: HttpRequest) -> _Open:
        """The episode of a request's key.

        Raises:
            Refused: There is none, or it has ended.
        """
        key = key_of(http)
        found = self._open.get(key)
        if found is not None:
            return found
        number, _, signature = key.partition("-")
        if hmac.compare_digest(signature.encode(), self._sign(number).encode()):
            raise ended()
        raise Refused(401, "invalid_api_key", "this key belongs to no episode")

    async def _models(self, http: HttpRequest) -> Response:
        about = {"id": MODEL, "object": "model", "created": 0, "owned_by": "ragen"}
        return JSONResponse({"object": "list", "data": [about]})

    async def _count_tokens(self, http: HttpRequest) -> Response:
        dialect = DIALECTS["/messages"]
        try:
            episode = self.episode_of(http)
            _, body = await body_of(http)
            request = dialect.read(body, episode.session.known)
            count = await episode.run(episode.session.count_tokens(request))
        except Refused as refused:
            return JSONResponse(dialect.error(refused), refused.status)
        return JSONResponse({"input_tokens": count})

    async def _reply(self, http: HttpRequest) -> Response:
        dialect = DIALECTS[http.url.path.rpartition("/v1")[2]]
        try:
            episode = self.episode_of(http)
            content, body = await body_of(http)
            request = dialect.read(body, episode.session.known)
            is_retry = http.headers.get("x-stainless-retry-count", "0") != "0"
            reply = await episode.run(
                episode.session.reply(content, request, is_retry=is_retry, role=_declared(http))
            )
        except Refused as refused:
            return JSONResponse(dialect.error(refused), refused.status)
        if await http.is_disconnected():
            episode.lost(reply)
        model = str(body.get("model") or MODEL)
        if request.stream:
            events = "".join(dialect.events(reply, model, body))
            return Response(events, media_type="text/event-stream")
        # In ASCII, because an answer repeats parts of the request, which may be no valid text.
        answered = json.dumps(dialect.write(reply, model, body))
        return Response(answered, media_type="application/json")


def key_of(http: HttpRequest) -> str:
    """The key in a request's headers, as any dialect sends it."""
    bearer = http.headers.get("authorization", "").partition(" ")[2]
    return http.headers.get("x-api-key") or bearer.strip()


async def body_of(http: HttpRequest) -> tuple[bytes, Mapping[str, Any]]:
    """The body of a request, as it is and as JSON.

    Raises:
        Refused: It is no JSON object, or too large.
    """
    content = bytearray()
    async for part in http.stream():
        content += part
        if len(content) > BODY_BYTES:
            raise Refused(413, "too_large", f"a request may have {BODY_BYTES} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_request", "the body of a request is a JSON object")
    return bytes(content), body


def _declared(http: HttpRequest) -> CallRole | None:
    role = http.headers.get(ROLE, "")
    if role not in ROLES:
        raise Refused(400, "invalid_value", f"{ROLE} is one of {', '.join(filter(None, ROLES))}")
    return ROLES[role]
