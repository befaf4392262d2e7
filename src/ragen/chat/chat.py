"""Conversations as tokens: sampled tokens are kept, and later messages are appended to them.

A chat model sees one flat sequence, and its template writes the text between the turns. Decoding
a reply, rendering the whole conversation again and encoding it gives *other* tokens than those that
were sampled, with other logprobs. So a `Chat` renders a conversation once, at its start. Then it
extends the running sequence by the reply's own ids and by the template's text between the end of
that reply and the start of the next one: the *bridge* (`ragen.chat.template`). A prompt ends where
the template puts a reply, after the *header* that some templates write only in the history.

Both are found from the tokenizer's own template and verified when the `Chat` is made; nothing
depends on a model's name. A template that drops the thoughts of earlier turns has a bridge too: the
text between replies without thoughts. The sampled thoughts are kept in the sequence. If there is no
bridge, or thoughts are dropped (`without_thought`), `Chat.exact` is false: each turn is rendered
from its messages and is a separate sample.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain, groupby, takewhile
from os.path import commonprefix
from typing import Any, Literal

from ragen.chat.actions import WHITESPACE, after_thought
from ragen.chat.control_tokens import AT_PLACE, ControlTokens, ids_after
from ragen.chat.reply_form import Said, write_reply
from ragen.chat.template import Ids, Template, Tokenizer, extends_exactly, find_bridge, folded
from ragen.chat.tool_calls import ToolForm, ToolParser
from ragen.chat.tool_template import TRIAL_TOOL, call_message, find_form, find_tool_bridge
from ragen.core.errors import RagenError
from ragen.core.json_text import hide_json
from ragen.core.pictures import MARK, Picture, begins, without_places
from ragen.core.types import Completion, Message
from ragen.envs.contract import Schema
from ragen.envs.tools import Call, read_call, write_call

PictureForm = Callable[[Picture], Ids]
"""All ids that stand for a picture in a prompt: its picture tokens, and the model's own around
them."""

NO_THOUGHTS_IN_HISTORY = (
    "the thoughts of earlier turns are left out of the prompts "
    '(prompt.history_thoughts = "drop"), so each turn becomes a separate training sample'
)
NOT_EXACT = (
    "this chat template does not keep earlier turns as they were sampled, so each turn becomes a "
    "separate training sample"
)


class Chat:
    r"""A tokenizer's chat template that extends sampled tokens without changing them.

    Attributes:
        exact: An episode is one growing sequence (`extend`); else each turn is rendered (`open`).
        warning: A warning to the user about this template, in one sentence; or ``None``.
        end_ids: The tokens that end a turn: the first special token that the template puts after
            an assistant's message, and the tokenizer's end-of-sequence token.
        control_ids: The tokens that structure a chat (`ragen.chat.control_tokens`), `end_ids`
            among them. The text of a message is never encoded as one of them, and a reply ends with
            the first one that is sampled. With tools, the tokens that mark a call are left out
            here: replies may contain them, but no other message may.
        calls: The form of calls of the tools, ``None`` without tools.
        tools: The schemas of the tools that every prompt shows.
        fold: System text is put at the top of the first user message, because the template has no
            system role, or moves system text (some templates put it into the last user message).
        asked, header: The text with which the template asks for a reply and that is left out, and
            the text that takes its place: the header, such as a channel, that it writes before a
            reply in the history. Both are empty where the template asks as it writes.
        opening: The start of a thought that the template's own generation prompt writes
            (``<think>\n``), or nothing. It counts as pre-filled. An empty thought that the template
            writes where none is asked for is part of the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        think: bool = True,
        history_thoughts: Literal["keep", "drop"] = "keep",
        tools: Sequence[Schema] = (),
        tool_parser: ToolParser | None = None,
        pictures: PictureForm | None = None,
    ) -> None:
        """Find the bridge of the tokenizer's template and verify it.

        With `think` replies have thoughts, which templates may drop from the history. Prompts keep
        them anyway if `history_thoughts` is ``"keep"``; if ``"drop"``, the messages must not
        contain them. Without `tool_parser`, the parser of the template's own form reads the calls.
        `pictures` is ``None`` for a model that reads none.

        Raises:
            RagenError: The tokenizer has no chat template, the template refuses the simplest
                conversation or leaves out its text, no token ends a turn, the template renders no
                tools, or calls in its form cannot be read.
        """
        self._tokenizer = tokenizer
        self._offering = lru_cache(maxsize=64)(
            lambda tools: Chat(
                tokenizer, think, history_thoughts, json.loads(tools), tool_parser, pictures
            )
        )
        # The Rust tokenizer behind the Python one encodes in two thirds of the time.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._cached_ids = lru_cache(maxsize=1024)(self._ids)
        self._pieces: dict[int, str] = {}
        self._picture_form = pictures
        plain = Template(tokenizer, think)
        start, closing = plain.start, plain.closing()
        self.opening, self.asked, self.header = plain.opening, plain.asked, plain.header
        self._prefill_ids = lru_cache(lambda text: ids_after(self.encode, start, text))
        before = start.removesuffix(self.opening)
        self._num_opening = len(ids_after(self.encode, before, self.opening))
        self._end = self._special_token(closing)
        ends = (self._end, tokenizer.eos_token_id)
        self.end_ids = frozenset(token for token in ends if token is not None)
        if not self.end_ids:
            raise RagenError(
                "no token ends a turn: the chat template writes no special token after a reply, "
                "and the tokenizer has no eos_token; set tokenizer.eos_token"
            )
        written = f"{tokenizer.chat_template}{start}{closing}"
        controls = ControlTokens(tokenizer, self.encode, written, self.end_ids)
        self._controls = self._in_replies = controls
        # Episodes of a group have the same start, and small environments repeat observations.
        self._rendering_ids = lru_cache(maxsize=1024)(controls.encode_rendering)
        self._template = plain
        if tools:
            offered = [_marked_texts(each, controls.mark) for each in tools]
            self._template = Template(tokenizer, think, offered)
        drops_thoughts = think and history_thoughts == "drop"
        bridge = None if drops_thoughts else find_bridge(self._template, plain, self.encode)
        self.fold = self._template.fold or (bridge is not None and bridge.fold)
        self.calls: ToolForm | None = None
        self.tools = tuple(tools)
        if tools:
            name, end = tools[0]["function"]["name"], self.text_of(self.end)
            around = find_tool_bridge(self._template, plain, end, name, self.fold)
            self.calls, self._takes_several_calls = find_form(around, tool_parser), around.several
            allowed = controls.in_text(self.calls.write([write_call(name)])) - self.end_ids
            self._in_replies = ControlTokens(tokenizer, self.encode, written, self.end_ids, allowed)
            self._tool_bridge = lru_cache(maxsize=1024)(
                lambda results: around.text([self._marked(dict(each)) for each in results])
            )
            if bridge is not None and not extends_exactly(
                self._template, self.fold, self.encode, around.exchanges
            ):
                bridge = None
        self.control_ids = self._in_replies.ids
        self.exact = bridge is not None
        self.warning: str | None = NO_THOUGHTS_IN_HISTORY if drops_thoughts else NOT_EXACT
        # Bridges put a conversation together where the template would drop or move parts.
        self._splices = False
        if bridge is not None:
            self.warning, text = bridge.warning, bridge.text
            self._splices = bridge.warning is not None or bool(tools)
            self._bridge = lru_cache(maxsize=1024)(lambda content: text(controls.mark(content)))

    def write(self, said: Said) -> str:
        """The text of a reply whose thought and calls stand beside its content.

        Raises:
            RagenError: The template leaves a part out, or RAGEN would not read the reply as `said`.
        """
        return write_reply(said, self._template, self.text_of(self.end), self.calls)

    @property
    def end(self) -> int:
        """The token that ends a written reply: the template's, otherwise the tokenizer's."""
        return min(self.end_ids) if self._end is None else self._end

    @property
    def loses_blanks(self) -> bool:
        """True if a message loses white space at its beginning: a template or a token drops it."""
        blanks = "\n  Q"
        ids, _ = self.open([{"role": "user", "content": blanks}])
        return blanks not in self.spell(ids)

    @property
    def name(self) -> str:
        """Where the tokenizer came from: a folder or an id of the Hub."""
        return str(getattr(self._tokenizer, "name_or_path", "")) or "this model"

    @property
    def reads_pictures(self) -> bool:
        """True if the model reads pictures."""
        return self._picture_form is not None

    def open(
        self, messages: Sequence[Message], prefill: str = "", pictures: Sequence[Picture] = ()
    ) -> tuple[Ids, int]:
        """Render a conversation up to the start of the next reply.

        `pictures` are those of the places in `messages`, in order. Returns all ids, and how many of
        the last ones are pre-filled: `prefill`, such as ``<think>``, which is not written twice if
        the template writes it already.
        """
        return self._prefilled(self._rendered(self._text_of(messages), pictures), prefill)

    def extend(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        prefill: str = "",
        pictures: Sequence[Picture] = (),
    ) -> tuple[Ids, int]:
        """Append the text between a sampled reply and the next one.

        `ids` end with the sampled ids of the last reply, including its end-of-turn token. A reply
        that was cut at its length limit, or by another control token, has none: then the template's
        closing is appended, as tokens that were not sampled. `messages` is the whole conversation,
        the new messages included: one of the user, or results of tools, after which one of the user
        may follow. `pictures` are those of the places in the messages after the last reply. Returns
        `ids` with the appended ids, and how many of the last ones are pre-filled (`open`).
        """
        assert self.exact, "no exact extension exists for this template: open each turn afresh"
        replies = (n for n, message in enumerate(messages) if message["role"] == "assistant")
        after = _after(messages, max(replies, default=-1))
        bridge = self._rendered(self._between(after), pictures)
        if ids[-1] in self.end_ids and self._end is not None:
            bridge = bridge[bridge.index(self._end) + 1 :]
        return self._prefilled((*ids, *bridge), prefill)

    def offering(self, tools: Sequence[Schema]) -> Chat:
        """A chat with the same template that offers these tools; it is made once for equal ones.

        Raises:
            RagenError: The template renders no tools, or calls in its form cannot be read.
        """
        chat: Chat = self._offering(json.dumps(tools))
        return chat

    def expect_tools(self) -> None:
        """Leave the tokens that mark a call out of `control_ids`: tools come with the requests.

        A policy has one chat, and would end each reply at such a token. If the template takes no
        tools, `offering` says so.
        """
        with suppress(RagenError):
            self.control_ids = self.offering([TRIAL_TOOL]).control_ids

    def taken(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The conversation as the template accepts it: without a system message if `fold`."""
        return folded(messages) if self.fold else messages

    def encode(self, text: str) -> Ids:
        """Ids of a rendering, where control tokens are spelled out; no special token is added."""
        return self._cached_ids(text)

    def encode_text(self, text: str) -> Ids:
        """Ids of a reply's text, without `control_ids`, even where the text spells one."""
        return self._controls.encode_rendering(self._in_replies.mark(without_places(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without the end-of-turn token; other special tokens are kept."""
        return self.spell(self._without_end(ids))

    def text_of(self, token: int) -> str:
        """The text of a token that follows another; a first token may lose its leading space.

        It is U+FFFD if the token spells only part of a character.
        """
        if token not in self._pieces:
            self._pieces[token] = self.spell((token, token))[len(self.spell((token,))) :]
        return self._pieces[token]

    def token_span(self, ids: Sequence[int], text: str, start: int, end: int) -> tuple[int, int]:
        """The tokens that spell the characters from `start` to `end` of ``text = decode(ids)``.

        Returns a half-open range of `ids` that covers the characters. It includes tokens that cross
        an edge, and every token that holds a byte of one of the characters. A negative start counts
        as 0. The range is empty if there is no such character.
        """
        start, end = max(0, start), min(end, len(text))
        if start >= end:
            return 0, 0
        ids = self._without_end(ids)
        reach = self._reach(ids, text)
        first = bisect_left(range(len(ids) + 1), start, key=reach)
        last = bisect_left(range(len(ids) + 1), end, lo=first, key=reach)
        return first - (reach(first) > start), last

    def thought_span(
        self, completion: Completion, chars: tuple[int, int] | None, prefill: str
    ) -> tuple[int, int] | None:
        """The half-open range of a completion's tokens that spell its thought, `prefill` excluded.

        `chars` is the thought's place in the whole reply; ``None`` without a thought or ids.
        """
        if chars is None or completion.token_ids is None:
            return None
        start, end = (max(0, at - len(prefill)) for at in chars)
        if start >= end:  # an empty thought is after the tokens that opened it
            _, place = self.token_span(completion.token_ids, completion.text, 0, start)
            return place, place
        return self.token_span(completion.token_ids, completion.text, start, end)

    def _ids(self, text: str) -> Ids:
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def spell(self, ids: Sequence[int]) -> str:
        """Text of ids, with every special token spelled out; a picture's tokens are a `MARK`."""
        if min(ids, default=0) < 0:
            runs = groupby(ids, lambda token: token < 0)
            return "".join(
                MARK * sum(map(begins, run)) if shown else self.spell([*run]) for shown, run in runs
            )
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
        """A function of k: the number of characters of `text` that the first k ids spell."""
        pieces = [self.spell(ids[:1]), *map(self.text_of, ids[1:])]
        if "".join(pieces) == text:
            return list(accumulate(map(len, pieces), initial=0)).__getitem__
        # The bytes of some character are spread over tokens that cannot be decoded alone.
        return lambda k: len(commonprefix((self.spell(ids[:k]), text)))  # noqa: RUF071 (characters)

    def _rendered(self, text: str, pictures: Sequence[Picture]) -> Ids:
        """Ids of a rendering that shows `pictures` at its places; without any, it has no places.

        Raises:
            RagenError: The template has left a place out, or repeated it.
        """
        if not pictures:
            return self._rendering_ids(without_places(text))
        assert self._picture_form is not None, "a model that reads no pictures gets none"
        ids, forms = self._rendering_ids(text), map(self._picture_form, pictures)
        if (places := ids.count(AT_PLACE)) != len(pictures):
            raise RagenError(
                f"this chat template writes {places} of {len(pictures)} pictures of a prompt: "
                "choose a model whose template keeps all that is said"
            )
        return tuple(chain.from_iterable(next(forms) if i == AT_PLACE else (i,) for i in ids))

    def _prefilled(self, ids: Ids, prefill: str) -> tuple[Ids, int]:
        if self.opening and prefill.strip() in ("", self.opening.strip()):
            return ids, self._num_opening
        more = self._prefill_ids(prefill)
        return ids + more, len(more)

    def _special_token(self, text: str) -> int | None:
        special = set(self._tokenizer.get_added_vocab().values())
        return next((token for token in self.encode(text) if token in special), None)

    def _text_of(self, messages: Sequence[Message]) -> str:
        """A conversation up to the start of the next reply, thoughts included, contents marked."""
        if not self._splices:
            return self._template.render(self.taken(self._with_calls(messages)))
        marked = [self._marked(message) for message in messages]
        opened = 1 + next(n for n, message in enumerate(messages) if message["role"] == "user")
        text = self._template.render(self.taken(marked[:opened]))
        for number, reply in enumerate(marked[opened:], opened):
            if reply["role"] == "assistant":
                # The text so far ends with the start of the thought, if the template writes one.
                rest = reply["content"].removeprefix(self.opening.strip())
                text += rest.removeprefix(self.opening.removeprefix("<think>"))
                text += self._between(_after(messages, number))
        return text

    def _marked(self, message: Message) -> Message:
        """A message with its texts marked, a tool's name too, because a policy chooses it."""
        controls = self._in_replies if message["role"] == "assistant" else self._controls
        return {
            key: text if key == "role" else controls.mark(text) for key, text in message.items()
        }

    def _between(self, after: Sequence[Message]) -> str:
        if after[0]["role"] != "tool":
            return self._bridge(after[-1]["content"])
        return self._tool_bridge(tuple(tuple(message.items()) for message in after))

    def _with_calls(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """The marked messages in the template's form, for a rendering of the whole history."""
        made: list[Mapping[str, Any]] = []
        for number, message in enumerate(messages):
            results = [*takewhile(lambda each: each["role"] == "tool", messages[number + 1 :])]
            if message["role"] == "assistant" and results:
                made += self._called(message["content"], results)
            elif message["role"] != "tool":
                made.append(self._marked(message))
        return made

    def _called(self, reply: str, results: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
        """A reply's calls and their results, in messages with as many calls as the template takes.

        Text between a thought and the first call is left out. Calls are marked after decoding,
        because JSON has escapes that spell a control token.

        Raises:
            RagenError: An agent's own reply has text in which other calls are read.
        """
        assert self.calls is not None
        mark, start = self._controls.mark, after_thought(reply)
        try:
            found = self.calls.parse(reply[start:].strip(WHITESPACE))
        except ValueError:
            found = ()
        if len(found) != len(results):
            raise RagenError(
                "this chat template cannot write a reply whose text looks like a part of a call"
            )
        calls = []
        for text in found:
            call = read_call(text) or Call("unknown", {"text": text})
            calls.append(Call(mark(call.name), _marked_texts(call.arguments, mark)))
        thought = mark(reply[:start].rstrip())
        ids = [each["tool_call_id"] for each in results]
        count = len(calls) if self._takes_several_calls else 1
        for at in range(0, len(calls), count):
            part = slice(at, at + count)
            yield call_message(calls[part], ids[part], "" if at else thought)
            yield from map(self._marked, results[part])


def without_thought(reply: str) -> str:
    """A reply without its thought: the text after the last one, or before one that was cut.

    Tags in strings of JSON belong to the JSON.
    """
    shown = hide_json(reply) if "think>" in reply else reply
    end = shown.rfind("</think>")
    if end >= 0:
        return reply[end + len("</think>") :].lstrip("\n")
    return reply[: len(shown.partition("<think>")[0])]


def _after(messages: Sequence[Message], reply: int) -> Sequence[Message]:
    return [*takewhile(lambda each: each["role"] != "assistant", messages[reply + 1 :])]


def _marked_texts(value: Any, mark: Callable[[str], str]) -> Any:
    """A JSON value with `mark` applied to its texts."""
    match value:
        case str():
            return mark(value)
        case Mapping():
            return {mark(key): _marked_texts(each, mark) for key, each in value.items()}
        case list() | tuple():
            return [_marked_texts(each, mark) for each in value]
    return value
