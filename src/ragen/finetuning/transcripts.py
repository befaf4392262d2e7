"""Conversations from a file, as the prompts and completions of an episode.

A file holds one conversation per line: user and assistant in turn, optionally after a system text.

    {"messages": [{"role": "user", "content": "P _ G"},
                  {"role": "assistant", "content": "<think>…</think><answer>Right</answer>"}]}

They take the path of a rollout. The chat opens or extends each prompt, and a completion is the
assistant's text with the token that ends its turn. So the trained tokens are exactly those that a
policy would have to sample, and no reply is searched for in rendered text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from ragen.algorithms.samples import Exchange
from ragen.chat.actions import WHITESPACE, AskedCall, after_thought
from ragen.chat.chat import Chat, without_thought
from ragen.chat.reply_form import THOUGHT_KEYS, Said
from ragen.chat.tool_calls import asked_calls, tool_messages, write_hermes
from ragen.core.errors import RagenError
from ragen.core.files import parse_json, read_json_lines
from ragen.core.types import Message, Prompt
from ragen.envs.tools import write_call
from ragen.rollout.policies import written_completion

MOST_BYTES = 2**30
"""Greatest size of a file of conversations, in bytes; all of them are held in memory."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation, with its file and line in `where`.

    The last message is the assistant's; assistant messages have no surrounding white space.
    `beside` has the parts of those, by index, whose thought or calls stand beside the content: the
    chat's template says how they are written, and ``content`` has them in RAGEN's own form. `tools`
    are those that the file says were offered.
    """

    where: str
    messages: tuple[Message, ...]
    beside: Mapping[int, Said] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None


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
    return [_transcript(found, where) for where, found in lines]


FORM = '{"messages": [{"role": text, "content": text}, …]}'


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """The object without keys that say nothing: tables have a key in every line or in none."""
        if not isinstance(value, dict):
            return value
        said = {key: each for key, each in value.items() if each is not None}
        return {"content": "", **said} if said.get("tool_calls") else said


class _Function(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return parse_json(value) if isinstance(value, str) else value


class _Call(_Part):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Part):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    weight: Literal[1] = 1
    reasoning_content: str = ""
    reasoning: str = ""
    thinking: str = ""
    tool_calls: list[_Call] = []
    name: str = ""
    tool_call_id: str = ""

    @model_validator(mode="after")
    def _check(self) -> _Message:
        of_role = {"assistant": (*THOUGHT_KEYS, "tool_calls"), "tool": ("name", "tool_call_id")}
        for role, keys in of_role.items():
            for key in keys:
                if role != self.role and getattr(self, key):
                    raise ValueError(f"{key} has no effect in the role {self.role}; remove it")
        thoughts = {key: getattr(self, key) for key in THOUGHT_KEYS if getattr(self, key).strip()}
        if len(set(thoughts.values())) > 1:
            raise ValueError(f"{' and '.join(thoughts)} hold different thoughts; keep one")
        self.content = self.content.strip() if self.role == "assistant" else self.content
        return self

    def said(self) -> Said:
        """The reply in parts."""
        key = next((key for key in THOUGHT_KEYS if getattr(self, key).strip()), "")
        thought = getattr(self, key).strip() if key else ""
        calls = (
            write_call(each.function.name, **each.function.arguments) for each in self.tool_calls
        )
        return Said(self.content, key, thought, tuple(calls))


class _Line(_Part):
    messages: list[_Message]
    weight: Literal[1] = 1
    tools: list[dict[str, Any]] | None = None


def _transcript(line: _Line, where: str) -> Transcript:
    roles = [message.role for message in line.messages]
    start, last, waiting = roles[:1] == ["system"], "assistant", list[str]()
    for message in line.messages[start:]:
        wanted = "tool" if waiting else "user" if last == "assistant" else "assistant"
        if message.role != wanted:
            break
        given, call = message.tool_call_id, waiting.pop(0) if waiting else ""
        if given and call and given != call:
            raise RagenError(
                f"{where}: tool_call_id {given!r}: expected {call!r}; results have the order of "
                "their calls"
            )
        waiting += [call.id for call in message.tool_calls]
        last = message.role
    else:
        wanted = ""
    if wanted or "assistant" not in roles:
        raise RagenError(
            f"{where}: the roles are {', '.join(roles) or 'none'}; user and assistant must "
            "alternate, after at most one system message; each call of tool_calls has a result in "
            "the role tool"
        )
    messages, beside = list[Message](), dict[int, Said]()
    for message in line.messages[: len(roles) - roles[::-1].index("assistant")]:
        content = message.content
        if message.role == "assistant":
            said = message.said()
            if said.key or said.calls:
                beside[len(messages)] = said
                thought = f"<think>{said.thought}</think>" if said.key else ""
                parts = (thought + said.content, write_hermes(said.calls))
                content = "\n".join(filter(None, parts))
            if not content:
                raise RagenError(f"{where}: an assistant message is empty")
        messages.append({"role": message.role, "content": content})
    return Transcript(where, tuple(messages), beside, line.tools)


def to_exchanges(
    transcript: Transcript, chat: Chat, prefill: str, drops_thoughts: bool = False
) -> list[Exchange]:
    """A conversation's prompts and completions, with earlier turns as the chat keeps them.

    If a reply begins with `prefill`, that part belongs to the prompt, as in a rollout. Any other
    reply is trained from its first token. With `drops_thoughts`, as for `chat`, earlier replies are
    shown without their thoughts.

    Raises:
        RagenError: A reply contains a control token, does not begin as the chat's replies do, or
            has a part that the chat's template does not write.
    """
    if transcript.tools is not None and transcript.tools != [*chat.tools]:
        raise RagenError(
            f"{transcript.where}: tools: these are not the tools of the environment, which every "
            "prompt shows: remove the key, or choose --env"
        )
    exchanges: list[Exchange] = []
    running: tuple[int, ...] = ()
    shown: list[Message] = []
    calls: tuple[AskedCall, ...] = ()
    for number, message in enumerate(transcript.messages):
        if message["role"] == "tool":
            shown += tool_messages(calls[:1], [message["content"]])
            calls = calls[1:]
            continue
        if message["role"] != "assistant":
            shown.append(message)
            continue
        before, reply = tuple(shown), message["content"]
        if said := transcript.beside.get(number):
            try:
                reply = chat.write(said)
            except RagenError as error:
                raise RagenError(f"{transcript.where}: {error}") from None
            if said.calls and chat.calls is not None:
                rest = reply[after_thought(reply) :].strip(WHITESPACE)
                calls = asked_calls(chat.calls.parse(rest), len(said.calls))
        given, rest = _split_prefill(reply, chat.opening, prefill, transcript.where)
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
