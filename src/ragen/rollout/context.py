"""The context of a turn: the whole episode, the last turns, or only the present one.

Earlier replies are shown with or without their thoughts. A prompt that would be too long leaves out
its oldest turns, but never the system text or the opening message, which describes the environment.
The opening message may have a summary of the turns that are not shown. Its lines, one for each
turn, are made from records, or the policy writes it: a prompt that nearly fills the context then
asks for a summary, and the next one shows it in place of all turns but the present one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen.chat.chat import without_thought
from ragen.chat.prompt import Limits, PromptBuilder, plain_number
from ragen.core.pictures import PLACE, Picture, without_places
from ragen.core.types import Completion, Message
from ragen.rollout.endpoint_format import without_reasoning
from ragen.rollout.setup import Setup, reads_no_pictures

SHORT = 80
"""Characters of an action or of an observation in a summary."""
SHARE = 0.75
"""A prompt and its reply that need more than this share of the context ask for a summary."""


@dataclass(frozen=True, slots=True)
class View:
    """The contents of one turn's messages to the policy.

    All but `observation` and `limits` describe the turn before. `reward` is ``None`` in the first
    turn, `problem` also after a valid reply. `results` are messages, one for each call of a tool.
    `actions` are those that were carried out. `pictures` are as in `Turn`: the last ones are those
    of the observation.
    """

    observation: str
    limits: Limits
    reward: float | None = None
    problem: str | None = None
    results: tuple[Message, ...] = ()
    actions: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()

    @property
    def shown(self) -> tuple[Picture, ...]:
        """The pictures of its messages."""
        if self.results:
            return self.pictures[: sum(each["content"].count(PLACE) for each in self.results)]
        return self.pictures[len(self.pictures) - self.observation.count(PLACE) :]


class Conversation:
    """The messages and tokens of one episode, turn by turn.

    While the prompts begin with the same turn and the chat template can be extended exactly, the
    running token sequence grows by the sampled ids and the template's bridge and is never rendered
    again. Otherwise a prompt is rendered from the messages in the turn's context. `env_texts` are
    the environment's rules, its goal and its action names. `turns_dropped` is the number of turns
    in the set-up's window for which the last prompt had no room and that no learned summary tells.
    `asks_summary` says that the last prompt asks for one. `sent` and `pictures` are as in `Prompt`.
    """

    def __init__(self, setup: Setup, env_texts: tuple[str, str, tuple[str, ...] | None]) -> None:
        chat = setup.chat
        exact = chat is not None and chat.exact
        assert not (setup.drops_thoughts and exact), "the chat keeps thoughts"
        self._setup, self._chat, self._env_texts = setup, chat, env_texts
        tools = bool(setup.tools)
        self._builder = PromptBuilder(setup.style, setup.think, setup.max_tokens, tools)
        self.turns_dropped = 0
        self.asks_summary = False
        self.sent: dict[int, Mapping[str, Any]] = {}
        self.pictures: tuple[Picture, ...] = ()
        self._views: list[View] = []
        self._replies: list[str] = []
        self._sent: list[Mapping[str, Any] | None] = []
        self._first = 0  # the oldest turn that is shown; a turn that is dropped stays dropped
        self._summed = 0  # the oldest turn in the summary
        self._learned, self._told = "", 0  # the policy's summary; the oldest turn that is not in it
        # The tokens so far of the prompts that begin with turn `_first`.
        self._running: tuple[int, ...] | None = None

    def ask(self, view: View) -> tuple[tuple[Message, ...], tuple[int, ...] | None, int]:
        """The next prompt: its messages, its token ids, and how many of them are pre-filled.

        It leaves room for a reply, unless the present turn is too long even without a summary. If
        it `asks_summary`, the reply goes to `sum_up`, and the view has to be asked with again.

        Raises:
            RagenError: There is a picture, and the model reads none.
        """
        if view.pictures and self._chat is not None and not self._chat.reads_pictures:
            raise reads_no_pictures(self._setup.env, self._chat.name)
        self._views.append(view)
        present, window = len(self._views) - 1, self._setup.window
        oldest = max(0, present + 1 - window) if window else self._told
        self._begin_with(max(self._first, oldest))
        self.asks_summary = False
        messages, ids, num_prefill = self._prompt()
        self.asks_summary = self._first < present and self._nearly_fills(ids)
        if self.asks_summary:
            messages, ids, num_prefill = self._prompt()
        while not self._setup.has_room(ids) and self._cut(present):
            messages, ids, num_prefill = self._prompt()
        self._running = ids
        self.turns_dropped = self._first - oldest
        return messages, ids, num_prefill

    def _nearly_fills(self, ids: tuple[int, ...] | None) -> bool:
        setup = self._setup
        if setup.summary != "learned" or ids is None:
            return False
        return len(ids) + setup.max_tokens > SHARE * setup.max_length

    def sum_up(self, summary: str | None) -> None:
        """Show this summary in place of all turns before the present one, or none of them.

        ``None`` is a summary that was rejected: an earlier one stays.
        """
        self._views.pop()
        self._first, self._running = len(self._views), None
        if summary is not None:
            self._learned, self._told = summary, self._first

    def _begin_with(self, first: int) -> None:
        if first != self._first:
            self._first, self._running = first, None

    def _cut(self, present: int) -> bool:
        """Leave out the oldest turn, else the summary's oldest line; false if there is neither."""
        if self._first < present:
            self._begin_with(self._first + 1)
        elif self._setup.summary != "none" and self._summed < self._first:
            self._summed, self._running = self._summed + 1, None
        else:
            return False
        return True

    def _prompt(self) -> tuple[tuple[Message, ...], tuple[int, ...] | None, int]:
        messages = self._messages()
        if self._chat is None:
            return messages, None, 0
        if self._running is not None and self._chat.exact:
            new = self._views[-1].shown
            return messages, *self._chat.extend(self._running, messages, self._setup.prefill, new)
        return messages, *self._chat.open(messages, self._setup.prefill, self.pictures)

    def reply(self, completion: Completion) -> None:
        """Append the policy's completion of the last prompt."""
        reply = self._setup.prefill + without_places(completion.text)
        sent = completion.message
        if self._setup.drops_thoughts:
            reply, sent = without_thought(reply), sent and without_reasoning(sent)
        self._replies.append(reply)
        self._sent.append(sent)
        if self._running is not None and completion.token_ids is not None:
            self._running += completion.token_ids

    def _messages(self) -> tuple[Message, ...]:
        system = self._builder.system()
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.sent, self.pictures = {}, ()
        for number in range(self._first, len(self._views)):
            view = self._views[number]
            messages += self._shown(view, number == self._first)
            self.pictures += view.shown
            if number < len(self._replies):
                if (sent := self._sent[number]) is not None:
                    self.sent[len(messages)] = sent
                messages.append({"role": "assistant", "content": self._replies[number]})
        if self.asks_summary:
            content = f"{messages[-1]['content']}\n{self._builder.summary_request()}"
            messages[-1] = {**messages[-1], "content": content}
        return tuple(messages)

    def _shown(self, view: View, opening: bool) -> Sequence[Message]:
        """The present message to the policy: one of the user, or the results of its calls."""
        builder, observation = self._builder, view.observation
        if opening or view.reward is None:
            if view.results:  # results of a turn that is not shown
                self.pictures += self._views[0].shown
                texts = (self._views[0].observation, *(each["content"] for each in view.results))
                observation = "\n".join(texts)
            summary = self._summary()
            content = builder.first(*self._env_texts, observation, view.limits, summary)
        elif view.results:
            *before, last = view.results
            text = builder.result(last["content"], view.reward, view.limits)
            return *before, {**last, "content": text}
        else:
            content = builder.following(observation, view.reward, view.problem, view.limits)
        return ({"role": "user", "content": content},)

    def _summary(self) -> str:
        kind, views = self._setup.summary, self._views
        if kind == "none" or self._summed == self._first:
            return ""
        if kind == "learned":
            return self._learned
        lines = [
            summary_line(number, views[number - 1], views[number], kind == "observations")
            for number in range(self._summed + 1, self._first + 1)
        ]
        # With results, `_shown` puts the first observation above them.
        if kind == "observations" and not views[self._first].results:
            self.pictures += views[0].shown
            lines.insert(0, views[0].observation)
        return "\n".join(lines)


def summary_line(number: int, before: View, after: View, followed: bool) -> str:
    r"""One turn as a line: its actions, its reward if it is not 0, and with `followed` its result.

    The result is the results of its calls, or the first line of the next observation that was not
    in the observation before.

    Example:
        >>> hall = View("hall\nlamp", Limits(1, 5, 5, 1))
        >>> attic = View("attic\nlamp", Limits(2, 4, 4, 1), reward=0.1, actions=("up",))
        >>> summary_line(1, hall, attic, followed=True)
        '1: up (reward 0.1) -> attic'
    """
    line = f"{number}: {', '.join(map(_short, after.actions)) or 'nothing'}"
    if after.reward:
        line += f" (reward {plain_number(after.reward)})"
    if not followed:
        return line
    seen = (*before.observation.splitlines(), PLACE)
    new = (each for each in after.observation.splitlines() if each not in seen)
    results = [_short(each["content"]) for each in after.results]
    news = (", ".join(results) or _short(next(new, ""))).replace(PLACE, "")
    return f"{line} -> {news}" if news else line


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 4]} ..."
