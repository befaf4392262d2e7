"""How chat servers differ: what they refuse, how they say so, and what is sent instead.

A `Dialect` begins with the parameters that most servers take, and learns from one server's
refusals. What counts is what the server names: a status, a code, a type, a parameter. Its words
decide only where it names none. `tests/rollout/servers.py` has the answers of thirteen servers with
their sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import inf
from typing import Any

from ragen.core.json_text import read_json
from ragen.core.types import Message, Prompt
from ragen.rollout.endpoint_format import error_message, for_server

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
"""Names of the maximum length of a reply, in the order in which they are tried."""

TOO_LONG_CODES = frozenset(
    {
        "context_length_exceeded",  # OpenAI, Azure, Groq, Cerebras
        "string_above_max_length",  # OpenAI
        "exceed_context_size_error",  # llama.cpp, and Ollama, which repeats it
        "request_too_large",  # Anthropic
        "model_max_prompt_tokens_exceeded",  # GitHub
    }
)
"""Codes and types of a prompt that is too long."""

TOO_LONG = re.compile(
    # OpenAI, DeepSeek, vLLM, SGLang, Mistral, llama.cpp, LM Studio, OpenRouter, MiniMax
    r"context.?(?:length|size|window|limit)"
    # Anthropic, Amazon Bedrock, Ollama; OpenAI and Groq beyond the tokens of a minute
    r"|(?:prompt|input|request|messages?)(?: is| are)? too (?:long|large)"
    # Gemini, Z.ai, GitHub
    r"|(?:prompt|input)\b.{0,40}\bexceeds?\b"
    # TGI
    r"|`inputs` (?:must have less than|tokens \+)"
    # xAI, Moonshot, DashScope, Cohere
    r"|maximum prompt length|model token limit|range of input length|too many tokens"
)
"""Words of servers that give such a refusal no code of its own."""

PER_TIME = re.compile(r"rate.?limit|quota|per (?:min|hour|day)|\btpm\b")
"""Words of a limit that passes with time, whose tokens are no matter of the context."""

CODES = ("code", "type", "status", "reason", "error_type")
"""Keys of codes in an error."""
PARAMETERS = ("param", "loc", "field")
"""Keys under which an error names parameters."""

NO_QUOTA = frozenset(
    {
        "insufficient_quota",  # OpenAI
        "billing_hard_limit_reached",  # OpenAI
        "billing_not_active",  # OpenAI
        "exceeded_current_quota_error",  # Moonshot
    }
)
"""Codes of a 429 for which waiting does not help."""

REFUSES = re.compile(
    r"unsupported|n[o']t\b.{0,20}\b(?:support|permit|allow|enabled)|deprecated|\bextra\b|forbidden"
    r"|unknown|unrecogni[sz]ed|unexpected|cannot find field|please remove"
)
"""Words and codes that refuse a parameter or a field, and not its value."""
WANTS = re.compile(r"missing|required|must be (?:passed|provided|set)")
"""Words that ask for a field."""
SYSTEM = re.compile(r"system (?:role|message|instruction)|'system'|developer (?:role|instruction)")
ONLY = re.compile(r"\bonly\b\D*?(\d+(?:\.\d+)?)")
"""The one value that a server takes: "only the default (1) value", "only 0.6 is allowed"."""
DELAY = re.compile(r"(?:try again|retry) (?:in|after) ((?:\d+(?:\.\d+)? ?(?:ms|[smh])[a-z]* ?)+)")
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MOST_LEVELS = 12
"""Maximum depth in which an error is looked at; some servers wrap the error of another."""
MOST_WORDS = 5000
"""Maximum number of characters of an error that are looked at."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of a server.

    `status` is the HTTP status, or the code in the body if the status is 200. `codes` are all codes
    and types in lower case, `where` the names of parameters. `after_s` are the seconds that the
    server asks to wait, or 0.
    """

    status: int
    message: str
    codes: frozenset[str]
    where: str
    after_s: float

    @property
    def words(self) -> str:
        """The message in lower case."""
        return self.message.lower()

    def names(self, parameter: str) -> bool:
        """True if it is about this parameter: by name, else by its words."""
        text = self.where or self.message
        return re.search(rf"(?<!\w){re.escape(parameter)}(?!\w)", text) is not None

    @property
    def refuses(self) -> bool:
        """True if it does not take what it names, whatever the value."""
        said = " ".join((self.words, *self.codes))
        return REFUSES.search(said) is not None and WANTS.search(self.words) is None

    @property
    def is_too_long(self) -> bool:
        """True if the prompt has no room in the model's context."""
        if self.status == 413 or self.codes & TOO_LONG_CODES:
            return True
        if self.status in (401, 402, 403, 404):
            return False
        if PER_TIME.search(self.words):  # OpenAI: one request is beyond the tokens of a minute
            return "request too large" in self.words
        return TOO_LONG.search(self.words) is not None

    @property
    def has_no_quota(self) -> bool:
        """True if somebody has to pay first."""
        low = "credit balance is too low" in self.words  # Anthropic's 400
        return self.status == 402 or low or bool(self.codes & NO_QUOTA)


def read_refusal(status: int, headers: Mapping[str, str], data: bytes) -> Refusal | None:
    """The error in an answer; ``None`` for a completion, and for what is neither."""
    if status == 200 and b'"error"' not in data:
        return None
    found = read_json(data.decode("utf-8-sig", "replace"))
    body = None if found is None else found[0]
    leaves = list(_leaves(body))
    if status == 200:
        if not isinstance(body, dict) or not body.get("error"):
            return None
        numbers = [value for key, value in leaves if key == "code" and type(value) is int]
        status = next((each for each in numbers if 400 <= each < 600), 200)
    message = error_message(data)[0][:MOST_WORDS]
    refusal = Refusal(
        status,
        message,
        frozenset(str(value).lower() for key, value in leaves if key in CODES),
        " ".join(str(value) for key, value in leaves if key in PARAMETERS)[:MOST_WORDS],
        _after(headers, message, [str(value) for key, value in leaves if key == "retryDelay"]),
    )
    return refusal if status != 200 or refusal.is_too_long else None


def _leaves(value: Any, key: str = "", levels: int = MOST_LEVELS) -> Iterator[tuple[str, Any]]:
    """The texts and numbers of a JSON value with their keys, also of JSON in a text."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        found = read_json(value)
        value = value if found is None else found[0]
    if isinstance(value, dict | list) and levels > 0:
        inside = value.items() if isinstance(value, dict) else ((key, each) for each in value)
        for name, each in inside:
            yield from _leaves(each, name, levels - 1)
    elif isinstance(value, str | int) and value:
        yield key, value


def _after(headers: Mapping[str, str], message: str, delays: Sequence[str]) -> float:
    """The seconds to wait: of a header, of Gemini's ``retryDelay``, or of the message."""
    if (seconds := retry_after(headers.get("retry-after-ms", "")) / 1000) > 0:
        return seconds
    if (seconds := retry_after(headers.get("Retry-After", ""))) > 0:
        return seconds
    for text in (*(f"retry in {delay}" for delay in delays), message.lower()):
        if found := DELAY.search(text):
            parts = re.findall(r"(\d+(?:\.\d+)?) ?(ms|[smh])", found[1])
            return retry_after(str(sum(float(number) * UNITS[unit] for number, unit in parts)))
    return 0.0


def retry_after(header: str) -> float:
    """Seconds of a ``Retry-After`` header (RFC 9110, 10.2.3), or until its date; 0 for no wait."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            until = parsedate_to_datetime(header)
        except (ValueError, OverflowError):
            return 0.0
        zone = until if until.tzinfo else until.replace(tzinfo=UTC)
        seconds = (zone - datetime.now(UTC)).total_seconds()
    return seconds if 0 < seconds < inf else 0.0


@dataclass
class Dialect:
    """What one server takes for one model, as far as its refusals have shown.

    With `own_temperature` the server's own temperature will do where it takes no other.
    """

    model: str
    tools: Sequence[Mapping[str, Any]] = ()
    own_temperature: bool = False
    length: str = LENGTHS[0]
    refused: set[str] = field(default_factory=set)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request for a prompt."""
        given = {
            self.length: prompt.max_tokens,
            "temperature": prompt.temperature,
            "seed": prompt.seed % 2**31,  # some servers store it in 32 bits
        }
        refused = self.refused
        if prompt.temperature != 1 and not self.own_temperature:
            refused = refused - {"temperature"}  # omitted, it would be another one
        messages: Sequence[Message] = prompt.messages
        sent = prompt.sent
        if "system" in self.refused and messages and messages[0]["role"] == "system":
            system, first, *rest = messages
            messages = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
            sent = {number - 1: each for number, each in sent.items()}
        return {
            "model": self.model,
            "messages": [_without(each, self.refused) for each in for_server(messages, sent)],
            **({"tools": self.tools} if self.tools else {}),
            **{name: value for name, value in given.items() if name not in refused},
        }

    def adapts(self, body: Mapping[str, Any], prompt: Prompt, refusal: Refusal) -> bool:
        """Learn from the refusal of a body; true if the prompt can be asked for in another form."""
        if refusal.status not in (400, 422):
            return False
        if body != self.body(prompt):  # another request has learned meanwhile
            return True
        if not self._learns(body, prompt, refusal):
            return False
        return body != self.body(prompt)

    def _learns(self, body: Mapping[str, Any], prompt: Prompt, refusal: Refusal) -> bool:
        lengths = [name for name in LENGTHS if refusal.names(name) or name in refusal.message]
        if lengths and refusal.refuses:
            self.refused.add(self.length)
            left = [name for name in (*lengths, *LENGTHS) if name not in self.refused]
            self.length = left[0] if left else self.length
            return bool(left)
        if "seed" in body and refusal.names("seed"):
            self.refused.add("seed")
            return True
        if "temperature" in body and refusal.names("temperature"):
            only = ONLY.search(refusal.words)
            takes_one = only is None or float(only[1]) == 1
            if self.own_temperature or (prompt.temperature == 1 and takes_one):
                self.refused.add("temperature")
                return True
            return False
        fields = _fields(body["messages"])
        if refusal.refuses and (named := {name for name in fields if refusal.names(name)}):
            self.refused |= named
            return True
        said = f"{refusal.words} {refusal.where}"
        if refusal.refuses and SYSTEM.search(said) and body["messages"][0]["role"] == "system":
            self.refused.add("system")
            return True
        return False

    def remedy(self, prompt: Prompt, refusal: Refusal) -> str | None:
        """What to do where the server will refuse every prompt with these settings."""
        if refusal.status not in (400, 422):
            return None
        if refusal.names("temperature"):
            only = ONLY.search(refusal.words)
            value = only[1] if only else "1"
            return f"it does not take temperature {prompt.temperature:g}: set --temperature {value}"
        if any(refusal.names(name) for name in LENGTHS):
            return f"set rollout.max_tokens to a number that it takes, not {prompt.max_tokens}"
        if self.tools and refusal.refuses and re.search(r"\btools?\b", refusal.words):
            return "the environment needs tools: choose a model and a server that take them"
        return None


def _fields(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of fields in replies that only their server knows."""
    replies = [each for each in messages if each["role"] == "assistant"]
    calls = [call for reply in replies for call in reply.get("tool_calls", ())]
    names = {name for each in (*replies, *calls) for name in each}
    return names - {"role", "content", "tool_calls", "id", "type", "function"}


def _without(message: Mapping[str, Any], refused: set[str]) -> Mapping[str, Any]:
    """A message without refused fields."""
    if message["role"] != "assistant" or not refused:
        return message
    kept = {name: value for name, value in message.items() if name not in refused}
    if "tool_calls" in kept:
        kept["tool_calls"] = [
            {name: value for name, value in call.items() if name not in refused}
            for call in kept["tool_calls"]
        ]
    return kept
