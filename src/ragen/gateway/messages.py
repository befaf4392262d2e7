"""What an agent asks and what it gets, whatever the dialect of its library.

A dialect (`ragen.gateway.dialects`) reads the body of a request into a `Request`, and writes a
`Reply` as its library expects it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ragen.envs.contract import Schema

Speaker = Literal["system", "user", "assistant", "tool"]
"""The role of a message; other names for these roles are read as one of them."""


Finish = Literal["stop", "length", "calls"]
"""Why a reply ended: by itself or at a stop text, at its limit of tokens, or with calls."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool in a reply.

    `arguments` are JSON text, as the policy or the agent wrote it; other text is kept as it is.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    `text` is ``None`` where the message has none, as beside `calls`. `call_id` says which call a
    message in the role ``tool`` answers, and `name` is the tool's name, if it is known.
    """

    role: Speaker
    text: str | None
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request demands of the calls in its reply: how many, and of which tool.

    Sampling does not enforce it: a reply that does not meet it is not valid.
    """

    least: int = 0
    most: int | None = None
    tool: str = ""

    def unmet(self, names: Sequence[str]) -> str | None:
        """What is wrong with a reply that calls these tools, as one sentence; ``None`` if nothing.

        Example:
            >>> Demand(least=1, tool="guess").unmet(["stop"]), Demand(most=1).unmet(["guess"])
            ('The reply must call "guess" and no other tool.', None)
        """
        if self.tool and set(names) != {self.tool}:
            return f'The reply must call "{self.tool}" and no other tool.'
        if len(names) < self.least:
            return "The reply must call a tool."
        if self.most is not None and len(names) > self.most:
            return f"The reply may have at most {self.most} calls."
        return None


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one reply.

    `max_tokens` is the agent's own limit, if it has one. A reply ends before the first of the texts
    in `stop`, and its calls are to meet the `demand`. With `stream` the reply is sent as events.
    `ignored` are parameters that the run decides, or that it cannot honour, by name: they change
    nothing.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Schema, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    demand: Demand = Demand()
    ignored: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request, with the number of tokens of its prompt and of itself.

    `stop` is the text of `Request.stop` before which it ended, if it did.
    """

    id: str
    text: str | None
    calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None

    @property
    def message(self) -> ChatMessage:
        """The reply as a message of the conversation."""
        return ChatMessage("assistant", self.text, self.calls)


class Refused(Exception):
    """A request that cannot be answered: an HTTP status, OpenAI's code for it, and one line."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code
