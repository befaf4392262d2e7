"""What a server sends over HTTP, of which the server decides the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

import httpx

MOST_BYTES = 2**26
"""Maximum number of bytes of an answer, before it is decompressed."""


class BoundedStream:
    """The body of an answer, which raises `httpx.ReadError` where it is too long.

    It may have `MOST_BYTES` bytes, and take `seconds`: the time limit of httpx is for one part.
    """

    def __init__(self, stream: Any, seconds: float) -> None:
        self._stream, self._left, self._until = stream, MOST_BYTES, time.monotonic() + seconds
        self._seconds = seconds

    def __iter__(self) -> Iterator[bytes]:
        return map(self._counted, self._stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield self._counted(part)

    def close(self) -> None:
        """Release the connection."""
        self._stream.close()

    async def aclose(self) -> None:
        """Release the connection."""
        await self._stream.aclose()

    def _counted(self, part: bytes) -> bytes:
        self._left -= len(part)
        if self._left < 0:
            raise httpx.ReadError(f"an answer of more than {MOST_BYTES >> 20} MiB")
        if time.monotonic() > self._until:
            raise httpx.ReadTimeout(f"an answer of more than {self._seconds:g} s")
        return part


def bound(response: httpx.Response, seconds: float = float("inf")) -> None:
    """Bound what is read of an answer; an event hook for the responses of an `httpx.Client`."""
    kind: Any = type(response.stream)
    response.stream = _bounded(kind)(response.stream, seconds)


async def bound_async(response: httpx.Response) -> None:
    """`bound` as an event hook of an `httpx.AsyncClient`, or of one of httpx2."""
    bound(response)


@cache
def _bounded(kind: Any) -> Any:
    """Bounded streams of a kind that the client accepts."""
    return type("BoundedStream", (BoundedStream, kind), {})
