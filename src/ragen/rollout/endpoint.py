"""Any model behind an OpenAI-compatible chat endpoint, as a policy.

Completions carry text and the server's count of tokens, no ids: they can be read and measured, not
trained on. What goes wrong on the way is either the user's to mend (a wrong key, model or address:
one line at once), passing (a busy or broken server: asked again, later each time), or the end of
that one episode, which is data.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from ragen.core.errors import RagenError
from ragen.core.seeding import derive
from ragen.core.types import Completion, FinishReason, Prompt, Usage
from ragen.rollout.actions import TAGS
from ragen.rollout.policies import NoCompletion

KEY_ENV = "OPENAI_API_KEY"
"""Environment variable of the key where no other is named."""

CONNECT_S = 10.0
"""Seconds that a connection may take to be made."""

TRIES = 8
"""Times that one completion is asked for."""

GIVE_UP_S = 900.0
"""Seconds after which a completion is asked for no more, waits included."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""The wait before the second try, doubled before each further one, and its bound."""

LOST_IN_A_ROW = 16
"""Completions lost for good with no answer in between, after which the server counts as gone."""

PASSING = (408, 409, 425, 429)
"""Status codes after which, as after 500 and above, the same request may well be answered."""

SHOWN = 300
"""Characters of a server's complaint that are shown."""

MOST_TOKENS = 2**31
"""Tokens of one completion from which on a server's count is none."""

SECRET = 8
"""Characters from which on a key is one: shorter ones are the dummies that local servers take."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a model is served, and how it may be asked.

    Args:
        base_url: Its address, to which ``/chat/completions`` is added; most end in ``/v1``.
        key_env: Environment variable that holds the key; ``None`` reads `KEY_ENV` if it is set.
        timeout_s: Seconds that one request may take.
        requests_per_minute: Requests that are begun in a minute at most; 0 sets no limit.

    Raises:
        RagenError: The address is none, or holds a password; a number is out of its range; the
            variable that was named is not set, or holds what cannot be a key.

    Example:
        >>> Server("http://localhost:8000/v1/").url
        'http://localhost:8000/v1/chat/completions'
    """

    base_url: str
    key_env: str | None = None
    timeout_s: float = 120.0
    requests_per_minute: float = 0.0
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise RagenError(f"--base-url {self.base_url!r} is no address: {error}") from None
        if url.userinfo or url.query:
            # Not shown: it may hold a secret.
            raise RagenError(
                "--base-url must hold neither a password nor a query; put the key into the "
                f"environment variable {self.key_env or KEY_ENV}"
            )
        if url.scheme not in ("http", "https") or not url.host:
            raise RagenError(
                f"--base-url {self.base_url!r} is no address: expected one such as "
                "http://localhost:8000/v1"
            )
        if not 0 < self.timeout_s < math.inf:
            raise RagenError(f"--timeout {self.timeout_s:g}: expected seconds above 0")
        if not 0 <= self.requests_per_minute < math.inf:
            raise RagenError(f"--rpm {self.requests_per_minute:g}: expected a number ≥ 0")
        key = os.environ.get(self.key_env or KEY_ENV, "").strip()
        if self.key_env and not key:
            raise RagenError(f"--key-env {self.key_env}: that environment variable is not set")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise RagenError(f"what {self.key_env or KEY_ENV} holds cannot be a key; set it anew")
        object.__setattr__(self, "key", key)

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def hide(self, text: str) -> str:
        """The text without the key, should the server have repeated it."""
        return text.replace(self.key, "***") if len(self.key) >= SECRET else text


class ChatEndpoint:
    """A `Policy` that asks a server; any number of completions at once, within one event loop.

    Args:
        server: Where it is and how it may be asked.
        model: The model's name there.
        think: Whether a reply opens with a thought, into which a server's own `reasoning` is put.
    """

    def __init__(self, server: Server, model: str, think: bool = True) -> None:
        self._server, self._model, self._think = server, model, think
        headers = {"Content-Type": "application/json"}
        if server.key:
            headers["Authorization"] = f"Bearer {server.key}"
        # The time limit is one of the whole request; httpx's own begin anew with every byte.
        limits = httpx.Timeout(None, connect=CONNECT_S)
        unbounded = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(headers=headers, timeout=limits, limits=unbounded)
        self._pace = Pace(server.requests_per_minute)
        self._length_key, self._takes_seed = "max_tokens", True
        self._answered, self._lost = False, 0

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def complete(self, prompt: Prompt) -> Completion:
        """Ask until there is an answer.

        Raises:
            RagenError: Asking again cannot help: the address, the model, the key or the request is
                wrong, or the server has never answered or does so no more.
            NoCompletion: This one completion could not be had.
        """
        chance = random.Random(derive(prompt.seed, "wait"))
        begun, failure = time.monotonic(), _Passing("it was not asked")
        for number in range(TRIES):
            try:
                completion = await self._ask(prompt)
            except _Passing as error:
                failure = error
                wait = max(error.after_s, patience(number, chance.random()))
                if number + 1 == TRIES or time.monotonic() + wait - begun > GIVE_UP_S:
                    break
                await asyncio.sleep(wait)
            else:
                self._answered, self._lost = True, 0
                return completion
        self._lost += 1
        if not self._answered:
            raise RagenError(f"{self._server.url} answered no request: {failure}; is it running?")
        if self._lost >= LOST_IN_A_ROW:
            raise RagenError(
                f"{self._server.url} answers no more: {failure}; the same command goes on from here"
            )
        raise NoCompletion(f"{self._server.url} gave no completion: {failure}")

    async def _ask(self, prompt: Prompt) -> Completion:
        """One request and what its answer says."""
        sent = self._body(prompt)
        text = json.dumps(sent)  # in ASCII: an environment may show half a surrogate pair
        await self._pace.turn()
        try:
            async with asyncio.timeout(self._server.timeout_s):
                response = await self._client.post(self._server.url, content=text)
        except TimeoutError:
            raise _Passing(f"no answer in {self._server.timeout_s:g} s") from None
        except httpx.RequestError as error:
            said = self._server.hide(str(error))
            raise _Passing(f"{type(error).__name__}{f' ({said})' if said else ''}") from None
        text = self._server.hide(response.text)
        if response.status_code == 200:
            return read_reply(text, self._think)
        return await self._refused(prompt, sent, response, text)

    async def _refused(
        self, prompt: Prompt, sent: Mapping[str, Any], response: httpx.Response, text: str
    ) -> Completion:
        """What follows from a status other than 200."""
        status, (said, code) = response.status_code, complaint(text)
        what = f"HTTP {status}{f': {said}' if said else ''}"
        if code == "insufficient_quota":  # OpenAI's 429 that no waiting mends
            raise RagenError(f"{self._server.url} has no quota left ({what})")
        if status in PASSING or status >= 500:
            after_s = retry_after(response.headers.get("Retry-After", ""), time.time())
            if after_s <= GIVE_UP_S:
                self._pace.hold(after_s)
            raise _Passing(what, after_s)
        if status in (400, 422):
            if self._adapts(sent, said):
                return await self._ask(prompt)
            if code == "content_filter":
                return Completion(None, None, "", "stop", 0)
            if code == "context_length_exceeded" or "context length" in said.lower():
                raise NoCompletion(what, "context")
            if self._answered:  # so it is this prompt that it does not take
                raise NoCompletion(f"{self._server.url} refused a prompt ({what})")
        key_env = self._server.key_env or KEY_ENV
        remedies = {
            401: f"put a valid key into {key_env}, or name another variable with --key-env",
            403: f"the key in {key_env} does not give access to this model",
            404: "check --base-url (most end in /v1) and the model's name",
        }
        remedy = remedies.get(status, "it would refuse the same request again")
        raise RagenError(f"{self._server.url} refused {self._model!r} ({what}); {remedy}")

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in prompt.messages],
            self._length_key: prompt.max_tokens,
            "temperature": prompt.temperature,
        }
        if self._takes_seed:
            body["seed"] = prompt.seed % 2**31  # some servers hold it in 32 bits
        return body

    def _adapts(self, sent: Mapping[str, Any], said: str) -> bool:
        """Whether the server only wants the same request in its own dialect."""
        if "max_tokens" in sent and "max_completion_tokens" in said:
            self._length_key = "max_completion_tokens"
            return True
        if "seed" in sent and "seed" in said.lower():
            self._takes_seed = False
            return True
        return False


class Pace:
    """Lets requests begin at a bounded rate, and none while the server asked for quiet."""

    def __init__(self, requests_per_minute: float) -> None:
        self._gap_s = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next = self._quiet_until = 0.0

    async def turn(self) -> None:
        """Wait for a request's turn; who waited already when quiet was asked for waits anew."""
        while True:
            now = time.monotonic()
            at = max(now, self._next)
            self._next = at + self._gap_s
            if at > now:
                await asyncio.sleep(at - now)
            if time.monotonic() >= self._quiet_until:
                return

    def hold(self, seconds: float) -> None:
        """Let no further request begin for so long."""
        self._quiet_until = max(self._quiet_until, time.monotonic() + seconds)
        self._next = max(self._next, self._quiet_until)


class _Passing(Exception):
    """A request that may be answered when it is made again, not before `after_s` seconds."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


def patience(number: int, chance: float) -> float:
    """Seconds to wait after the try of this number: doubled each time, between half and all of it.

    The chance spreads those who were turned away together (exponential backoff with "equal
    jitter"; Brooker, AWS Architecture Blog, 2015).

    Example:
        >>> [patience(number, 1.0) for number in (0, 1, 2, 20)], patience(0, 0.0)
        ([0.5, 1.0, 2.0, 60.0], 0.25)
    """
    longest = min(LONGEST_WAIT_S, math.ldexp(FIRST_WAIT_S, number))
    return longest * (0.5 + 0.5 * chance)


def retry_after(header: str, now: float) -> float:
    """Seconds that a ``Retry-After`` asks for, as a number or a date (RFC 9110, 10.2.3); else 0.

    Example:
        >>> retry_after("7", 0.0), retry_after("Thu, 01 Jan 1970 00:01:00 GMT", 50.0)
        (7.0, 10.0)
    """
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - now
        except ValueError:
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def complaint(text: str) -> tuple[str, str]:
    """What an error's body says, in one line, and its code; servers write it in many ways.

    Example:
        >>> complaint('{"error": {"message": "No such model.", "code": "model_not_found"}}')
        ('No such model.', 'model_not_found')
        >>> complaint('{"error": "slow down"}'), complaint("Bad Gateway")
        (('slow down', ''), ('Bad Gateway', ''))
    """
    said: Any = text
    code = ""
    with suppress(ValueError, RecursionError):
        said = json.loads(text)
    for _ in range(3):  # {"error": {"message": …}}, {"detail": {"error": …}}
        if isinstance(said, dict):
            code = code or next((said[k] for k in ("code", "type") if said.get(k)), "")
            said = next((said[k] for k in ("error", "message", "detail") if said.get(k)), "")
    words = " ".join((said if isinstance(said, str) else json.dumps(said)).split())
    return words[: SHOWN - 1] + "…" if len(words) > SHOWN else words, str(code)


def read_reply(text: str, think: bool) -> Completion:
    """The completion in an answer's body.

    A refusal is what the model said. A thought that the server split off (``reasoning`` or
    ``reasoning_content``) is put back in front where a thought is asked for and the text has none,
    without the tags it may quote; so is the ``<think>`` that a model's own template wrote for it.
    A call of a tool instead of text is an empty reply.

    Raises:
        _Passing: The answer is broken: no JSON, an error, no choice, no message.

    Example:
        >>> read_reply(
        ...     '{"choices": [{"message": {"content": "<answer>Up</answer>", "reasoning": "go"},'
        ...     ' "finish_reason": "stop"}]}',
        ...     think=True,
        ... ).text
        '<think>go</think><answer>Up</answer>'
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):  # the latter of brackets by the thousand
        raise _Passing("an answer that is no JSON") from None
    if not isinstance(answer, dict) or answer.get("error"):
        said, _ = complaint(text)
        raise _Passing(f"an error in place of an answer: {said}")
    match answer.get("choices"):
        case [{"message": dict() as message, **choice}, *_] if (
            choice.get("finish_reason") != "error"
        ):
            pass
        case _:
            raise _Passing("an answer without a choice")
    said = _joined(message.get("content")) or _joined(message.get("refusal"))
    reasoning = _joined(message.get("reasoning_content")) or _joined(message.get("reasoning"))
    if think and "<think>" not in said:
        if reasoning:
            said = f"<think>{_untagged(reasoning)}</think>{said}"
        elif said.count("</think>") == 1:
            said = f"<think>{said}"
    cut = choice.get("finish_reason") in ("length", "max_tokens")
    finish: FinishReason = "length" if cut else "stop"
    return Completion(None, None, said, finish, 0, usage=_usage(answer.get("usage")))


def _joined(content: Any) -> str:
    """Text that comes as such, as a list of parts, or not at all."""
    if isinstance(content, list):
        return "".join(_joined(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _untagged(reasoning: str) -> str:
    for tag in TAGS:
        reasoning = reasoning.replace(tag, tag.strip("<>"))
    return reasoning


def _usage(counted: Any) -> Usage | None:
    match counted:
        case {"prompt_tokens": int(read), "completion_tokens": int(written)} if (
            min(read, written) >= 0 and max(read, written) < MOST_TOKENS
        ):
            return Usage(read, written)
    return None
