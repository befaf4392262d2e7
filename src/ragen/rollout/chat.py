"""Conversations as tokens: what was sampled stays, what comes next is appended.

A chat model sees one flat sequence, and a template decides what stands between the turns. Decoding
a reply, rendering the whole conversation anew and encoding it again gives *other* tokens than those
that were sampled, and other logprobs with them. So a `Chat` renders a conversation once, at its
start; then it extends the running sequence by the reply's own ids and by what the template puts
between the end of that reply and the start of the next one: the *bridge*.

The bridge is found, not known: two renderings of the tokenizer's own template are differenced, and
the result is checked on trial conversations, text and tokens, when the `Chat` is made. Nothing
depends on a model's name. Templates that drop the thoughts of earlier turns have a bridge too, that
between replies without thoughts; what was sampled then stays all the same. Where no bridge holds,
or thoughts are to be dropped (`without_thought`), `Chat.exact` is false: each turn is opened afresh
and is a sample of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import date
from functools import lru_cache
from itertools import accumulate
from os.path import commonprefix
from typing import Any, Literal, Protocol

from ragen.core.errors import RagenError
from ragen.core.types import Message

Ids = tuple[int, ...]

DAY = date(2025, 1, 1)
"""What templates that write the date of today are told: a run must not depend on its day."""

# Trial texts: words that no template contains and that trimming leaves alone.
_SYSTEM, _USER, _LAST_USER = "Qsystemq", "Quserq", "Qlastuserq"
_THOUGHT = "Qthoughtq</think>"
_ANSWERS = ("<answer>Qupq</answer>", "<answer>Qdownq</answer>")
# User messages in which a template's handling of content would show.
_CONTENTS = ("Qa b\nc", " Q\n", "\n\nQ {{ x }} {% y %} ", "<b>&amp;</b> 'q' \"r\" é🙂")


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a conversation."""

    def encode(self, text: str, **options: Any) -> list[int]:
        """Text to ids."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Ids to text."""

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are cut out of a text before the rest is split: all special ones are."""


class Chat:
    r"""A tokenizer's chat template, able to go on from sampled tokens without touching them.

    Attributes:
        exact: An exact extension exists, so that an episode is one growing sequence (`extend`).
            If not, each turn is opened afresh (`open`) and is a sample of its own.
        warning: What a user should know about this template, in one sentence; or ``None``.
        end_ids: The tokens that end a turn: the first special token that the template puts behind
            an assistant's message, and the tokenizer's end-of-sequence token.
        fold: System text goes on top of the first user message, since the template has no system
            role, or one whose text does not stay in place (some move it to the last user message).
        opening: The start of a thought that the template's own generation prompt writes
            (``<think>\n``), or nothing. It counts as pre-filled. An empty thought that it writes
            where none is asked for belongs to the prompt altogether.

    Example:
        With ChatML, behind a sampled reply that ends with its ``<|im_end|>`` and for the user
        message ``P G``, `extend` appends the tokens of
        ``\n<|im_start|>user\nP G<|im_end|>\n<|im_start|>assistant\n``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        think: bool = True,
        history_thoughts: Literal["keep", "drop"] = "keep",
    ) -> None:
        """Find the bridge of the tokenizer's template and check it on trial conversations.

        Args:
            tokenizer: A loaded Hugging Face tokenizer.
            think: Whether replies hold thoughts, which templates may drop from the history.
            history_thoughts: Whether the thoughts of earlier turns stay, even where the template
                would drop them. If not, the messages that are rendered must come without them.

        Raises:
            RagenError: The tokenizer has no chat template, the template refuses the plainest
                conversation or shows nothing of it, or no token ends a turn.
        """
        if tokenizer.chat_template is None:
            raise RagenError(
                "this tokenizer has no chat template: choose an instruction-tuned model, or set "
                "tokenizer.chat_template and save the tokenizer beside the weights"
            )
        self._tokenizer = tokenizer
        # The Rust tokenizer behind the Python one encodes in two thirds of the time.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # The members of a group open alike, and in a small environment often see the same again.
        self._cached_ids = lru_cache(maxsize=1024)(self._ids)
        self._cached_bridge = lru_cache(maxsize=1024)(self._bridge)
        self._pieces: dict[int, str] = {}
        self._prefills: dict[str, Ids] = {"": ()}

        self._think = think
        self.fold = self._lacks_system_role()
        start = self._render(_conversation(_USER))
        if _USER not in start:
            raise RagenError(
                "this chat template leaves out what the user says: choose an instruction-tuned "
                "model, or save the template that belongs to it beside the weights"
            )
        self._written = _written_thought(start.rpartition(_USER)[2])
        self._head = start.removesuffix(self._written)
        self.opening = "" if "</think>" in self._written else self._written
        self._num_opening = len(self._behind(start.removesuffix(self.opening), self.opening))

        self._end = self._end_of_turn()
        ends = (self._end, tokenizer.eos_token_id)
        self.end_ids = frozenset(token for token in ends if token is not None)
        if not self.end_ids:
            raise RagenError(
                "no token ends a turn: the chat template puts no special token behind a reply, and "
                "the tokenizer has no eos_token; set tokenizer.eos_token"
            )
        thought = f"{self.opening or '<think>'}{_THOUGHT}" if think or self.opening else ""
        self.exact, self._splices = False, False
        self.warning: str | None = None
        if think and history_thoughts == "drop":
            self.warning = (
                "the thoughts of earlier turns are left out of the prompts "
                '(prompt.history_thoughts = "drop"), so each turn becomes a training sample of '
                "its own"
            )
        elif self._bridge_is_found(thought):
            self.exact = True
        elif thought and self._bridge_is_found(""):
            self.exact = self._splices = True
            self.warning = (
                "this chat template drops the thoughts of earlier turns; here they stay as they "
                'were sampled (prompt.history_thoughts = "keep"), so an episode is one sample'
            )
        else:
            self.warning = (
                "this chat template does not keep earlier turns as they were sampled, so each turn "
                "becomes a training sample of its own"
            )

    @property
    def end(self) -> int:
        """What ends a reply that nobody samples: the template's token, or else the tokenizer's."""
        return min(self.end_ids) if self._end is None else self._end

    def open(self, messages: Sequence[Message], prefill: str = "") -> tuple[Ids, int]:
        """Render a conversation up to the start of the next reply.

        Args:
            messages: The conversation; its last message is the user's.
            prefill: Start of the reply that is not sampled, such as ``<think>``. Where the
                template has written it already, it is not written twice.

        Returns:
            All ids, and how many of the last ones are the pre-filled start of the reply.

        Raises:
            RagenError: The template refuses the conversation.
        """
        return self._prefilled(self.encode(self._text_of(messages)), prefill)

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], prefill: str = ""
    ) -> tuple[Ids, int]:
        """Append what comes between a sampled reply and the next one.

        Args:
            ids: The sequence so far. It ends with the sampled ids of the last reply and its
                end-of-turn token if one was drawn; if none was (the reply was cut by its length
                limit), the template's closing is appended, as tokens that nobody sampled.
            messages: The whole conversation; its last message is the new user message.
            prefill: As for `open`.

        Returns:
            `ids` unchanged and the appended ones, and how many of the last ones are pre-filled.
        """
        assert self.exact, "no exact extension exists for this template: open each turn afresh"
        bridge = self.encode(self._cached_bridge(messages[-1]["content"]))
        if ids[-1] in self.end_ids and self._end is not None:
            bridge = bridge[bridge.index(self._end) + 1 :]
        return self._prefilled((*ids, *bridge), prefill)

    def taken(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation as the template takes it: without a system message where it has none."""
        return _folded(messages) if self.fold else messages

    def encode(self, text: str) -> Ids:
        """Ids of a text; none is added before or behind it."""
        return self._cached_ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without the end-of-turn token; other special tokens are kept."""
        return self._text(self._without_end(ids))

    def text_of(self, token: int) -> str:
        """A token's text behind another token: at the start it may lose a leading space.

        Of a token that spells a part of a character only, U+FFFD.
        """
        if token not in self._pieces:
            self._pieces[token] = self._text((token, token))[len(self._text((token,))) :]
        return self._pieces[token]

    def token_span(self, ids: Sequence[int], text: str, start: int, end: int) -> tuple[int, int]:
        """The tokens that spell some characters of a decoded text.

        Args:
            ids: Sampled ids.
            text: ``decode(ids)``.
            start: First character; one before the text counts as its start.
            end: One past the last character.

        Returns:
            Half-open range of `ids` that covers the characters. A token that reaches over an edge
            is covered, and so are all tokens of a character whose bytes are spread over several.
        """
        start, end = max(0, start), min(end, len(text))
        if start >= end:
            return 0, 0
        ids = self._without_end(ids)
        reach = self._reach(ids, text)
        first = bisect_left(range(len(ids) + 1), start, key=reach)
        last = bisect_left(range(len(ids) + 1), end, lo=first, key=reach)
        return first - (reach(first) > start), last

    # Tokens and text.

    def _ids(self, text: str) -> Ids:
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        stop = len(ids)
        while stop and ids[stop - 1] in self.end_ids:
            stop -= 1
        return ids[:stop]

    def _reach(self, ids: Sequence[int], text: str) -> Callable[[int], int]:
        """A function of k: how many characters of `text` the first k ids spell completely."""
        pieces = [self._text(ids[:1]), *map(self.text_of, ids[1:])]
        if "".join(pieces) == text:
            return list(accumulate(map(len, pieces), initial=0)).__getitem__
        # Some character's bytes are spread over tokens, which alone decode to nothing readable.
        return lambda k: len(commonprefix((self._text(ids[:k]), text)))  # noqa: RUF071 (characters)

    def _behind(self, before: str, text: str) -> Ids:
        """Ids of `text` as they are when it stands behind `before`."""
        head, whole = self.encode(before), self.encode(before + text)
        return whole[len(head) :] if whole[: len(head)] == head else self.encode(text)

    def _prefilled(self, ids: Ids, prefill: str) -> tuple[Ids, int]:
        if self.opening and prefill.strip() in ("", self.opening.strip()):
            return ids, self._num_opening
        if prefill not in self._prefills:
            before = self._render(_conversation(_USER))
            self._prefills[prefill] = self._behind(before, prefill)
        more = self._prefills[prefill]
        return ids + more, len(more)

    # The template.

    def _text_of(self, messages: Sequence[Message]) -> str:
        """A conversation up to the start of the next reply, thoughts included."""
        if not self._splices:
            return self._render(messages)
        asked = 1 + next(n for n, message in enumerate(messages) if message["role"] == "user")
        text = self._render(messages[:asked])
        for reply, user in zip(messages[asked::2], messages[asked + 1 :: 2], strict=True):
            # The text so far ends with the start of the thought, if the template writes one.
            said = reply["content"].removeprefix(self.opening.strip())
            text += said.removeprefix(self.opening.removeprefix("<think>"))
            text += self._cached_bridge(user["content"])
        return text

    def _render(self, messages: Sequence[Message]) -> str:
        """The template's text up to the start of the next reply."""
        return self._apply(self.taken(messages))

    def _apply(self, messages: Sequence[Message]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=self._think,
                    strftime_now=DAY.strftime,
                )
            )
        except _template_errors() as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RagenError(
                f"the chat template refuses a conversation of {roles} ({error}): choose a model "
                "whose template takes user and assistant messages in turn"
            ) from error

    def _bridge_is_found(self, thought: str) -> bool:
        """Whether a bridge holds between replies with this thought, or with none.

        A template may write an empty thought or its start where the next reply begins and not in
        the history, or the other way round: that is its way with thoughts, and no hindrance.
        """
        self._trial_replies = tuple(thought + answer for answer in _ANSWERS)
        self._said = tuple(reply.removeprefix(self.opening) for reply in self._trial_replies)
        first = self._render(_conversation(_USER, self._trial_replies[0], _LAST_USER))
        block = first.removeprefix(self._head).partition(self._said[0])[0]
        self._block = block if _is_empty_thought(block) else ""
        self._lead = self._head + self._block + self._said[0]
        if not first.startswith(self._lead):
            return False
        if self._bridges_hold():
            return True
        if not self.fold:
            self.fold = self._bridges_hold(fold=True)
            return self.fold
        return False

    def _bridge(self, content: str) -> str:
        """What stands between a reply and the start of the next, around one user message.

        Rendered in a conversation of three messages, so its cost does not grow with the episode.
        """
        text = self._render(_conversation(_USER, self._trial_replies[0], content))
        assert text.startswith(self._lead)
        return text[len(self._lead) :]

    def _lacks_system_role(self) -> bool:
        messages = ({"role": "system", "content": _SYSTEM}, *_conversation(_USER))
        try:
            return _SYSTEM not in self._apply(messages)
        except RagenError:
            return True

    def _end_of_turn(self) -> int | None:
        """The first special token behind an assistant's message, if the template has one."""
        text = self._render(_conversation(_USER, _ANSWERS[0], _LAST_USER))
        closing = text.rpartition(_ANSWERS[0])[2].partition(_LAST_USER)[0]
        special = set(self._tokenizer.get_added_vocab().values())
        return next((token for token in self.encode(closing) if token in special), None)

    def _bridges_hold(self, fold: bool = False) -> bool:
        """Whether extending gives what rendering gives, in text and in tokens, over three turns."""
        system = {"role": "system", "content": _SYSTEM}
        heads: tuple[tuple[Message, ...], ...] = ((), (system,))
        return all(self._trial(head, content, fold) for head in heads for content in _CONTENTS)

    def _trial(self, head: tuple[Message, ...], content: str, fold: bool) -> bool:
        def render(*contents: str) -> str:
            messages = (*head, *_conversation(*contents))
            return self._render(_folded(messages) if fold else messages)

        contents = [content]
        text = render(*contents)
        users = (content, _LAST_USER)
        for reply, said, user in zip(self._trial_replies, self._said, users, strict=True):
            contents += [reply, user]
            whole = render(*contents)
            text = text.removesuffix(self._written) + self._block + said
            bridge = self._bridge(user)
            if whole != text + bridge:
                return False
            if self.encode(whole) != self.encode(text) + self.encode(bridge):
                return False
            text = whole
        return True


def _conversation(*contents: str) -> tuple[Message, ...]:
    """Messages of user and assistant in turn."""
    return tuple(
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    )


def _folded(messages: Sequence[Message]) -> Sequence[Message]:
    """The same conversation with the system text on top of the first user message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, user, *rest = messages
    return [{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def without_thought(reply: str) -> str:
    """What is left of a reply in a history without thoughts: the part behind the last one.

    Example:
        >>> without_thought("<think>up</think><answer>Up</answer>")
        '<answer>Up</answer>'
        >>> without_thought("<think>a thought that was cut")
        ''
    """
    if "</think>" in reply:
        return reply.rpartition("</think>")[2].lstrip("\n")
    return reply.partition("<think>")[0]


def _written_thought(generation_prompt: str) -> str:
    """The start of a thought, or an empty one, at the very end of a generation prompt."""
    at = generation_prompt.rfind("<think>")
    return generation_prompt[at:] if _is_empty_thought(generation_prompt[at:]) else ""


def _is_empty_thought(text: str) -> bool:
    return "".join(text.split()) in ("<think>", "<think></think>")


def _template_errors() -> tuple[type[Exception], ...]:
    """What a template may raise: its engine's errors, and Python's about the values it handles."""
    from jinja2 import TemplateError  # looked up only where a template fails

    return TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError
