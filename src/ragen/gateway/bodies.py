"""What the dialects share: how the parts of a request are read, and how events are written.

What cannot be honoured is refused in one line if it would change the conversation. Any other
parameter that is not read is kept in `Request.ignored`, because a client that sends a new parameter
must not fail for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragen.envs.contract import Schema
from ragen.envs.tools import read_object, tool_schema
from ragen.gateway.messages import ChatMessage, Demand, Refused, Reply, Speaker

ROLES: Mapping[str, Speaker] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""The roles of all dialects."""
TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("summary_text", "reasoning_text"), "text"),
    **{"refusal": "refusal", "thinking": "thinking"},
}
"""The types of parts that are text, with the key of the text."""
INVALID = "INVALID_JSON"
"""The key of arguments that are no JSON object, where a dialect or a library needs an object."""


def wrong(text: str) -> Refused:
    """A request that is not in the dialect's form."""
    return Refused(400, "invalid_value", text)


def unsupported(what: str, remedy: str) -> Refused:
    """A request for something that the gateway does not offer."""
    return Refused(400, "unsupported_value", f"{what} is not supported: {remedy}")


def refuse(body: Mapping[str, Any], parameters: Mapping[str, str]) -> None:
    """Raise `Refused` if a request sets one of the `parameters`, which have a remedy each."""
    for name, remedy in parameters.items():
        if body.get(name):
            raise unsupported(name, remedy)


def ignored(body: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """The parameters of a request that are set and not among those that are `read`."""
    return {
        name: value for name, value in body.items() if name not in read and value not in (None, [])
    }


def objects(value: Any, where: str) -> Sequence[Mapping[str, Any]]:
    """A list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise wrong(f"{where} must be a list of objects")
    return value


def words(value: Any, where: str) -> str:
    """A text, empty for null; half a surrogate pair becomes the replacement character.

    Programs that cut text in the middle of a pair send such halves, which no tokenizer takes.
    """
    if not isinstance(value, str | None):
        raise wrong(f"{where} must be a text")
    text = value or ""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def field(given: Mapping[str, Any], key: str) -> str:
    """The text under a key of an object, empty if there is none."""
    return words(given.get(key), key)


def text_of(content: Any, joint: str = "\n") -> str:
    """The text of a message: a text, or a list of parts of text, between which `joint` is put."""
    if not isinstance(content, list):
        return words(content, "content")
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return joint.join(part_text(part) for part in objects(parts, "content"))


def part_text(part: Mapping[str, Any]) -> str:
    """The text of a part of a message."""
    kind = words(part.get("type") or "text", "type")
    if kind not in TEXTS:
        raise unsupported(f"content of type {kind!r}", "messages may hold text only")
    text = field(part, TEXTS[kind])
    return thought(text) if kind == "thinking" else text


def role_of(message: Mapping[str, Any]) -> Speaker:
    """The role of a message."""
    role = field(message, "role")
    if role not in ROLES:
        raise wrong(f"role {role!r}: expected one of {', '.join(ROLES)}")
    return ROLES[role]


def thought(text: str) -> str:
    """A thought that a library keeps apart from the text of a reply, as it was in the text."""
    return f"<think>{text}</think>" if text else ""


def conversation(messages: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Messages in their canonical form.

    Messages of the assistant in a row are one message, because libraries send the parts of a reply
    as several. A tool's result has the name of the tool that was called.
    """
    found, names = list[ChatMessage](), dict[str, str]()
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        if message.role == "tool":
            message = replace(message, name=names.get(message.call_id, message.name))
        if message.role == "assistant" and found and found[-1].role == "assistant":
            texts = [text for text in (found[-1].text, message.text) if text]
            calls = (*found.pop().calls, *message.calls)
            message = ChatMessage("assistant", "\n".join(texts) or None, calls)
        found.append(message)
    if not found:
        raise wrong("the conversation has no message")
    return tuple(found)


def tools_of(tools: Any, key: str, kinds: Collection[str]) -> tuple[Schema, ...]:
    """Tools in the one form that chat templates take, as environments of RAGEN have it.

    `key` is the name of the JSON schema of the arguments, which is kept as it is: the policy reads
    it in the order in which it was written. `kinds` are the types of tools that the agent itself
    carries out. Everything else that a library adds, such as ``strict``, is left out.
    """
    made = []
    for tool in objects(tools or [], "tools"):
        kind = words(tool.get("type") or "function", "type")
        if kind not in kinds:
            raise unsupported(f"a tool of type {kind!r}", "offer functions that the agent runs")
        about = tool.get("function", tool)
        if not isinstance(about, dict) or not about.get("name"):
            raise wrong("each tool must have a name")
        (schema,) = objects([about.get(key) or {"type": "object", "properties": {}}], key)
        made.append(tool_schema(field(about, "name"), field(about, "description"), schema))
    try:
        json.dumps(made, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise wrong("tools must be plain JSON of a moderate depth") from None
    return tuple(made)


def demand_of(choice: Any, parallel: Any, tools: Sequence[Schema]) -> Demand:
    """What a request demands of calls: a `choice` of any dialect, and if several are permitted.

    Example:
        >>> demand_of("required", False, [tool_schema("guess", "", {})])
        Demand(least=1, most=1, tool='')
    """
    (about,) = objects([choice if isinstance(choice, dict) else {"type": choice}], "tool_choice")
    is_single = parallel is False or about.get("disable_parallel_tool_use") is True  # Anthropic's
    kind, most = about.get("type") or "auto", 1 if is_single else None
    if kind == "auto":
        return Demand(0, most)
    if kind == "none":
        return Demand(0, 0)
    if kind not in ("required", "any", "function", "tool"):
        raise unsupported(f"tool_choice {kind!r}", "send auto, none, required or one of the tools")
    (named,) = objects([about.get("function", about)], "the function of tool_choice")
    tool = field(named, "name") if kind in ("function", "tool") else ""
    if not tools or (tool and all(each["function"]["name"] != tool for each in tools)):
        what = repr(tool) if tool else "a tool"
        raise wrong(f"tool_choice demands {what}, which the request does not offer")
    return Demand(1, most, tool)


def refuse_form(form: Any, where: str) -> None:
    """Raise `Refused` if a request wants its reply in a form other than text."""
    (given,) = objects([form or {}], where)
    if given.get("type") not in (None, "text"):
        what = f"{where} of type {given['type']!r}"
        raise unsupported(what, "describe the form in your messages, and check the reply")


def limit_of(*limits: Any) -> int | None:
    """The smallest of the given limits of tokens."""
    given = [limit for limit in limits if limit is not None]
    if any(type(limit) is not int or limit < 1 for limit in given):
        raise wrong("a limit of tokens must be a whole number above 0")
    return min(given, default=None)


def stops_of(stop: Any) -> tuple[str, ...]:
    """The texts that end a reply, given as a text or a list."""
    texts = stop if isinstance(stop, list) else [stop]
    return tuple(text for text in (words(each, "stop") for each in texts) if text)


def spelled(arguments: str) -> str:
    r"""The arguments of a call as a reply sends them: an object in the spelling of `json.dumps`.

    Libraries that read and write the arguments use this spelling, so that they come back as they
    were sent. Other text is sent as it is.

    Example:
        >>> spelled('{"n":4,"why":"caf\u00e9"}')
        '{"n": 4, "why": "café"}'
    """
    found = read_object(arguments or "{}")
    return arguments if found is None else json.dumps(found, ensure_ascii=False)


def object_of(arguments: str) -> Mapping[str, Any]:
    """The arguments of a call as an object; other text is put under the key `INVALID`."""
    found = read_object(arguments or "{}")
    return {INVALID: arguments} if found is None else found


def arguments_of(value: Any) -> str:
    """The arguments of a call in a request, which are JSON text or an object."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
    return words(text, "arguments")


def said(reply: Reply) -> str | None:
    """The text of a reply as it is sent: ``None`` if there are only calls."""
    return reply.text or (None if reply.calls else "")


def error_text(refused: Refused) -> str:
    """The message of an error.

    Not all libraries look at the code: langchain-openai and those for Anthropic know a prompt that
    exceeds the context by the first words of the message, and then shorten it.
    """
    is_long = refused.code == "context_length_exceeded"
    return f"prompt is too long: {refused}" if is_long else str(refused)


def error_of(refused: Refused) -> dict[str, Any]:
    """An error in the form of OpenAI's APIs."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    told = {"message": error_text(refused), "type": kind, "param": None, "code": refused.code}
    return {"error": told}


def event(data: Mapping[str, Any], name: str = "") -> str:
    """A server-sent event; its JSON is ASCII, so that no character can end a line of it."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"
