"""From a reply to actions: a strict parser of ``<think>…</think><answer>…</answer>``.

The text comes from a policy that is being optimised against this parser, so nothing in it is
trusted: the structure is checked with plain searches (linear in the reply, no regular expressions),
and every reply, however odd, becomes a `Parsed`; nothing is raised.
"""

from __future__ import annotations

from dataclasses import dataclass

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
"""Each appears exactly once in a well-formed reply, the first two never in an answer-only one."""

WHITESPACE = " \t\r\n"
"""What is trimmed. Zero-width, control and exotic spaces are text, and wrong where text is."""

_QUOTED_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a reply says.

    Attributes:
        thought: The text between the think tags, as written; ``None`` without a closed thought at
            the start of the reply, or when no thought is asked for.
        thought_chars: Half-open range of characters of the reply that spells the thought.
        actions_asked: Names in the answer, trimmed, as written, unknown ones included.
        actions: What the environment is to carry out: the legal ones in their canonical spelling,
            in order, at most `max_actions`. Where some of several names are unknown, the others are
            still here.
        well_formed: The reply has exactly the asked structure.
        valid: Well formed, at least one legal action, and no unknown one. The format penalty is due
            exactly where this is false.
        problem: What was wrong, in one short sentence for the next prompt; ``None`` where valid.

    Example:
        >>> parse(
        ...     "<think>up, then?</think><answer>up || fly</answer>",
        ...     think=True,
        ...     actions=("Up", "Down"),
        ...     max_actions=5,
        ... )  # doctest: +NORMALIZE_WHITESPACE
        Parsed(thought='up, then?', thought_chars=(7, 16), actions_asked=('up', 'fly'),
               actions=('Up',), well_formed=True, valid=False,
               problem='"fly" is not an action and was left out.')
    """

    thought: str | None
    thought_chars: tuple[int, int] | None
    actions_asked: tuple[str, ...]
    actions: tuple[str, ...]
    well_formed: bool
    valid: bool
    problem: str | None


def parse(
    reply: str,
    *,
    think: bool,
    actions: tuple[str, ...] | None,
    separator: str = "||",
    max_actions: int,
) -> Parsed:
    """Read a whole reply: pre-filled start and sampled text together.

    The structure is all or nothing: the thought block if `think`, the answer block, white space
    around them, nothing else, and no tag twice. A reply that breaks it carries out nothing. In a
    well-formed one, unknown names are dropped at the price of the format penalty, and legal ones
    beyond `max_actions` without.

    Args:
        reply: The text.
        think: Whether the reply must open with ``<think>…</think>``; if not, thoughts are refused.
        actions: The environment's action names, matched whatever their case; ``None`` for
            environments of free text, where the whole answer is one action.
        separator: Stands between the actions of one answer.
        max_actions: How many may be carried out now: the smaller of the turn's limit and what is
            left of the episode's.

    Returns:
        A `Parsed`; never raises.
    """
    thought_chars, answer = _structure(reply, think)
    thought = None if thought_chars is None else reply[slice(*thought_chars)]
    if answer is None:
        form = "<think>…</think><answer>…</answer>" if think else "<answer>…</answer>"
        wrong = f"The reply must be exactly {form} with nothing else around it."
        return Parsed(thought, thought_chars, (), (), False, False, wrong)

    unknown: str | None = None
    if actions is None:
        asked = tuple(text for text in (answer.strip(WHITESPACE),) if text)
        legal = list(asked)
    else:
        pieces = (piece.strip(WHITESPACE) for piece in answer.split(separator))
        asked = tuple(piece for piece in pieces if piece)
        legal, unknown = _match(asked, actions)
    problem: str | None = None
    if not asked:
        problem = "The answer names no action."
    elif unknown is not None:
        problem = f"{_quote(unknown)} is not an action and was left out."
    return Parsed(
        thought,
        thought_chars,
        asked,
        tuple(legal[: max(0, max_actions)]),
        well_formed=True,
        valid=problem is None,
        problem=problem,
    )


def _structure(reply: str, think: bool) -> tuple[tuple[int, int] | None, str | None]:
    """Range of the thought, and the answer's text where the whole structure is right."""
    once = all(reply.count(tag) == (think or "answer" in tag) for tag in TAGS)
    at = _skip(reply, 0)
    thought_chars = None
    if think:
        start = at + len("<think>")
        stop = reply.find("</think>", start)
        if not reply.startswith("<think>", at) or stop == -1:
            return None, None
        if any(reply.find(tag, start, stop) != -1 for tag in TAGS):
            return None, None
        thought_chars = (start, stop)
        at = _skip(reply, stop + len("</think>"))
    end = reply.find("</answer>", at)
    if not once or not reply.startswith("<answer>", at) or end == -1:
        return thought_chars, None
    if _skip(reply, end + len("</answer>")) != len(reply):
        return thought_chars, None
    return thought_chars, reply[at + len("<answer>") : end]


def _skip(text: str, at: int) -> int:
    """The first position from `at` on that holds no white space."""
    return len(text) - len(text[at:].lstrip(WHITESPACE))


def _match(names: tuple[str, ...], actions: tuple[str, ...]) -> tuple[list[str], str | None]:
    """The legal actions among `names`, canonically spelt, and the first unknown name."""
    canonical = {action.lower(): action for action in actions}
    legal, unknown = [], None
    for name in names:
        action = canonical.get(name.lower())
        # The Kelvin sign lowers to an ASCII k: a look-alike, no action.
        if action is not None and name.isascii() == action.isascii():
            legal.append(action)
        elif unknown is None:
            unknown = name
    return legal, unknown


def _quote(name: str) -> str:
    """A policy's word made safe to print: no control or direction characters, no tags, not long."""
    short = name if len(name) <= _QUOTED_LENGTH else name[: _QUOTED_LENGTH - 1] + "…"
    shown = "".join(char if char.isprintable() and char not in "<>|" else "?" for char in short)
    return f'"{shown}"'
