"""Tools of MCP servers, through the official client library.

A server is a command, which is started and reached over its standard streams, or a URL, which is
reached over streamable HTTP. A session belongs to one environment and one episode. The first call
of a tool opens it, and the next `reset` or `close` of the environment closes it. So no state of a
session passes from one episode to another, and a server that dies or hangs fails one episode.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, TextIO, cast

from anyio import BrokenResourceError, ClosedResourceError

from ragen.core.errors import RagenError, last_line, printable
from ragen.core.user_code import UserCodeError, boundary
from ragen.core.waiting import begin, wait
from ragen.envs.adapters.adapted import Played, Replayed, missing
from ragen.envs.contract import Schema
from ragen.envs.tools import Tool, ToolEnv, ToolError, read_call

CALL_S = 60.0
"""Seconds that a server may take to answer, unless the limit of the call is shorter."""
CLOSE_S = 5.0
"""Seconds that a session may take to close; the library ends a process after two or four."""
MOST_PAGES = 100
"""Maximum number of pages of a server's list of tools."""
SAID_CHARS, SAID_BYTES = 300, 2**16
"""What is shown of a server's last line of error, which is looked for at the end of its output."""
INVALID_PARAMS = -32602
"""JSON-RPC's error for a wrong call; the agent reads it, like an error of the tool."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: a command with its environment variables, or a URL with its headers."""

    command: tuple[str, ...] = ()
    url: str = ""
    values: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"the MCP server {self.url or shlex.join(self.command)}"


class McpServer:
    """A server whose tools an environment offers.

    `address` is a command, as one text or as a list of words, or a URL that begins with ``http://``
    or ``https://``. A command gets the few environment variables that the library considers
    harmless, and `env`. `headers`, such as a token, go with every request to a URL.

    Raises:
        RagenError: The package mcp is not installed, or the address is empty.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(address, str) and address.startswith(("http://", "https://")):
            self.address = Address(url=address, values=tuple((headers or {}).items()))
        else:
            words = shlex.split(address) if isinstance(address, str) else address
            self.address = Address(tuple(words), values=tuple((env or {}).items()))
            if not words:
                raise RagenError("an MCP server needs a command or a URL")
        if find_spec("mcp") is None:
            raise missing(str(self.address), "mcp", "mcp")
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # episodes report failures
        self._session: _Session | None = None

    def tools(self) -> list[Tool]:
        """The server's tools. Each process asks a server for them once.

        Raises:
            RagenError: The server cannot be started or reached, or it has no tools.
        """
        return [Tool(*about, partial(self._call, about[0])) for about in _listed(self.address)]

    def interrupt(self) -> None:
        """Let the call in progress in another thread fail soon."""
        if self._session is not None:
            self._session.interrupt()

    def close(self) -> None:
        """End the session, if there is one; the next call begins a new session."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self._session is None:
            self._session = _Session(self.address)
        return str(self._session.run(self._session.call(name, dict(arguments))))


class McpEnv(Replayed, ToolEnv):
    """An environment with the tools of MCP servers and with its own methods marked `tool`.

    A subclass names its `servers` and defines `rules`, `goal`, `begin` and `answer`. If a server
    gives other answers when a snapshot is restored, the environment cannot be branched, but
    everything else works.
    """

    waits = "threads"
    servers: ClassVar[Sequence[str | McpServer]] = ()
    """Commands or URLs, as `McpServer` takes them, or `McpServer` objects, which are copied."""

    @cached_property
    def _opened(self) -> list[McpServer]:
        return [McpServer(each) if isinstance(each, str) else copy(each) for each in self.servers]

    def toolbox(self) -> Sequence[Tool]:
        found = [*super().toolbox(), *(tool for each in self._opened for tool in each.tools())]
        names = [each.name for each in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise RagenError(f"{type(self).__name__} has several tools of the name {min(twice)!r}")
        return found

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self._hang_up()
        return super().reset(seed=seed, options=options)

    def play(self, action: str) -> Played:
        call = read_call(action)
        if call is not None:
            return Played(self.result(call), 0.0, False, False, False)
        observation, reward, terminated, truncated, info = self.answer(action)
        return Played(observation, reward, terminated, truncated, info["success"])

    def interrupt(self) -> None:
        for each in self._opened:
            each.interrupt()

    def close(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        for each in self._opened:
            each.close()


class _Session:
    """An open session. A task holds it, because the task that opens one has to close it, too."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - `close` does
        self._ready, self._closing = asyncio.Event(), asyncio.Event()
        self._client: Any = None
        self._holder: asyncio.Task[None] = wait(begin(self._begin()))
        try:
            self.run(self._ready.wait())
        except BaseException:
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine; `RuntimeError` if the session ends first or after `CALL_S`."""
        return wait(begin(self._within(coroutine)))

    async def tools(self) -> list[tuple[str, str, Schema]]:
        """The server's tools: name, description and the JSON schema of the arguments."""
        from mcp.types import PaginatedRequestParams

        found, cursor = list[tuple[str, str, Schema]](), None
        for _ in range(MOST_PAGES):
            page = await self._client.list_tools(params=PaginatedRequestParams(cursor=cursor))
            said = page.model_dump(by_alias=True)  # the protocol's names, in mcp 1 and 2
            found += [(t["name"], t["description"] or "", t["inputSchema"]) for t in said["tools"]]
            if not (cursor := said["nextCursor"]):
                return found
        raise RuntimeError(f"{self._address} lists more than {MOST_PAGES} pages of tools")

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text that a call returns; a wrong call, or one that failed, raises `ToolError`."""
        import mcp

        refused: type[Any] = vars(mcp).get("MCPError") or vars(mcp)["McpError"]  # of mcp 2, or 1
        try:
            answer = await self._client.call_tool(name, arguments)
        except refused as error:
            if error.error.code == INVALID_PARAMS:
                raise ToolError(error.error.message) from None
            raise RuntimeError(f"{self._address}: {error.error.message}") from None
        said = answer.model_dump(by_alias=True)
        text = text_of(said["content"], said["structuredContent"])
        if said["isError"]:
            raise ToolError(text)
        return text

    def interrupt(self) -> None:
        """Let the session end soon, and with it the call in progress."""
        begin(self._end())

    def close(self) -> None:
        """End the session and the process of a command; an error of the session is ignored."""
        with boundary("closing a session with an MCP server"):
            wait(begin(self._end()))
        self._log.close()

    async def _within(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        work = asyncio.ensure_future(coroutine)
        try:
            async with asyncio.timeout(CALL_S):
                await asyncio.wait({work, self._holder}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise RuntimeError(f"{self._address} gave no answer in {CALL_S:g} s") from None
        finally:
            if not work.done():
                work.cancel()
        if not work.done() or work.cancelled():
            raise RuntimeError(f"{self._address}: {self._reason()}")
        return work.result()

    async def _begin(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        from mcp import ClientSession

        async with self._streams() as (reads, writes), ClientSession(reads, writes) as client:
            await client.initialize()
            self._client = client
            self._ready.set()
            await self._closing.wait()

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        address, values = self._address, dict(self._address.values)
        if address.url:
            async with (
                _http().AsyncClient(headers=values, timeout=CALL_S, verify=_certificates()) as http,
                streamable_http_client(address.url, http_client=http) as (reads, writes, *_),
            ):
                yield reads, writes
        else:
            command, *rest = address.command
            server = StdioServerParameters(command=command, args=rest, env=values)
            async with stdio_client(server, errlog=cast(TextIO, self._log)) as streams:
                yield streams

    async def _end(self) -> None:
        self._closing.set()
        await asyncio.wait({self._holder}, timeout=CLOSE_S)
        self._holder.cancel()  # nothing, if it has ended
        if self._holder.done() and not self._holder.cancelled():
            self._holder.exception()  # marks it as seen, so that asyncio does not report it

    def _reason(self) -> str:
        ended = self._holder.done() and not self._holder.cancelled()
        error = self._holder.exception() if ended else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, (BrokenResourceError, ClosedResourceError)):  # they have no text
            said = "Connection closed"
        else:
            said = "the session has ended" if error is None else f"{type(error).__name__}: {error}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - SAID_BYTES))
        last = last_line(self._log.read())[-SAID_CHARS:]
        return printable(" ".join((f"{said} ({last})" if last else said).split()))


def _http() -> Any:
    """The HTTP library of the installed mcp, 1 or 2."""
    import mcp

    return import_module("httpx2" if hasattr(mcp, "MCPError") else "httpx")


@cache
def _certificates() -> Any:
    """Read once: that takes 40 ms, most of what a session costs."""
    return _http().create_ssl_context()


@lru_cache(maxsize=16)
def _listed(address: Address) -> tuple[tuple[str, str, Schema], ...]:
    try:
        about = "listing the tools of an MCP server"
        with boundary(about), closing(_Session(address)) as session:
            found = session.run(session.tools())
    except UserCodeError as failure:
        raise RagenError(failure.reason.removeprefix("RuntimeError: ")) from None
    if not found:
        raise RagenError(f"{address} has no tools")
    return tuple(found)


def text_of(content: Sequence[Mapping[str, Any]], structured: Any) -> str:
    r"""The result of a tool as text; a part that is not text is named by its kind.

    Example:
        >>> text_of([{"type": "text", "text": "4 apples"}, {"type": "image", "data": "…"}], None)
        '4 apples\n[image]'
    """
    parts = []
    for part in content:
        text = part.get("resource", part).get("text")
        parts.append(f"[{part['type']}]" if text is None else text)
    if not parts and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(parts)
