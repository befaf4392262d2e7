"""The routes of the gateway, and the dialect of each.

A dialect is a module of pure functions between the JSON of its library and the records of
`ragen.gateway.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ragen.gateway import anthropic_messages, chat_completions, responses
from ragen.gateway.messages import ChatMessage, Refused, Reply, Request


class Dialect(Protocol):
    """The form of requests, answers, events and errors on one route."""

    def read(
        self, body: Mapping[str, Any], known: Callable[[str], Sequence[ChatMessage]]
    ) -> Request:
        """The request of a body.

        `known` gives the conversation up to and with the reply that has an id (`Reply.id`): the
        `Request.messages` that were read, and the reply. It raises `LookupError` for another id.
        Only Responses asks it.

        Raises:
            Refused: The body is not in the dialect's form, or asks for what is not offered.
        """

    def write(self, reply: Reply, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer with a reply to the request of a `body`; `model` is the name in it."""

    def events(self, reply: Reply, model: str, body: Mapping[str, Any]) -> Iterator[str]:
        """The same answer as server-sent events, each ready to send."""

    def error(self, refused: Refused) -> dict[str, Any]:
        """The answer to a refused request, as the dialect's libraries know it."""


DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": chat_completions,
    "/responses": responses,
    "/messages": anthropic_messages,
}
"""The dialects by their routes, below the base address of an agent."""
