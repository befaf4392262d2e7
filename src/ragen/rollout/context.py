"""What a turn sees of its episode: everything, the last turns, or only the present.

Earlier replies are shown with their thoughts, or without. Whichever it is, a prompt that would be
too long leaves out the oldest turns it would show. The message that opens a conversation (the
system text, what the environment is) stays on top of those that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

from ragen.core.types import Completion, Message
from ragen.rollout.chat import Chat, without_thought
from ragen.rollout.prompt import Limits, PromptBuilder


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

    As long as the prompts begin with the same turn and the chat template can be extended exactly,
    the running token sequence grows by the sampled ids and the template's own glue, and is never
    rendered anew. In the other cases a prompt is rendered from the messages that the turn may see.

    Args:
        builder: Writes the messages.
        words: The environment's rules, its title and the names of its actions.
        chat: Renders messages as tokens; ``None`` for policies that take messages only.
        window: Turns that a prompt shows, the present one among them; 0 shows all.
        max_length: Tokens that a prompt may have.
        prefill: The start of the reply that the policy is given, such as ``"<think>"``, or ``""``.
        drops_thoughts: Whether replies are shown without their thoughts. `chat` must know of it.

    Attributes:
        turns_dropped: Turns that the window would show and the last prompt had no room for.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        words: tuple[str, str, tuple[str, ...] | None],
        chat: Chat | None,
        window: int,
        max_length: int,
        prefill: str,
        drops_thoughts: bool = False,
    ) -> None:
        assert not (drops_thoughts and chat is not None and chat.exact), "the chat keeps thoughts"
        self._builder = builder
        self._words = words
        self._chat = chat
        self._window, self._max_length = window, max_length
        self._prefill, self._drops_thoughts = prefill, drops_thoughts
        self.turns_dropped = 0
        self._views: list[View] = []
        self._replies: list[str] = []
        self._first = 0  # the oldest turn that is shown; once a turn is out, it stays out
        self._running: tuple[int, ...] | None = None  # of the prompts that begin with that turn

    def ask(self, view: View) -> tuple[tuple[Message, ...], tuple[int, ...] | None, int]:
        """The next prompt: its messages, its token ids and how many of them are pre-filled.

        It is longer than `max_length` only where the present turn alone is.
        """
        self._views.append(view)
        present = len(self._views) - 1
        oldest = max(0, present + 1 - self._window) if self._window else 0
        self._begin_with(max(self._first, oldest))
        messages, ids, num_prefill = self._prompt()
        while ids is not None and len(ids) > self._max_length and self._first < present:
            self._begin_with(self._first + 1)
            messages, ids, num_prefill = self._prompt()
        self._running = ids
        self.turns_dropped = self._first - oldest
        return messages, ids, num_prefill

    def _begin_with(self, first: int) -> None:
        if first != self._first:
            self._first, self._running = first, None

    def _prompt(self) -> tuple[tuple[Message, ...], tuple[int, ...] | None, int]:
        messages = self._messages()
        if self._chat is None:
            return messages, None, 0
        if self._running is not None and self._chat.exact:
            ids, num_prefill = self._chat.extend(self._running, messages, self._prefill)
        else:
            ids, num_prefill = self._chat.open(messages, self._prefill)
        return messages, ids, num_prefill

    def reply(self, completion: Completion) -> None:
        """Append what the policy said to the last prompt."""
        reply = self._prefill + completion.text
        self._replies.append(without_thought(reply) if self._drops_thoughts else reply)
        if self._running is not None and completion.token_ids is not None:
            self._running += completion.token_ids

    def _messages(self) -> tuple[Message, ...]:
        system = self._builder.system()
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for number in range(self._first, len(self._views)):
            opening = number == self._first
            messages.append({"role": "user", "content": self._user(self._views[number], opening)})
            if number < len(self._replies):
                messages.append({"role": "assistant", "content": self._replies[number]})
        return tuple(messages)

    def _user(self, view: View, opening: bool) -> str:
        if opening or view.reward is None:
            return self._builder.first(*self._words, view.observation, view.limits)
        return self._builder.following(view.observation, view.reward, view.problem, view.limits)
