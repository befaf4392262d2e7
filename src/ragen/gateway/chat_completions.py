"""OpenAI's chat completions, which most libraries speak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ragen.gateway import bodies
from ragen.gateway.messages import ChatMessage, Reply, Request, ToolCall

READ = {
    *("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream"),
    *("stream_options", "n", "tool_choice", "parallel_tool_calls", "response_format"),
}
REFUSED = {
    "logit_bias": "the run decides how tokens are sampled",
    "functions": "offer tools",
}
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}

error = bodies.error_of


def read(body: Mapping[str, Any], known: Callable[[str], Sequence[ChatMessage]]) -> Request:
    """The request of a body; `known` is not used."""
    bodies.refuse(body, REFUSED)
    if body.get("n") not in (None, 1):
        raise bodies.unsupported("n other than 1", "send the request again for another reply")
    bodies.refuse_form(body.get("response_format"), "response_format")
    bodies.objects([body.get("stream_options") or {}], "stream_options")
    given = bodies.objects(body.get("messages"), "messages")
    left = bodies.ignored(body, READ)
    # A participant's name: no chat template writes it. A tool's name is read.
    named = [each for each in given if each.get("name") and bodies.role_of(each) != "tool"]
    if named:
        left["name"] = [each["name"] for each in named]
    tools = bodies.tools_of(body.get("tools"), "parameters", ("function",))
    return Request(
        bodies.conversation(map(_message, given)),
        tools,
        bodies.limit_of(body.get("max_tokens"), body.get("max_completion_tokens")),
        bodies.stops_of(body.get("stop")),
        bool(body.get("stream")),
        bodies.demand_of(body.get("tool_choice"), body.get("parallel_tool_calls"), tools),
        left,
    )


def _message(given: Mapping[str, Any]) -> ChatMessage:
    role = bodies.role_of(given)
    if role == "tool":
        text, name = bodies.text_of(given.get("content")), bodies.field(given, "name")
        return ChatMessage(role, text, (), bodies.field(given, "tool_call_id"), name)
    if role != "assistant":
        return ChatMessage(role, bodies.text_of(given.get("content")))
    reasoning = bodies.field(given, "reasoning_content") or bodies.field(given, "reasoning")
    text = bodies.text_of(given.get("content"), "") or bodies.field(given, "refusal")
    calls = [_call(each) for each in bodies.objects(given.get("tool_calls") or [], "tool_calls")]
    return ChatMessage(role, bodies.thought(reasoning) + text or None, tuple(calls))


def _call(given: Mapping[str, Any]) -> ToolCall:
    kind = given.get("type") or "function"
    if kind != "function":
        raise bodies.unsupported(f"a call of type {kind!r}", "offer functions that the agent runs")
    (about,) = bodies.objects([given.get("function")], "the function of each call")
    arguments = bodies.arguments_of(about.get("arguments"))
    return ToolCall(bodies.field(given, "id"), bodies.field(about, "name"), arguments)


def write(reply: Reply, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer with a reply."""
    message: dict[str, Any] = {"role": "assistant", "content": bodies.said(reply), "refusal": None}
    if reply.calls:
        message["tool_calls"] = _calls(reply)
    choice = {"index": 0, "message": message, "finish_reason": FINISH[reply.finish]}
    return _head(reply, model, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def events(reply: Reply, model: str, body: Mapping[str, Any]) -> Iterator[str]:
    """The answer as server-sent events: the role, the text, each call, the end, perhaps usage."""
    text = bodies.said(reply)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": text and ""}]
    deltas += [{"content": text}] if text else []
    deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(_calls(reply))]
    head = _head(reply, model, "chat.completion.chunk")
    for delta in [*deltas, {}]:
        finish = None if delta else FINISH[reply.finish]
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        yield bodies.event(head | {"choices": [choice]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield bodies.event(head | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _head(reply: Reply, model: str, kind: str) -> dict[str, Any]:
    # Without the time of day, the same reply is the same answer.
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": 0, "model": model}


def _calls(reply: Reply) -> list[dict[str, Any]]:
    made = []
    for call in reply.calls:
        about = {"name": call.name, "arguments": bodies.spelled(call.arguments)}
        made.append({"id": call.id, "type": "function", "function": about})
    return made


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
