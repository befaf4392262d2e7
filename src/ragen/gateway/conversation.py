"""Between an agent's messages and a chat: what its template takes, and what a reply says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from ragen.chat.actions import Parsed
from ragen.chat.chat import Chat
from ragen.chat.tool_calls import ToolForm, parse_tools
from ragen.core.types import Completion, Message, fingerprint
from ragen.envs.tools import read_call, write_call
from ragen.gateway.bodies import INVALID, object_of, wrong
from ragen.gateway.endpoint_chat import EndpointChat
from ragen.gateway.messages import ChatMessage, Demand, Finish, Reply, ToolCall

MOST_CALLS = 1000
"""Calls of tools that are read in one reply."""


def merged(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """A conversation as chat templates take it.

    Messages of the system come first, as one. Later ones are part of the next message of the user,
    and messages of the user that follow each other are one. The results of a reply's calls are in
    the order of the calls.

    Raises:
        Refused: The conversation has no message of the user, ends with a reply, or a call has no
            result.
    """
    made: list[ChatMessage] = []
    for message in messages:
        if message.role == "system" and any(each.role != "system" for each in made):
            message = replace(message, role="user")
        if made and message.role in ("system", "user") and made[-1].role == message.role:
            text = f"{made[-1].text or ''}\n\n{message.text or ''}"
            made[-1] = replace(made[-1], text=text)
        else:
            made.append(message)
    if all(message.role != "user" for message in made):
        raise wrong("a conversation has a message of the user")
    if made[-1].role == "assistant":
        raise wrong("the conversation ends with a reply: send the message to reply to")
    for index, message in enumerate(made):
        if message.role == "assistant" and message.calls:
            _sort_results(made, index)
        elif message.role == "tool" and not (
            made[index - 1].role == "tool" or made[index - 1].calls
        ):
            raise wrong(f"the result of the call {message.call_id!r} follows no call")
    return tuple(made)


def _sort_results(messages: list[ChatMessage], index: int) -> None:
    """Put the results of a message's calls in the order of the calls."""
    calls = messages[index].calls
    end = index + 1
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    found = {message.call_id: message for message in messages[index + 1 : end]}
    if len(found) != len(calls) or end - index - 1 != len(calls):
        raise wrong(f"a reply with {len(calls)} calls has {end - index - 1} results")
    missing = [call.id for call in calls if call.id not in found]
    if missing:
        raise wrong(f"the call {missing[0]!r} has no result")
    for at, call in enumerate(calls, index + 1):
        messages[at] = replace(found[call.id], name=call.name)


def written(
    chat: Chat | EndpointChat, messages: Sequence[ChatMessage], call_ids: Sequence[str]
) -> tuple[Message, ...]:
    """The messages as a `Chat` takes them: a reply is one text, with its calls in it.

    The results after the last reply refer to the `call_ids` of its calls, if these are known.
    """
    made: list[Message] = []
    last = max((n for n, each in enumerate(messages) if each.role == "assistant"), default=0)
    for index, message in enumerate(messages):
        text = message.text or ""
        if message.role == "assistant" and message.calls:
            asked = [_as_text(call) for call in message.calls]
            text += "\n" if text and not text.endswith("\n") else ""
            text += chat.calls.write(asked) if chat.calls else "\n".join(asked)
        if message.role == "assistant":
            since, ids = index + 1, [f"call{n:05d}" for n in range(len(message.calls))]
            ids = [*call_ids] if call_ids and index == last else ids
        if message.role != "tool":
            made.append({"role": message.role, "content": text})
        elif chat.calls is None:  # an earlier call had tools, and this one offers none
            _add_to_user(made, f"Result of {message.name}: {text}")
        else:
            about = {"name": message.name, "tool_call_id": ids[index - since]}
            made.append({"role": "tool", **about, "content": text})
    return tuple(made)


def _add_to_user(made: list[Message], text: str) -> None:
    if made[-1]["role"] == "user":
        text = f"{made.pop()['content']}\n\n{text}"
    made.append({"role": "user", "content": text})


def _as_text(call: ToolCall) -> str:
    """The text of a call that the agent sends, which `read_call` can read, whatever it holds."""
    text = write_call(call.name, **object_of(call.arguments))
    return text if read_call(text) else write_call(call.name, **{INVALID: call.arguments})


def cut(
    chat: Chat | EndpointChat, completion: Completion, stops: Sequence[str]
) -> tuple[Completion, str, str | None]:
    """A completion that ends with the first of the stop texts, its text before that, and which.

    It ends at the token that completes the stop text, as if sampling had stopped there.
    """
    text = completion.text
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return completion, text, None
    end, stop = min(found)
    shorter = replace(completion, text=text[:end], finish_reason="stop")
    if not isinstance(chat, EndpointChat):
        assert completion.token_ids is not None and completion.logprobs is not None
        _, count = chat.token_span(completion.token_ids, text, 0, end)
        ids, logprobs = completion.token_ids[:count], completion.logprobs[:count]
        mark = fingerprint(ids, logprobs)
        shorter = replace(shorter, token_ids=ids, logprobs=logprobs, text=chat.decode(ids))
        shorter = replace(shorter, fingerprint=mark)
    return shorter, text[: end - len(stop)], stop


def parsed(
    chat: Chat | EndpointChat, text: str, completion: Completion, think: bool, demand: Demand
) -> Parsed:
    """The thought and the calls in the text of a completion.

    It has no calls, and is not valid, if it was cut or does not meet the `demand`.
    """
    parser = chat.calls.parse if chat.calls is not None else lambda _: []
    found = parse_tools(text, parser, think=think, max_actions=MOST_CALLS)
    problem = demand.unmet([call.name for call in found.calls]) if found.valid else None
    if completion.finish_reason == "length":
        problem = "It was cut off at its limit of tokens."
    if problem is not None:
        return replace(found, actions=(), valid=False, problem=problem, calls=())
    return found


def reply_of(
    id_: str,
    number: int,
    form: ToolForm | None,
    text: str,
    found: Parsed,
    is_cut: bool,
    counts: tuple[int, int],
) -> Reply:
    """The reply with the `text` of call `number`; `counts` are the tokens of prompt and reply.

    Beside calls in this `form`, it has the text before them.
    """
    calls = tuple(
        ToolCall(f"call{number:03d}{index:02d}", *_name_and_arguments(call.text))
        for index, call in enumerate(found.calls)
        if found.valid
    )
    said: str | None = text
    if calls and form is not None:
        thought = found.thought_chars
        start = 0 if thought is None else thought[1] + len("</think>")
        said = (text[:start] + form.before(text[start:])).rstrip() or None
    finish: Finish = "length" if is_cut else "calls" if calls else "stop"
    return Reply(id_, said, calls, finish, *counts)


def _name_and_arguments(text: str) -> tuple[str, str]:
    call = read_call(text)
    assert call is not None, "a valid reply has calls that can be read"
    return call.name, json.dumps(call.arguments, ensure_ascii=False)
