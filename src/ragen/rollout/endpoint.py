"""A policy that is any model behind an OpenAI-compatible chat endpoint.

Completions have text and the server's token counts but no ids: they can be evaluated, not trained
on. An error that the user can fix (a wrong key, model or address) ends the command at once, with
one line. After a temporary error (a busy or broken server) the request is repeated, with growing
waits. Any other error ends its episode, which is kept as data.

Nothing that a server sends is trusted. Requests have a time limit, and answers a maximum size. No
compression, charset, redirect or cookie of the server is accepted, and its messages are escaped.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from ragen.core.errors import RagenError, printable
from ragen.core.seeding import derive
from ragen.core.types import Completion, Prompt
from ragen.envs.contract import Schema
from ragen.rollout.dialects import Dialect, Refusal, read_refusal
from ragen.rollout.endpoint_format import WrongAnswer, read_reply
from ragen.rollout.policies import NoCompletion

KEY_ENV = "OPENAI_API_KEY"
"""Default environment variable of the key."""
CONNECT_S = 4.5
"""Time limit for opening a connection."""
TEMPORARY = (408, 409, 424, 425, 429)
"""Status codes below 500 after which the same request may succeed later."""
MAX_BODY = 2**22
"""Maximum size of an answer in bytes, about a million tokens of text."""
CHECK_ADDRESS = "check its address: most OpenAI-compatible servers end in /v1"
"""The remedy if a server never gave a completion."""
MAX_SHOWN = 300
"""Maximum number of characters that are shown of a server's error message."""
SECRET = re.compile(r"[^@]*//[^/]*@|[^/]*@|.*[?#]", re.DOTALL)
"""An address with a password, a query or a fragment, which may be a secret."""


TRIES = 8
"""Maximum number of attempts for one completion."""
LONG_S = 900.0
"""Seconds that the attempts may take with the waits between them."""
SHORT_S = 4.0
"""The same where repeating rarely helps: the server cannot be reached, or gives no completion."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Bounds of a wait between two attempts."""
MAX_LOST = 16
"""Lost completions in a row after which the server is gone."""


def wait_s(number: int, chance: float) -> float:
    """Seconds to wait after an attempt, counted from 0: exponential backoff with equal jitter.

    min(longest, first · 2^number) · (½ + ½ · chance), where the chance from 0 to 1 spreads requests
    that failed together (Brooker, AWS Architecture Blog, 2015).
    """
    return min(LONGEST_WAIT_S, math.ldexp(FIRST_WAIT_S, number)) * (0.5 + 0.5 * chance)


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server, its key and its limits.

    ``/chat/completions`` is added to `base_url`, which usually ends in ``/v1``. `key_env` names the
    environment variable of the key; ``None`` reads `default_key_env` if it is set. `timeout_s` is
    for one request. `requests_per_minute` limits how many requests begin; 0 sets no limit.

    Raises:
        RagenError: The address is invalid or has a password, a number is out of range, or the named
            variable is not set or cannot be a key.
    """

    base_url: str
    key_env: str | None = None
    timeout_s: float = 120.0
    requests_per_minute: float = 0.0
    default_key_env: str = KEY_ENV
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = self.key_env or self.default_key_env
        key = f"put the key into the environment variable {name}"
        check_address("--base-url", self.base_url, key)
        if not 0 < self.timeout_s < math.inf:
            raise RagenError(f"--timeout {self.timeout_s:g}: expected seconds above 0")
        if not 0 <= self.requests_per_minute < math.inf:
            raise RagenError(f"--rpm {self.requests_per_minute:g}: expected a number ≥ 0")
        key = os.environ.get(name, "").strip()
        if self.key_env and not key:
            raise RagenError(f"--key-env {self.key_env}: that environment variable is not set")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise RagenError(f"what {name} holds cannot be a key; set it anew")
        object.__setattr__(self, "key", key)

    @property
    def url(self) -> str:
        """The address of requests."""
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def shown(self, text: str) -> str:
        """A message from outside for one line of RAGEN's: escaped, cut, and without the key."""
        words = " ".join(text.split())
        if len(self.key) >= 8:  # shorter ones are dummies for local servers
            words = words.replace(self.key, "***")
        words = printable(words)
        return words[: MAX_SHOWN - 1] + "…" if len(words) > MAX_SHOWN else words


def check_address(name: str, address: str, remedy: str) -> None:
    """Check that requests can be sent to an address, and that it holds no secret.

    `name` is the option or key that gave it; `remedy` says where a secret belongs.

    Raises:
        RagenError: No request can be sent, or there is a secret, which the message does not show.
    """
    if SECRET.match(address):
        raise RagenError(f"{name} must hold neither a password nor a query; {remedy}")
    if not _is_address(address):
        raise RagenError(
            f"{name} {address[:MAX_SHOWN]!r} is not an address: expected one such as "
            "http://localhost:8000/v1"
        )


def _is_address(text: str) -> bool:
    """True if a request can be sent to such an address, and to paths below it."""
    try:
        url = httpx.URL(text).join("v1/chat/completions")
        url.raw_host.decode("ascii").encode("idna")  # as a look-up of the name does
        has_port = url.port is None or 0 < url.port < 2**16
        return url.scheme in ("http", "https") and bool(url.host) and has_port
    except (httpx.InvalidURL, UnicodeError):
        return False


class ChatEndpoint:
    """A `Policy` that sends requests to a server, any number at once within one event loop.

    With `think` a reply begins with a thought; a separate `reasoning` of the server becomes that
    thought. Every request offers the `tools`, and the calls of an answer become a part of its text.
    What the server does not take is learned once (`ragen.rollout.dialects.Dialect`).
    """

    def __init__(
        self,
        server: Server,
        model: str,
        think: bool = True,
        tools: Sequence[Schema] = (),
        own_temperature: bool = False,
    ) -> None:
        self._server, self._model, self._think = server, model, think
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if server.key:
            headers["Authorization"] = f"Bearer {server.key}"
        try:
            self._client = httpx.AsyncClient(
                headers=headers,
                # The time limit is for the whole request; those of httpx restart with every byte.
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=None),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )
        except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
            raise RagenError(
                "the environment variables of proxies or certificates (HTTPS_PROXY, ALL_PROXY, "
                f"SSL_CERT_FILE) cannot be used ({type(error).__name__}): set them anew"
            ) from None  # the reason may repeat a proxy's password
        self._pace = Pace(server.requests_per_minute)
        tools = [dict(each) for each in tools]
        self._dialect = Dialect(model, tools, own_temperature)
        self._answered, self._lost = False, 0

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def complete(self, prompt: Prompt) -> Completion:
        """Send the request, and repeat it after temporary errors.

        Raises:
            RagenError: Repeating cannot help: the address, the model, the key or the request is
                wrong, or the server has never answered or has stopped answering.
            NoCompletion: This one completion failed.
        """
        chance = random.Random(derive(prompt.seed, "wait"))
        begun, number = time.monotonic(), 0
        while True:
            try:
                completion = await self._ask(prompt)
            except _RequestFailed as failure:
                pause_s = max(failure.after_s, wait_s(number, chance.random()))
                number += 1
                elapsed_s = time.monotonic() - begun
                if number == TRIES or elapsed_s + pause_s > failure.repeat_s:
                    raise self._given_up(failure) from None
                await asyncio.sleep(pause_s)
            else:
                self._answered, self._lost = True, 0
                return completion

    def _given_up(self, failure: _RequestFailed) -> RagenError | NoCompletion:
        self._lost += 1
        url, reason = self._server.url, self._server.shown(failure.reason)
        if not self._answered:
            return RagenError(f"{url} gave no completion: {reason}; {failure.remedy}")
        if self._lost >= MAX_LOST or failure.is_gone:
            return RagenError(
                f"{url} no longer answers: {reason}; what was played is kept: continue once it does"
            )
        return NoCompletion(f"{url} gave no completion: {reason}")

    async def _ask(self, prompt: Prompt) -> Completion:
        sent = self._dialect.body(prompt)
        text = json.dumps(sent)  # in ASCII: an observation may have half a surrogate pair
        await self._pace.turn()
        try:
            async with (
                asyncio.timeout(self._server.timeout_s),
                self._client.stream("POST", self._server.url, content=text) as response,
            ):
                body = await _body_of(response)
            refusal = read_refusal(response.status_code, response.headers, body)
            if refusal is None:
                return read_reply(body, self._think, "tools" in sent)
        except (TimeoutError, WrongAnswer, httpx.RequestError, ssl.SSLError) as error:
            raise self._failure(error) from None
        return await self._refused(sent, prompt, refusal)

    def _failure(self, error: Exception) -> _RequestFailed:
        """The failure of a request that got no answer, or no completion.

        A broken connection concerns one request, unless the server has never answered. Where an
        answer is not a completion, the same request would usually get the same again.
        """
        if isinstance(error, TimeoutError):
            return _RequestFailed(f"no answer in {self._server.timeout_s:g} s", LONG_S)
        if isinstance(error, WrongAnswer):
            repeat_s = LONG_S if error.is_temporary else SHORT_S
            return _RequestFailed(str(error), repeat_s, remedy=CHECK_ADDRESS)
        reason = f"{type(error).__name__} ({error})".removesuffix(" ()")
        is_gone = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError)
        repeat_s = LONG_S if self._answered and not is_gone else SHORT_S
        return _RequestFailed(reason, repeat_s, is_gone=is_gone)

    async def _refused(
        self, sent: Mapping[str, Any], prompt: Prompt, refusal: Refusal
    ) -> Completion:
        """Act on an error; a reply that was filtered or cut before it began is an empty one."""
        url, status = self._server.url, refusal.status
        what = f"HTTP {status}: {self._server.shown(refusal.message)}".removesuffix(": ")
        if refusal.is_too_long:
            raise NoCompletion(what, "context")
        if refusal.has_no_quota:
            raise RagenError(f"{url} has no quota left ({what})")
        if status in TEMPORARY or status >= 500:
            if refusal.after_s <= LONG_S:
                self._pace.hold(refusal.after_s)
            raise _RequestFailed(what, LONG_S, refusal.after_s, remedy="try again later")
        if "content_filter" in refusal.codes:
            return Completion(None, None, "", "stop", 0)
        if "output limit was reached" in refusal.words:  # OpenAI: by thoughts alone
            return Completion(None, None, "", "length", 0)
        learned = self._dialect.learn(sent, prompt, refusal)
        if learned is True:
            return await self._ask(prompt)
        if status in (400, 422) and self._answered:
            raise NoCompletion(f"{url} refused a prompt ({what})")  # it refuses this one only
        key_env = self._server.key_env or self._server.default_key_env
        remedies = {
            401: f"put a valid key into {key_env}",
            403: f"the key in {key_env} does not give access to this model",
            404: "check the address (most end in /v1) and the model's name",
        }
        remedy = learned or remedies.get(status, "it would refuse the same request again")
        raise RagenError(f"{url} refused {self._model!r} ({what}); {remedy}")


class Pace:
    """Limits the rate at which requests begin, and pauses when the server asks for it."""

    def __init__(self, requests_per_minute: float) -> None:
        self._gap_s = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next = 0.0
        self._in_line = asyncio.Lock()

    async def turn(self) -> None:
        """Wait until a request may begin."""
        async with self._in_line:
            while (wait_s := self._next - time.monotonic()) > 0:  # `hold` may move it on
                await asyncio.sleep(wait_s)
            self._next = time.monotonic() + self._gap_s

    def hold(self, seconds: float) -> None:
        """Pause: let no request begin for `seconds` seconds."""
        self._next = max(self._next, time.monotonic() + seconds)


@dataclass(eq=False)
class _RequestFailed(Exception):
    """A failed request; it is repeated after at least `after_s` seconds, for at most `repeat_s`.

    `is_gone` says that the server takes no connection. `remedy` helps if it gave no completion.
    """

    reason: str
    repeat_s: float
    after_s: float = 0.0
    is_gone: bool = False
    remedy: str = "is it running?"


async def _body_of(response: httpx.Response) -> bytes:
    """The body of an answer as it was sent; of an error's body, the beginning."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_BODY:
            if response.status_code == 200:
                raise WrongAnswer(f"an answer of more than {MAX_BODY >> 20} MB")
            break
    return bytes(body)
