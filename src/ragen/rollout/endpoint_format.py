"""Requests and answers of OpenAI's chat completions API, as JSON.

A server sends the calls of a reply apart from its text. Here they become a part of the text, in the
form of `ragen.chat.tool_calls.hermes`, so that replies of a server and of a model on this
machine are parsed, recorded and shown alike. The next request has the server's own message again,
because some servers refuse a history without what they added to it: signatures of calls, or
thoughts in a field of their own.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from ragen.chat.actions import TAGS, WHITESPACE, after_thought
from ragen.chat.chat import without_thought
from ragen.chat.tool_calls import hermes, write_hermes
from ragen.core.json_text import hide_json
from ragen.core.pictures import PLACE, Picture, for_people
from ragen.core.types import Completion, FinishReason, Message, Usage
from ragen.envs.answers import is_deeper
from ragen.envs.tools import MOST_LEVELS, read_object

EMPTY_THOUGHT = "<think></think>"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A name of a tool that servers take in a request."""
REASONING = ("reasoning_content", "reasoning")
"""Fields of a message in which servers put a thought."""
UNKNOWN = "unknown"
"""Replaces, in requests, a name that servers would refuse."""
CUT = ("length", "max_tokens", "model_length", "model_context_window_exceeded")
"""Reasons why a reply ended before its end; the last two are Mistral's and Anthropic's."""
OF_RESULTS = "The pictures of these results, in order:"
"""Stands above the pictures that calls returned."""
MAX_TOKENS = 2**31
"""Token counts of a server are ignored if they are this large or larger."""


class WrongAnswer(Exception):
    """An answer is not a completion; `is_temporary` says that the next one may be."""

    def __init__(self, reason: str, shown: str = "", is_temporary: bool = False) -> None:
        super().__init__(f"{reason}: {shown}" if shown else reason)
        self.is_temporary = is_temporary


def error_message(data: bytes) -> str:
    """The message of an error's body, in any of the usual formats."""
    text = data.decode("utf-8-sig", "replace")
    try:
        body = json.loads(text)
        body = body[0] if isinstance(body, list) and body else body  # Gemini's
        for _ in range(3):  # {"error": {"message": …}}, {"detail": {"error": …}}
            if isinstance(body, dict):
                body = next((body[k] for k in ("error", "message", "detail") if body.get(k)), "")
        return body if isinstance(body, str) else json.dumps(body)
    except (ValueError, RecursionError):
        return text


def read_reply(data: bytes, think: bool, tools: bool = False) -> Completion:
    """The completion in the body of an answer.

    A refusal counts as the reply. If `think` and the text has no thought, a separate one (a field
    of `REASONING`, or parts of the content) is put in front, without any tags that it quotes.
    Without one, a ``<think>`` is put in front of a thought that is only closed, because the model's
    own template opened it. With `tools`, calls are appended in the form of
    `ragen.chat.tool_calls.hermes`; otherwise a call without text is an empty reply. Half a
    surrogate pair, which is not text, becomes the replacement character.

    Raises:
        WrongAnswer: It is not JSON in UTF-8, is an error, or has no choice or message.
    """
    text = data.decode("utf-8-sig", "replace")
    try:
        answer = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        raise WrongAnswer("an answer that is not JSON", text) from None
    if not isinstance(answer, dict) or answer.get("error"):
        raise WrongAnswer("an error in place of an answer", error_message(data))
    match answer.get("choices"):
        case [{"finish_reason": "error"}, *_]:  # the model behind the server failed
            raise WrongAnswer("a reply that broke off", is_temporary=True)
        case [{"message": dict() as message, **choice}, *_]:
            pass
        case _:
            raise WrongAnswer("an answer without a choice that has a message", text)
    reply = _joined(message.get("content")) or _joined(message.get("refusal"))
    reasoning = _reasoning(message)
    shown = hide_json(reply) if "think>" in reply else reply
    if think and "<think>" not in shown:
        if reasoning:
            for tag in TAGS:
                reasoning = reasoning.replace(tag, tag.strip("<>"))
            reply = f"<think>{reasoning}</think>{reply}"
        elif shown.count("</think>") == 1:
            reply = f"<think>{reply}"
    if tools:
        reply = with_calls(reply, message.get("tool_calls"), think)
    reply = reply.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    cut = choice.get("finish_reason") in CUT
    finish: FinishReason = "length" if cut else "stop"
    usage, kept = _usage(answer.get("usage")), _kept(message)
    return Completion(None, None, reply, finish, 0, usage=usage, message=kept)


def _joined(content: Any) -> str:
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _reasoning(message: Mapping[str, Any]) -> str:
    """The thought that a server sends apart from the text: a field, or parts of the content."""
    fields = [message.get(name) for name in REASONING]
    match message.get("content"):
        case list() as parts:
            fields += [[{"text": _joined(p.get("thinking"))} for p in parts if isinstance(p, dict)]]
    return next(filter(None, map(_joined, fields)), "")


def _kept(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A message that can be sent back; ``None`` if it has a NaN or is nested too deeply."""
    try:
        json.dumps(message, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return None if is_deeper(message, MOST_LEVELS) else message


def _usage(counted: Any) -> Usage | None:
    match counted:
        case {"prompt_tokens": int(read), "completion_tokens": int(written)}:
            if min(read, written) >= 0 and max(read, written) < MAX_TOKENS:
                return Usage(read, written)
    return None


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
    try:
        written = write_hermes([_text(call) for call in calls])
    except RecursionError:
        raise WrongAnswer("a call that is nested too deeply") from None
    return f"{reply}\n{written}" if reply else written


def _text(call: Any) -> str:
    """A call as JSON text, without a tag in it; arguments that are not a JSON object stay text."""
    match call:
        case {"function": {"name": str(name), "arguments": arguments}}:
            if isinstance(arguments, str):  # most servers send the object as JSON text
                found = read_object(arguments or "{}")
                arguments = arguments if found is None else found
            call = {"name": name, "arguments": arguments}
    return json.dumps(call, ensure_ascii=False).replace("<", "\\u003c")


def for_server(
    messages: Sequence[Message], sent: Mapping[int, Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    r"""A conversation as a server takes it: replies with calls, and results that refer to them.

    `sent` has the replies that came from this server, as it sent them, by their index. They go back
    unchanged, but for what a server would refuse in its own calls: a missing id or one that another
    call of the reply has, an odd name, and arguments that are not a JSON object.

    Example:
        >>> called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        >>> result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "1"}
        >>> reply, told = for_server([{"role": "assistant", "content": called}, result], {})
        >>> reply["tool_calls"][0]["function"]
        {'name': 'add', 'arguments': '{"a": 1}'}
        >>> told
        {'role': 'tool', 'tool_call_id': 'call00001', 'content': '1'}
    """
    ids = list[str]()  # of the calls whose results follow
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            yield {"role": "tool", "tool_call_id": ids.pop(0), "content": message["content"]}
        elif message["role"] == "assistant":
            after = takewhile(lambda each: each["role"] == "tool", messages[number + 1 :])
            own = [f"call{at:05d}" for at, _ in enumerate(after, number + 1)]
            reply = _returned(message["content"], sent.get(number, {}), own)
            ids = [call["id"] for call in reply.get("tool_calls", ())]
            yield reply
        else:
            yield dict(message)


def with_pictures(
    messages: Iterable[Mapping[str, Any]], pictures: Iterable[Picture]
) -> Iterator[Mapping[str, Any]]:
    """Messages with the pictures at their places, as parts of the content.

    Servers take pictures of the user alone: those of results follow these in a message of the user.
    """
    shown, results = iter(pictures), list[Mapping[str, Any]]()
    for message in messages:
        if results and message["role"] != "tool":
            yield {"role": "user", "content": results}
            results = []
        content = message["content"] if message["role"] in ("user", "tool") else ""
        first, *others = content.split(PLACE)
        if not others:
            yield message
        elif message["role"] == "tool":
            results = results or [_text_part(OF_RESULTS)]
            results += [_image_part(next(shown)) for _ in others]
            yield {**message, "content": for_people(content)}
        else:
            parts = [_text_part(first)]
            for text in others:
                parts += [_image_part(next(shown)), _text_part(text)]
            yield {**message, "content": [part for part in parts if part.get("text") != ""]}
    if results:
        yield {"role": "user", "content": results}


def _text_part(text: str) -> Mapping[str, Any]:
    return {"type": "text", "text": text}


@lru_cache(256)
def _image_part(picture: Picture) -> Mapping[str, Any]:
    data = base64.b64encode(picture.png()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _returned(reply: str, sent: Mapping[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    """A reply as its server sent it, with a call for each of `ids`; without `sent`, its text."""
    kept = {name: value for name, value in sent.items() if value is not None}
    calls = kept.pop("tool_calls", None)
    calls = calls if isinstance(calls, list) else []
    if len(calls) != len(ids):  # calls in the text, or calls of which none was carried out
        kept = {} if calls else without_reasoning(kept)
        return {**kept, "role": "assistant", **(_called(reply, ids) if ids else {"content": reply})}
    if calls:
        given: list[Any] = [call.get("id") if isinstance(call, dict) else None for call in calls]
        for at, each in enumerate(given):
            usable = isinstance(each, str) and each and given.index(each) == at
            given[at] = each if usable else ids[at]
        kept["tool_calls"] = [_call(call, id_) for call, id_ in zip(calls, given, strict=True)]
    said = kept.get("content")
    if not isinstance(said, str | list):
        said = None if calls else _joined(kept.get("refusal")) if sent else reply
    if reply == f"<think>{said}":  # the template writes the tag, and the server leaves it out
        said = reply
    return {**kept, "role": "assistant", "content": said}


def _call(call: Any, id_: str) -> dict[str, Any]:
    """A call as its server sent it, in a form that servers take."""
    call = call if isinstance(call, dict) else {"function": call}
    function = call["function"] if isinstance(call.get("function"), dict) else {}
    written, given = _function(_text(call)), function.get("arguments")
    if isinstance(given, dict) or (isinstance(given, str) and read_object(given) is not None):
        written = {**written, "arguments": given}
    return {"type": "function", **call, "id": id_, "function": {**function, **written}}


def _called(reply: str, ids: Sequence[str]) -> dict[str, Any]:
    """The content and the calls of a reply; a thought stays in the text unless it is empty."""
    rest = reply[after_thought(reply) :].strip(WHITESPACE)  # as it was parsed
    start = len(reply.rstrip(WHITESPACE)) - len(rest) + hide_json(rest).find("<tool_call>")
    said = reply[:start].removeprefix(EMPTY_THOUGHT).rstrip()
    calls = [
        {"id": each, "type": "function", "function": _function(text)}
        for each, text in zip(ids, hermes(rest), strict=True)
    ]
    return {"content": said or None, "tool_calls": calls}


def without_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A server's message without its thought; signatures and other fields stay."""
    kept = {name: value for name, value in message.items() if name not in REASONING}
    match kept.get("content"):
        case str(text):
            kept["content"] = without_thought(text)
        case list() as parts:
            kept["content"] = [p for p in parts if not (isinstance(p, dict) and "thinking" in p)]
    return kept


def _function(text: str) -> dict[str, Any]:
    found = read_object(text) or {}
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        name = UNKNOWN
    if not isinstance(arguments, dict):
        arguments = {"text": text}
    return {"name": name, "arguments": json.dumps(arguments)}
