"""Conversations from a file, as the prompts and completions of an episode.

A file holds one conversation per line: user and assistant in turn, optionally after a system text.

    {"messages": [{"role": "user", "content": "P _ G"},
                  {"role": "assistant", "content": "<think>…</think><answer>Right</answer>"}]}

They take the path of a rollout. The chat opens or extends each prompt, and a completion is the
assistant's text with the token that ends its turn. So the trained tokens are exactly those that a
policy would have to sample, and no reply is searched for in rendered text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ragen.algorithms.samples import Exchange
from ragen.chat.chat import Chat, without_thought
from ragen.core.errors import RagenError
from ragen.core.files import read_json_lines
from ragen.core.types import Message, Prompt
from ragen.rollout.policies import written_completion

MOST_BYTES = 2**30
"""Greatest size of a file of conversations, in bytes; all of them are held in memory."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation, with its file and line in `where`.

    The last message is the assistant's; assistant messages have no surrounding white space.
    """

    where: str
    messages: tuple[Message, ...]


def lost_blanks(transcripts: Sequence[Transcript], chat: Chat) -> str | None:
    """A warning if messages begin with white space that this chat drops."""
    starts = (each["content"][:1] for made in transcripts for each in made.messages)
    if not any(map(str.isspace, starts)) or not chat.loses_blanks:
        return None
    return (
        "some messages begin with white space, which this model's chat template or tokenizer "
        "drops: begin them with a word where it matters"
    )


OWN_PLAYERS = ("random", "wanderer", "solver", "teacher")
"""The players that a name means, also where a file has this name."""


def is_file(player: str) -> bool:
    """True for a file of conversations: any file, also a pipe, such as /dev/stdin."""
    path = Path(player)
    names_file = path.suffix == ".jsonl" or (path.exists() and not path.is_dir())
    return names_file and player not in OWN_PLAYERS


def read_transcripts(path: Path) -> list[Transcript]:
    """A file's conversations, one per line, without a last message of the user: it has no reply."""
    lines = read_json_lines(path, _Line, MOST_BYTES, FORM, is_stream=True)
    if not lines:
        raise RagenError(f"{path} holds no conversation; write one per line, {FORM}")
    return [Transcript(where, tuple(_messages(found, where))) for where, found in lines]


ALTERNATING = ("user", "assistant")


FORM = '{"messages": [{"role": text, "content": text}, …]}'


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant"]
    content: str
    weight: Literal[1] = 1


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[_Message]
    weight: Literal[1] = 1


def _messages(found: _Line, where: str) -> list[Message]:
    roles = [message.role for message in found.messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) < 2 or any(role != ALTERNATING[i % 2] for i, role in enumerate(turns)):
        raise RagenError(
            f"{where}: the roles are {', '.join(roles) or 'none'}; user and assistant must "
            "alternate, after at most one system message"
        )
    messages = found.messages[: len(roles) - len(turns) % 2]
    for message in messages[1:]:
        if message.role == "assistant":
            message.content = message.content.strip()
            if not message.content:
                raise RagenError(f"{where}: an assistant message is empty")
    return [{"role": message.role, "content": message.content} for message in messages]


def to_exchanges(
    transcript: Transcript, chat: Chat, prefill: str, drops_thoughts: bool = False
) -> list[Exchange]:
    """A conversation's prompts and completions, with earlier turns as the chat keeps them.

    If a reply begins with `prefill`, that part belongs to the prompt, as in a rollout. Any other
    reply is trained from its first token. With `drops_thoughts`, as for `chat`, earlier replies are
    shown without their thoughts.

    Raises:
        RagenError: A reply contains a control token, or does not begin as the chat's replies do.
    """
    exchanges: list[Exchange] = []
    running: tuple[int, ...] = ()
    shown: list[Message] = []
    for message in transcript.messages:
        if message["role"] != "assistant":
            shown.append(message)
            continue
        before = tuple(shown)
        given, rest = _split_prefill(message["content"], chat.opening, prefill, transcript.where)
        if running and chat.exact:
            ids, num_prefill = chat.extend(running, before, given)
        else:
            ids, num_prefill = chat.open(before, given)
        completion = written_completion(rest, lambda text: (*chat.encode_text(text), chat.end))
        sampled = completion.token_ids or ()
        forged = next((token for token in chat.encode(rest) if token in chat.control_ids), None)
        if forged is not None:
            raise RagenError(
                f"{transcript.where}: an assistant message contains the token "
                f"{chat.text_of(forged)}, which ends a turn; remove it"
            )
        running = ids + sampled
        reply = message["content"]
        shown.append({**message, "content": without_thought(reply) if drops_thoughts else reply})
        prompt = Prompt(before, ids, num_prefill, len(sampled), temperature=1.0, seed=0)
        exchanges.append((prompt, completion))
    return exchanges


def _split_prefill(reply: str, opening: str, prefill: str, where: str) -> tuple[str, str]:
    """The pre-filled start of a reply and the rest, which is sampled."""
    if opening:
        tag = opening.strip()
        if not reply.startswith(tag):
            raise RagenError(
                f"{where}: this model's chat template begins every reply with {tag}, but an "
                "assistant message does not; write a thought, or use another model"
            )
        return tag, reply.removeprefix(opening if reply.startswith(opening) else tag)
    given = prefill if reply.startswith(prefill) else ""
    return given, reply.removeprefix(given)
