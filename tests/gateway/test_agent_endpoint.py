"""An agent whose model is behind an endpoint: its calls are passed on, recorded and scored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen.cli.main import main
from ragen.core.types import Completion, Prompt
from ragen.gateway.endpoint_chat import EndpointChat
from ragen.gateway.messages import ChatMessage, Refused, Request
from ragen.gateway.session import FIRST_CALL, Budget, Session
from ragen.rollout.endpoint import ChatEndpoint, Server
from tests.faulty import Answer, FaultyServer, api_error, chat_reply
from tests.gateway.test_session import GUESS
from tests.limits import needs_posix

AGENT = Path(__file__).with_name("agents_at_work.py")
HELLO = ChatMessage("user", "Hello.")
CALLED = {"id": "call_x", "type": "function", "function": {"name": "guess", "arguments": '{"n":4}'}}
SIGNED = {"tool_calls": [CALLED], "reasoning_content": "4, then", "signature": "s1"}


def run(
    script: Callable[[int, dict[str, Any]], Answer], agent: Callable[[Session], Awaitable[None]]
) -> tuple[FaultyServer, Session]:
    """What an agent asks a session before a server."""

    async def work(server: FaultyServer) -> Session:
        policy = ChatEndpoint(Server(server.url), "gpt", think=False)

        async def complete(prompt: Prompt, is_first: bool) -> Completion:
            return await policy.complete(prompt)

        session = Session(EndpointChat(), Budget(9, 40, 2**20), complete, lambda *_: 7)
        try:
            await agent(session)
        finally:
            await policy.close()
        return session

    with FaultyServer(script) as server:
        return server, asyncio.run(work(server))


async def ask(session: Session, *messages: ChatMessage, **more: Any) -> Any:
    request = Request(messages, **more)
    return await session.reply(repr(request).encode(), request, is_retry=False)


def test_tools_and_the_servers_own_messages_go_to_it_unchanged() -> None:
    async def agent(session: Session) -> None:
        first = await ask(session, HELLO, tools=(GUESS,))
        assert (first.text, first.finish) == ("I guess.", "calls")
        assert (first.prompt_tokens, first.completion_tokens) == (100, 20)
        result = ChatMessage("tool", "low", (), first.calls[0].id)
        last = await ask(session, HELLO, first.message, result, tools=(GUESS,), stop=("END",))
        assert (last.text, last.stop, last.calls) == ("It is 5. ", "END", ())

    answers = [chat_reply("I guess.", "tool_calls", **SIGNED), chat_reply("It is 5. END more")]
    server, session = run(lambda number, body: answers[number], agent)
    first, second = server.requests
    assert first["tools"] == second["tools"] == [GUESS]
    assert second["messages"] == [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "I guess.", **SIGNED},
        {"role": "tool", "tool_call_id": "call_x", "content": "low"},
    ]
    turns, others = session.turns()
    assert [turn.call.link for turn in turns if turn.call] == [FIRST_CALL, "verbatim"]
    assert [turn.results for turn in turns] == [("low",), None] and others == ()
    assert [turn.completion.usage is not None for turn in turns] == [True, True]
    assert {turn.completion.token_ids for turn in turns} == {None}


def test_an_agent_without_tools_after_calls_is_passed_on() -> None:
    async def agent(session: Session) -> None:
        first = await ask(session, HELLO, tools=(GUESS,))
        result = ChatMessage("tool", "low", (), first.calls[0].id)
        await ask(session, HELLO, first.message, result)

    answers = [chat_reply(None, "tool_calls", **SIGNED), chat_reply("Done.")]
    server, _ = run(lambda number, body: answers[number], agent)
    assert "tools" not in server.requests[1]
    assert [each["role"] for each in server.requests[1]["messages"]] == [
        "user",
        "assistant",
        "tool",
    ]


def test_tokens_of_an_endpoints_prompt_are_not_counted() -> None:
    async def agent(session: Session) -> None:
        with pytest.raises(Refused, match="only the endpoint knows"):
            await session.count_tokens(Request((HELLO,)))

    run(lambda number, body: chat_reply("Hi."), agent)


def evaluate(server: FaultyServer, tmp_path: Path, do: str, *more: str) -> int:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps({"do": each}) for each in (do, "silent")))
    agent = ["--agent", f"{AGENT}:main", "--tasks", str(tasks), "--base-url", server.url]
    limits = ["--episodes", "1", "--env.params.processes", "1", "--out", str(tmp_path / "evals")]
    return main(["eval", "gpt", *agent, *limits, *more])


@needs_posix
def test_an_agent_is_evaluated_with_a_model_behind_an_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FaultyServer(lambda number, body: chat_reply("Hi.")) as server:
        assert evaluate(server, tmp_path, "talk", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["success"], found["valid_fraction"]) == (1.0, 1.0)
    assert (found["total_prompt_tokens"], found["total_completion_tokens"]) == (200, 40)
    assert server.requests[1]["messages"][1]["content"] == "Hi."


@needs_posix
def test_a_refused_key_ends_the_evaluation_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int, body: dict[str, Any]) -> Answer:
        return replace(api_error(401, "no such key"), wait_s=0.3 if number else 0.0)

    monkeypatch.setattr("ragen.web.server.ENDING_S", 0)  # the calls in progress are cut
    with FaultyServer(refuse) as server:
        assert evaluate(server, tmp_path, "talk", "--episodes", "8") == 2
    said = capsys.readouterr().err
    assert "refused 'gpt' (HTTP 401: no such key)" in said and "Traceback" not in said
