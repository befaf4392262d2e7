"""What a turn sees of its episode: everything, the last turns, or only the present."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragen.chat import Chat
from ragen.prompt import Limits, PromptBuilder
from ragen.types import Completion, Message


@dataclass(frozen=True, slots=True)
class View:
    """What the policy is shown in one turn, before it becomes a user message.

    `reward` and `problem` speak of the turn before and are ``None`` in the first one; `problem` is
    ``None`` too where that turn's reply was fine.
    """

    observation: str
    limits: Limits
    reward: float | None = None
    problem: str | None = None


class Conversation:
    """The messages and tokens of one episode, turn by turn.

    With the full history and a chat template that can be extended exactly, the running token
    sequence grows by the sampled ids and the template's own glue, and is never rendered anew. In
    the other cases each prompt is rendered from the messages that the turn may see.

    Args:
        builder: Writes the messages.
        words: The world's rules, its title and the names of its actions.
        chat: Renders messages as tokens; ``None`` for policies that take messages only.
        context: ``"full"``, ``"window"`` (the last `window` turns) or ``"single"``.
        window: Turns that a window holds, the present one among them.
        prefill: The start of the reply that the policy is given, such as ``"<think>"``, or ``""``.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        words: tuple[str, str, tuple[str, ...] | None],
        chat: Chat | None,
        context: Literal["full", "window", "single"] = "full",
        window: int = 3,
        prefill: str = "",
    ) -> None:
        self._builder = builder
        self._words = words
        self._chat = chat
        self._visible = {"full": None, "window": window, "single": 1}[context]
        self._prefill = prefill
        self._views: list[View] = []
        self._replies: list[str] = []
        self._running: tuple[int, ...] | None = None

    def ask(self, view: View) -> tuple[tuple[Message, ...], tuple[int, ...] | None, int]:
        """The next prompt: its messages, its token ids and how many of them are pre-filled."""
        self._views.append(view)
        messages = self._messages()
        if self._chat is None:
            return messages, None, 0
        if self._running is not None and self._visible is None and self._chat.exact:
            ids, num_prefill = self._chat.extend(self._running, messages, self._prefill)
        else:
            ids, num_prefill = self._chat.open(messages, self._prefill)
        self._running = ids
        return messages, ids, num_prefill

    def reply(self, completion: Completion) -> None:
        """Append what the policy said to the last prompt."""
        self._replies.append(self._prefill + completion.text)
        if self._running is not None and completion.token_ids is not None:
            self._running += completion.token_ids

    def _messages(self) -> tuple[Message, ...]:
        first = 0 if self._visible is None else max(0, len(self._views) - self._visible)
        system = self._builder.system()
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for number in range(first, len(self._views)):
            opening = number == first
            messages.append({"role": "user", "content": self._user(self._views[number], opening)})
            if number < len(self._replies):
                messages.append({"role": "assistant", "content": self._replies[number]})
        return tuple(messages)

    def _user(self, view: View, opening: bool) -> str:
        if opening or view.reward is None:
            return self._builder.first(*self._words, view.observation, view.limits)
        return self._builder.following(view.observation, view.reward, view.problem, view.limits)
