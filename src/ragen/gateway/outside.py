"""An agent outside: programs in any language fetch tasks, work on them and post rewards.

RAGEN starts no program. ``POST /v1/episodes`` answers with the task, key and address of a waiting
episode. The program's calls carry this key, and ``POST /v1/reward`` ends the episode. While no
episode waits, the server sends white space, which JSON allows before a value; it keeps the client
from giving up. After the run the answer is ``null``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp
from typing_extensions import override

from ragen.core.errors import RagenError
from ragen.core.waiting import begin
from ragen.gateway.agents import Outcome
from ragen.gateway.bodies import error_of
from ragen.gateway.messages import Refused
from ragen.gateway.server import Gateway, body_of, key_of
from ragen.web.security import AccessControl, is_loopback, token_in
from ragen.web.server import url_of

T = TypeVar("T")

ADDRESS = "127.0.0.1:8000"
"""Where programs fetch their tasks, unless the user names another address."""
TOKEN = "RAGEN_GATEWAY_TOKEN"
"""The environment variable of the token that programs send to fetch a task."""
EPISODES = "/v1/episodes"
QUIET_S = 10.0
"""Seconds after which a program that waits for a task gets white space, so that it goes on."""
LAST_S = 0.5
"""Seconds that the server stays after the run, so that programs can ask again and get ``null``."""


class _Offer:
    """An episode for a program, in the loop of its run; the methods are for another thread."""

    def __init__(self, key: str, task: Mapping[str, Any], timeout_s: float) -> None:
        self.about = {"key": key, "task": task, "timeout_s": timeout_s}
        self._loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[None] = self._loop.create_future()
        self.outcome: asyncio.Future[Outcome] = self._loop.create_future()

    def take(self) -> None:
        """Note that a program has fetched the task."""
        self._loop.call_soon_threadsafe(_resolve, self.taken, None)

    def end(self, body: Mapping[str, Any]) -> None:
        """End the episode with what a program has posted; the first post counts."""
        error = body.get("error")
        outcome = Outcome(body, None if error is None else str(error), False)
        self._loop.call_soon_threadsafe(_resolve, self.outcome, outcome)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    """Set a result once; a run that stops has cancelled what it waited for."""
    if not future.done():
        future.set_result(value)


class Outside(Gateway):
    """The server of a run whose agent is outside, at an `address` such as ``127.0.0.1:8000``.

    Raises:
        RagenError: It is no address, it is taken, or other machines reach it without a token.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()):
            raise RagenError(f"{address!r} is no address: expected HOST:PORT, as {ADDRESS}")
        token = token_in(TOKEN)
        if token is None and not is_loopback(host):
            raise RagenError(
                f"other machines reach {address}: put a token into the environment variable "
                f"{TOKEN}; programs send it to {EPISODES} as Authorization: Bearer TOKEN"
            )
        super().__init__(host, int(port))
        self.invitation = f"programs fetch tasks with POST {url_of(self.listening, host, None)}"
        self.invitation += EPISODES.lstrip("/") + (f" and the token in {TOKEN}" if token else "")
        self._token = token
        self._waiting: asyncio.Queue[_Offer | None] = asyncio.Queue()
        self._offers: dict[str, _Offer] = {}
        self.serve()

    async def offer(self, task: Mapping[str, Any], key: str, timeout_s: float) -> Outcome:
        """Let a program work on a task. Its time begins when it has fetched the task."""
        offer = self._offers[key] = _Offer(key, task, timeout_s)
        begin(self._waiting.put(offer))
        try:
            await offer.taken
            async with asyncio.timeout(timeout_s):
                return await offer.outcome
        except TimeoutError:
            return Outcome(None, f"no reward was posted in {timeout_s:g} s", True)
        finally:
            del self._offers[key]

    @override
    def close(self) -> None:
        begin(self._waiting.put(None))
        time.sleep(LAST_S)
        super().close()

    @override
    def application(self) -> ASGIApp:
        return _Access(super().application(), self.listening.getsockname()[1], self._token)

    @override
    def routes(self) -> list[Route]:
        fetch = Route(EPISODES, self._fetch, methods=["POST"])
        reward = Route("/v1/reward", self._reward, methods=["POST"])
        return [*super().routes(), fetch, reward]

    async def _fetch(self, http: HttpRequest) -> Response:
        found = self._next(f"{http.base_url}v1")
        return StreamingResponse(found, media_type="application/json")

    async def _next(self, base_url: str) -> AsyncIterator[str]:
        """The next waiting episode as JSON; at the end of the run every program gets ``null``."""
        while True:
            try:
                async with asyncio.timeout(QUIET_S):
                    offer = await self._waiting.get()
            except TimeoutError:
                yield "\n"
                continue
            if offer is None or offer.about["key"] in self._offers:
                break
        about = None if offer is None else {**offer.about, "base_url": base_url}
        is_taken = False
        try:
            yield f"{json.dumps(about)}\n"
            is_taken = offer is not None
        finally:
            if offer is not None and is_taken:
                offer.take()
            else:  # the program has left
                self._waiting.put_nowait(offer)

    async def _reward(self, http: HttpRequest) -> Response:
        try:
            self.episode_of(http)
            _, body = await body_of(http)
        except Refused as refused:
            return JSONResponse(error_of(refused), refused.status)
        if offer := self._offers.get(key_of(http)):
            offer.end(body)
        return JSONResponse({})


class _Access(AccessControl):
    """The token is for fetching tasks; an episode's other requests have its key."""

    @override
    def admission(self, request: HTTPConnection, token: str) -> Response | None:
        return super().admission(request, token) if request.url.path == EPISODES else None
