"""`ragen serve`: an environment as a server of OpenEnv's protocol.

A session is one WebSocket with its own environment. An environment in this process is called in the
loop's thread, where its time can be limited; a hang delays the other sessions until the limit. With
``env.isolate``, it is called in a thread of its session, and delays no other session.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ragen.core.errors import RagenError
from ragen.core.user_code import UserCodeError
from ragen.envs.adapters.adapted import missing
from ragen.envs.adapters.openenv import TOKEN
from ragen.rollout.setup import Setup
from ragen.serving.sessions import Answer, Description, Refused, Session, describe
from ragen.web.security import AccessControl, is_loopback, token_in
from ragen.web.server import MOST, Server, listen, make_room, url_of

Result = TypeVar("Result")

IDLE_S = 3600.0
"""Seconds a client may take to send a message; its model may be slow."""

RESERVE = 64
"""Number of files that the process may open besides connections."""


class EnvServer:
    """The application `app`, and the sessions in progress, at most `most`.

    Without a `token`, only this machine has access. `report` gets a line for each failed session.
    """

    def __init__(
        self,
        setup: Setup,
        about: Description,
        most: int,
        port: int,
        token: str | None,
        report: Callable[[str], None],
    ) -> None:
        self._setup, self._most, self._report = setup, most, report
        self.num_sessions = 0
        answers: dict[str, Answer] = {"/health": {"status": "healthy"}}
        answers |= {f"/{name}": answer for name, answer in about._asdict().items()}
        routes = [Route(path, JSONResponse(answer)) for path, answer in answers.items()]
        app = Starlette(routes=[*routes, WebSocketRoute("/ws", self._session)])
        self.app = AccessControl(app, port, token)

    async def _session(self, client: WebSocket) -> None:
        await client.accept()
        if self.num_sessions >= self._most:
            await _end(client, "CAPACITY_REACHED", f"all {self._most} sessions are taken")
            return
        self.num_sessions += 1
        thread = ThreadPoolExecutor(1) if self._setup.venue.waits else None
        try:
            await self._play(client, thread)
        finally:
            self.num_sessions -= 1
            if thread is not None:
                thread.shutdown(wait=False)

    async def _play(self, client: WebSocket, thread: ThreadPoolExecutor | None) -> None:
        """Make an environment and answer messages about it until the session ends."""
        try:
            session = await _called(thread, lambda: Session(self._setup))
        except UserCodeError as failure:
            await self._fail(client, "FACTORY_ERROR", failure)
            return
        try:
            await self._answer(client, session, thread)
        except WebSocketDisconnect:
            pass
        except TimeoutError:
            await _end(client, "SESSION_ERROR", f"the session was idle for {IDLE_S:g} s")
        except UserCodeError as failure:
            await self._fail(client, "EXECUTION_ERROR", failure)
        # This is not in a `finally`: when the server ends, this task is cancelled, and closing here
        # could wait for a call that hangs. `Setup.close` then stops the processes that are left.
        await _called(thread, session.close)

    async def _answer(
        self, client: WebSocket, session: Session, thread: ThreadPoolExecutor | None
    ) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                message = await client.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text") or ""  # bytes are no message of the protocol
            try:
                answer = await _called(thread, partial(session.answer, text))
            except Refused as refused:
                answer = _error(refused.code, str(refused))
            if answer is None:
                return
            await client.send_text(json.dumps(answer))

    async def _fail(self, client: WebSocket, code: str, failure: UserCodeError) -> None:
        self._report(f"a session failed: {failure.reason}")
        await _end(client, code, failure.reason)


async def _called(thread: ThreadPoolExecutor | None, call: Callable[[], Result]) -> Result:
    if thread is None:
        return call()
    return await asyncio.get_running_loop().run_in_executor(thread, call)


def _error(code: str, text: str) -> Answer:
    return {"type": "error", "data": {"message": text, "code": code}}


async def _end(client: WebSocket, code: str, text: str) -> None:
    """End a session with an error, which is sent if the client still reads."""
    with suppress(WebSocketDisconnect):
        await client.send_text(json.dumps(_error(code, text)))
        await client.close()


def serve(
    setup: Setup,
    host: str,
    port: int,
    most: int,
    say: Callable[[str, str | None], None],
    report: Callable[[str], None],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve an environment in at most `most` sessions at the same time, until Ctrl-C.

    The token is in the environment variable ``OPENENV_TOKEN``. Without one, an address beyond this
    machine gets a new token. `say` is called once clients can connect, with the URL and what they
    set as the token: a new token, or the name of the variable that has the user's own token.
    `report` gets a line for each failed session.

    Raises:
        RagenError: The package for WebSockets is not installed, the token is not valid, the
            environment fails, there is no such address, or the port is taken.
    """
    if find_spec("websockets") is None:
        raise missing("ragen serve", "websockets", "openenv")
    token = token_in(TOKEN)
    shown = None if token is None else f"${TOKEN}"
    # For each session, one more connection may wait. An environment's process takes three files.
    make_room(most * (5 if setup.venue.workers else 2) + MOST + RESERVE)
    try:
        about = describe(setup)
    except UserCodeError as failure:
        raise RagenError(
            f"the environment {setup.env!r} failed: {failure.reason}; run `ragen check` on it"
        ) from failure
    with listen(host, port) as listening:
        if token is None and not is_loopback(listening.getsockname()[0]):
            shown = token = secrets.token_urlsafe(24)
        server = EnvServer(setup, about, most, listening.getsockname()[1], token, report)
        say(url_of(listening, host, tls), shown)
        Server(server.app, tls, most=most + MOST, web_sockets=True).serve_on(listening)
