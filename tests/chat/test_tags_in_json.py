"""Strings of JSON may quote any tag: in calls, in answers, and beside thoughts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.chat.actions import TAGS, parse
from ragen.chat.chat import without_thought
from ragen.chat.tool_calls import hermes, llama3, mistral, parse_tools, write_hermes

MARKS = (
    *TAGS,
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "||",
    "```",
    '"',
    "\\",
    "{",
    "[",
    ";",
)
quoting = st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=6).map("".join)
arguments = st.dictionaries(quoting, quoting | st.lists(quoting, max_size=2), max_size=3)
FORMS: dict[str, tuple[Callable[[str], Sequence[str]], Callable[[Sequence[str]], str]]] = {
    "hermes": (hermes, write_hermes),
    "llama3": (llama3, "; ".join),
    "mistral": (mistral, lambda calls: f"[TOOL_CALLS][{', '.join(calls)}]"),
}


def written(call: Mapping[str, Any]) -> str:
    return json.dumps({"name": "say", "arguments": call}, ensure_ascii=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("think", [True, False])
@given(calls=st.lists(arguments, min_size=1, max_size=3))
def test_calls_are_read_back(form: str, think: bool, calls: list[dict[str, Any]]) -> None:
    parser, write = FORMS[form]
    reply = ("<think>hm [1</think>\n" if think else "") + write([written(call) for call in calls])
    parsed = parse_tools(reply, parser, think=think, max_actions=9)
    assert parsed.valid and parsed.thought == ("hm [1" if think else None)
    assert [json.loads(action)["arguments"] for action in parsed.actions] == calls


@pytest.mark.parametrize("think", [True, False])
@given(answer=arguments)
def test_an_answer_in_json_is_one_action(think: bool, answer: dict[str, Any]) -> None:
    text = json.dumps(answer, ensure_ascii=False)
    thought = "<think>so</think>" if think else ""
    reply = f"{thought}<answer> {text}</answer>"
    parsed = parse(reply, think=think, actions=None, max_actions=5)
    assert parsed.valid and parsed.actions == (text,)
    parsed = parse_tools(f"{thought}{text}", hermes, think=think, max_actions=5)
    assert parsed.valid and parsed.actions == (text,) and not parsed.calls
    assert without_thought(f"{thought}{text}") == text


@given(quoted=arguments)
def test_a_thought_may_quote_json(quoted: dict[str, Any]) -> None:
    thought = f"I saw {json.dumps(quoted, ensure_ascii=False)} there"
    parsed = parse(f"<think>{thought}</think><answer>go</answer>", think=True, actions=None,
                   max_actions=1)  # fmt: skip
    assert parsed.valid and parsed.thought == thought


@pytest.mark.parametrize(
    "reply",
    [
        '<think>a</think>{"say": "x"}</think>',
        '<think>a</think>b<think>{"say": "<think>"}',
        '<think>a</think><tool_call>{"name": "say", "arguments": {}}</tool_call></think>',
        '<think>a</think><tool_call>{"name": "say", "arguments": {}}',
        '<think>a</think><tool_call>{"say": "</tool_call>',
        "<think>a</think><tool_call><tool_call>{}</tool_call>",
    ],
)
def test_tags_outside_json_count_as_before(reply: str) -> None:
    assert not parse_tools(reply, hermes, think=True, max_actions=5).valid


def test_names_of_actions_are_no_json() -> None:
    reply = '<answer>["</answer>"]</answer>'
    assert not parse(reply, think=False, actions=("Up",), max_actions=1).problem.startswith('"')  # type: ignore[union-attr]
