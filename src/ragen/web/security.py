"""Access control: who may make requests, from this machine or with a token.

Any web site that is open in a browser of this machine can send requests to a server on it. The
check of Host prevents DNS rebinding: no site can have a loopback name. The port may be another one,
as of ``ssh -L 9000:localhost:7246``. The checks of Origin and Sec-Fetch-Site refuse the pages of
other servers, even those of another port of this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragen.core.errors import RagenError

METHODS = ("GET", "HEAD", "POST")

MIN_TOKEN = 8
"""The least number of characters of a token."""

PORT = re.compile(r":[0-9]*$", re.ASCII)
"""The end of a Host with a port; a browser leaves out the scheme's own."""


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("localhost")
        (True, False, True)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class AccessControl:
    """An application behind the checks.

    A token is presented as a bearer token (RFC 6750). A server of pages overrides this. Without a
    token, only this machine has access.
    """

    app: ASGIApp
    port: int
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers(scope["path"]).items():
                    headers[name] = value
            await send(message)

        request = HTTPConnection(scope)
        refused = self._refusal(request)
        if refused is None and self.token is not None:
            refused = self.admission(request, self.token)
        answer: ASGIApp = refused or self.app
        await answer(scope, receive, send_with_headers)

    def headers(self, path: str) -> Mapping[str, str]:
        """The headers of every answer to a path, errors included."""
        return {"x-content-type-options": "nosniff", "cache-control": "no-store"}

    def is_open(self, path: str) -> bool:
        """True if a page of another server may link to a path."""
        return False

    def admission(self, request: HTTPConnection, token: str) -> Response | None:
        """The refusal of a request that does not present the token; ``None`` if it does."""
        scheme, _, said = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_equal(said.strip(), token):
            return None
        answer = refusal(401, "the token is missing or wrong: send Authorization: Bearer TOKEN")
        answer.headers["www-authenticate"] = "Bearer"
        return answer

    def _refusal(self, request: HTTPConnection) -> Response | None:
        """The refusal of a request, whatever its token; ``None`` if it is permitted."""
        headers, method = request.headers, request.scope.get("method", "GET")  # none: a WebSocket
        host = headers.get("host", "")
        if method not in METHODS:
            return refusal(405, f"the method {method} is not supported")
        if len(headers.getlist("host")) != 1 or not (
            self.token or is_loopback(PORT.sub("", host.lower()))
        ):
            return refusal(403, "this server answers only to localhost: use that name")
        # A page of another port of this machine is "same-site", and still a foreign page.
        site = headers.get("sec-fetch-site", "none")
        is_foreign = not self.is_open(request.scope["path"]) and site not in ("same-origin", "none")
        own = f"{request.scope['scheme'].replace('ws', 'http')}://{host}"
        origin = headers.get("origin", own)
        # A proxy may change the Host; a page of this server then has another address than `own`.
        name = PORT.sub("", origin.partition("://")[2])
        is_vouched = site == "same-origin" and (self.token is not None or is_loopback(name))
        if is_foreign or not (origin == own or is_vouched):
            return refusal(403, "requests from other pages are refused")
        return None


def token_in(variable: str) -> str | None:
    """The token in an environment variable, ``None`` without one.

    Raises:
        RagenError: It is too short, or cannot be sent in a header.
    """
    token = os.environ.get(variable, "").strip()
    if token and (len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable()):
        raise RagenError(f"{variable}: expected at least {MIN_TOKEN} ASCII characters")
    return token or None


def is_equal(said: str, token: str) -> bool:
    """True if a text is the token; the time does not reveal how many characters agree."""
    return hmac.compare_digest(said.encode(), token.encode())


def refusal(status: int, error: str) -> Response:
    """The answer of a server that refuses a request."""
    return JSONResponse({"error": error}, status)
