"""The limits of connections: how many there may be, and how long a client may keep one waiting.

Anybody may connect, and most of an attack happens before a request can be checked. The server
therefore distinguishes admitted clients (`ragen.serving.security`) from strangers, and closes the
connections of strangers first. However many they open, there is room for the user's page.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragen.core.errors import RagenError

PATIENCE_S = 10.0
"""Seconds that a client may take to send a request, or to receive 48 KB of an answer."""

MOST = 96
"""Maximum number of connections at the same time. An answer opens up to four files, and the lowest
limit of a process that is in use is 256 files."""

MOST_EACH = 48
"""Maximum number of connections from one address; a browser opens six."""

LEAST = 8
"""The connections that are kept even if the process has no room for more."""

NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a process or a system that has no room for a connection."""

MESSAGE_BYTES = 2**20
"""Maximum number of bytes in a message to a WebSocket."""

PONG_S = 60.0
"""Seconds that a WebSocket's client may be out of reach."""

QUEUE = 1024
"""Maximum number of connections that the system holds until they are accepted."""

ENDING_S = 2
"""Seconds that unfinished answers may take when the server ends."""

Peer = tuple[str, int]
"""The address and the port of a client."""


class Listening(socket.socket):
    """A listening socket that closes a connection whenever there would be too many.

    It closes the oldest connection of a stranger, first of strangers at an address from which
    nobody was admitted. If there are no strangers, it closes the oldest connection of all.

    Attributes:
        admitted: The clients with a permitted request.
        most: The most connections at the same time; fewer once the process has run out of files.
        most_each: The most connections from one address.
    """

    def __init__(self, family: socket.AddressFamily) -> None:
        # Without the protocol, asyncio keeps Nagle's algorithm, and each answer waits 40 ms.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.admitted: set[Peer] = set()
        self.most, self.most_each = MOST, MOST_EACH
        self._open: dict[Peer, tuple[socket.socket, float]] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection, as `socket.socket.accept` returns it."""
        try:
            client, address = super().accept()
        except BlockingIOError:
            raise
        except OSError as error:  # asyncio would write a traceback at each attempt
            if error.errno in NO_ROOM:
                self.most = max(LEAST, len(self._open) // 2)
                self._make_room()
            time.sleep(0.1)  # asyncio would try again at once
            raise BlockingIOError from None
        peer = address[:2]
        self._make_room(peer)
        self._open[peer] = client, time.monotonic()
        return client, address

    def release(self, peer: Peer) -> None:
        """Stop counting a connection; the code that takes it over has to limit it."""
        self._open.pop(peer, None)

    def close_strangers(self, now: float) -> None:
        """Close the connections that had no permitted request within `PATIENCE_S`."""
        for peer, (_, begun) in list(self._open.items()):
            if peer not in self.admitted and now - begun > PATIENCE_S:
                self._shut(peer)

    def _make_room(self, newcomer: Peer | None = None) -> None:
        """Close connections until there is room for one more."""
        self._open = {peer: each for peer, each in self._open.items() if each[0].fileno() >= 0}
        self.admitted.intersection_update(self._open)
        same = [peer for peer in self._open if newcomer and peer[0] == newcomer[0]]
        if len(same) >= self.most_each:
            self._shut(self._first(same))
        while len(self._open) >= self.most:
            self._shut(self._first(list(self._open)))

    def _first(self, peers: list[Peer]) -> Peer:
        """The client whose connection is closed first; `peers` are in order of arrival."""
        known = {host for host, _ in self.admitted}
        return min(peers, key=lambda peer: (peer in self.admitted, peer[0] in known))

    def _shut(self, peer: Peer) -> None:
        """Shut a connection down; its transport then closes it."""
        client, _ = self._open.pop(peer)
        with suppress(OSError):  # the client was faster
            client.shutdown(socket.SHUT_RDWR)


class Connection(H11Protocol):
    """A connection that is closed if its client keeps the server waiting."""

    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The wait for the first request begins."""
        super().connection_made(transport)
        self._since = time.monotonic()

    def on_response_complete(self) -> None:
        """The wait for the next request begins."""
        self._since = time.monotonic()
        super().on_response_complete()

    def resume_writing(self) -> None:
        """The client took a part of an answer."""
        super().resume_writing()
        self._since = time.monotonic()

    def close_if_late(self, now: float) -> None:
        """Close the connection if the client has been awaited for `PATIENCE_S`."""
        unsent = self.transport.get_write_buffer_size() > 0
        if not unsent and self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._since = now  # the server is at work
        elif now - self._since > PATIENCE_S:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; if an answer has begun, no second one can be sent."""
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:
            self.transport.abort()


class Server(uvicorn.Server):
    """A server of one application, with limits.

    When it ends, it calls `ending` first, which has to end endless streams.
    """

    def __init__(
        self,
        app: ASGIApp,
        tls: ssl.SSLContext | None = None,
        ending: Callable[[], None] = lambda: None,
        web_sockets: bool = False,
    ) -> None:
        config = uvicorn.Config(
            app,
            # httptools, the default if installed, does not limit the size of headers.
            http=Connection,
            ws="websockets-sansio" if web_sockets else "none",
            ws_max_size=MESSAGE_BYTES,
            ws_per_message_deflate=False,
            ws_ping_timeout=PONG_S,
            lifespan="off",
            # The default of Windows does not call `Listening.accept`.
            loop="asyncio:SelectorEventLoop",
            # asyncio accepts as many at once before it looks at the first, or at an error.
            backlog=1,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=ENDING_S + 1,
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self._ending = ending
        self._listening: Listening

    def serve_on(self, listening: Listening) -> None:
        """Serve until Ctrl-C."""
        self._listening = listening
        self.run(sockets=[listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._listening.listen(QUEUE)  # uvicorn set it to its backlog

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; without `_abort`, TLS would wait half a minute for a client that does not close."""
        asyncio.get_running_loop().call_later(ENDING_S, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        """Close the connections of late clients; called ten times a second."""
        now = time.monotonic()
        self._listening.close_strangers(now)
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):  # not a WebSocket
                connection.close_if_late(now)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Call `ending`, and begin to end."""
        self._ending()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> Listening:
    """A listening socket, so that the address is known before the server starts.

    A name with several addresses is served on the first one that can be bound, IPv4 before IPv6.

    Raises:
        RagenError: `host` is no address of this machine, or the port is taken.
    """
    if not host:
        raise RagenError(
            "--host is empty: give an address of this machine, or 0.0.0.0 for all of them"
        )
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, ValueError) as error:  # ValueError: it is not a name
        raise _no_place(host, port, error) from None
    problem: OSError | None = None
    for family, *_, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        listening = None
        try:
            listening = Listening(family)
            if os.name == "posix":  # on Windows it would let two servers share a port
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(QUEUE)
            return listening
        except OSError as error:
            if listening is not None:
                listening.close()
            problem = problem or error
    assert problem is not None
    raise _no_place(host, port, problem)


def url_of(listening: Listening, host: str, tls: ssl.SSLContext | None) -> str:
    """The URL of a server on `host`; that of a server on all addresses has the machine's name."""
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
    """What TLS needs, from files in PEM format; without `key`, the key is in the file `cert`.

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
