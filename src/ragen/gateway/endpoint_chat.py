"""The chat of an endpoint: it takes messages, and only its server knows their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ragen.chat.tool_calls import ToolForm
from ragen.core.types import Completion, Message
from ragen.envs.contract import Schema


@dataclass(frozen=True, slots=True)
class EndpointChat:
    """What an agent's calls need of a `ragen.chat.chat.Chat`, in messages alone.

    Prompts have no ids. A server's calls of tools come as text in the form `calls`
    (`ragen.rollout.endpoint_format`).
    """

    calls: ToolForm = field(default_factory=ToolForm)
    opening: str = ""

    def offering(self, tools: Sequence[Schema]) -> EndpointChat:
        """This chat: each prompt brings its tools (`Prompt.tools`)."""
        return self

    def thought_span(
        self, completion: Completion, chars: tuple[int, int] | None, prefill: str
    ) -> None:
        """A completion without ids has no span of ids."""

    def open(self, messages: Sequence[Message], prefill: str) -> tuple[None, int]:
        """There are no ids, and nothing is pre-filled."""
        return None, 0
