"""JSON inside other text, decoded from where it begins.

Tags such as ``</think>`` and ``<tool_call>`` mark the parts of a reply, and a string of JSON in a
part may quote them. So whoever looks for a tag looks for it outside JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

PATIENCE = 8
"""Limits the cost of failed attempts, which is counted in decoded characters."""

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_OPENING = re.compile(r"""\{\s*["}]|\[\s*["{\[\]\dtfn-]""")


def read_json(text: str, start: int = 0) -> tuple[Any, int] | None:
    """The JSON value that begins at `start`, after white space, and where it ends; else ``None``.

    Example:
        >>> read_json('{"say": "</call>"}</call>')
        ({'say': '</call>'}, 18)
    """
    try:
        return _DECODER.raw_decode(text, _SPACE.match(text, start).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        return None


def hide_json(text: str) -> str:
    """The text with zeros in place of every JSON object and list in it.

    What is found in the result is outside JSON, and at the same place in `text`. The time is linear
    in the text: after too many brackets that begin no JSON, the rest stays as it is.

    Example:
        >>> hide_json('see {"say": "</call>"}</call>')
        'see 000000000000000000</call>'
    """
    parts, copied, at = list[str](), 0, 0
    left = PATIENCE * (len(text) + 1000)
    while left > 0 and (opening := _OPENING.search(text, at)):
        start = opening.start()
        try:
            _, at = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError as error:
            left -= 64 + error.pos - start + error.pos // 32  # it counts the lines before it
            at = start + 1
        except (ValueError, RecursionError):  # an integer of thousands of digits, or deep brackets
            left -= len(text)
            at = start + 1
        else:
            parts += text[copied:start], "0" * (at - start)
            copied = at
    return "".join((*parts, text[copied:]))
