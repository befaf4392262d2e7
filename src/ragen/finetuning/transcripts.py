"""Conversations that somebody wrote, as the prompts and completions of an episode.

A file holds one conversation a line: a user and an assistant in turn, perhaps behind a system text.

    {"messages": [{"role": "user", "content": "P _ G"},
                  {"role": "assistant", "content": "<think>…</think><answer>Right</answer>"}]}

They take the path of a rollout. A prompt is what the chat opens or extends, a completion is what
the assistant says with the token that ends its turn; so what is learnt are exactly the tokens that
a policy would have had to sample there, and none is looked for in a rendered text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen.algorithms.samples import Exchange
from ragen.core.errors import RagenError
from ragen.core.types import Message, Prompt
from ragen.rollout.chat import Chat, without_thought
from ragen.rollout.policies import written_completion


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation and, in words, where it stands.

    Its last message is an assistant's; what the assistant says has no white space around it.

    Example:
        >>> messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"})
        >>> Transcript("chats.jsonl, line 1", messages).messages[1]["content"]
        'Ho'
    """

    where: str
    messages: tuple[Message, ...]


def read_transcripts(path: Path) -> list[Transcript]:
    """All conversations of a file, one a line; empty lines are none.

    A last message of the user is left out, since nobody answers it.

    Raises:
        RagenError: The file cannot be read or holds no conversation, or a line is none: no JSON, no
            ``messages``, roles that do not take turns, an empty reply, or no reply at all.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "chats.jsonl"
        >>> _ = path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
        >>> read_transcripts(path)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ragen.core.errors.RagenError: .../chats.jsonl, line 1: the assistant says nothing in it
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark before the text
    except OSError as error:
        raise RagenError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise RagenError(f"{path} is not UTF-8 text, so it holds no conversations") from None
    found = [
        Transcript(where, tuple(_messages(line, where)))
        for where, line in _lines(text, path)
        if line.strip()
    ]
    if not found:
        raise RagenError(f'{path} holds no conversation; write one a line, {{"messages": […]}}')
    return found


def _lines(text: str, path: Path) -> Iterator[tuple[str, str]]:
    # Not `splitlines`, which also parts at characters that JSON allows inside a text.
    for number, line in enumerate(text.split("\n"), 1):
        yield f"{path}, line {number}", line


def _messages(line: str, where: str) -> list[Message]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RagenError(f"{where}: it is not JSON ({error})") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise RagenError(f'{where}: expected {{"messages": [{{"role": …, "content": …}}, …]}}')
    found = [_message(message, where) for message in messages]
    turns = found[1:] if found[0]["role"] == "system" else found
    for number, message in enumerate(turns):
        expected = "assistant" if number % 2 else "user"
        if message["role"] != expected:
            raise RagenError(
                f"{where}: message {number + 1 + len(found) - len(turns)} is of role "
                f"{message['role']!r}, expected {expected!r}; user and assistant take turns, at "
                "most one system message before them"
            )
    if len(turns) < 2:
        raise RagenError(f"{where}: the assistant says nothing in it")
    if any(message["role"] == "assistant" and not message["content"] for message in turns):
        raise RagenError(f"{where}: an assistant's message is empty")
    return found if len(turns) % 2 == 0 else found[:-1]


def _message(message: Any, where: str) -> Message:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    )
    if not (isinstance(role, str) and isinstance(content, str)):
        raise RagenError(f'{where}: a message is not {{"role": text, "content": text}}')
    if any("\ud800" <= char <= "\udfff" for char in content):
        raise RagenError(f"{where}: a message holds half a character (a lone surrogate)")
    return {"role": role, "content": content.strip() if role == "assistant" else content}


def recite(
    transcript: Transcript,
    chat: Chat,
    prefill: str,
    max_tokens: int,
    drops_thoughts: bool = False,
) -> list[Exchange]:
    """A conversation's prompts and completions, the earlier turns in them as the chat keeps them.

    A reply that begins with `prefill` is given that much, as in a rollout; any other is learnt from
    its first token.

    Args:
        transcript: The conversation.
        chat: Of the model that is to learn it.
        prefill: The start of a reply that prompts hold already, such as ``<think>``.
        max_tokens: Of a completion, for the prompts.
        drops_thoughts: Whether earlier replies are shown without their thoughts. `chat` must know.

    Raises:
        RagenError: A reply is nothing that the model could say in its chat.
    """
    exchanges: list[Exchange] = []
    running: tuple[int, ...] = ()
    shown: list[Message] = []
    for message in transcript.messages:
        if message["role"] != "assistant":
            shown.append(message)
            continue
        before = tuple(shown)
        given, rest = _parted(message["content"], chat.opening, prefill, transcript.where)
        if running and chat.exact:
            ids, num_prefill = chat.extend(running, before, given)
        else:
            ids, num_prefill = chat.open(before, given)
        completion = written_completion(rest, lambda text: (*chat.encode(text), chat.end))
        said = completion.token_ids or ()
        if not chat.end_ids.isdisjoint(said[:-1]):
            raise RagenError(
                f"{transcript.where}: an assistant's message spells the token that ends its turn"
            )
        running = ids + said
        reply = message["content"]
        shown.append({**message, "content": without_thought(reply) if drops_thoughts else reply})
        exchanges.append((Prompt(before, ids, num_prefill, max_tokens, 1.0, 0), completion))
    return exchanges


def _parted(reply: str, opening: str, prefill: str, where: str) -> tuple[str, str]:
    """The pre-filled start of a reply, as the chat takes it, and what is left to be said."""
    if opening:
        tag = opening.strip()
        if not reply.startswith(tag):
            raise RagenError(
                f"{where}: this model's chat template begins every reply with {tag}, and an "
                "assistant's message does not; write a thought, or take another model"
            )
        return tag, reply.removeprefix(opening if reply.startswith(opening) else tag)
    given = prefill if reply.startswith(prefill) else ""
    return given, reply.removeprefix(given)
