"""JSON inside other text: found from where it begins, in linear time."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.core.json_text import hide_json, read_json


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("", ""),
        ("no JSON, [ or {", "no JSON, [ or {"),
        ('a {"b": "</c>"} </c>', "a 0000000000000 </c>"),
        ('{"a": {"b": ["}"]}} x [1, 2]', "0000000000000000000 x 000000"),
        ('{"open": "</c>', '{"open": "</c>'),
        ('{"outer": [1, {"b": "x"}', '{"outer": [1, 0000000000'),
        ("{'no': 'JSON'}", "{'no': 'JSON'}"),
        ('{"a": "\\"</c>"}', "0" * 15),
        ('["raw\nline"]', '["raw\nline"]'),
        ("[" + "9" * 5000 + "] [1]", "[" + "9" * 5000 + "] 000"),
    ],
)
def test_whole_objects_and_lists_are_hidden(text: str, hidden: str) -> None:
    assert hide_json(text) == hidden


def test_a_value_is_read_from_where_it_begins() -> None:
    assert read_json(' \n{"a": 1} rest') == ({"a": 1}, 10)
    assert read_json("see [1]", 4) == ([1], 7)
    assert read_json("7") == (7, 1)
    for text in ("", "x", "{", "[" * 100_000, "\xa0[]"):
        assert read_json(text) is None


@given(st.recursive(st.text('<>/think"\\[]{} \n', max_size=9), st.lists, max_leaves=5))
def test_any_value_is_hidden_wherever_it_stands(value: object) -> None:
    text = json.dumps([value], ensure_ascii=False)
    assert hide_json(f"</think>{text}<think>") == f"</think>{'0' * len(text)}<think>"
    assert read_json(f"({text})", 1) == ([value], len(text) + 1)


@pytest.mark.parametrize(
    "part", ["[", "{", '{"', '{"a":', '{"a":"', "[1,", '["{', '{"</think>{": ', "[x]", '"', "[[]"]
)
def test_the_time_is_linear_in_the_text(part: str) -> None:
    """300,000 characters, many times the longest reply, take a fraction of a second."""
    text = part * (300_000 // len(part))
    start = time.process_time()
    assert len(hide_json(text)) == len(text)
    assert time.process_time() - start < 2
