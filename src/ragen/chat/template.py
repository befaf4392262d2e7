"""A tokenizer's chat template: it renders conversations, and its bridge is found.

The *header* of a reply is the text that a template puts between its generation prompt and the
reply, such as the channel of gpt-oss. The *bridge* is the text between the end of a reply and the
start of the next one, its header included. Both are found by differencing two renderings, and
verified on trial conversations, in text and in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product
from typing import Any, Protocol

from ragen.chat.actions import TAGS
from ragen.core.errors import RagenError
from ragen.core.types import Message

Ids = tuple[int, ...]

DAY = date(2025, 1, 1)
"""The date for templates that write today's date: a run must not depend on its day."""

# Trial texts: words that no template contains and that trimming does not change.
SYSTEM, USER, LAST_USER = "Qsystemq", "Quserq", "Qlastuserq"
ANSWERS = ("<answer>Qupq</answer>", "<answer>Qdownq</answer>")
THOUGHT = "Qthoughtq</think>"
THOUGHTS_STAY = (
    "this chat template drops the thoughts of earlier turns; here they stay as they were sampled "
    '(prompt.history_thoughts = "keep"), so an episode is one sample'
)
TOOLS_STAY = (
    "this chat template moves the tools into the last user message; here they stay in the first "
    "one, so an episode is one sample"
)

CONTENTS = ("Qa b\nc", " Q\n", "\n\nQ {{ x }} {% y %} ", "<b>&amp;</b> 'q' \"r\" é🙂")
"""Messages that reveal how a template handles their content."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    chat_template: Any
    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a conversation."""

    def get_chat_template(self, chat_template: None = None, tools: Any = None) -> str:
        """The template that it uses, one of several if they depend on tools."""

    def encode(self, text: str, **options: Any) -> list[int]:
        """Text to ids."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Ids to text."""

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are cut out of a text before the rest is split, all special ones included."""


class Template:
    """A chat template, tried out on short conversations.

    Every rendering offers the `tools`, and ends where the template puts a reply: after its header.
    `think` says that replies have thoughts; some templates take it as an option. `fold` says that
    the template has no system role. `start` is the rendering of the user message `USER`. `written`
    is what its end has and the history has not, such as the start of a thought or an empty one;
    `opening` is the start of a thought in it, or nothing. `header` takes the place of `asked` at
    the end of what the template itself renders; both are mostly empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, think: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        if tokenizer.chat_template is None:
            raise RagenError(
                "this tokenizer has no chat template: choose an instruction-tuned model, or set "
                "tokenizer.chat_template and save the tokenizer beside the weights"
            )
        self._tokenizer, self.think = tokenizer, think
        self._options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        if "strftime_now" in str(tokenizer.chat_template):
            self._options["chat_template"] = dated(tokenizer.get_chat_template(tools=tools or None))
        self.asked = self.header = ""
        self.fold = self._lacks_system_role()
        self.start = self.render(conversation(USER))
        if USER not in self.start:
            raise RagenError(
                "this chat template leaves out what the user says: choose an instruction-tuned "
                "model, or save the template that belongs to it beside the weights"
            )
        prompt = self.start.rpartition(USER)[2]
        thought = prompt[prompt.rfind("<think>") :] if "<think>" in prompt else ""
        self.written = thought if is_empty_thought(thought) else ""
        self.opening = "" if "</think>" in self.written else self.written
        self._find_header()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, with calls as OpenAI writes them, up to the next reply."""
        text = self._render(messages)
        if not text.endswith(self.asked):
            raise RagenError(
                f"this chat template asks for a reply with {self.asked!r} in some conversations "
                f"and with {text[-len(self.asked) :]!r} in others: choose another model"
            )
        return text.removesuffix(self.asked) + self.header

    def _render(self, messages: Sequence[Mapping[str, Any]], **options: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    **{"add_generation_prompt": True, "enable_thinking": self.think} | options,
                    **self._options,
                )
            )
        except _template_errors() as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = str(error) or type(error).__name__
            raise RagenError(
                f"the chat template refuses a conversation of {roles} ({reason[:300]}): choose a "
                "model whose template takes user and assistant messages in turn"
            ) from error

    def first_reply(self, messages: Sequence[Mapping[str, Any]], what: str) -> str:
        """The rendering of a reply after `USER` and of what follows it; `what` describes the reply.

        Raises:
            RagenError: The template begins it in another way than others.
        """
        text = self.render([*conversation(USER), *messages])
        head = self.start.removesuffix(self.written)
        if not text.startswith(head):
            raise RagenError(
                f"this chat template begins a reply {what} in another way than others: choose a "
                "model whose template begins all replies alike, such as Qwen3"
            )
        return text.removeprefix(head)

    def closing(self) -> str:
        """The text between an assistant's message and the next user message."""
        text = self.render(_EXCHANGE)
        return text.rpartition(ANSWERS[0])[2].partition(LAST_USER)[0]

    def _find_header(self) -> None:
        """Find what the template writes before a reply in the history, and not to ask for one.

        If it asks with another text, the one in the history takes its place. If it asks with more,
        that stays, because it may say that there is no thought. Spaces at the end of a header are
        left to the reply: many tokens begin with one.
        """
        before, answer, _ = self.render(_EXCHANGE).rpartition(ANSWERS[0])
        _, user, shown = before.rpartition(USER)
        asked = self.start.removesuffix(self.written).rpartition(USER)[2]
        if not (answer and user):
            return
        if not (shown.startswith(asked) or asked.startswith(shown)):
            # The template may change the user's last message.
            asked, shown = self._from_control(asked), self._from_control(shown)
        if shown.startswith(asked):
            asked, shown = "", shown.removeprefix(asked)
        elif asked.startswith(shown):
            more = asked.removeprefix(shown)
            self._refuse_open_thought(more)
            self.written = more + self.written
            return
        header = re.split("</?think>", shown)[0].rstrip(" ")
        if header:
            self.asked, self.header = asked + self.written, header + self.written
            self.start = self.render(conversation(USER))

    def _from_control(self, text: str) -> str:
        """The text from its first control token on."""
        added = self._tokenizer.get_added_vocab()
        return text[min((text.find(each) for each in added if each in text), default=len(text)) :]

    def _refuse_open_thought(self, prompt: str) -> None:
        """Refuse replies inside a thought of control tokens, because such a token ends a reply.

        Where a thought is switched off, they are an empty one.
        """
        added = self._tokenizer.get_added_vocab()
        if any(token in prompt and token not in TAGS for token in added) and (
            self._render(conversation(USER), enable_thinking=True).endswith(prompt)
        ):
            raise RagenError(
                f"this chat template begins replies with {prompt!r}, a thought that a control "
                "token ends, and a reply ends with its first control token: save a template "
                "without it beside the weights (prompt.think = false leaves it out in some)"
            )

    def _lacks_system_role(self) -> bool:
        messages = ({"role": "system", "content": SYSTEM}, *conversation(USER))
        try:
            return SYSTEM not in self.render(messages)
        except RagenError:
            return True


def conversation(*contents: str) -> tuple[Message, ...]:
    """Messages of a user and an assistant in turn."""
    return tuple(
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    )


_EXCHANGE = conversation(USER, ANSWERS[0], LAST_USER)


def dated(template: str) -> str:
    """The template with the date `DAY` wherever it writes today's.

    Example:
        >>> dated("Today is {{ strftime_now('%d %b %Y') }}.")
        "Today is {{ '01 Jan 2025' }}."

    Raises:
        RagenError: The template computes the form of the date.
    """
    called = r"strftime_now\s*\("
    found = re.sub(called + r"\s*(['\"])(.*?)\1\s*\)", lambda c: repr(DAY.strftime(c[2])), template)
    if re.search(called, found):
        raise RagenError(
            "this chat template writes today's date in a form that it computes, so a run would "
            "depend on its day: save a template with a fixed date beside the weights"
        )
    return found


def folded(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The same conversation with the system text on top of the first user message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, user, *rest = messages
    return [{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def is_empty_thought(text: str) -> bool:
    """True if a text is the start of a thought, or all or the end of an empty one, spaces aside."""
    return "".join(text.split()) in ("<think>", "<think></think>", "</think>")


def _template_errors() -> tuple[type[Exception], ...]:
    """The exceptions of a template: its engine's, Python's about values, and their limits."""
    from jinja2 import TemplateError  # imported only where a template fails

    about_values = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
    return TemplateError, *about_values, MemoryError, RecursionError


Exchange = tuple[Sequence[Mapping[str, Any]], str, str]
"""A reply and the messages after it up to the next reply; the reply's text in a rendering; and the
bridge after it."""


def extends_exactly(
    template: Template,
    fold: bool,
    encode: Callable[[str], Ids],
    exchanges: Callable[[str], Iterable[Exchange]],
) -> bool:
    """True if extending equals rendering, in text and in tokens, over trial conversations.

    `exchanges` gives the exchanges of the conversation that begins with this content.
    """
    system = {"role": "system", "content": SYSTEM}
    heads: tuple[tuple[Message, ...], ...] = ((), (system,))
    for head, content in product(heads, CONTENTS):
        messages: list[Mapping[str, Any]] = [*head, *conversation(content)]
        text = template.render(folded(messages) if fold else messages)
        for more, reply, bridge in exchanges(content):
            messages += more
            text = text.removesuffix(template.written) + reply
            whole = template.render(folded(messages) if fold else messages)
            if whole != text + bridge or encode(whole) != encode(text) + encode(bridge):
                return False
            text = whole
    return True


@dataclass(frozen=True, slots=True)
class Bridge:
    """The bridges of a template between replies of one kind: with thoughts, or without.

    `replies` are two trial replies of that kind. `block` is the empty thought, or a part of it, or
    the spaces, that the template writes before a reply in the history. `lead` is the rendering of a
    user message and the first reply, after which the bridge comes. With `fold` the system text must
    be part of the first user message. `warning` names a part that stays, and that the template
    would drop or move.
    """

    template: Template
    replies: tuple[str, str]
    block: str
    lead: str
    fold: bool
    warning: str | None

    def text(self, content: str) -> str:
        """The bridge around one user message; the cost does not grow with the episode."""
        text = self.template.render(conversation(USER, self.replies[0], content))
        assert text.startswith(self.lead)
        return text[len(self.lead) :]

    def exchanges(self, content: str) -> Iterator[Exchange]:
        """The exchanges of a trial conversation (`extends_exactly`)."""
        for reply, user in zip(self.replies, (content, LAST_USER), strict=True):
            written = self.block + reply.removeprefix(self.template.opening)
            yield conversation(USER, reply, user)[1:], written, self.text(user)


def find_bridge(template: Template, plain: Template, encode: Callable[[str], Ids]) -> Bridge | None:
    """The bridge between replies as they are sampled; ``None`` if there is no bridge.

    `plain` is the template without tools. Where `template` drops the thoughts of earlier turns, the
    bridge is the text between replies without thoughts; where it moves the tools, the text of
    `plain`.
    """
    has_thought = plain.think or plain.opening
    thought = f"{plain.opening or '<think>'}{THOUGHT}" if has_thought else ""
    tries: list[tuple[Template, str, str | None]] = [(template, thought, None)]
    if thought:
        tries.append((template, "", THOUGHTS_STAY))
    if template is not plain:
        tries += [(plain, thought, TOOLS_STAY), (plain, "", TOOLS_STAY)]
    found = (_bridge_between(encode, *each) for each in tries)
    return next((bridge for bridge in found if bridge is not None), None)


def _bridge_between(
    encode: Callable[[str], Ids], template: Template, thought: str, warning: str | None
) -> Bridge | None:
    """The bridge between replies with this thought, tags included, or with none.

    Some templates write an empty thought, or its start, where the next reply begins and not in the
    history, or the other way round. The bridge takes account of both.
    """
    first, second = (thought + answer for answer in ANSWERS)
    head = template.start.removesuffix(template.written)
    reply = first.removeprefix(template.opening)
    text = template.render(conversation(USER, first, LAST_USER))
    block = text.removeprefix(head).partition(reply)[0]
    block = block if is_empty_thought(block) or not block.strip(" ") else ""
    lead = head + block + reply
    if not text.startswith(lead):
        return None
    for fold in (True,) if template.fold else (False, True):
        bridge = Bridge(template, (first, second), block, lead, fold, warning)
        if extends_exactly(template, fold, encode, bridge.exchanges):
            return bridge
    return None
