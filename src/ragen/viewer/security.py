"""Access control: only pages that this server sent may make requests, here or with a token.

Runs are private, and any web site that is open in the same browser can send requests to the viewer.
The check of Host prevents DNS rebinding. Those of Origin and Sec-Fetch-Site refuse other pages,
also those of another port of this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)

HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
    }
)
"""The headers of every answer, errors included."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

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

    Attributes:
        app: The application that answers permitted requests.
        port: The server's port.
        token: What every request has to present; ``None`` if only this machine has access.
        admitted: Gets the client of each permitted request (`ragen.viewer.connections`).
    """

    app: ASGIApp
    port: int
    token: str | None
    admitted: set[tuple[str, int]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # web sockets are not supported; the server closes them
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                store = "no-cache" if scope["path"].startswith("/static/") else "no-store"
                headers["cache-control"] = store
            await send(message)

        request = HTTPConnection(scope)
        refused = self._refusal(request) or self._admission(request)
        if refused is None:
            self.admitted.add(scope["client"])
        answer: ASGIApp = refused or self.app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        """The refusal of a request; ``None`` if it is permitted."""
        headers, method = request.headers, request.scope["method"]
        host = headers.get("host", "")
        if method not in METHODS:
            return refusal(405, f"the method {method} is not supported")
        if len(headers.getlist("host")) != 1 or not (self.token or self._is_ours(host)):
            return refusal(403, "this viewer answers only to localhost and its own port")
        # A page of another port of this machine is "same-site", and still a foreign page.
        site = headers.get("sec-fetch-site", "none")
        is_foreign = request.scope["path"].startswith("/api/") and site not in (
            "same-origin",
            "none",
        )
        own = f"{request.scope['scheme']}://{host}"
        if is_foreign or headers.get("origin", own) != own:
            return refusal(403, "requests from other pages are refused")
        return None

    def _is_ours(self, host: str) -> bool:
        name, colon, port = host.lower().rpartition(":")
        if not colon or host.endswith("]"):  # a browser leaves the port 80 out
            name, port = host.lower(), "80"
        return is_loopback(name) and port == str(self.port)

    def _admission(self, request: HTTPConnection) -> Response | None:
        """With a token: move it from the address into a cookie, or refuse the request."""
        if self.token is None:
            return None
        cookie, asked = f"ragen-{self.port}", request.query_params  # all ports share cookies
        if request.scope["method"] == "GET" and self._knows(asked.get("token", "")):
            rest = urlencode([pair for pair in asked.multi_items() if pair[0] != "token"])
            # A path on this server: two slashes at the start would name another host.
            path = "/" + request.scope["path"].lstrip("/\\")
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            secure = request.scope["scheme"] == "https"
            answer.set_cookie(
                cookie, self.token, secure=secure, httponly=True, samesite="strict", path="/"
            )
            return answer
        if self._knows(request.cookies.get(cookie, "")):
            return None
        return refusal(403, "the token is missing: open the address that ragen view printed")

    def _knows(self, said: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(said.encode(), self.token.encode())


def refusal(status: int, error: str) -> Response:
    """An error, as the API returns it."""
    return JSONResponse({"error": error}, status)
