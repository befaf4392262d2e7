"""A policy that is any model behind an OpenAI-compatible chat endpoint.

Completions have text and the server's token counts but no ids: they can be evaluated, not trained
on. There are three kinds of errors. An error that the user can fix (a wrong key, model or address)
ends the command at once, with one line. After a temporary error (a busy or broken server) the
request is repeated, with growing waits. Any other error ends its episode, which is kept as data.

What a server sends is not trusted. Requests have a time limit, and answers have a maximum size.
No compression, charset, redirect or cookie of the server is accepted, and its messages are escaped.
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from ragen.chat.actions import TAGS
from ragen.core.errors import RagenError, printable
from ragen.core.seeding import derive
from ragen.core.types import Completion, FinishReason, Prompt, Usage
from ragen.envs.contract import Schema
from ragen.rollout.endpoint_tools import for_server, with_calls
from ragen.rollout.policies import NoCompletion

KEY_ENV = "OPENAI_API_KEY"
"""Default environment variable of the key."""
CONNECT_S = 4.5
"""Time limit for opening a connection."""
SOON_S = 4.0
"""Seconds for which a request is repeated if that rarely helps: the server cannot be reached (it
may be restarting), or what it sends is not a completion."""
TRIES = 8
"""Number of attempts for one completion."""
GIVE_UP_S = 900.0
"""Time limit for all attempts at one completion, waits included."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""The wait before the second attempt, doubled before each further one, and its limit."""
MAX_LOST = 16
"""Consecutive lost completions after which the server counts as gone."""
TEMPORARY = (408, 409, 425, 429)
"""Status codes below 500 after which the same request may succeed later."""
MAX_BODY = 2**22
"""Maximum size of an answer in bytes, about a million tokens of text."""
MAX_ERROR = 2**16
"""Maximum number of bytes that are read of an error's body."""
MAX_SHOWN = 300
"""Maximum number of characters that are shown of a server's error message."""
MAX_TOKENS = 2**31
"""Token counts of a server are ignored if they are this large or larger."""
MIN_KEY = 8
"""Minimum length of a secret key; shorter keys are dummies for local servers."""
SECRET = re.compile(r"[^@]*//[^/]*@|[^/]*@|.*[?#]", re.DOTALL)
"""An address with a password, a query or a fragment, which may be a secret."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server, its key and its limits.

    ``/chat/completions`` is added to `base_url`, which usually ends in ``/v1``. `key_env` names the
    environment variable of the key; ``None`` reads `default_key_env` if it is set. `timeout_s` is
    the time limit of one request. `requests_per_minute` limits how many requests begin; 0 sets no
    limit.

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

    def hide(self, text: str) -> str:
        """The text without the key, in case the server repeats it."""
        return text.replace(self.key, "***") if len(self.key) >= MIN_KEY else text

    def shown(self, text: str) -> str:
        """A message from outside for one line of RAGEN's: escaped, cut, and without the key."""
        words = printable(self.hide(" ".join(text.split())))
        return words[: MAX_SHOWN - 1] + "…" if len(words) > MAX_SHOWN else words


def check_address(name: str, address: str, remedy: str) -> None:
    """Check that requests can be sent to an address, and that it holds no secret.

    `name` is the option or key that gave it; `remedy` says where a secret belongs.

    Raises:
        RagenError: No request can be sent to the address, or it holds a secret, which the message
            does not show.
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
    """

    def __init__(
        self, server: Server, model: str, think: bool = True, tools: Sequence[Schema] = ()
    ) -> None:
        self._server, self._model, self._think = server, model, think
        self._tools = [dict(each) for each in tools]
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
        self._length_key, self._takes_seed = "max_tokens", True
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
        begun, failure = time.monotonic(), _RequestFailed("it was not asked")
        for number in range(TRIES):
            try:
                completion = await self._ask(prompt)
                self._answered, self._lost = True, 0
                return completion
            except _RequestFailed as error:
                failure = error
            wait = max(failure.after_s, backoff(number, chance.random()))
            if number + 1 == TRIES or time.monotonic() + wait - begun > failure.repeat_s:
                break
            await asyncio.sleep(wait)
        self._lost += 1
        url, reason = self._server.url, self._server.shown(str(failure))
        if not self._answered:
            said = "gave no completion" if failure.remedy else "answered no request"
            raise RagenError(f"{url} {said}: {reason}; {failure.remedy or 'is it running?'}")
        if self._lost >= MAX_LOST or failure.is_gone:
            raise RagenError(
                f"{url} no longer answers: {reason}; what was played is kept: continue once it does"
            )
        raise NoCompletion(f"{url} gave no completion: {reason}")

    async def _ask(self, prompt: Prompt) -> Completion:
        sent = self._body(prompt)
        text = json.dumps(sent)  # in ASCII: an observation may have half a surrogate pair
        await self._pace.turn()
        try:
            async with (
                asyncio.timeout(self._server.timeout_s),
                self._client.stream("POST", self._server.url, content=text) as response,
            ):
                body = await _body_of(response)
        except TimeoutError:
            raise _RequestFailed(f"no answer in {self._server.timeout_s:g} s") from None
        except (httpx.RequestError, ssl.SSLError) as error:  # SSLError: a broken record
            raise self._unheard(error) from None
        if response.status_code != 200:
            return await self._refused(prompt, sent, response, body)
        completion = read_reply(body, self._think, bool(self._tools))
        return replace(completion, text=self._server.hide(completion.text))

    def _unheard(self, error: Exception) -> _RequestFailed:
        """The failure that an error below HTTP means: no connection, or one that broke.

        Before the first answer, the address is wrong or the server does not run. Later on, a broken
        connection concerns one request, and a server that takes no connection is gone.
        """
        what = f"{type(error).__name__} ({error})".removesuffix(" ()")
        is_gone = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError)
        if self._answered:
            return _RequestFailed(what, repeat_s=SOON_S if is_gone else GIVE_UP_S, is_gone=is_gone)
        return _RequestFailed(what, repeat_s=0.0 if is_gone else SOON_S)

    async def _refused(
        self, prompt: Prompt, sent: Mapping[str, Any], response: httpx.Response, body: bytes
    ) -> Completion:
        """Act on a status other than 200: raise, or repeat the request in the server's dialect."""
        status, (message, code) = response.status_code, error_message(body)
        what = f"HTTP {status}: {self._server.shown(message)}".removesuffix(": ")
        if code == "insufficient_quota":  # OpenAI's 429 for which waiting does not help
            raise RagenError(f"{self._server.url} has no quota left ({what})")
        if status in TEMPORARY or status >= 500:
            after_s = retry_after(response.headers.get("Retry-After", ""))
            if after_s <= GIVE_UP_S:
                self._pace.hold(after_s)
            raise _RequestFailed(what, after_s, remedy="try again later")
        if status in (400, 422):
            if self._adapts(sent, message):
                return await self._ask(prompt)
            if code == "content_filter":
                return Completion(None, None, "", "stop", 0)
            if code == "context_length_exceeded" or "context length" in message.lower():
                raise NoCompletion(what, "context")
            if self._answered:  # so the server refuses only this prompt
                raise NoCompletion(f"{self._server.url} refused a prompt ({what})")
        key_env = self._server.key_env or self._server.default_key_env
        remedies = {
            401: f"put a valid key into {key_env}",
            403: f"the key in {key_env} does not give access to this model",
            404: "check the address (most end in /v1) and the model's name",
        }
        remedy = remedies.get(status, "it would refuse the same request again")
        raise RagenError(f"{self._server.url} refused {self._model!r} ({what}); {remedy}")

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": list(for_server(prompt.messages)),
            **({"tools": self._tools} if self._tools else {}),
            self._length_key: prompt.max_tokens,
            "temperature": prompt.temperature,
            # Some servers store the seed in 32 bits.
            **({"seed": prompt.seed % 2**31} if self._takes_seed else {}),
        }

    def _adapts(self, sent: Mapping[str, Any], message: str) -> bool:
        """True if the server needs another dialect, which is used from now on."""
        if "max_tokens" in sent and "max_completion_tokens" in message:
            self._length_key = "max_completion_tokens"
            return True
        if "seed" in sent and "seed" in message.lower():
            self._takes_seed = False
            return True
        return False


class Pace:
    """Limits the rate at which requests begin, and pauses when the server asks for it."""

    def __init__(self, requests_per_minute: float) -> None:
        self._gap_s = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next = self._paused_until = 0.0

    async def turn(self) -> None:
        """Wait until a request may begin; a pause applies to waiting requests, too."""
        while True:
            now = time.monotonic()
            at = max(now, self._next)
            self._next = at + self._gap_s
            if at > now:
                await asyncio.sleep(at - now)
            if time.monotonic() >= self._paused_until:
                return

    def hold(self, seconds: float) -> None:
        """Pause: let no request begin for `seconds` seconds."""
        self._paused_until = max(self._paused_until, time.monotonic() + seconds)
        self._next = max(self._next, self._paused_until)


class _RequestFailed(Exception):
    """A request failed, and may succeed after at least `after_s` seconds.

    It is repeated for at most `repeat_s` seconds. If `is_gone`, the server then counts as gone.
    `remedy` is the advice if the server did answer.
    """

    def __init__(
        self,
        text: str,
        after_s: float = 0.0,
        repeat_s: float = GIVE_UP_S,
        is_gone: bool = False,
        remedy: str = "",
    ) -> None:
        super().__init__(text)
        self.after_s, self.repeat_s, self.is_gone = after_s, repeat_s, is_gone
        self.remedy = remedy


def _wrong(text: str, shown: str = "", repeat_s: float = SOON_S) -> _RequestFailed:
    """An answer that is not a completion; the same request would usually get the same again."""
    remedy = "check that its address is that of an OpenAI-compatible server (most end in /v1)"
    return _RequestFailed(f"{text}: {shown}" if shown else text, repeat_s=repeat_s, remedy=remedy)


async def _body_of(response: httpx.Response) -> bytes:
    """The body of an answer; of an error's body the first `MAX_ERROR` bytes, if it is plain."""
    limit = MAX_BODY if response.status_code == 200 else MAX_ERROR
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        if response.status_code != 200:
            return b""
        raise _wrong("a compressed answer, which was not asked for", repeat_s=0.0)
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            break
    if len(body) > MAX_BODY:
        raise _wrong(f"an answer of more than {MAX_BODY >> 20} MB", repeat_s=0.0)
    return bytes(body[:limit])


def backoff(number: int, chance: float) -> float:
    """Seconds to wait after an attempt, counted from 0: exponential backoff with equal jitter.

    min(longest, first · 2^number) · (½ + ½ · chance), where the chance from 0 to 1 spreads requests
    that failed together (Brooker, AWS Architecture Blog, 2015).
    """
    longest = min(LONGEST_WAIT_S, math.ldexp(FIRST_WAIT_S, number))
    return longest * (0.5 + 0.5 * chance)


def retry_after(header: str) -> float:
    """Seconds of a ``Retry-After`` header (RFC 9110, 10.2.3); 0 for a date or anything else."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def error_message(data: bytes) -> tuple[str, str]:
    """The message of an error's body and its code, in any of the usual formats."""
    text = data.decode("utf-8-sig", "replace")
    body: Any = text
    code: Any = ""
    with suppress(ValueError, RecursionError):
        body = json.loads(text)
    for _ in range(3):  # {"error": {"message": …}}, {"detail": {"error": …}}
        if isinstance(body, dict):
            code = code or next((body[k] for k in ("code", "type") if body.get(k)), "")
            body = next((body[k] for k in ("error", "message", "detail") if body.get(k)), "")
    if not isinstance(body, str):
        try:
            body = json.dumps(body)
        except RecursionError:
            body = text
    return body, str(code) if isinstance(code, str | int) else ""


def read_reply(data: bytes, think: bool, tools: bool = False) -> Completion:
    """The completion in the body of an answer.

    A refusal counts as the reply. If `think` and the text has no thought, a separate one
    (``reasoning`` or ``reasoning_content``) is put in front, without any tags that it quotes.
    Without one, a ``<think>`` is put in front of a thought that is only closed, because the model's
    own template opened it. With `tools`, calls are appended in the form of
    `ragen.chat.tool_calls.hermes`; otherwise a call without text is an empty reply. Half a
    surrogate pair, which is not text, becomes the replacement character.

    Raises:
        _RequestFailed: The answer is not JSON in UTF-8, is an error, or has no choice or message.
    """
    text = data.decode("utf-8-sig", "replace")
    try:
        answer = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        raise _wrong("an answer that is not JSON", text) from None
    if not isinstance(answer, dict) or answer.get("error"):
        words, code = error_message(data)
        is_temporary = re.fullmatch(r"5\d\d", code) or code in map(str, TEMPORARY)
        repeat_s = GIVE_UP_S if is_temporary else SOON_S
        raise _wrong("an error in place of an answer", words, repeat_s)
    match answer.get("choices"):
        case [{"finish_reason": "error"}, *_]:  # the model behind the server failed
            raise _wrong("a reply that broke off", repeat_s=GIVE_UP_S)
        case [{"message": dict() as message, **choice}, *_]:
            pass
        case _:
            with suppress(RecursionError):
                text = json.dumps(answer, ensure_ascii=False)  # escapes in it may hide the key
            raise _wrong("an answer without a choice that has a message", text)
    reply = _joined(message.get("content")) or _joined(message.get("refusal"))
    reasoning = _joined(message.get("reasoning_content")) or _joined(message.get("reasoning"))
    if think and "<think>" not in reply:
        if reasoning:
            for tag in TAGS:
                reasoning = reasoning.replace(tag, tag.strip("<>"))
            reply = f"<think>{reasoning}</think>{reply}"
        elif reply.count("</think>") == 1:
            reply = f"<think>{reply}"
    if tools:
        reply = with_calls(reply, message.get("tool_calls"), think)
    reply = reply.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    cut = choice.get("finish_reason") in ("length", "max_tokens")
    finish: FinishReason = "length" if cut else "stop"
    return Completion(None, None, reply, finish, 0, usage=_usage(answer.get("usage")))


def _joined(content: Any) -> str:
    """The text of a content: a string, a list of parts, or nothing."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _usage(counted: Any) -> Usage | None:
    match counted:
        case {"prompt_tokens": int(read), "completion_tokens": int(written)} if (
            not {type(read), type(written)} & {bool}
            and min(read, written) >= 0
            and max(read, written) < MAX_TOKENS
        ):
            return Usage(read, written)
    return None
