"""Which reply an agent's message repeats, although its library may have changed the spelling.

Libraries write JSON anew, strip white space, put a stop text back or drop the text beside calls.
A message that repeats a reply stands for the reply's own tokens; any other is the agent's own text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ragen.gateway.bodies import object_of, spelled
from ragen.gateway.messages import ChatMessage, Reply, ToolCall

GRADES = (
    "verbatim",
    "JSON written anew",
    "other white space",
    "with its stop text",
    "without the text beside calls",
)
"""What each grade means; a message has the worst grade of its parts."""


def grade(heard: ChatMessage, reply: Reply, stop: Sequence[str] = ()) -> int | None:
    """How well a message of the assistant repeats a reply: an index of `GRADES`, or ``None``.

    `stop` are the texts that would have ended the reply. The ids of calls do not count, because
    some libraries give their own; their order does.
    """
    if len(heard.calls) != len(reply.calls):
        return None
    grades = [_grade_call(*pair) for pair in zip(heard.calls, reply.calls, strict=True)]
    grades.append(_grade_text(heard.text or "", reply, stop))
    found = [each for each in grades if each is not None]
    return max(found) if len(found) == len(grades) else None


def signature(call: ToolCall) -> tuple[str, str]:
    """A call's name and arguments in a form that is equal for all spellings of the same JSON.

    Keys are sorted, and a whole number is an integer: JavaScript writes 4.0 as 4.
    """
    arguments = json.dumps(_whole(object_of(call.arguments)), sort_keys=True)
    return call.name, arguments


def _grade_call(heard: ToolCall, sent: ToolCall) -> int | None:
    as_sent = (spelled(sent.arguments), sent.arguments)  # the gateway's own record has the latter
    if heard.name == sent.name and heard.arguments in as_sent:
        return 0
    return 1 if signature(heard) == signature(sent) else None


def _grade_text(heard: str, reply: Reply, stop: Sequence[str]) -> int | None:
    sent = reply.text or ""
    if heard == sent:
        return 0
    if _squeezed(heard) == _squeezed(sent):
        return 2
    if any(_squeezed(heard) == _squeezed(sent + text) for text in stop):
        return 3
    return 4 if reply.calls and not heard.strip() else None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _whole(value: Any) -> Any:
    match value:
        case dict():
            return {key: _whole(each) for key, each in value.items()}
        case list():
            return [_whole(each) for each in value]
        case float() if value.is_integer():
            return int(value)
    return value
