"""The strict parser of replies: ``<think>…</think><answer>…</answer>``.

The policy is optimised against this parser, so its text is not trusted. The structure is checked
in time linear in the reply. Every reply becomes a `Parsed`; nothing is raised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ragen.core.json_text import hide_json

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
"""Each appears exactly once in a well-formed reply, the first two only if it has a thought. Strings
of JSON may quote them."""

SEPARATOR = "||"
"""Separates the actions of one answer."""

WHITESPACE = " \t\r\n"
"""The characters that are trimmed. Zero-width, control and other spaces count as text."""

_WITHOUT_TAGS = r"([^<]*+(?:<(?!/?(?:think|answer)>)[^<]*+)*+)"
_THOUGHT = re.compile(rf"[{WHITESPACE}]*<think>{_WITHOUT_TAGS}</think>")
_ANSWER = re.compile(rf"[{WHITESPACE}]*<answer>{_WITHOUT_TAGS}</answer>[{WHITESPACE}]*")
_QUOTED_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Parsed:
    """The contents of a reply.

    Attributes:
        thought: As written; ``None`` if the reply does not begin with a closed thought, or if it
            must not have one.
        thought_chars: Half-open range of the thought's characters in the reply.
        actions_asked: The names in the answer as written, trimmed, unknown ones included.
        actions: The actions to carry out: the legal ones in canonical spelling, in order, at most
            `max_actions`. They are kept even if other names are unknown.
        valid: The reply has the required structure, a legal action and no unknown one.
        problem: The fault, as one short sentence for the next prompt; ``None`` if valid.

    Example:
        >>> reply = "<think>up, then?</think><answer>up || fly</answer>"
        >>> parse(reply, think=True, actions=("Up", "Down"), max_actions=5)
        ... # doctest: +NORMALIZE_WHITESPACE
        Parsed(thought='up, then?', thought_chars=(7, 16), actions_asked=('up', 'fly'),
               actions=('Up',), valid=False,
               problem='"fly" is not an action and was left out.', calls=())
    """

    thought: str | None
    thought_chars: tuple[int, int] | None
    actions_asked: tuple[str, ...]
    actions: tuple[str, ...]
    valid: bool
    problem: str | None
    calls: tuple[AskedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class AskedCall:
    """One call of a tool in a reply.

    `text` is the call as JSON that the environment takes; if it is not a call, `text` is as written
    and `name` is empty. The result refers to `id`. `refusal` says why a call is not carried out.
    """

    text: str
    name: str
    id: str
    refusal: str | None = None


def parse(reply: str, *, think: bool, actions: tuple[str, ...] | None, max_actions: int) -> Parsed:
    """Parse a whole reply: pre-filled start and sampled text together.

    A well-formed reply is the thought block (only with `think`) and then the answer block. Only
    white space may stand around them, and no tag appears twice. Any other reply carries out no
    action. In a well-formed reply, unknown names are dropped and cost the format penalty; legal
    actions beyond `max_actions` are dropped without a penalty.

    `actions` are matched regardless of case; ``None`` takes the whole answer as one action. JSON in
    it may quote a tag.
    """
    thought_chars = find_thought(reply) if think else None
    thought = None if thought_chars is None else reply[slice(*thought_chars)]
    start = 0 if thought_chars is None else thought_chars[1] + len("</think>")
    found = None
    if thought is not None or not think:
        found = _ANSWER.fullmatch(reply, start)
        if found is None and actions is None:
            found = _ANSWER.fullmatch(hide_json(reply), start)
    if found is None:
        form = "<think>…</think><answer>…</answer>" if think else "<answer>…</answer>"
        wrong = f"The reply must be exactly {form} with nothing else around it."
        return Parsed(thought, thought_chars, (), (), False, wrong)

    answer = reply[slice(*found.span(1))]
    pieces = [answer] if actions is None else answer.split(SEPARATOR)
    asked = tuple(name for piece in pieces if (name := piece.strip(WHITESPACE)))
    legal, unknown = (list(asked), None) if actions is None else _match(asked, actions)
    problem = None if asked else "The answer names no action."
    if unknown is not None:
        problem = f"{_quote(unknown)} is not an action and was left out."
    carried_out = tuple(legal[: max(0, max_actions)])
    return Parsed(thought, thought_chars, asked, carried_out, problem is None, problem)


def find_thought(reply: str) -> tuple[int, int] | None:
    """Range of the thought that a reply begins with: closed, and outside JSON without a tag."""
    found = _THOUGHT.match(reply)
    if found is None or any(reply.find(tag, found.end()) >= 0 for tag in TAGS[:2]):
        found = _THOUGHT.match(hide_json(reply)) or found
    return None if found is None else found.span(1)


def after_thought(reply: str) -> int:
    """Where the text after the thought begins that a reply begins with; 0 if it has none."""
    thought = find_thought(reply)
    return 0 if thought is None else thought[1] + len("</think>")


def _match(names: tuple[str, ...], actions: tuple[str, ...]) -> tuple[list[str], str | None]:
    """The legal actions among `names` in canonical spelling, and the first unknown name."""
    canonical = {action.lower(): action for action in actions}
    legal, unknown = [], None
    for name in names:
        action = canonical.get(name.lower())
        # The lower case of the Kelvin sign is an ASCII k: a look-alike is not an action.
        if action is not None and name.isascii() == action.isascii():
            legal.append(action)
        elif unknown is None:
            unknown = name
    return legal, unknown


def _quote(name: str) -> str:
    """A policy's word, safe to print: shortened, without control characters, tags and the like."""
    short = name if len(name) <= _QUOTED_LENGTH else name[: _QUOTED_LENGTH - 1] + "…"
    shown = "".join(char if char.isprintable() and char not in "<>|" else "?" for char in short)
    return f'"{shown}"'
