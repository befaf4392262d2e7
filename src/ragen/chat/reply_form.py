"""Replies whose thought and calls stand beside their content, as OpenAI's API and data sets do it.

The template says how a model writes such a reply: it renders one of trial texts, and the thought,
the content and the calls take their places. So no template trims or interprets what was said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ragen.chat.actions import find_thought
from ragen.chat.template import ANSWERS, THOUGHT, USER, Template, conversation
from ragen.chat.tool_calls import ToolForm, parse_tools
from ragen.chat.tool_template import (
    ARGUMENTS,
    call_message,
    trial_results,
    without_empty_thought,
)
from ragen.core.errors import RagenError
from ragen.envs.tools import Call, read_call

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The keys in which servers, data sets and templates keep a thought."""
IN_CONTENT = "write it into the content, as <think>…</think>"


class Said(NamedTuple):
    """A reply in parts: its content, its thought under the key `key`, and its calls as JSON."""

    content: str
    key: str = ""
    thought: str = ""
    calls: tuple[str, ...] = ()


def write_reply(said: Said, template: Template, end: str, form: ToolForm | None) -> str:
    """The reply as the template writes it; `end` is the text of the token that ends a reply.

    Raises:
        RagenError: The template leaves a part out, or RAGEN would not read the reply as `said`.
    """
    if said.key and not template.think:
        raise RagenError(f"{said.key} holds a thought, and prompt.think is false: set it to true")
    if said.calls and form is None:
        raise RagenError("there are tool_calls, and the environment has no tools: choose --env")
    trial: dict[str, Any] = {**conversation(USER, ANSWERS[0] if said.content else "")[1]}
    thought = THOUGHT.removesuffix("</think>")
    trial |= dict.fromkeys(THOUGHT_KEYS, thought) if said.key else {}
    parts = [
        (said.key, thought, said.thought),
        ("the content beside tool_calls", ANSWERS[0], said.content),
    ]
    results: Sequence[Mapping[str, Any]] = ()
    if said.calls and form is not None:
        call = Call(json.loads(said.calls[0])["name"], ARGUMENTS)
        trial |= {"tool_calls": call_message([call], ["call00000"])["tool_calls"]}
        results = trial_results(["call00000"], "Qq")
        written = form.write([json.dumps(call._asdict())])
        parts.append(("tool_calls", written, form.write(said.calls)))
    rest = template.first_reply([trial, *results], f"with {said.key or 'tool_calls'}")
    # The next reply begins as the first one does, also where no token ends a reply.
    before_reply = template.start.rpartition(USER)[2]
    rest = rest.partition(end)[0] if end in rest else rest.removesuffix(before_reply)
    reply = ""
    for name, mark, real in parts:
        if real:
            before, found, rest = rest.partition(mark)
            if not found:
                remedy = IN_CONTENT if name == said.key else "leave it out of the message"
                raise RagenError(f"this model's chat template leaves out {name}: {remedy}")
            reply += before + real
    reply = reply if said.key else without_empty_thought(reply)
    _check(said, reply, form)
    return reply


def _check(said: Said, reply: str, form: ToolForm | None) -> None:
    span = find_thought(reply)
    if said.key and (span is None or reply[slice(*span)].strip() != said.thought):
        raise RagenError(
            f"{said.key}: this model's chat template writes {reply[:60]!r}, in which RAGEN reads "
            f"no such thought: {IN_CONTENT}"
        )
    if said.calls and form is not None:
        most = len(said.calls)
        found = parse_tools(reply, form.parse, think=span is not None, max_actions=most)
        if [read_call(each.text) for each in found.calls] != [*map(read_call, said.calls)]:
            raise RagenError(
                f"tool_calls: this model's chat template writes {reply[-60:]!r}, in which RAGEN "
                f"reads other calls: {found.problem or 'the content has a call, too'}"
            )
