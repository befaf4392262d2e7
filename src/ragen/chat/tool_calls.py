"""Replies that call tools: the forms in which models write calls, and the parser of such replies.

A reply has a thought if thoughts are asked for, and then either calls of tools or an answer. The
form of a call follows from the model's chat template (`ragen.chat.tool_template`), or
``prompt.tool_parser`` names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ragen.chat.actions import TAGS, WHITESPACE, AskedCall, Parsed, find_thought
from ragen.config.extensions import TOOL_PARSER
from ragen.core.json_text import hide_json, read_json
from ragen.core.types import Message
from ragen.core.user_code import boundary
from ragen.envs.tools import read_call

ToolParser = Callable[[str], Sequence[str]]
"""The signature of every parser of calls: it takes a reply without its thought.

    def hermes(reply: str) -> list[str]: ...

It returns each call as the text of a JSON object with ``name`` and ``arguments`` (or
``parameters``), in order, and an empty list for an answer. It raises `ValueError` with a sentence
for the agent if the calls are not in its form.
"""

PARSER_S = 30.0
"""Seconds that a parser from outside may take for one reply."""

CALL_ID = re.compile("[A-Za-z0-9]{9}")
"""An id that the model may give a call."""

NO_CALL = "This call is not a JSON object with a name and arguments."
NO_BUDGET = "This call was not carried out: no action was left."
ENDED = "This call was not carried out: the episode had ended."


def hermes(reply: str) -> list[str]:
    """Hermes and Qwen: JSON between ``<tool_call>`` and ``</tool_call>``, after any other text."""
    first, *parts = hide_json(reply).split("<tool_call>")
    calls, at = [], len(first)
    for part in parts:
        call, end, after = part.partition("</tool_call>")
        if not end or after.strip(WHITESPACE):
            raise ValueError("Each call must be closed, and nothing may follow the last one.")
        at += len("<tool_call>")
        calls.append(reply[at : at + len(call)].strip(WHITESPACE))
        at += len(part)
    return calls


def llama3(reply: str) -> list[str]:
    """Llama 3: the reply is one JSON object, or several separated by ``;``."""
    rest, calls = reply.strip(WHITESPACE), []
    while rest.startswith("{"):
        found = read_json(rest)
        if found is None:
            raise ValueError("A call must be a JSON object.")
        calls.append(rest[: found[1]])
        rest = rest[found[1] :].lstrip(f"{WHITESPACE};")
    if calls and rest:
        raise ValueError("Nothing may follow the last call.")
    return calls


def mistral(reply: str) -> list[str]:
    """Mistral: ``[TOOL_CALLS]`` and a JSON list of calls, after any other text."""
    at = hide_json(reply).find("[TOOL_CALLS]")
    if at < 0:
        return []
    try:
        found = json.loads(reply[at + len("[TOOL_CALLS]") :])
        listed = found if isinstance(found, list) else []
        texts = [json.dumps(call, ensure_ascii=False) for call in listed]
    except (ValueError, RecursionError):
        texts = []
    if not texts:
        raise ValueError("[TOOL_CALLS] must be followed by a JSON list of calls and nothing else.")
    return texts


TOOL_PARSERS: dict[str, ToolParser] = {"hermes": hermes, "llama3": llama3, "mistral": mistral}
"""RAGEN's own parsers by their name in the config."""


def find_tool_parser(name: str) -> ToolParser:
    """The parser of a name in the config, RAGEN's own or from outside."""
    parser = TOOL_PARSER.find(name, TOOL_PARSERS)
    if name in TOOL_PARSERS:
        return parser

    def guarded(reply: str) -> Sequence[str]:
        with boundary(f"the tool parser {name}", PARSER_S):
            try:
                calls = parser(reply)
            except ValueError as error:
                calls, refusal = None, str(error)
            else:
                if not isinstance(calls, list | tuple):
                    raise TypeError(f"it returned {type(calls).__name__}, no list of texts")
                return [str(call) for call in calls]
        raise ValueError(refusal)

    return guarded


def write_hermes(calls: Sequence[str]) -> str:
    """Calls in the form of `hermes`."""
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The form of calls in replies: how they are read, and how a player writes them.

    `mark` is the text that begins the first call; it is empty where a call begins without one.
    """

    parse: ToolParser = hermes
    write: Callable[[Sequence[str]], str] = write_hermes
    mark: str = "<tool_call>"

    def before(self, reply: str) -> str:
        """The text before the first call of a reply without its thought."""
        return reply[: max(0, hide_json(reply).find(self.mark))]

    def reply(self, actions: Sequence[str]) -> str:
        """The reply of a player, without a thought: calls, or one answer."""
        if read_call(actions[0]) is None:
            return actions[0]
        return self.write(actions)


def parse_tools(reply: str, parser: ToolParser, *, think: bool, max_actions: int) -> Parsed:
    r"""Parse a whole reply that calls tools or answers; see `ragen.chat.actions.parse`.

    A reply that is not well formed carries out nothing. In a well-formed one every call has a
    result. A call that cannot be read is refused and costs the format penalty; calls beyond
    `max_actions` are refused without a penalty.
    """
    thought_chars = find_thought(reply) if think else None
    thought = None if thought_chars is None else reply[slice(*thought_chars)]
    start = 0 if thought_chars is None else thought_chars[1] + len("</think>")
    rest = reply[start:].strip(WHITESPACE)

    def malformed(problem: str) -> Parsed:
        return Parsed(thought, thought_chars, (), (), False, problem)

    if think and thought is None:
        return malformed("The reply must begin with <think>…</think>.")
    if any(tag in rest and tag in hide_json(rest) for tag in TAGS[:2]):
        return malformed("The reply may have a thought only where one is asked for.")
    try:
        found = parser(rest)
    except ValueError as error:
        return malformed(str(error))
    if not found:
        if not rest:
            return malformed("The reply has neither a call nor an answer.")
        if read_call(rest) is not None:
            return malformed("The call is not in the form of this model's calls.")
        left = (rest,)[: max(0, max_actions)]
        return Parsed(thought, thought_chars, (rest,), left, True, None)
    calls = asked_calls(found, max_actions)
    asked = tuple(call.text for call in calls)
    carried_out = tuple(call.text for call in calls if call.refusal is None)
    problem = NO_CALL if any(call.refusal == NO_CALL for call in calls) else None
    return Parsed(thought, thought_chars, asked, carried_out, problem is None, problem, calls)


def asked_calls(found: Sequence[str], max_actions: int) -> tuple[AskedCall, ...]:
    """The calls of a reply, of which at most `max_actions` are carried out."""
    calls, left = list[AskedCall](), max_actions
    for at, text in enumerate(found):
        call = _read(text, f"call{at:05d}")
        if call.refusal is None and left <= 0:
            call = replace(call, refusal=NO_BUDGET)
        left -= call.refusal is None
        calls.append(call)
    return tuple(calls)


def _read(text: str, default_id: str) -> AskedCall:
    """One call; a model may give it an id, to which its result refers."""
    call = read_call(text)
    if call is None:
        return AskedCall(text, "", default_id, NO_CALL)
    given = json.loads(text).get("id")
    own = given if isinstance(given, str) and CALL_ID.fullmatch(given) else default_id
    return AskedCall(json.dumps(call._asdict(), ensure_ascii=False), call.name, own)


def results_of(calls: Sequence[AskedCall], observations: Sequence[str]) -> tuple[str, ...]:
    """The result of each call: the next of the `observations`, or why it was not carried out."""
    shown = iter(observations)
    return tuple(
        next(shown, f"Error: {ENDED}") if call.refusal is None else f"Error: {call.refusal}"
        for call in calls
    )


def tool_messages(calls: Sequence[AskedCall], results: Sequence[str]) -> tuple[Message, ...]:
    """The messages with the results of calls, in the role ``tool``."""
    return tuple(
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
        for call, result in zip(calls, results, strict=True)
    )
