"""Calls of tools as OpenAI's chat endpoints write them, and as text that is parsed and recorded.

A server sends the calls of a reply apart from its text. Here they become a part of the text, in the
form of `ragen.chat.tool_calls.hermes`, so that replies of a server and of a model on this
machine are parsed, recorded and shown alike. In the next request they are calls again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ragen.chat.chat import without_thought
from ragen.chat.tool_calls import hermes, write_hermes
from ragen.core.types import Message

EMPTY_THOUGHT = "<think></think>"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A name of a tool that servers take in a request."""
UNKNOWN = "unknown"
"""Replaces, in requests, a name that servers would refuse."""


def with_calls(reply: str, calls: Any, think: bool) -> str:
    r"""A reply with the calls that a server sent beside it; without calls, the reply as it is.

    A malformed call stays in the text, so that the parser refuses it. Many models write no text
    beside their calls; with `think`, such a reply has an empty thought.

    Example:
        >>> called = {"function": {"name": "add", "arguments": '{"a": 1}'}}
        >>> with_calls("I add.", [called], think=False)
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    """
    if not isinstance(calls, list) or not calls:
        return reply
    if think and not reply.strip():
        reply = EMPTY_THOUGHT
    written = write_hermes([_text(call) for call in calls])
    return f"{reply}\n{written}" if reply else written


def _text(call: Any) -> str:
    """A call as JSON text, without a tag in it; arguments that are not a JSON object stay text."""
    match call:
        case {"function": {"name": str(name), "arguments": arguments}}:
            found = {"name": name, "arguments": _arguments(arguments)}
        case _:
            found = call
    try:
        text = json.dumps(found, ensure_ascii=False)
    except RecursionError:
        text = '"…"'
    return text.replace("<", "\\u003c")


def _arguments(arguments: Any) -> Any:
    """A call's arguments as an object; most servers send them as JSON text.

    Text that is not a JSON object is returned as it is.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
        json.dumps(found)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def for_server(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    r"""A conversation as a server takes it: replies with calls, and results that refer to them.

    The ids of calls are unique in a conversation, and what a server would refuse in its own calls
    is replaced: an odd name, and arguments that are not a JSON object.

    Example:
        >>> called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        >>> result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "1"}
        >>> reply, told = for_server([{"role": "assistant", "content": called}, result])
        >>> reply["tool_calls"][0]["function"]
        {'name': 'add', 'arguments': '{"a": 1}'}
        >>> told
        {'role': 'tool', 'tool_call_id': 'call00001', 'content': '1'}
    """
    for number, message in enumerate(messages):
        after = takewhile(lambda each: each["role"] == "tool", messages[number + 1 :])
        ids = [f"call{at:05d}" for at, _ in enumerate(after, number + 1)]
        if message["role"] == "tool":
            id_ = f"call{number:05d}"
            yield {"role": "tool", "tool_call_id": id_, "content": message["content"]}
        elif ids:
            yield _called(message["content"], ids)
        else:
            yield dict(message)


def _called(reply: str, ids: Sequence[str]) -> Mapping[str, Any]:
    """A reply with calls; a thought stays in the text unless it is empty."""
    said = reply.partition("<tool_call>")[0].removeprefix(EMPTY_THOUGHT).rstrip()
    calls = [
        {"id": each, "type": "function", "function": _function(text)}
        for each, text in zip(ids, hermes(without_thought(reply)), strict=True)
    ]
    return {"role": "assistant", "content": said or None, "tool_calls": calls}


def _function(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    name, arguments = UNKNOWN, None
    if isinstance(found, dict):
        name, arguments = str(found.get("name")), found.get("arguments", found.get("parameters"))
    if not isinstance(arguments, dict):
        arguments = {"text": text}
    name = name if NAME.fullmatch(name) else UNKNOWN
    return {"name": name, "arguments": json.dumps(arguments)}
