"""A server of one application: its address, TLS, and uvicorn's limits of connections."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ragen.core.errors import RagenError

MOST = 96
"""Maximum number of connections at the same time; a further one gets the status 503. An answer
opens up to four files, and the lowest limit of a process that is in use is 256 files."""

MESSAGE_BYTES = 2**20
"""Maximum number of bytes in a message to a WebSocket."""

PONG_S = 60.0
"""Seconds that a WebSocket's client may be out of reach."""

ENDING_S = 2
"""Seconds that unfinished answers may take when the server ends."""


class Server(uvicorn.Server):
    """A server for at most `most` connections; at its end, `ending` has to end endless streams."""

    def __init__(
        self,
        app: ASGIApp,
        tls: ssl.SSLContext | None = None,
        ending: Callable[[], None] = lambda: None,
        most: int = MOST,
        web_sockets: bool = False,
    ) -> None:
        config = uvicorn.Config(
            app,
            http="h11",  # httptools, the default if installed, does not limit the size of headers
            ws="websockets-sansio" if web_sockets else "none",
            ws_max_size=MESSAGE_BYTES,
            ws_per_message_deflate=False,
            ws_ping_timeout=PONG_S,
            limit_concurrency=most,
            lifespan="off",
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=ENDING_S,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        super().__init__(config)
        self._ending = ending

    def serve_on(self, listening: socket.socket) -> None:
        """Serve until Ctrl-C."""
        self.run(sockets=[listening])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Call `ending`, and begin to end."""
        self._ending()
        super().handle_exit(sig, frame)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the reports of unfinished answers that were cut after `ENDING_S`."""
    error = record.exc_info[1] if record.exc_info else None
    return "timeout graceful shutdown" not in f"{record.msg} {error}"


def make_room(files: int) -> int:
    """Let the process open this many files, or as many as the system allows; returns how many."""
    try:
        import resource
    except ImportError:  # Windows
        return files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < files:
        soft = files if hard < 0 else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return files if soft < 0 else min(files, soft)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that the address is known before the server starts.

    A name with several addresses is served on the first one, IPv4 before IPv6.

    Raises:
        RagenError: `host` is no address of this machine, or the port is taken.
    """
    if not host:
        raise RagenError(
            "--host is empty: give an address of this machine, or 0.0.0.0 for all of them"
        )
    listening = None
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        # Without the protocol, asyncio keeps Nagle's algorithm, and each answer waits 40 ms.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if os.name == "posix":  # on Windows it would let two servers share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
        return listening
    except (OSError, OverflowError, ValueError) as error:  # ValueError: `host` is not a name
        if listening is not None:
            listening.close()
        raise _no_place(host, port, error) from None


def url_of(listening: socket.socket, host: str, tls: ssl.SSLContext | None) -> str:
    """The URL of a server on `host`, with the machine's name if it serves all addresses."""
    address, port = listening.getsockname()[:2]
    name = socket.gethostname() if ipaddress.ip_address(address).is_unspecified else host
    name = f"[{name.strip('[]')}]" if ":" in name else name
    return f"{'http' if tls is None else 'https'}://{name}:{port}/"


def _no_place(host: str, port: int, error: Exception) -> RagenError:
    if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
        remedy = "choose another one with --port, or 0 for any free one"
    else:
        remedy = "--host is an address or a name of this machine"
    reason = getattr(error, "strerror", None) or str(error)
    return RagenError(f"cannot listen on {host!r}, port {port}: {reason.lower()}; {remedy}")


def tls_of(cert: Path, key: Path | None) -> ssl.SSLContext:
    """The settings of TLS, from files in PEM format; without `key`, the key is in the file `cert`.

    Raises:
        RagenError: A file cannot be read, or they do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # never ask in the terminal
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        reason = getattr(error, "strerror", None) or str(error)
        raise RagenError(
            f"--tls-cert {cert}: {reason}; give a certificate and its unencrypted key, "
            "both in PEM format, with --tls-cert FILE --tls-key FILE"
        ) from None
    return context
