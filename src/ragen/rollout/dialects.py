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
from math import inf
from typing import Any

from ragen.core.json_text import read_json
from ragen.core.types import Message, Prompt
from ragen.rollout.endpoint_format import error_message, for_server, with_pictures

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
"""Names of the maximum length of a reply, in the order in which they are tried."""

TOO_LONG = re.compile(
    # OpenAI, Groq, DeepSeek, vLLM, SGLang, Mistral, llama.cpp, Ollama, LM Studio, OpenRouter
    r"context.?(?:length|size|window|limit)"
    # Anthropic, Amazon Bedrock; OpenAI and Groq beyond the tokens of a minute
    r"|(?:prompt|input|request|messages?)(?: is| are)?[ _]too[ _](?:long|large)"
    # Gemini, Z.ai, GitHub
    r"|(?:prompt|input)\b.{0,40}\bexceeds?\b|prompt_tokens_exceeded"
    # TGI, older vLLM
    r"|`inputs` (?:must have less than|tokens \+)|at least 1, got -"
    # OpenAI, xAI, Moonshot, DashScope, Cohere
    r"|above_max_length|maximum prompt length|model token limit|range of input length"
    r"|too many tokens"
)
"""Codes, types and words of a prompt that is too long."""

PER_TIME = re.compile(r"rate.?limit|quota|per (?:min|hour|day)|\btpm\b")
"""Words of a rate limit, which says nothing about the context."""

NO_QUOTA = re.compile(  # OpenAI, Moonshot, Anthropic
    r"insufficient_quota|billing_(?:hard|not)|exceeded_current_quota|credit balance is too low"
)
"""Codes and words of a refusal for which waiting does not help."""

REFUSES = re.compile(
    r"unsupported|n[o']t\b.{0,20}\b(?:support|permit|allow|enabled)|deprecated|\bextra\b|forbidden"
    r"|unknown|unrecogni[sz]ed|unexpected|cannot find field|please remove"
)
"""Words and codes that refuse a parameter or a field, and not its value."""
WANTS = re.compile(r"missing|required|must be (?:passed|provided|set)")
"""Words that ask for a field."""
NO_SYSTEM = re.compile(
    r"system (?:role|message|instruction)|'system'|developer (?:role|instruction)"
)
VALUE = re.compile(
    r"\bonly\b[^.\d]*(?<![-\w])(\d+(?:\.\d+)?)|range|between|(?:less|greater) than|positive|[<>]=?"
)
"""Words that refuse a value, with the one that is allowed, as in "only the default (1)"."""
CODES = ("code", "type", "status", "reason", "error_type")
"""Keys of codes in an error."""
PARAMETERS = ("param", "loc", "field")
"""Keys under which an error names parameters."""
USUAL = frozenset({"role", "content", "tool_calls", "id", "type", "function"})
"""Fields of replies and calls that every server takes."""
SYSTEM, EMPTY = "the role system", "a reply without text"
"""What a server may refuse besides parameters and fields."""
NO_TEXT = "(no text)"
"""Stands for a reply without text where a server takes none: Anthropic, Mistral, older Ollama."""
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

    @property
    def said(self) -> str:
        """The codes and the words."""
        return " ".join((*self.codes, self.words))

    def names(self, parameter: str) -> bool:
        """True if it is about this parameter: by name, else by its words."""
        text = self.where or self.message
        return re.search(rf"(?<!\w){re.escape(parameter)}(?!\w)", text) is not None

    @property
    def refuses(self) -> bool:
        """True if the server refuses the named parameter itself, and not its value."""
        return REFUSES.search(self.said) is not None and WANTS.search(self.words) is None

    @property
    def is_too_long(self) -> bool:
        """True if the prompt has no room in the model's context."""
        if self.status == 413 or TOO_LONG.search(" ".join(self.codes)):
            return True
        if self.status in (401, 402, 403, 404):
            return False
        if PER_TIME.search(self.words):  # OpenAI: one request is beyond the tokens of a minute
            return "request too large" in self.words
        return TOO_LONG.search(self.words) is not None

    @property
    def has_no_quota(self) -> bool:
        """True if waiting does not help: the account has no quota left."""
        return self.status == 402 or NO_QUOTA.search(self.said) is not None


def read_refusal(status: int, headers: Mapping[str, str], data: bytes) -> Refusal | None:
    """The error in an answer; ``None`` if the answer has none."""
    if status == 200 and b'"error"' not in data:
        return None
    found = read_json(data.decode("utf-8-sig", "replace"))
    body = None if found is None else found[0]
    leaves = list(_leaves(body))
    if status == 200:
        if not isinstance(body, dict) or not body.get("error"):
            return None
        codes = (str(value) for key, value in leaves if key == "code")
        status = next((int(each) for each in codes if re.fullmatch(r"[45]\d\d", each)), 200)
    refusal = Refusal(
        status,
        error_message(data)[:MOST_WORDS],
        frozenset(str(value).lower() for key, value in leaves if key in CODES),
        " ".join(str(value) for key, value in leaves if key in PARAMETERS)[:MOST_WORDS],
        retry_after(headers.get("Retry-After", "")),
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


def retry_after(header: str) -> float:
    """Seconds of a ``Retry-After`` header (RFC 9110, 10.2.3); 0 for no wait, or for a date."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < inf else 0.0


@dataclass
class Dialect:
    """What one server takes for one model, as far as its refusals have shown.

    `length` is its name for the maximum length of a reply. With `own_temperature` the server's own
    temperature will do where it takes no other.
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
            refused = refused - {"temperature"}  # without it, the server would use its own
        messages: Sequence[Message] = prompt.messages
        sent = prompt.sent
        if SYSTEM in self.refused and messages[0]["role"] == "system":
            system, first, *rest = messages
            messages = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
            sent = {number - 1: each for number, each in sent.items()}
        written = for_server(messages, sent)
        if prompt.pictures:
            written = with_pictures(written, prompt.pictures)
        return {
            "model": self.model,
            "messages": [self._message(each) for each in written],
            **({"tools": tools} if (tools := prompt.tools or self.tools) else {}),
            **{name: value for name, value in given.items() if name not in refused},
        }

    def learn(self, body: Mapping[str, Any], prompt: Prompt, refusal: Refusal) -> bool | str:
        """What the refusal of a body means for the next request.

        Returns:
            True if the prompt can be asked for in another form, which is used from now on; in
            words, what to do where every prompt will be refused; false if it may be this one alone.
        """
        if refusal.status not in (400, 422):
            return False
        if body != self.body(prompt):  # another request has learned meanwhile
            return True
        lengths = [name for name in LENGTHS if refusal.names(name) or name in refusal.message]
        if lengths:
            self.refused |= {self.length} if refusal.refuses else set()
            left = [name for name in (*lengths, *LENGTHS) if name not in self.refused]
            if refusal.refuses and left:
                self.length = left[0]
                return True
            most = f"it takes no reply of up to {prompt.max_tokens} tokens"
            return f"{most}: lower rollout.max_tokens, or choose another model"
        if "temperature" in body and refusal.names("temperature"):
            value = VALUE.search(refusal.words)
            one = value is None or value[1] in ("1", "1.0")
            if not (self.own_temperature or (prompt.temperature == 1 and one)):
                other = (value and value[1]) or (
                    "1" if prompt.temperature != 1 else "another value"
                )
                said = f"it does not take temperature {prompt.temperature:g}"
                return f"{said}: set --temperature to {other}"
        refused = self._refused(body["messages"], refusal) - self.refused
        self.refused |= refused
        if not refused and refusal.refuses and "tools" in body and "tool" in refusal.words:
            return "the environment needs tools: choose a model and a server that take them"
        if not refused and prompt.pictures and "image" in refusal.words:
            return "the environment shows pictures: choose a model that reads them"
        return bool(refused)

    def _refused(self, messages: Sequence[Mapping[str, Any]], refusal: Refusal) -> set[str]:
        """What a refusal names of all that can be left out or written otherwise."""
        replies = [each for each in messages if each["role"] == "assistant"]
        calls = [call for reply in replies for call in reply.get("tool_calls", ())]
        fields = {name for each in (*replies, *calls) for name in each} - USUAL
        named = {name for name in ("temperature", "seed") if refusal.names(name)}
        if refusal.refuses or (refusal.where and not WANTS.search(refusal.words)):
            named |= {name for name in fields if refusal.names(name)}
        if refusal.refuses and NO_SYSTEM.search(f"{refusal.words} {refusal.where}"):
            named.add(SYSTEM)
        if refusal.names("content") and not all(reply["content"] for reply in replies):
            named.add(EMPTY)
        return named

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = {name: value for name, value in message.items() if name not in self.refused}
        if "tool_calls" in kept:
            kept["tool_calls"] = [self._message(call) for call in kept["tool_calls"]]
        if EMPTY in self.refused and "content" in kept and not kept["content"]:
            kept["content"] = NO_TEXT
        return kept
