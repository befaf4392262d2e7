"""How a chat template writes calls of tools and their results, found by differencing renderings.

Replies are kept as they were sampled, so only two things are needed of the template: the text
between a reply with calls and the next reply, which holds the results (a bridge, as in
`ragen.chat.template`), and the form of a call, which tells how sampled calls are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from ragen.chat.template import (
    LAST_USER,
    Exchange,
    Template,
    is_empty_thought,
)
from ragen.chat.tool_calls import TOOL_PARSERS, ToolForm, ToolParser
from ragen.core.errors import RagenError
from ragen.core.json_text import hide_json
from ragen.core.types import Message
from ragen.core.user_code import UserCodeError
from ragen.envs.tools import Call, read_call, tool_schema

ARGUMENTS: Mapping[str, Any] = {"Qkeyq": "Qvalueq"}
"""The arguments of trial calls."""
TRIAL_TOOL = tool_schema("Qtoolq", "Qq", {"type": "object", "properties": {}})
"""A tool for trials where none is known."""


def call_message(calls: Sequence[Call], ids: Sequence[str], content: str = "") -> dict[str, Any]:
    """An assistant's message with calls; their results refer to them by `ids`."""
    made = [
        {"id": each, "type": "function", "function": {**call._asdict()}}
        for call, each in zip(calls, ids, strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


@dataclass(frozen=True, slots=True)
class ToolBridge:
    """The text of a template after a reply that calls tools.

    `end` is the token that ends a reply, as text; `name` is a tool for trial calls. With `several`
    one message may have several calls, with `fold` the system text is in the first user message.
    """

    template: Template
    end: str
    name: str
    several: bool
    fold: bool

    def text(self, results: Sequence[Message]) -> str:
        """The bridge around the results of a reply's calls, from the end of the reply on.

        A message of the user may follow the results.
        """
        text = self._parts(self._trial(results), results)[1]
        if results[-1]["role"] == "user" and results[-1]["content"] not in text:
            raise RagenError(
                "this chat template leaves out what the user says after the results of tools"
            )
        return text

    def write(self, calls: Sequence[str]) -> str:
        """The reply with these calls as the template writes it."""
        made = [call for call in map(read_call, calls) if call is not None]
        assert len(made) == len(calls), "a player's actions are all calls or one answer"
        ids = [f"call{at:05d}" for at in range(len(made))]
        parts = [(made, ids)] if self.several else [([call], ids[:1]) for call in made]
        texts = (
            self._parts(call_message(*part), trial_results(part[1], "Qq"))[0] for part in parts
        )
        return "; ".join(without_empty_thought(text) for text in texts)

    def exchanges(self, content: str) -> Iterator[Exchange]:
        """The exchanges of a trial conversation (`extends_exactly`)."""
        for number, shown in enumerate((content, LAST_USER)):
            results = trial_results([f"call{number:05d}"], shown)
            call = self._trial(results)
            yield [call, *results], *self._parts(call, results)

    def _trial(self, results: Sequence[Message]) -> dict[str, Any]:
        ids = [each["tool_call_id"] for each in results if each["role"] == "tool"]
        ids = ids[: None if self.several else 1]
        return call_message([Call(self.name, ARGUMENTS)] * len(ids), ids)

    def _parts(self, calls: Mapping[str, Any], results: Sequence[Message]) -> tuple[str, str]:
        """The text of a reply with calls, and all that follows it."""
        text = self.template.first_reply([calls, *results], "that calls tools")
        reply, end, rest = text.partition(self.end)
        if not end:
            raise RagenError(
                "this chat template does not end a reply that calls tools: choose a model whose "
                "template takes tool calls"
            )
        return reply, end + rest


def find_tool_bridge(
    template: Template, plain: Template, end: str, name: str, fold: bool
) -> ToolBridge:
    """The tool bridge of a template that offers tools, `name` among them; `plain` offers none.

    The caller must still check that the template `extends_exactly`.
    """
    if template.start == plain.start:
        raise RagenError(
            "this model's chat template renders no tools, which the environment needs: set "
            "model.path to a model whose template does, such as Qwen3 or Llama 3.1 "
            "(the embedded models know no tools)"
        )
    ids = ["call00000", "call00001"]
    try:
        several = ToolBridge(template, end, name, True, fold)
        written = several.write([json.dumps({"name": name, "arguments": ARGUMENTS})] * 2)
        several.text([result for each in ids for result in trial_results([each], "Qq")])
        if written.count(ARGUMENTS["Qkeyq"]) == 2:
            return several
    except RagenError:
        pass  # the template takes one call in a message
    return ToolBridge(template, end, name, False, fold)


def find_form(bridge: ToolBridge, parser: ToolParser | None) -> ToolForm:
    """The form of a template's calls; `parser` reads it if one is named."""
    call = Call(bridge.name, ARGUMENTS)
    written = bridge.write([json.dumps(call._asdict())])
    for each in TOOL_PARSERS.values() if parser is None else (parser,):
        try:
            found = [read_call(text) for text in each(written)]
        except ValueError:
            continue
        except UserCodeError as failure:
            raise RagenError(f"prompt.tool_parser cannot be used: {failure.reason}") from failure
        if found == [call]:
            mark = commonprefix((hide_json(written), written.partition(bridge.name)[0]))  # noqa: RUF071 (characters)
            return ToolForm(each, bridge.write, mark.strip())
    raise RagenError(
        f"a call of this model's chat template, {written[:100]!r}, cannot be read: name a parser "
        "in prompt.tool_parser (docs/extend.md), or choose another model"
    )


def trial_results(ids: Sequence[str], content: str) -> list[Message]:
    """Messages with equal results of calls that have these ids."""
    return [
        {"role": "tool", "name": "Qtoolq", "tool_call_id": each, "content": content} for each in ids
    ]


def without_empty_thought(text: str) -> str:
    """A reply without the empty thought that some templates write before it."""
    thought, end, rest = text.partition("</think>")
    return rest.lstrip("\n") if end and is_empty_thought(thought + end) else text
