"""OpenAI's Responses, in which the items of a reply are messages and calls of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ragen.gateway import bodies
from ragen.gateway.messages import ChatMessage, Refused, Reply, Request, ToolCall

READ = {
    *("model", "input", "instructions", "previous_response_id", "tools", "max_output_tokens"),
    *("stream", "tool_choice", "parallel_tool_calls"),
}
REFUSED = {
    "background": "wait for the answer",
    "conversation": "send the messages, or previous_response_id",
    "prompt": "send the messages",
}
REPEATED: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "previous_response_id", "max_output_tokens", "metadata")),
    **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
}
"""The parameters that an answer repeats, as libraries expect, with their defaults."""
PREFIX = "resp_"
"""Begins the id of an answer, by which some libraries know that it can be continued."""
INSTRUCTIONS = "instructions"
"""The name of the system message with a request's instructions, which the next does not inherit."""

error = bodies.error_of


def read(body: Mapping[str, Any], known: Callable[[str], Sequence[ChatMessage]]) -> Request:
    """The request of a body; see `ragen.gateway.dialects.Dialect`."""
    bodies.refuse(body, REFUSED)
    (text,) = bodies.objects([body.get("text") or {}], "text")
    bodies.refuse_form(text.get("format"), "text.format")
    instructions = bodies.field(body, "instructions")
    messages = [ChatMessage("system", instructions, name=INSTRUCTIONS)] if instructions else []
    if previous := bodies.field(body, "previous_response_id"):
        try:
            earlier = known(previous.removeprefix(PREFIX))
        except LookupError:
            raise Refused(
                400,
                "previous_response_not_found",
                f"previous response {previous!r} is not known: send the messages",
            ) from None
        messages += [each for each in earlier if each.name != INSTRUCTIONS or each.role != "system"]
    given = body.get("input") or []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages += map(_message, bodies.objects(given, "input"))
    tools = bodies.tools_of(body.get("tools"), "parameters", ("function",))
    return Request(
        bodies.conversation(messages),
        tools,
        bodies.limit_of(body.get("max_output_tokens")),
        (),
        bool(body.get("stream")),
        bodies.demand_of(body.get("tool_choice"), body.get("parallel_tool_calls"), tools),
        bodies.ignored(body, READ),
    )


def _message(item: Mapping[str, Any]) -> ChatMessage:
    """An item of the input, which may be only a part of a reply."""
    match item.get("type") or "message":
        case "message":
            role = bodies.role_of(item)
            text = bodies.text_of(item.get("content"), "" if role == "assistant" else "\n")
            return ChatMessage(role, text or None if role == "assistant" else text)
        case "function_call":
            arguments = bodies.arguments_of(item.get("arguments"))
            id_, name = bodies.field(item, "call_id"), bodies.field(item, "name")
            return ChatMessage("assistant", None, (ToolCall(id_, name, arguments),))
        case "function_call_output":
            call_id = bodies.field(item, "call_id")
            return ChatMessage("tool", bodies.text_of(item.get("output")), (), call_id)
        case "reasoning":
            text = bodies.text_of(item.get("content")) or bodies.text_of(item.get("summary"))
            if item.get("encrypted_content") and not text:
                raise bodies.unsupported("encrypted reasoning", "leave it out of the input")
            return ChatMessage("assistant", bodies.thought(text) or None)
        case kind:
            what = f"an item of type {kind!r}"
            raise bodies.unsupported(what, "send messages and calls of functions")


def write(reply: Reply, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer with a reply."""
    is_cut = reply.finish == "length"
    return _answer(reply, model, body) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(reply),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def events(reply: Reply, model: str, body: Mapping[str, Any]) -> Iterator[str]:
    """The answer as server-sent events: an empty answer, each item, the whole answer."""
    whole = write(reply, model, body)
    for number, (kind, data) in enumerate(_events(whole, _answer(reply, model, body))):
        yield bodies.event({"type": kind, "sequence_number": number, **data}, kind)


def _events(
    whole: Mapping[str, Any], empty: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "response.created", {"response": empty}
    yield "response.in_progress", {"response": empty}
    for at, item in enumerate(whole["output"]):
        place = {"output_index": at, "item_id": item["id"]}
        begun = {**item, "status": "in_progress"}
        added = "response.output_item.added"
        if item["type"] == "function_call":
            arguments, call = item["arguments"], "response.function_call_arguments"
            yield added, {"output_index": at, "item": {**begun, "arguments": ""}}
            yield f"{call}.delta", {**place, "delta": arguments}
            yield f"{call}.done", {**place, "name": item["name"], "arguments": arguments}
        else:
            (part,) = item["content"]
            place["content_index"] = 0
            text = {**place, "logprobs": []}
            yield added, {"output_index": at, "item": {**begun, "content": []}}
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**text, "delta": part["text"]}
            yield "response.output_text.done", {**text, "text": part["text"]}
            yield "response.content_part.done", {**place, "part": part}
        yield "response.output_item.done", {"output_index": at, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _answer(reply: Reply, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": PREFIX + reply.id,
        "object": "response",
        "created_at": 0,  # without the time of day, the same reply is the same answer
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **REPEATED,
        **{key: body[key] for key in REPEATED if body.get(key) is not None},
    }


def _output(reply: Reply) -> list[dict[str, Any]]:
    status = "incomplete" if reply.finish == "length" else "completed"
    items, text = list[dict[str, Any]](), bodies.said(reply)
    if text is not None:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
        items.append({**head, "status": status, "content": [part]})
    for number, call in enumerate(reply.calls):
        head = {"id": f"fc_{reply.id}_{number}", "type": "function_call", "call_id": call.id}
        about = {"name": call.name, "arguments": bodies.spelled(call.arguments)}
        items.append({**head, "status": status, **about})
    return items
