"""The calls of an episode that were answered, and the role of each one.

Most calls continue a conversation. Others stand beside it: titles, replies that no client received,
and summaries that replace a long conversation. The agent asks for a summary in a new conversation,
whose messages quote earlier replies. If it uses the summary, a later message quotes the summary.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragen.chat.actions import Parsed
from ragen.chat.chat import Chat
from ragen.core.types import CallRole, Completion, Prompt
from ragen.gateway.endpoint_chat import EndpointChat
from ragen.gateway.messages import ChatMessage, Reply, Request

QUOTED = 20
"""Letters and digits that a reply has at least if its text is looked for in later messages."""
NO_LETTER = re.compile(r"[\W_]+")
"""What may differ between a text and another one that quotes it."""
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[nrtbf]|(.))")
"""How JSON writes a character of a text."""


@dataclass(slots=True, eq=False)
class Question:
    """A request and its retries, and how many clients wait for the reply or have got it."""

    clients: int = 0
    retries: int = -1
    task: asyncio.Task[Reply] = field(init=False)


@dataclass(slots=True, eq=False)
class Made:
    """A call that was answered; its messages `tell` the replies of earlier calls.

    The agent may have `declared` its role. `letters` is the text of its reply as later messages are
    searched for it.
    """

    number: int
    request: Request
    chat: Chat | EndpointChat
    parent: int
    link: str
    observation: str
    prompt: Prompt
    completion: Completion
    parsed: Parsed
    reply: Reply
    seconds: float
    question: Question
    declared: CallRole | None
    tells: frozenset[int]
    letters: str = field(init=False)
    num_children: int = 0
    results: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.letters = _letters((self.reply.text or "").rpartition("</think>")[2])


def told(made: Sequence[Made], messages: Sequence[ChatMessage]) -> frozenset[int]:
    """The numbers of the calls whose replies are quoted in messages that are no replies."""
    text = " ".join(each.text or "" for each in messages if each.role != "assistant")
    read = ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[2] or " ", text)
    texts = {_letters(text), _letters(read)}
    quoted = (each for each in made if len(each.letters) >= QUOTED)
    return frozenset(each.number for each in quoted if any(each.letters in text for text in texts))


def roles_of(made: Sequence[Made]) -> list[CallRole]:
    """The role of each call of an episode."""
    told_later = frozenset[int]().union(*(each.tells for each in made))
    used = told_later | {each.number for each in made if each.num_children}
    offers = any(each.request.tools for each in made)

    def is_rejected(call: Made) -> bool:
        """True for a summary that was not used, while what it tells was used again."""
        if call.number in used or (call.parent >= 0 and call.declared != "compaction"):
            return False
        source = call.tells | ({call.parent} - {-1})
        later = made[call.number + 1 :]
        return any(
            each.parent in source or (each.number in used and each.tells & source) for each in later
        )

    def role(call: Made) -> CallRole:
        if call.declared == "auxiliary":
            return "auxiliary"
        if not call.num_children and (
            not call.question.clients or (call.declared != "agent" and is_rejected(call))
        ):
            return "discarded"
        if call.declared or call.num_children:
            return call.declared or "agent"
        if call.number in told_later:
            return "compaction" if call.parent < 0 and call.tells else "agent"
        is_last = call.number == len(made) - 1
        return "auxiliary" if offers and not call.request.tools and not is_last else "agent"

    return [role(call) for call in made]


def _letters(text: str) -> str:
    return NO_LETTER.sub("", text)
