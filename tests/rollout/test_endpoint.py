"""Chat endpoints: answers, errors and odd answers of servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ragen.core.errors import RagenError
from ragen.core.types import Completion, Prompt, Usage
from ragen.rollout import endpoint
from ragen.rollout.endpoint import (
    ChatEndpoint,
    Pace,
    Server,
    backoff,
    error_message,
    read_reply,
    retry_after,
)
from ragen.rollout.policies import NoCompletion
from tests.faulty import GOOD, Answer, FaultyServer, api_error, chat_reply

KEY = "sk-test-0123456789abcdef"
PROMPT = Prompt(({"role": "user", "content": "go"},), None, 0, 64, 0.5, 2**40 + 7)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of milliseconds, and no key but that of a test."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    monkeypatch.delenv(endpoint.KEY_ENV, raising=False)


def ask(
    server: FaultyServer, prompts: Sequence[Prompt] = (PROMPT,), think: bool = True, **how: Any
) -> list[Completion | BaseException]:
    """What comes of asking for the prompts one after the other."""

    async def run() -> list[Completion | BaseException]:
        policy = ChatEndpoint(Server(server.url, **how), "some/model", think)
        answers: list[Completion | BaseException] = []
        try:
            for prompt in prompts:
                answers += await asyncio.gather(policy.complete(prompt), return_exceptions=True)
        finally:
            await policy.close()
        return answers

    return asyncio.run(run())


def in_turn(*answers: Answer) -> Callable[[int, dict[str, Any]], Answer]:
    """The answers in their order, the last one for ever."""
    return lambda number, _: answers[min(number, len(answers) - 1)]


def test_the_request_and_the_answer() -> None:
    with FaultyServer(in_turn(chat_reply())) as server:
        (found,) = ask(server)
    assert found == Completion(None, None, GOOD, "stop", 0, usage=Usage(100, 20))
    assert server.requests == [
        {
            "model": "some/model",
            "messages": [{"role": "user", "content": "go"}],
            "max_tokens": 64,
            "temperature": 0.5,
            "seed": 7 + 2**40 % 2**31,
        }
    ]
    assert "Authorization" not in server.headers[0]


def test_a_prompt_may_contain_any_text() -> None:
    odd = 'half a pair: \ud83d, a nul: \x00, "quotes", é'
    prompt = replace(PROMPT, messages=({"role": "user", "content": odd},))
    with FaultyServer(in_turn(chat_reply("\ud83d"))) as server:
        (found,) = ask(server, [prompt])
    assert server.requests[0]["messages"][0]["content"] == odd
    assert isinstance(found, Completion) and found.text == "\ud83d"


FAULTS = {
    "busy": api_error(429, "slow down", Retry_After="0.02"),
    "broken": Answer("<html>Internal Server Error</html>", 500),
    "overloaded": api_error(503, "overloaded"),
    "hangs up": Answer(drops_connection=True),
    "too slow": Answer(chat_reply().body, wait_s=0.7),
    "truncated JSON": Answer('{"choices": [{"message": {"content": "<thi'),
    "breaks off": Answer(chat_reply().body, length=10_000),
    "no JSON": Answer("OK"),
    "a list": Answer([1]),
    "brackets without end": Answer("[" * 200_000),
    "empty choices": Answer({"choices": []}),
    "no choices": Answer({"object": "chat.completion"}),
    "no message": Answer({"choices": [{"text": "legacy"}]}),
    "an error inside": Answer({"error": {"message": "upstream failed", "code": 502}}),
    "failed half way": chat_reply("half", finish="error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_temporary_errors_are_retried_and_lasting_ones_lose_the_completion(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first completion comes in the third try; the second one never does."""
    monkeypatch.setattr(endpoint, "TRIES", 3)
    bad = FAULTS[fault]
    with FaultyServer(in_turn(bad, bad, chat_reply(), bad)) as server:
        good, lost = ask(server, [PROMPT, PROMPT], timeout_s=0.5 if bad.wait_s else 60.0)
    assert isinstance(good, Completion) and good.text == GOOD
    assert isinstance(lost, NoCompletion) and lost.stop_reason == "request"
    assert "\n" not in str(lost) and "gave no completion: " in str(lost)
    assert len(server.requests) == 6
    assert all(body == server.requests[0] for body in server.requests), "the same seed each time"


def test_a_server_that_never_answers_is_an_error_for_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "TRIES", 2)
    with FaultyServer(in_turn(chat_reply())) as server:
        pass  # its port is closed again
    (found,) = ask(server)
    assert isinstance(found, RagenError)
    assert "answered no request: ConnectError" in str(found) and "is it running?" in str(found)


def test_a_server_that_is_gone_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "TRIES", 1)
    monkeypatch.setattr(endpoint, "MAX_LOST", 3)
    with FaultyServer(in_turn(chat_reply(), Answer("", 502))) as server:
        found = ask(server, [PROMPT] * 4)
    assert [type(each) for each in found] == [Completion, NoCompletion, NoCompletion, RagenError]
    assert "no longer answers: HTTP 502; run the same command again to continue" in str(found[-1])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (api_error(400, "messages: wrong"), "(HTTP 400: messages: wrong)"),
        (
            api_error(401, f"Incorrect API key provided: {KEY}."),
            "put a valid key into OPENAI_API_KEY",
        ),
        (api_error(403, "no access"), "does not give access to this model"),
        (api_error(404, "The model does not exist", "model_not_found"), "most end in /v1"),
        (Answer("", 301, {"Location": "http://127.0.0.1:9/"}), "(HTTP 301)"),
        (Answer("who knows", 499), "(HTTP 499: who knows)"),
        (api_error(429, "You exceeded your quota", "insufficient_quota"), "has no quota left"),
    ],
)
def test_errors_that_a_retry_cannot_cure_are_raised_at_once(
    answer: Answer, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.KEY_ENV, KEY)
    with FaultyServer(in_turn(answer)) as server:
        (found,) = ask(server)
    assert isinstance(found, RagenError) and words in str(found)
    assert len(server.requests) == 1
    assert KEY not in str(found) and server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_a_prompt_that_is_refused_ends_one_episode() -> None:
    """After an answer, a 400 is about this prompt."""
    with FaultyServer(
        in_turn(
            chat_reply(),
            api_error(400, "odd characters"),
            api_error(400, "maximum context length is 4096 tokens", "context_length_exceeded"),
            api_error(400, "This model's context length is 4096"),
            api_error(400, "filtered", "content_filter"),
        )
    ) as server:
        _, odd, long, longer, filtered = ask(server, [PROMPT] * 5)
    assert isinstance(odd, NoCompletion) and odd.stop_reason == "request"
    assert isinstance(long, NoCompletion) and long.stop_reason == "context"
    assert isinstance(longer, NoCompletion) and longer.stop_reason == "context"
    assert isinstance(filtered, Completion) and filtered.text == ""


def test_another_dialect_is_learned_once() -> None:
    def script(_: int, body: dict[str, Any]) -> Answer:
        if "max_tokens" in body:
            return api_error(400, "Unsupported parameter: use 'max_completion_tokens' instead.")
        if "seed" in body:
            return Answer({"detail": [{"loc": ["body", "seed"], "msg": "extra"}]}, 422)
        return chat_reply()

    with FaultyServer(script) as server:
        first, second = ask(server, [PROMPT, PROMPT])
    assert isinstance(first, Completion) and isinstance(second, Completion)
    sizes = [len(body) for body in server.requests]
    assert sizes == [5, 5, 4, 4]
    assert server.requests[-1]["max_completion_tokens"] == 64


def test_retry_after_is_waited_for() -> None:
    for after in ("0.3", 0.3):
        wait = {"Retry_After": str(after)}
        with FaultyServer(in_turn(api_error(429, "slow", **wait), chat_reply())) as server:
            start = time.monotonic()
            ask(server)
        assert time.monotonic() - start >= 0.3


def test_a_wait_beyond_the_limit_does_not_begin() -> None:
    with FaultyServer(
        in_turn(chat_reply(), api_error(429, "tomorrow", Retry_After="86400"))
    ) as server:
        start = time.monotonic()
        _, lost = ask(server, [PROMPT, PROMPT])
    assert isinstance(lost, NoCompletion) and "tomorrow" in str(lost)
    assert time.monotonic() - start < 5 and len(server.requests) == 2


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("soon", 0.0),
        ("", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        # 1 January 1970, 00:01:40, is second 100; now is second 40.
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
    ],
)
def test_all_forms_of_retry_after(header: str, seconds: float) -> None:
    assert retry_after(header, now=40.0) == seconds


def test_waits_double_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.5)
    # ½, 1, 2, … 32, then the bound of 60; chance 0 takes half of each.
    assert [backoff(n, 1.0) for n in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [backoff(n, 0.0) for n in range(3)] == [0.25, 0.5, 1.0]


def test_requests_begin_at_the_given_rate() -> None:
    """600 a minute are one each 0.1 s: the fourth begins 0.3 s after the first."""

    async def four(pace: Pace) -> float:
        start = time.monotonic()
        await asyncio.gather(*(pace.turn() for _ in range(4)))
        return time.monotonic() - start

    assert 0.3 <= asyncio.run(four(Pace(600))) < 2.0
    assert asyncio.run(four(Pace(0))) < 0.3
    quiet = Pace(0)
    quiet.hold(0.2)
    assert asyncio.run(four(quiet)) >= 0.19


def test_a_pause_applies_to_waiting_requests() -> None:
    """600 a minute: the second's turn would come after 0.1 s, and the server asks for 0.3."""

    async def held() -> float:
        pace, start = Pace(600), time.monotonic()
        await pace.turn()
        second = asyncio.create_task(pace.turn())
        await asyncio.sleep(0)
        pace.hold(0.3)
        await second
        return time.monotonic() - start

    assert 0.3 <= asyncio.run(held()) < 2.0


READINGS: dict[str, tuple[dict[str, Any], str, bool, str, str]] = {
    # message, finish reason, whether a thought is asked for, text, finish reason
    "plain": ({"content": "<answer>Up</answer>"}, "stop", False, "<answer>Up</answer>", "stop"),
    "parts": (
        {
            "content": [
                {"type": "text", "text": "<answer>"},
                {"type": "text", "text": "Up</answer>"},
            ]
        },
        "stop",
        False,
        "<answer>Up</answer>",
        "stop",
    ),
    "reasoning": (
        {"content": "\n\n<answer>Up</answer>", "reasoning": "so"},
        "stop",
        True,
        "<think>so</think>\n\n<answer>Up</answer>",
        "stop",
    ),
    "reasoning_content": (
        {"content": "<answer>Up</answer>", "reasoning_content": "so"},
        "stop",
        True,
        "<think>so</think><answer>Up</answer>",
        "stop",
    ),
    "reasoning that quotes the form": (
        {"content": "<answer>Up</answer>", "reasoning": "say <answer>…</answer> after </think>"},
        "stop",
        True,
        "<think>say answer…/answer after /think</think><answer>Up</answer>",
        "stop",
    ),
    "reasoning beside a thought": (
        {"content": GOOD, "reasoning": "hidden"},
        "stop",
        True,
        GOOD,
        "stop",
    ),
    "reasoning that nobody asked for": (
        {"content": "<answer>Up</answer>", "reasoning": "so"},
        "stop",
        False,
        "<answer>Up</answer>",
        "stop",
    ),
    "the template wrote <think>": (
        {"content": "so</think><answer>Up</answer>"},
        "stop",
        True,
        "<think>so</think><answer>Up</answer>",
        "stop",
    ),
    "cut while it reasoned": (
        {"content": None, "reasoning": "on and on"},
        "length",
        True,
        "<think>on and on</think>",
        "length",
    ),
    "cut": ({"content": "<think>on"}, "length", True, "<think>on", "length"),
    "refusal": (
        {"content": None, "refusal": "I cannot do that."},
        "stop",
        True,
        "I cannot do that.",
        "stop",
    ),
    "content filter": ({"content": None}, "content_filter", True, "", "stop"),
    "tool call": (
        {"content": None, "tool_calls": [{"function": {"name": "move"}}]},
        "tool_calls",
        True,
        "",
        "stop",
    ),
}


@pytest.mark.parametrize("name", READINGS)
def test_answers_are_read(name: str) -> None:
    message, finish, think, text, expected = READINGS[name]
    body = json.dumps({"choices": [{"message": message, "finish_reason": finish}]})
    assert read_reply(body, think) == Completion(None, None, text, expected, 0)  # type: ignore[arg-type]


def test_impossible_token_counts_are_ignored() -> None:
    for count in (-1, 10**30, "7", None, 1.5):
        usage = {"prompt_tokens": count, "completion_tokens": 1}
        choice = {"message": {"content": "go"}, "finish_reason": "stop"}
        assert read_reply(json.dumps({"choices": [choice], "usage": usage}), False).usage is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"error": {"message": "a\\n b", "code": "c"}}', ("a b", "c")),
        ('{"object": "error", "message": "too long", "code": 400}', ("too long", "400")),
        ('{"error": "down"}', ("down", "")),
        ('{"detail": "Not Found"}', ("Not Found", "")),
        ('{"detail": [{"msg": "x"}]}', ('[{"msg": "x"}]', "")),
        ('{"error": {"message": "m", "type": "t", "code": null}}', ("m", "t")),
        ("<html>\nBad Gateway</html>", ("<html> Bad Gateway</html>", "")),
        ("", ("", "")),
        ("{}", ("", "")),
        ("x" * 301, ("x" * 299 + "…", "")),
    ],
)
def test_error_messages_in_all_formats(text: str, expected: tuple[str, str]) -> None:
    assert error_message(text) == expected


def test_the_key_comes_only_from_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", f" {KEY}\n")
    server = Server("https://models.example/v1", key_env="OTHER_KEY")
    assert server.key == KEY and KEY not in repr(server)
    with pytest.raises(RagenError, match="--key-env MISSING_KEY: that environment variable"):
        Server("https://models.example/v1", key_env="MISSING_KEY")
    monkeypatch.setenv("OTHER_KEY", "two words")
    with pytest.raises(RagenError, match="OTHER_KEY holds cannot be a key") as caught:
        Server("https://models.example/v1", key_env="OTHER_KEY")
    assert "two words" not in str(caught.value)


def test_a_server_that_repeats_the_key_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(endpoint.KEY_ENV, KEY)
    with FaultyServer(
        in_turn(chat_reply(f"your key is {KEY}"), api_error(400, f"no: {KEY}"))
    ) as server:
        found, lost = ask(server, [PROMPT, PROMPT])
    assert isinstance(found, Completion) and found.text == "your key is ***"
    assert isinstance(lost, NoCompletion) and KEY not in str(lost) and "no: ***" in str(lost)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"base_url": "localhost:8000"}, "is no address"),
        ({"base_url": "ftp://host/v1"}, "is no address"),
        ({"base_url": "http://"}, "is no address"),
        ({"base_url": "http://user:secret@host/v1"}, "neither a password nor a query"),
        ({"base_url": "http://host/v1?key=secret"}, "neither a password nor a query"),
        ({"base_url": "http://host:port/v1"}, "is no address"),
        ({"base_url": "http://host/v1", "timeout_s": 0.0}, "--timeout 0: expected seconds"),
        ({"base_url": "http://host/v1", "requests_per_minute": -1.0}, "--rpm -1: expected"),
    ],
)
def test_invalid_servers_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RagenError, match=words) as caught:
        Server(**values)
    assert "secret" not in str(caught.value)
