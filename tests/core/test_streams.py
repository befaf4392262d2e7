"""An answer over HTTP whose end never comes: it is given up after a number of bytes or seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

import httpx
import pytest

from ragen.core import streams


class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Parts of one KiB without an end; it fails where far too many are read."""

    def __init__(self, pause: float = 0.0) -> None:
        self._pause = pause

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(100):
            time.sleep(self._pause)
            yield b" " * 1024
        raise AssertionError("it is read without a bound")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


def answering(pause: float = 0.0) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(200, stream=Endless(pause)))


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_BYTES", 2**14)
    hooks = {"response": [streams.bound]}
    with (
        httpx.Client(transport=answering(), event_hooks=hooks) as client,
        pytest.raises(httpx.ReadError, match="an answer of more than"),
    ):
        client.get("http://there")

    async def ask() -> None:
        hooks = {"response": [streams.bound_async]}
        async with httpx.AsyncClient(transport=answering(), event_hooks=hooks) as client:
            await client.get("http://there")

    with pytest.raises(httpx.ReadError, match="an answer of more than"):
        asyncio.run(ask())


def test_an_answer_that_trickles_is_given_up() -> None:
    hooks = {"response": [partial(streams.bound, seconds=0.05)]}
    with (
        httpx.Client(transport=answering(0.01), event_hooks=hooks) as client,
        pytest.raises(httpx.ReadTimeout, match=r"an answer of more than 0.05 s"),
    ):
        client.get("http://there")
