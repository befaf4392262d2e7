"""The web server of the viewer: a static front end, the JSON API and a stream of news.

The export (`ragen.viewer.share`) gets the API's answers from `ROUTES`, too.
"""

from __future__ import annotations

import json
import secrets
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ragen.core.errors import RagenError
from ragen.viewer import (
    collapse,
    comparison,
    episode_list,
    episode_page,
    phrases,
    run_list,
    run_page,
)
from ragen.viewer.branching import Branching
from ragen.viewer.bundle import STATIC
from ragen.viewer.live import folder_news, run_news, stream
from ragen.viewer.reading import Answer, Question, Runs, Unanswered
from ragen.viewer.security import PageAccess
from ragen.web.security import is_loopback, refusal
from ragen.web.server import Server, listen, url_of

ROUTES: Mapping[str, Callable[[Question], Answer]] = {
    "/api/runs": run_list.runs,
    "/api/run": run_page.about,
    "/api/metrics": run_page.metrics,
    "/api/episodes": episode_list.episodes,
    "/api/episode": episode_page.episode,
    "/api/group": episode_page.group,
    "/api/tokens": episode_page.tokens,
    "/api/compare": comparison.compare,
    "/api/levels": comparison.levels,
    "/api/level": comparison.level,
    "/api/phrases": phrases.phrases,
    "/api/collapse": collapse.collapse,
    "/api/matrix": collapse.matrix,
}
"""The paths of the API, and the functions that answer them."""

COMPRESSED = 2000

LARGEST_BODY = 10_000
"""Largest body of a POST request, in bytes; it holds a few numbers."""


class Json(JSONResponse):
    """An answer as JSON; a lone surrogate, which UTF-8 cannot encode, is written as its escape."""

    def render(self, content: Any) -> bytes:
        """The bytes of the answer."""
        try:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        except (ValueError, TypeError):  # numbers that are not finite, or bytes
            return json.dumps(finite(content), separators=(",", ":")).encode()


def finite(value: Any) -> Any:
    """The value with ``None`` for numbers that are not finite, and text for bytes.

    SQLite does not check types: a database that another program wrote may have them in any column.

    Example:
        >>> finite({"a": [1.0, float("nan")], "b": float("inf")})
        {'a': [1.0, None], 'b': None}
    """
    return to_jsonable_python(value, inf_nan_mode="null", bytes_mode="base64")


class Viewer:
    """The viewer of the runs below a folder: `app` is the application that a server runs.

    `ended` is to be set when the server ends, so that the streams of news end, too.
    """

    def __init__(self, root: Path, port: int, token: str | None = None) -> None:
        """A Host header has to name the `port`, and every request the `token`, if there is one."""
        self._runs, self.branching = Runs(root), Branching()
        self.ended = threading.Event()
        answers = {**ROUTES, "/api/branches": self._branches}
        routes = [
            Route("/", _front_page),
            *(Route(path, self._endpoint(answer)) for path, answer in answers.items()),
            Route("/api/picture", self._endpoint(episode_page.picture, _png)),
            Route("/api/branch", self._branch, methods=["POST"]),
            Route("/api/cancel", self._cancel, methods=["POST"]),
            Route("/api/events", self._events),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        handlers = {HTTPException: _http_error, RagenError: _unanswered, Exception: _bug}
        compressing = Middleware(GZipMiddleware, minimum_size=COMPRESSED, compresslevel=1)
        app = Starlette(
            routes=routes,
            middleware=[compressing],
            exception_handlers=handlers,  # type: ignore[arg-type]
        )
        self.app = PageAccess(app, port, token)

    def _endpoint(
        self, answer: Callable[[Question], Any], form: Callable[[Any], Response] = Json
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            asked = Question(self._runs, request.query_params)
            # Reading and building JSON take time, and must not block the event loop.
            return await run_in_threadpool(lambda: form(answer(asked)))

        return endpoint

    def _branches(self, asked: Question) -> Answer:
        return self.branching.branches(asked.folder(), asked.whole_number("episode"))

    async def _branch(self, request: Request) -> Response:
        folder, body = await self._command(request)
        return Json({"id": await run_in_threadpool(self.branching.start, folder, body)})

    async def _cancel(self, request: Request) -> Response:
        folder, body = await self._command(request)
        await run_in_threadpool(self.branching.cancel, folder, body)
        return Json({})

    async def _command(self, request: Request) -> tuple[Path, dict[str, Any]]:
        body = await _body(request)
        if not isinstance(body.get("run"), str):
            raise Unanswered("the key 'run' is missing")
        return await run_in_threadpool(self._runs.folder, body["run"]), body

    async def _events(self, request: Request) -> Response:
        run = request.query_params.get("run")
        folder = None if run is None else await run_in_threadpool(self._runs.folder, run)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        looks = folder_news(self._runs) if folder is None else run_news(folder)
        return StreamingResponse(stream(looks, self.ended), media_type="text/event-stream")


def _png(data: bytes) -> Response:
    return Response(data, media_type="image/png")


async def _front_page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


async def _body(request: Request) -> dict[str, Any]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get("x-ragen") != "1" or kind != "application/json":
        raise HTTPException(403, "the request needs the header X-Ragen: 1 and a JSON body")
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                raise HTTPException(413, f"at most {LARGEST_BODY} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the request is incomplete") from None
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise Unanswered("the body is not JSON") from None
    if not isinstance(asked, dict):
        raise Unanswered("the body is not a JSON object")
    return asked


async def _http_error(request: Request, error: HTTPException) -> Response:
    return refusal(error.status_code, error.detail)


async def _unanswered(request: Request, error: RagenError) -> Response:
    status = error.status if isinstance(error, Unanswered) else 409
    return refusal(status, " ".join(str(error).split()))


async def _bug(request: Request, error: Exception) -> Response:
    return refusal(500, "a bug in the viewer; see its terminal for details")


def serve(
    root: Path,
    host: str,
    port: int,
    say: Callable[[str], None],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve the runs below a folder until Ctrl-C; beyond this machine requests need a token.

    `say` is called with the address (and its token) once it can be opened.
    """
    if not root.is_dir():
        raise RagenError(
            f"there is no folder {root}; name the folder of your runs: ragen view FOLDER"
        )
    with listen(host, port) as listening:
        address, port = listening.getsockname()[:2]
        token = None if is_loopback(address) else secrets.token_urlsafe(24)
        viewer = Viewer(root, port, token)
        say(url_of(listening, host, tls) + (f"?token={token}" if token else ""))
        try:
            Server(viewer.app, tls, viewer.ended.set).serve_on(listening)
        finally:
            viewer.branching.stop()
