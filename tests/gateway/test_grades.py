"""A reply is known again in what libraries make of it, and in nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ragen.gateway.dialects import DIALECTS
from ragen.gateway.grades import GRADES, grade
from ragen.gateway.messages import ChatMessage, Reply, ToolCall
from tests.gateway.scripted_gateway import ARGUMENTS, TURNS, reply


def heard(text: str | None, *arguments: str, name: str = "guess") -> ChatMessage:
    calls = tuple(ToolCall(f"other{n}", name, each) for n, each in enumerate(arguments))
    return ChatMessage("assistant", text, calls)


SPELT = '{"n": 4, "why": "café é 1.0"}'
SAID = "  I think\n4 is  good. "


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (heard(SAID, SPELT), "verbatim"),
        (heard(SAID, ARGUMENTS), "verbatim"),
        (heard(SAID, json.dumps(json.loads(SPELT))), "JSON written anew"),
        (heard(SAID, '{"why":"café é 1.0","n":4.0}'), "JSON written anew"),
        (heard(SAID.strip(), SPELT), "other white space"),
        (heard(SAID.strip(), '{"n":4,"why":"café é 1.0"}'), "other white space"),
        (heard(None, SPELT), "without the text beside calls"),
        (heard("", '{"n":4,"why":"café é 1.0"}'), "without the text beside calls"),
        (heard(SAID), None),
        (heard(None), None),
        (heard("I think 5 is good.", SPELT), None),
        (heard(SAID, SPELT, SPELT), None),
        (heard(SAID, SPELT, name="Guess"), None),
        (heard(SAID, '{"n": 5, "why": "café é 1.0"}'), None),
        (heard(SAID, '{"n": true, "why": "café é 1.0"}'), None),
        (heard(SAID, '{"n": "4", "why": "café é 1.0"}'), None),
        (heard(SAID, '{"n": 4, "why": "cafe é 1.0"}'), None),
        (heard(SAID, '{"n": 4, "why": "café é 1.0", "x": null}'), None),
    ],
)
def test_each_grade(message: ChatMessage, expected: str | None) -> None:
    found = grade(message, reply(SAID, ARGUMENTS))
    assert found == (None if expected is None else GRADES.index(expected))


def test_values_that_python_holds_for_equal_are_told_apart() -> None:
    for ours, theirs, expected in [
        ("1", "true", None),
        ("0", "false", None),
        ("[1]", "[true]", None),
        ("1e2", "100", 1),
        ("-0.0", "0", 1),
        ("9007199254740993", "9007199254740992", None),
        ("1.5", "1.50", 1),
    ]:
        sent = reply(None, f'{{"n": {ours}}}')
        assert grade(heard(None, f'{{"n":{theirs}}}'), sent) == expected, (ours, theirs)


def test_calls_are_compared_in_their_order() -> None:
    first, second = '{"n": 1}', '{"n": 2}'
    assert grade(heard(None, first, second), reply(None, first, second)) == 0
    assert grade(heard(None, second, first), reply(None, first, second)) is None


def test_arguments_that_are_no_object() -> None:
    assert grade(heard(None, "[1"), reply(None, "[1")) == 0
    assert grade(heard(None, '{"INVALID_JSON": "[1"}'), reply(None, "[1")) == 1
    assert grade(heard(None, "{}"), reply(None, "")) == 0
    assert grade(heard(None, ""), reply(None, "{}")) == 1
    assert grade(heard(None, "[2"), reply(None, "[1")) is None
    assert grade(heard(None, "[" * 9999), reply(None, "{}")) is None


def test_a_stop_text_that_was_put_back() -> None:
    sent = reply("Thought: go\n<code>\nf()\n")
    message = heard("Thought: go\n<code>\nf()</code>")
    assert grade(message, sent) is None
    assert grade(message, sent, ("Observation:", "</code>")) == GRADES.index("with its stop text")
    assert grade(heard("f()</code>"), sent, ("</code>",)) is None
    more = heard("Thought: go\n<code>\nf()</code>\nCalling tools: []")
    assert grade(more, sent, ("</code>",)) is None


def test_an_empty_reply() -> None:
    empty = Reply("r", "", (), "stop", 1, 1)
    assert grade(heard(None), empty) == 0
    assert grade(heard("a"), empty) is None


@pytest.mark.parametrize("made", TURNS)
def test_an_answer_that_is_sent_back_is_verbatim(made: Reply) -> None:
    user = {"role": "user", "content": "hi"}
    for route, dialect in DIALECTS.items():
        answer = json.loads(json.dumps(dialect.write(made, "policy", {})))
        if "choices" in answer:
            body = {"messages": [user, answer["choices"][0]["message"]]}
        elif "output" in answer:
            body = {"input": [user, *answer["output"]]}
        else:
            body = {"messages": [user, {key: answer[key] for key in ("role", "content")}]}
        back = dialect.read(body, {}.__getitem__).messages[-1]
        assert grade(back, made) == 0, route
        assert grade(back, replace(made, id="another")) == 0
