"""What each library may send, what is refused, and answers as JSON and as events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from ragen.gateway.dialects import DIALECTS, Dialect
from ragen.gateway.messages import ChatMessage, Demand, Refused, Reply, Request, ToolCall
from ragen.gateway.responses import INSTRUCTIONS
from tests.gateway.scripted_gateway import ARGUMENTS, TURNS, reply

CHAT, RESPONSES, ANTHROPIC = DIALECTS.values()
ROUTES = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}, "additionalProperties": False}
TOOL = {
    "type": "function",
    "function": {"name": "guess", "description": "Guess.", "parameters": SCHEMA},
}
CALL = ToolCall("c1", "guess", '{"n": 4}')


def nothing(_: str) -> Sequence[ChatMessage]:
    raise KeyError


def read(dialect: Dialect, **body: Any) -> Request:
    key = "input" if dialect is RESPONSES else "messages"
    return dialect.read({"model": "policy", key: [USER], **body}, nothing)


def chat(*messages: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    return read(CHAT, messages=list(messages)).messages


def anthropic(*messages: Mapping[str, Any], **body: Any) -> tuple[ChatMessage, ...]:
    return read(ANTHROPIC, messages=list(messages), **body).messages


def items(*given: Mapping[str, Any], **body: Any) -> tuple[ChatMessage, ...]:
    return read(RESPONSES, input=list(given), **body).messages


def texts(*content: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": each} for each in content]


CONVERSATION = (
    ChatMessage("system", "Play."),
    ChatMessage("user", "a\nb"),
    ChatMessage("assistant", "I guess.", (CALL,)),
    ChatMessage("tool", "low", (), "c1", "guess"),
    ChatMessage("user", "go on"),
)
"""The conversation that each dialect spells below."""


def test_chat_completions_are_read() -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "guess", "arguments": '{"n": 4}'}}
    assert (
        chat(
            {"role": "developer", "content": texts("Play.")},
            {"role": "user", "content": texts("a", "b")},
            {"role": "assistant", "content": texts("I ", "guess."), "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": texts("low")},
            {"role": "user", "content": "go on", "name": None},
        )
        == CONVERSATION
    )


def test_messages_of_anthropic_are_read() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "guess", "input": {"n": 4}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": texts("low")}
    cached = {"type": "text", "text": "Play.", "cache_control": {"type": "ephemeral"}}
    assert (
        anthropic(
            {"role": "user", "content": texts("a", "b")},
            {"role": "assistant", "content": [*texts("I guess."), call]},
            {"role": "user", "content": [result, *texts("go on")]},
            system=[cached],
        )
        == CONVERSATION
    )


def test_items_of_responses_are_read() -> None:
    found = items(
        {"role": "user", "content": texts("a", "b", kind="input_text")},
        {"type": "message", "role": "assistant", "content": texts("I guess.", kind="output_text")},
        {"type": "function_call", "call_id": "c1", "name": "guess", "arguments": '{"n": 4}'},
        {"type": "function_call_output", "call_id": "c1", "output": "low"},
        {"role": "user", "content": "go on"},
        instructions="Play.",
    )
    assert found == (ChatMessage("system", "Play.", name=INSTRUCTIONS), *CONVERSATION[1:])
    assert read(RESPONSES, input="hi").messages == (ChatMessage("user", "hi"),)


def test_messages_of_the_assistant_in_a_row_are_one() -> None:
    first, second = ({"role": "assistant", "content": text} for text in ("a", "b"))
    called = {"role": "assistant", "tool_calls": [{"id": "c1", **TOOL}]}
    call = ToolCall("c1", "guess", "")
    assert chat(USER, first, called, second)[1:] == (ChatMessage("assistant", "a\nb", (call,)),)


def test_no_text_and_empty_text_of_a_reply_are_the_same() -> None:
    spellings: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}, {"content": []}]
    for each in spellings:
        assert chat({"role": "assistant", **each})[0].text is None


def test_a_thought_that_was_kept_apart_is_in_the_text_again() -> None:
    whole = (ChatMessage("assistant", "<think>so</think>5"),)
    for key in ("reasoning_content", "reasoning"):
        assert chat({"role": "assistant", "content": "5", key: "so"}) == whole
    blocks = [{"type": "thinking", "thinking": "so", "signature": "x"}, *texts("5")]
    assert anthropic({"role": "assistant", "content": blocks}) == whole
    for key, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        item = {"type": "reasoning", "id": "r", "summary": [], key: texts("so", kind=kind)}
        (found,) = items(item, {"role": "assistant", "content": "5"})
        assert found.text == "<think>so</think>\n5"
    assert items(USER, {"type": "reasoning", "summary": []})[1:] == (
        ChatMessage("assistant", None),
    )


def test_a_system_message_stays_in_its_place() -> None:
    system = {"role": "system", "content": "Answer with a tool."}
    for found in (chat(USER, system), items(USER, system), anthropic(USER, system)):
        assert [each.role for each in found] == ["user", "system"]


def test_half_a_surrogate_pair_becomes_text() -> None:
    half, pair = "a\ud83d", "\ud83d\ude00"
    assert chat({"role": "user", "content": half})[0].text == "a\ufffd"
    assert anthropic({"role": "user", "content": texts(half, pair)})[0].text == "a\ufffd\n😀"
    block = {"type": "tool_use", "id": "c", "name": "guess", "input": {"n": half}}
    (found,) = anthropic({"role": "assistant", "content": [block]})
    assert found.calls[0].arguments == '{"n": "a\ufffd"}'


def test_a_previous_response_brings_its_conversation_and_not_its_instructions() -> None:
    first = read(RESPONSES, input="hi", instructions="Play.")
    sent = reply(None, '{"n":4}')
    calls = (*first.messages, sent.message)
    body = {
        "previous_response_id": RESPONSES.write(sent, "policy", {})["id"],
        "instructions": "Now",
    }
    result = {"type": "function_call_output", "call_id": sent.calls[0].id, "output": "low"}
    found = RESPONSES.read({**body, "input": [result]}, {sent.id: calls}.__getitem__)
    assert [(each.role, each.text) for each in found.messages] == [
        ("system", "Now"),
        ("user", "hi"),
        ("assistant", None),
        ("tool", "low"),
    ]
    assert found.messages[2].calls == sent.calls
    with pytest.raises(Refused, match="previous response 'resp_r9' is not known"):
        read(RESPONSES, previous_response_id="resp_r9")


@ROUTES
def test_the_same_tools_are_equal_whatever_a_library_adds(dialect: Dialect) -> None:
    key = "input_schema" if dialect is ANTHROPIC else "parameters"
    about = {key: SCHEMA, "strict": True, "name": "guess", "description": "Guess."}
    flat: dict[str, Any] = {"type": "custom" if dialect is ANTHROPIC else "function", **about}
    given = {"function": about, "type": "function"} if dialect is CHAT else flat
    found = read(dialect, tools=[given]).tools
    assert json.dumps(found) == json.dumps([TOOL])
    assert read(dialect, tools=None).tools == read(dialect, tools=[]).tools == ()


@ROUTES
def test_a_tool_without_arguments_has_an_empty_schema(dialect: Dialect) -> None:
    (tool,) = read(dialect, tools=[{"name": "stop", "description": None}]).tools
    empty = {"type": "object", "properties": {}}
    assert tool["function"] == {"name": "stop", "description": "", "parameters": empty}


def test_limits_and_stop_texts() -> None:
    asked = read(CHAT, max_tokens=9, max_completion_tokens=7, stop=["a", "b"], stream=True)
    assert (asked.max_tokens, asked.stop, asked.stream) == (7, ("a", "b"), True)
    assert read(CHAT, stop="a").stop == ("a",)
    assert read(CHAT, stop=None) == read(CHAT, stop="") == read(CHAT)
    assert read(ANTHROPIC, stop_sequences=["a"], max_tokens=3).stop == ("a",)
    assert read(RESPONSES, max_output_tokens=5).max_tokens == 5


@ROUTES
def test_parameters_that_are_not_honoured_are_recorded(dialect: Dialect) -> None:
    given = {"temperature": 0.5, "seed": 1, "new_parameter": {"x": 1}}
    assert read(dialect, **given, top_p=None, include=[]).ignored == given


NAMED = {"name": "guess"}


@pytest.mark.parametrize(
    ("dialect", "body", "demand"),
    [
        (CHAT, {"tool_choice": "auto"}, Demand()),
        (CHAT, {"tool_choice": "none"}, Demand(0, 0)),
        (CHAT, {"tool_choice": "required"}, Demand(1)),
        (CHAT, {"tool_choice": {"type": "function", "function": NAMED}}, Demand(1, None, "guess")),
        (CHAT, {"parallel_tool_calls": False}, Demand(0, 1)),
        (CHAT, {"parallel_tool_calls": True, "response_format": {"type": "text"}}, Demand()),
        (RESPONSES, {"tool_choice": {"type": "function", **NAMED}}, Demand(1, None, "guess")),
        (RESPONSES, {"tool_choice": "required", "parallel_tool_calls": False}, Demand(1, 1)),
        (RESPONSES, {"text": {"verbosity": "low", "format": {"type": "text"}}}, Demand()),
        (ANTHROPIC, {"tool_choice": {"type": "any"}}, Demand(1)),
        (ANTHROPIC, {"tool_choice": {"type": "none"}}, Demand(0, 0)),
        (ANTHROPIC, {"tool_choice": {"type": "tool", **NAMED}}, Demand(1, None, "guess")),
        (
            ANTHROPIC,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            Demand(0, 1),
        ),
    ],
)
def test_what_a_request_demands_of_calls(
    dialect: Dialect, body: dict[str, Any], demand: Demand
) -> None:
    asked = read(dialect, tools=[{"name": "guess"}, {"name": "stop"}], **body)
    assert (asked.demand, asked.ignored.keys() - {"text"}) == (demand, set())


def test_marks_that_no_template_writes_are_recorded() -> None:
    assert read(CHAT, messages=[{**USER, "name": "bob"}]).ignored == {"name": ["bob"]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True}
    asked = read(ANTHROPIC, messages=[{"role": "user", "content": [result]}])
    assert asked.ignored == {"is_error": 1}


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("dialect", "body", "line"),
    [
        (CHAT, {"n": 2}, "n other than 1"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format of type"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format of type"),
        (ANTHROPIC, {"output_format": {"type": "json_schema"}}, "output_format of type"),
        (ANTHROPIC, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        (CHAT, {"tool_choice": "required"}, "demands a tool, which the request does not offer"),
        (
            RESPONSES,
            {"tools": [{"name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
            "demands 'g', which",
        ),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice 'allowed_tools' is not"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias is"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions is not supported: offer tools"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "type 'image_url'"),
        (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "role 'bot': expected one of"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content must be a text"),
        (CHAT, {"messages": []}, "the conversation has no message"),
        (CHAT, {"messages": "hi"}, "messages must be a list of objects"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "a call"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function of each call"),
        (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "a tool of type 'custom'"),
        (CHAT, {"tools": [{"type": "function"}]}, "each tool must have a name"),
        (CHAT, {"tools": [{"name": "f", "parameters": {"a": "\ud800"}}]}, "tools must be plain"),
        (CHAT, {"max_tokens": 0}, "a limit of tokens"),
        (CHAT, {"stop": [5]}, "stop must be a text"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "a tool of type 'web_search'"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "type 'item_reference'"),
        (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "encrypted"),
        (RESPONSES, {"background": True}, "background is not supported"),
        (ANTHROPIC, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
        (ANTHROPIC, {"mcp_servers": [{}]}, "mcp_servers is"),
        (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(
    dialect: Dialect, body: dict[str, Any], line: str
) -> None:
    with pytest.raises(Refused, match=line) as refused:
        read(dialect, **body)
    assert refused.value.status == 400
    assert "\n" not in str(refused.value)


# Answers.


def test_an_answer_of_chat_completions() -> None:
    answer = CHAT.write(TURNS[0], "policy", {})
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == TURNS[0].text
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "guess", "arguments": '{"n": 4, "why": "café é 1.0"}'}
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    assert CHAT.write(TURNS[1], "policy", {})["choices"][0]["message"]["content"] is None
    assert "tool_calls" not in CHAT.write(TURNS[2], "policy", {})["choices"][0]["message"]


@pytest.mark.parametrize(
    ("finish", "chat", "status", "anthropic"),
    [
        ("stop", "stop", "completed", "end_turn"),
        ("length", "length", "incomplete", "max_tokens"),
        ("calls", "tool_calls", "completed", "tool_use"),
    ],
)
def test_why_a_reply_ended(finish: Any, chat: str, status: str, anthropic: str) -> None:
    ended = Reply("r1", "a", (), finish, 1, 2)
    assert CHAT.write(ended, "policy", {})["choices"][0]["finish_reason"] == chat
    answer = RESPONSES.write(ended, "policy", {})
    assert answer["status"] == answer["output"][0]["status"] == status
    assert (answer["incomplete_details"] is None) == (status == "completed")
    assert ANTHROPIC.write(ended, "policy", {})["stop_reason"] == anthropic


def test_anthropic_is_told_which_stop_text_ended_a_reply() -> None:
    answer = ANTHROPIC.write(Reply("r1", "a", (), "stop", 1, 2, "END"), "policy", {})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


@ROUTES
def test_an_empty_reply_has_an_empty_text(dialect: Dialect) -> None:
    answer = dialect.write(Reply("r1", None, (), "stop", 1, 1), "policy", {})
    for part in ("choices", 0, "message", "content"), ("output", 0, "content", 0, "text"):
        if part[0] in answer:
            assert at(answer, *part) == ""
    if dialect is ANTHROPIC:
        assert answer["content"] == texts("")


def at(value: Any, *path: str | int) -> Any:
    for each in path:
        value = value[each]
    return value


def test_arguments_that_are_no_object_are_still_an_object_for_anthropic() -> None:
    odd = reply(None, "[1", "")
    first, second = ANTHROPIC.write(odd, "policy", {})["content"]
    assert first["input"] == {"INVALID_JSON": "[1"}
    assert second["input"] == {}
    sent = CHAT.write(odd, "policy", {})["choices"][0]["message"]["tool_calls"]
    assert [each["function"]["arguments"] for each in sent] == ["[1", "{}"]


def test_an_answer_of_responses_repeats_the_request() -> None:
    body = {"instructions": "Play.", "tools": [{"type": "function"}], "parallel_tool_calls": False}
    answer = RESPONSES.write(TURNS[1], "policy", body)
    assert body.items() <= answer.items()
    assert answer["tool_choice"] == "auto"
    ids = [item["id"] for item in answer["output"]]
    assert len(set(ids)) == 2


def sent(dialect: Dialect, reply: Reply, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and the data of the events."""
    for text in dialect.events(reply, "policy", body):
        assert text.isascii()
        assert text.endswith("\n\n")
        *name, data = text.rstrip("\n").split("\n")
        data = data.removeprefix("data: ")
        yield "".join(name).removeprefix("event: "), None if data == "[DONE]" else json.loads(data)


REPLIES = pytest.mark.parametrize(
    "made",
    [*TURNS, Reply("r1", "", (), "length", 1, 2)],
    ids=["one", "two", "text", "next", "empty"],
)


@REPLIES
def test_chunks_add_up_to_the_answer(made: Reply) -> None:
    whole = CHAT.write(made, "policy", {})
    *chunks, counted, end = [
        data for _, data in sent(CHAT, made, {"stream_options": {"include_usage": True}})
    ]
    assert end is None
    assert (counted["choices"], counted["usage"]) == ([], whole["usage"])
    assert len(list(sent(CHAT, made, {}))) == len(chunks) + 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    message = whole["choices"][0]["message"]
    assert deltas[0]["role"] == "assistant"
    said = [delta["content"] for delta in deltas if "content" in delta]
    assert (None if None in said else "".join(said)) == message["content"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == list(range(len(made.calls)))
    assert calls == message.get("tool_calls", [])
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes[-1] == whole["choices"][0]["finish_reason"]
    assert set(finishes[:-1]) == {None}


@REPLIES
def test_events_of_responses_add_up_to_the_answer(made: Reply) -> None:
    whole = RESPONSES.write(made, "policy", {})
    found = list(sent(RESPONSES, made, {}))
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert found[-1][1]["response"] == whole
    assert found[-1][0] == f"response.{whole['status']}"
    done = [data["item"] for name, data in found if name == "response.output_item.done"]
    assert done == whole["output"]
    deltas = [data["delta"] for name, data in found if name.endswith(".delta")]
    texts = [item.get("arguments") or at(item, "content", 0, "text") for item in whole["output"]]
    assert deltas == texts


@REPLIES
def test_events_of_anthropic_add_up_to_the_answer(made: Reply) -> None:
    whole = ANTHROPIC.write(made, "policy", {})
    found = list(sent(ANTHROPIC, made, {}))
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    message = found[0][1]["message"]
    assert (found[0][0], message["content"], found[-1][0]) == ("message_start", [], "message_stop")
    for name, data in found:
        if name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["input"] = json.loads(delta["partial_json"])
        elif name == "message_delta":
            message.update(data["delta"])
            message["usage"].update(data["usage"])
    assert message == whole


def test_errors_have_the_form_of_their_dialect() -> None:
    long = Refused(400, "context_length_exceeded", "the maximum context length is 9 tokens")
    words = f"prompt is too long: {long}"
    for dialect in (CHAT, RESPONSES):
        told = dialect.error(long)["error"]
        assert told["code"] == "context_length_exceeded"
        assert (told["type"], told["message"]) == ("invalid_request_error", words)
    told = ANTHROPIC.error(long)
    assert told["error"]["message"] == words
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    kinds = {401: "authentication_error", 410: "invalid_request_error", 503: "api_error"}
    for status, kind in kinds.items():
        assert ANTHROPIC.error(Refused(status, "x", "y"))["error"]["type"] == kind
    assert CHAT.error(Refused(503, "x", "y"))["error"]["type"] == "server_error"


def test_arguments_are_sent_in_the_spelling_that_libraries_write() -> None:
    (call,) = reply(None, ARGUMENTS).calls
    assert call.arguments == ARGUMENTS
    for dialect in (CHAT, RESPONSES):
        text = json.dumps(dialect.write(TURNS[0], "policy", {}), ensure_ascii=False)
        assert json.dumps('{"n": 4, "why": "café é 1.0"}', ensure_ascii=False) in text
