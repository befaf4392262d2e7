"""One episode of an agent: its calls as a tree, in the tokens that were sampled.

An agent sends its whole history with every call, in its own words: libraries respell JSON, drop
fields and rewrite texts. So a history is matched by what was returned before. The replies in it are
looked up among those that were sampled at the same place, by a tolerant comparison
(`ragen.gateway.grades`). The prompt is then the exact ids up to the last of them, and the
template's text around the messages after it (`Chat.extend`). If a history ends otherwise, it is
rendered as text, and begins another conversation of the episode. No sampled token is encoded again,
realigned or left out to make a history fit.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ragen.chat.chat import Chat
from ragen.core.errors import RagenError
from ragen.core.types import TRAINED_ROLES, Call, CallRole, Completion, Message, Prompt, Turn
from ragen.gateway.bodies import unsupported, wrong
from ragen.gateway.calls import Made, Question, roles_of, told
from ragen.gateway.conversation import cut, merged, parsed, reply_of, written
from ragen.gateway.endpoint_chat import EndpointChat
from ragen.gateway.grades import GRADES, grade, signature
from ragen.gateway.messages import ChatMessage, Refused, Reply, Request

STOP_TEXT = "The budget of this episode is used up. Give your final answer now."
"""The reply to calls beyond the budget. It is not sampled, and never trained on."""
FIRST_CALL = "first call"
"""The link of an episode's first call."""
MOST_STOPS = 3
"""Calls that get `STOP_TEXT`; further ones are refused."""
PARAMETER = re.compile(r"\w{1,40}", re.ASCII)
"""Names of parameters that are recorded if they have no effect."""
SHOWN = 60
"""Characters of a message in the reason for a new root."""

Complete = Callable[[Prompt, bool], Awaitable[Completion]]
"""Samples the completion of a prompt; true in the episode's first conversation, up to a fork, whose
calls follow each other."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of an episode and of its calls, and how they are sampled.

    An episode has at most `calls` calls, and begins none after `tokens` sampled tokens. A reply has
    at most `max_tokens` tokens, a prompt and its reply at most `max_length`. With `think`, replies
    begin with a thought; `prefilled` writes its tag. `penalty` is the reward of a reply that is not
    valid.
    """

    calls: int
    max_tokens: int
    max_length: int
    temperature: float = 1.0
    think: bool = False
    prefilled: bool = True
    penalty: float = 0.0
    tokens: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request belongs: the call whose reply it continues, and the keys of its history.

    There is a key for the tools, one for the history up to each message, and one for all of it.
    `replies` are the calls whose replies are in the history, by the index of the message.
    """

    keys: tuple[bytes, ...]
    parent: Made | None
    link: str
    fresh: tuple[ChatMessage, ...]
    replies: Mapping[int, Made]


class Session:
    """The calls of one episode.

    `chat` is the policy's, without tools; with an `EndpointChat` prompts have no ids. `seed` gives
    the seed of a call from its prompt's ids or text and how often these were asked before, so that
    neither the order in which calls arrive nor a retry changes a reply. `is_full` says that a
    prompt had no room for a reply, and `failure` is what ended the episode from our side.
    """

    def __init__(
        self,
        chat: Chat | EndpointChat,
        budget: Budget,
        complete: Complete,
        seed: Callable[[Sequence[Any], int], int],
    ) -> None:
        self._chat, self._budget, self._complete, self._seed = chat, budget, complete, seed
        self.made: list[Made] = []
        self.stops: list[tuple[Request, Reply]] = []
        self.is_full = False
        self.failure: BaseException | None = None
        self._begun = self._spent = 0
        self._last_of_first = -1  # the last call of the first conversation, −2 during the next one
        self._asked: dict[bytes, list[Made]] = {}  # by the key of the history before the reply
        self._known: set[bytes] = set()  # the keys of the histories up to each message
        self._times: Counter[Sequence[Any]] = Counter()
        self._questions: dict[bytes, list[Question]] = {}  # by the hash of their body
        self._by_reply: dict[str, Made] = {}
        self._is_closed = False

    async def reply(
        self, body: bytes, request: Request, *, is_retry: bool, role: CallRole | None = None
    ) -> Reply:
        """The reply to a request; to a retry, the one of the same `body`.

        A retry says so, or sends the body of a request whose clients have all left. A client that
        leaves while it waits cancels this call. `role` is the one that the agent declares.

        Raises:
            Refused: The request cannot be answered, or the episode has ended.
        """
        if self._is_closed:
            raise ended()
        same = self._questions.setdefault(_digest(b"", body), [])
        left = (each for each in same if not each.clients)
        question = next(left, same[-1] if same and is_retry else None)
        if question is None:
            question = Question()
            question.task = asyncio.create_task(self._answer(question, request, role))
            question.task.add_done_callback(self._answered)
            same.append(question)
        question.clients += 1
        question.retries += 1
        try:
            return await asyncio.shield(question.task)
        except asyncio.CancelledError:
            if not question.task.cancelled():
                question.clients -= 1
                raise
            raise ended() from None
        except Refused:
            raise
        except Exception as error:
            raise Refused(400, "internal_error", f"the run has failed: {error}") from error

    def _answered(self, task: asyncio.Task[Reply]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Refused):
            self.failure = error  # a bug or a broken policy: it is the run's, not the agent's

    def lost(self, reply: Reply) -> None:
        """Record that a client has left before the reply was sent to it."""
        if made := self._by_reply.get(reply.id):
            made.question.clients -= 1

    async def count_tokens(self, request: Request) -> int:
        """The number of tokens of the prompt of a request."""
        chat, messages = self._chat_of(request), merged(request.messages)
        ids = self._ids(chat, messages, self._place(messages, request))[1]
        if ids is None:
            raise unsupported("count_tokens", "only the endpoint knows the tokens of a prompt")
        return len(ids)

    def known(self, reply_id: str) -> tuple[ChatMessage, ...]:
        """The conversation up to and with a reply; a `KeyError` if there is none of this id."""
        made = self._by_reply[reply_id]
        return (*made.request.messages, made.reply.message)

    def close(self) -> None:
        """End the episode: open calls are cancelled, and further ones are refused."""
        self._is_closed = True
        for question in chain.from_iterable(self._questions.values()):
            question.task.cancel()

    async def _answer(self, question: Question, request: Request, role: CallRole | None) -> Reply:
        if self._begun >= self._budget.calls or self._spent >= self._budget.tokens:
            return self._stop(request)
        chat = self._chat_of(request)
        messages = merged(request.messages)
        place = self._place(messages, request)
        prompt = self._prompt(chat, messages, place, request)
        self._begun += 1
        parent = -1 if place.parent is None else place.parent.number
        is_first = parent == self._last_of_first
        if is_first:
            self._last_of_first = -2
        began = time.monotonic()
        completion = await self._complete(prompt, is_first)
        seconds = time.monotonic() - began
        number = len(self.made)
        if is_first:
            self._last_of_first = number
        completion, text, stop = cut(chat, completion, request.stop)
        text = self._prefill(chat) + text
        think = self._budget.think or self._prefill(chat) != ""
        found = parsed(chat, text, completion, think, request.demand)
        name = _digest(b"reply", f"{number} {prompt.token_ids}").hex()[:16]
        is_cut = completion.finish_reason == "length"
        counts = _counts(prompt, completion)
        reply = reply_of(name, number, chat.calls, text, found, is_cut, counts)
        made = Made(
            number,
            request,
            chat,
            parent,
            place.link,
            "\n\n".join(each.text or "" for each in place.fresh),
            prompt,
            completion,
            found,
            replace(reply, stop=stop),
            seconds,
            question,
            role,
            told(self.made, place.fresh),
        )
        self.made.append(made)
        self._spent += counts[1]
        self._by_reply[name] = made
        self._asked.setdefault(place.keys[-1], []).append(made)
        self._known.update(place.keys, [_digest(b"reply", str(number))])
        if place.parent is not None:
            place.parent.num_children += 1
            results = tuple(each.text or "" for each in place.fresh if each.role == "tool")
            place.parent.results = place.parent.results or results
        return made.reply

    def _stop(self, request: Request) -> Reply:
        if len(self.stops) >= MOST_STOPS:
            limits = "its calls (env.max_turns) or its tokens (env.params.max_tokens)"
            raise Refused(410, "budget", f"this episode has used up {limits}")
        reply = Reply(f"stop{len(self.stops)}", STOP_TEXT, (), "length", 0, 0)
        self.stops.append((request, reply))
        return reply

    def _chat_of(self, request: Request) -> Chat | EndpointChat:
        if not request.tools:
            return self._chat
        with _refusing():
            return self._chat.offering(request.tools)

    def _prefill(self, chat: Chat | EndpointChat) -> str:
        budget = self._budget
        return "<think>" if budget.think and budget.prefilled else chat.opening

    # Where a request belongs.

    def _place(self, messages: Sequence[ChatMessage], request: Request) -> _Place:
        keys = [_digest(b"", json.dumps(request.tools))]
        parent: Made | None = None
        link, begin, own = "", 0, -1
        replies: dict[int, Made] = {}
        for index, message in enumerate(messages):
            if message.role == "assistant":
                found = self._sampled(keys[-1], message)
                if found is not None:
                    (how, parent), begin, own = found, index + 1, -1
                    link, replies[index] = GRADES[how], parent
                    keys.append(_digest(b"reply", str(parent.number)))
                    continue
                own = index if own < 0 else own
            said = [message.role, message.text, *map(signature, message.calls)]
            keys.append(_digest(keys[-1], json.dumps(said)))
        if parent is None or own >= 0:
            why = self._why_root(keys, messages)
            return _Place(tuple(keys), None, why, tuple(messages), replies)
        return _Place(tuple(keys), parent, link, tuple(messages[begin:]), replies)

    def _sampled(self, key: bytes, message: ChatMessage) -> tuple[int, Made] | None:
        """The reply that was sampled after a history and that a message repeats, with its grade."""
        asked = self._asked.get(key, ())
        graded = [(grade(message, made.reply, made.request.stop), made) for made in asked]
        fits = [(how, made) for how, made in graded if how is not None]
        return min(fits, key=lambda fit: (fit[0], fit[1].number), default=None)

    def _why_root(self, keys: Sequence[bytes], messages: Sequence[ChatMessage]) -> str:
        """Why a history continues no reply: the first part that no earlier call had there."""
        if not self.made:
            return FIRST_CALL
        new = next((n for n, key in enumerate(keys) if key not in self._known), len(keys))
        if new == 0:
            return "no earlier call offers these tools"
        if new == len(keys):
            return "the same prompt once more"
        message = messages[new - 1]
        said = [message.text or "", *(f"{call.name} {call.arguments}" for call in message.calls)]
        text = " ".join(" ".join(said).split())
        shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
        return f"message {new} ({message.role}) is new: {shown}"

    # Its prompt.

    def _prompt(
        self,
        chat: Chat | EndpointChat,
        messages: Sequence[ChatMessage],
        place: _Place,
        request: Request,
    ) -> Prompt:
        budget = self._budget
        text, ids, num_prefill = self._ids(chat, messages, place)
        if ids is not None and len(ids) + budget.max_tokens > budget.max_length:
            self.is_full = True
            raise Refused(
                400,
                "context_length_exceeded",
                f"this model's maximum context length is {budget.max_length} tokens: the prompt "
                f"has {len(ids)}, and a reply may have {budget.max_tokens}",
            )
        most = min(request.max_tokens or budget.max_tokens, budget.max_tokens)
        content = json.dumps([text, request.tools]) if ids is None else ids
        times = self._times[content]
        self._times[content] += 1
        seed = self._seed(content, times)
        prompt = Prompt(text, ids, num_prefill, most, budget.temperature, seed)
        if ids is not None:
            return prompt
        said = {at: made.completion.message for at, made in place.replies.items()}
        sent = {at: message for at, message in said.items() if message is not None}
        return replace(prompt, sent=sent, tools=request.tools)

    def _ids(
        self, chat: Chat | EndpointChat, messages: Sequence[ChatMessage], place: _Place
    ) -> tuple[tuple[Message, ...], tuple[int, ...] | None, int]:
        """The messages as a chat takes them, their ids, and how many of these are pre-filled."""
        parent, prefill = place.parent, self._prefill(chat)
        with _refusing():
            own = () if parent is None else [call.id for call in parent.parsed.calls]
            text = written(chat, messages, own)
            if parent is None or isinstance(chat, EndpointChat) or not chat.exact:
                return text, *chat.open(text, prefill)
            assert parent.prompt.token_ids is not None and parent.completion.token_ids is not None
            before = parent.prompt.token_ids + parent.completion.token_ids
            return text, *chat.extend(before, text, prefill)

    # The episode's turns.

    def turns(self) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
        """The calls that are trained on, and the others with their roles, in order of arrival."""
        roles = roles_of(self.made)
        trained_first = sorted(range(len(roles)), key=lambda n: roles[n] not in TRAINED_ROLES)
        places = {number: place for place, number in enumerate(trained_first)}
        turns, others = list[Turn](), list[Turn]()
        for made, role in zip(self.made, roles, strict=True):
            turn = self._turn(made, Call(places.get(made.parent, -1), made.link, role))
            (turns if role in TRAINED_ROLES else others).append(turn)
        return tuple(turns), (*others, *(_stopped(*each) for each in self.stops))

    def _turn(self, made: Made, call: Call) -> Turn:
        parsed = made.parsed
        return Turn(
            made.observation,
            made.prompt,
            made.completion,
            parsed.thought,
            made.chat.thought_span(made.completion, parsed.thought_chars, self._prefill(made.chat)),
            parsed.actions_asked,
            parsed.actions,
            0.0,
            0.0 if parsed.valid else -self._budget.penalty,
            parsed.valid,
            _digest(b"", str(made.prompt.token_ids or made.prompt.messages)).hex(),
            _about(made),
            problem=parsed.problem,
            results=made.results or None,
            completion_s=made.seconds,
            call=call,
        )


def _stopped(request: Request, reply: Reply) -> Turn:
    text = reply.text or ""
    prompt = Prompt((), None, 0, 0, 0.0, 0)
    completion = Completion(None, None, text, "length", 0)
    call = Call(-1, "the budget is used up", "budget")
    said = request.messages[-1].text or ""
    return Turn(said, prompt, completion, None, None, (), (), 0.0, 0.0, True, "", call=call)


def _counts(prompt: Prompt, completion: Completion) -> tuple[int, int]:
    """The tokens of a prompt and its completion, as an endpoint counts them if they have no ids."""
    if prompt.token_ids is not None and completion.token_ids is not None:
        return len(prompt.token_ids), len(completion.token_ids)
    used = completion.usage
    return (0, 0) if used is None else (used.prompt_tokens, used.completion_tokens)


def _about(made: Made) -> dict[str, Any]:
    """What the metrics say of a call: its retries, and the parameters of it without effect."""
    ignored = sorted(name for name in made.request.ignored if PARAMETER.fullmatch(name))
    about = {"retries": made.question.retries, "ignored": ignored}
    return {name: value for name, value in about.items() if value}


def _digest(before: bytes, text: str | bytes) -> bytes:
    content = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    return hashlib.blake2b(before + content, digest_size=16).digest()


def ended() -> Refused:
    """The refusal of a request after the end of its episode."""
    return Refused(410, "episode_ended", "this episode has ended")


@contextmanager
def _refusing() -> Iterator[None]:
    """A template that cannot write a conversation refuses the request."""
    try:
        yield
    except RagenError as error:
        raise wrong(str(error)) from error
