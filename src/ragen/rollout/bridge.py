"""The bridge: what a chat template puts between the end of a reply and the start of the next one.

It is found by differencing two renderings of the template, and verified on trial conversations, in
text and in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ragen.core.types import Message
from ragen.rollout.template import (
    ANSWERS,
    LAST_USER,
    SYSTEM,
    USER,
    Ids,
    Template,
    conversation,
    folded,
    is_empty_thought,
)

THOUGHT = "Qthoughtq</think>"
# User messages that reveal how a template handles their content.
_CONTENTS = ("Qa b\nc", " Q\n", "\n\nQ {{ x }} {% y %} ", "<b>&amp;</b> 'q' \"r\" é🙂")


@dataclass(frozen=True, slots=True)
class Bridge:
    """The bridges of a template between replies of one kind: with thoughts, or without.

    Attributes:
        template: The template.
        replies: Two trial replies of that kind.
        block: The empty thought, or its start, that the template writes before a reply in the
            history.
        lead: The rendering of a user message and the first reply; the bridge comes after it.
        fold: The system text must be part of the first user message.
    """

    template: Template
    replies: tuple[str, str]
    block: str
    lead: str
    fold: bool = False

    def text(self, content: str) -> str:
        """The bridge around one user message.

        It is rendered in a conversation of three messages, so its cost does not grow with the
        episode.
        """
        text = self.template.render(conversation(USER, self.replies[0], content))
        assert text.startswith(self.lead)
        return text[len(self.lead) :]

    def holds(self, encode: Callable[[str], Ids]) -> bool:
        """Whether extending equals rendering, in text and in tokens, over three turns."""
        system = {"role": "system", "content": SYSTEM}
        heads: tuple[tuple[Message, ...], ...] = ((), (system,))
        return all(self._holds(encode, head, content) for head in heads for content in _CONTENTS)

    def _holds(self, encode: Callable[[str], Ids], head: tuple[Message, ...], content: str) -> bool:
        def render(*contents: str) -> str:
            messages = (*head, *conversation(*contents))
            return self.template.render(folded(messages) if self.fold else messages)

        contents = [content]
        text = render(*contents)
        for reply, user in zip(self.replies, (content, LAST_USER), strict=True):
            contents += [reply, user]
            whole = render(*contents)
            text = text.removesuffix(self.template.written) + self.block
            text += reply.removeprefix(self.template.opening)
            bridge = self.text(user)
            if whole != text + bridge or encode(whole) != encode(text) + encode(bridge):
                return False
            text = whole
        return True


def find_bridge(template: Template, encode: Callable[[str], Ids], thought: str) -> Bridge | None:
    """The bridge between replies with a thought, or with none; ``None`` where there is no bridge.

    Some templates write an empty thought, or its start, where the next reply begins and not in the
    history, or the other way round. The bridge takes account of both. `thought` is the thought of
    the trial replies with its tags, or nothing.
    """
    first, second = (thought + answer for answer in ANSWERS)
    head = template.start.removesuffix(template.written)
    reply = first.removeprefix(template.opening)
    text = template.render(conversation(USER, first, LAST_USER))
    block = text.removeprefix(head).partition(reply)[0]
    block = block if is_empty_thought(block) else ""
    lead = head + block + reply
    if not text.startswith(lead):
        return None
    for fold in (True,) if template.fold else (False, True):
        bridge = Bridge(template, (first, second), block, lead, fold)
        if bridge.holds(encode):
            return bridge
    return None
