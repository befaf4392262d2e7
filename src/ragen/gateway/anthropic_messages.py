"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ragen.gateway import bodies
from ragen.gateway.messages import ChatMessage, Refused, Reply, Request, ToolCall

READ = {
    *("model", "messages", "system", "tools", "max_tokens", "stop_sequences", "stream"),
    "tool_choice",
}
REFUSED = {
    "mcp_servers": "offer functions that the agent runs",
    "container": "offer functions that the agent runs",
}
FINISH = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def read(body: Mapping[str, Any], known: Callable[[str], Sequence[ChatMessage]]) -> Request:
    """The request of a body; `known` is not used."""
    bodies.refuse(body, REFUSED)
    (config,) = bodies.objects([body.get("output_config") or {}], "output_config")
    bodies.refuse_form(body.get("output_format"), "output_format")
    bodies.refuse_form(config.get("format"), "output_config.format")
    system = bodies.text_of(body.get("system"))
    messages = [ChatMessage("system", system)] if system else []
    failed = 0
    for given in bodies.objects(body.get("messages"), "messages"):
        messages += _messages(given)
        failed += sum(block.get("is_error") is True for block in _blocks(given))
    # A result that is an error says so in its text; no chat template has a mark for it.
    left = bodies.ignored(body, READ) | ({"is_error": failed} if failed else {})
    tools = bodies.tools_of(body.get("tools"), "input_schema", ("function", "custom"))
    return Request(
        bodies.conversation(messages),
        tools,
        bodies.limit_of(body.get("max_tokens")),
        bodies.stops_of(body.get("stop_sequences")),
        bool(body.get("stream")),
        bodies.demand_of(body.get("tool_choice"), None, tools),
        left,
    )


def _blocks(given: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = given.get("content")
    if not isinstance(content, list):
        content = [{"type": "text", "text": content}]
    return bodies.objects(content, "content")


def _messages(given: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """The messages in one of Anthropic's: a reply, or results of tools and texts in their order."""
    role, texts, calls = bodies.role_of(given), list[str](), list[ToolCall]()
    for block in _blocks(given):
        if role == "assistant" and block.get("type") == "tool_use":
            id_, name = bodies.field(block, "id"), bodies.field(block, "name")
            calls.append(ToolCall(id_, name, bodies.arguments_of(block.get("input"))))
        elif role == "user" and block.get("type") == "tool_result":
            if texts:
                yield ChatMessage("user", "\n".join(texts))
            texts = []
            call_id = bodies.field(block, "tool_use_id")
            yield ChatMessage("tool", bodies.text_of(block.get("content")), (), call_id)
        else:
            texts.append(bodies.part_text(block))
    if role == "assistant":
        yield ChatMessage(role, "".join(texts) or None, tuple(calls))
    elif texts:
        yield ChatMessage(role, "\n".join(texts))


def write(reply: Reply, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer with a reply."""
    reason = FINISH[reply.finish] if reply.stop is None else "stop_sequence"
    finish = {"stop_reason": reason, "stop_sequence": reply.stop}
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": model}
    return {**head, "content": _content(reply), **finish, "usage": usage}


def events(reply: Reply, model: str, body: Mapping[str, Any]) -> Iterator[str]:
    """The answer as server-sent events: an empty message, each block, the end."""
    whole = write(reply, model, body)
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    empty = whole | {"content": [], "stop_reason": None, "usage": usage}
    yield _event("message_start", message=empty)
    for at, block in enumerate(whole["content"]):
        if block["type"] == "text":
            start, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=at, content_block=start)
        yield _event("content_block_delta", index=at, delta=delta)
        yield _event("content_block_stop", index=at)
    finish = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", delta=finish, usage={"output_tokens": reply.completion_tokens})
    yield _event("message_stop")


def error(refused: Refused) -> dict[str, Any]:
    """The answer to a refused request."""
    known = ERRORS.get(refused.status)
    kind = known or ("invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": bodies.error_text(refused)}}


def _content(reply: Reply) -> list[dict[str, Any]]:
    text = bodies.said(reply)
    blocks: list[dict[str, Any]] = [] if text is None else [{"type": "text", "text": text}]
    for call in reply.calls:
        head = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**head, "input": bodies.object_of(call.arguments)})
    return blocks


def _event(name: str, **data: Any) -> str:
    return bodies.event({"type": name, **data}, name)
