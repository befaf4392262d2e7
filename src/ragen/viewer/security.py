"""Access control of the viewer: only pages that it served itself may make requests.

Runs are private. Beyond this machine, the printed address holds the token, and a cookie keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from typing_extensions import override

from ragen.web.security import AccessControl, is_equal, refusal

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)

HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""The headers of every answer, errors included."""


class PageAccess(AccessControl):
    """The viewer's application behind the checks."""

    __slots__ = ()

    @override
    def headers(self, path: str) -> Mapping[str, str]:
        store = "no-cache" if path.startswith("/static/") else "no-store"
        return {**HEADERS, "cache-control": store}

    @override
    def is_open(self, path: str) -> bool:
        return not path.startswith("/api/")

    def admission(self, request: HTTPConnection, token: str) -> Response | None:
        """Move the token from the address into a cookie, or refuse a request without either."""
        cookie, asked = f"ragen-{self.port}", request.query_params  # all ports share cookies
        if request.scope.get("method") == "GET" and is_equal(asked.get("token", ""), token):
            rest = urlencode([pair for pair in asked.multi_items() if pair[0] != "token"])
            # A path on this server: two slashes at the start would name another host.
            path = "/" + request.scope["path"].lstrip("/\\")
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            secure = request.scope["scheme"] == "https"
            answer.set_cookie(
                cookie, token, secure=secure, httponly=True, samesite="strict", path="/"
            )
            return answer
        if is_equal(request.cookies.get(cookie, ""), token):
            return None
        return refusal(403, "the token is missing: open the address that ragen view printed")
