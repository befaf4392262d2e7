"""A gateway on loopback whose replies are scripted, and how agents send them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ragen.gateway.dialects import DIALECTS
from ragen.gateway.grades import grade
from ragen.gateway.messages import ChatMessage, Refused, Reply, Request, ToolCall
from tests.faulty import Answer, FaultyServer

ARGUMENTS = '{"n":  4, "why":"caf\\u00e9 é 1.0"}'
"""The arguments of a call in a spelling that no library writes."""


def reply(text: str | None, *arguments: str, id_: str = "r1") -> Reply:
    """A reply with a text and a call of ``guess`` for each of the `arguments`."""
    calls = (ToolCall(f"call_{id_}_{at}", "guess", each) for at, each in enumerate(arguments))
    return Reply(id_, text, tuple(calls), "calls" if arguments else "stop", 11, 7)


TURNS = (
    reply("<think>a  b</think>  I think\n4 is  good. ", ARGUMENTS),
    reply(None, '{"n": 5, "why": "b\\u2028"}', '{"n":10,"why":""}', id_="r2"),
    reply("<think>so</think>It is 5.", id_="r3"),
    reply("\n6  it is. ", id_="r4"),
)
"""A conversation of one call, two calls, a text, and a text in answer to the next task."""


FINAL = ToolCall("call_final", "final_answer", '{"answer": "It is 5."}')
TOOLS = (TURNS[0], Reply("r2", None, (FINAL,), "calls", 11, 7))
"""A conversation for agents that answer by a call."""
CODE = (
    reply("Thought: I guess.\n<code>\nprint(guess(4, 'a'))\n"),
    reply("Thought: I know.\n<code>\nfinal_answer('It is 5.')\n", id_="r2"),
)
"""A conversation for agents that write programs, without the stop texts."""


class ScriptedGateway:
    """Answers each request with the turn that has its number of the assistant's messages.

    With `refused` it answers all of them with an error.

    Attributes:
        requests: What was read, in order of arrival.
        grades: For each request, the grade of each of the assistant's messages.
        server: The server; its `url` is the agent's base address.
    """

    def __init__(self, turns: Sequence[Reply] = TURNS, refused: Refused | None = None) -> None:
        self.requests: list[Request] = []
        self.grades: list[list[int | None]] = []
        self._turns, self._refused = turns, refused
        self._sent: list[tuple[Request, Reply]] = []
        self.server = FaultyServer(self._answer)

    def _answer(self, number: int, body: dict[str, Any]) -> Answer:
        dialect = DIALECTS[self.server.paths[number].removeprefix("/v1").partition("?")[0]]
        try:
            if self._refused is not None:
                raise self._refused
            request = dialect.read(body, self._known)
        except Refused as refused:
            return Answer(dialect.error(refused), refused.status)
        heard = [each for each in request.messages if each.role == "assistant"]
        self.requests.append(request)
        self.grades.append([self._best(each) for each in heard])
        made = replace(self._turns[len(heard)], id=f"r{number}")
        self._sent.append((request, made))
        if request.stream:
            events = "".join(dialect.events(made, body["model"], body))
            return Answer(events, headers={"Content-Type": "text/event-stream"})
        headers = {"Content-Type": "application/json"}
        return Answer(dialect.write(made, body["model"], body), headers=headers)

    def _known(self, id_: str) -> Sequence[ChatMessage]:
        found = {made.id: (*request.messages, made.message) for request, made in self._sent}
        return found[id_]

    def _best(self, heard: ChatMessage) -> int | None:
        found = [grade(heard, made, request.stop) for request, made in self._sent]
        return min((each for each in found if each is not None), default=None)
