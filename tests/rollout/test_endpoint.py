"""Chat endpoints: replies, errors and malformed replies of servers."""

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
from ragen.rollout.dialects import retry_after
from ragen.rollout.endpoint import ChatEndpoint, Pace, Server, wait_s
from ragen.rollout.endpoint_format import error_message, read_reply
from ragen.rollout.policies import NoCompletion
from tests.faulty import GOOD, Answer, FaultyServer, api_error, chat_reply

pytestmark = pytest.mark.usefixtures("short_waits")

KEY = "sk-test-0123456789abcdef"
PROMPT = Prompt(({"role": "user", "content": "go"},), None, 0, 64, 0.5, 2**40 + 7)


def request(
    server: FaultyServer, prompts: Sequence[Prompt] = (PROMPT,), think: bool = True, **options: Any
) -> list[Completion | BaseException]:
    """The completion or exception for each prompt, requested one after the other."""

    async def run() -> list[Completion | BaseException]:
        policy = ChatEndpoint(Server(server.url, **options), "some/model", think)
        answers: list[Completion | BaseException] = []
        try:
            for prompt in prompts:
                answers += await asyncio.gather(policy.complete(prompt), return_exceptions=True)
        finally:
            await policy.close()
        return answers

    return asyncio.run(run())


def in_order(*answers: Answer) -> Callable[[int, dict[str, Any]], Answer]:
    """A script that gives the answers in their order and repeats the last one."""
    return lambda number, _: answers[min(number, len(answers) - 1)]


def test_request_body_and_completion() -> None:
    with FaultyServer(in_order(chat_reply())) as server:
        (completion,) = request(server)
    assert completion == Completion(None, None, GOOD, "stop", 0, usage=Usage(100, 20))
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
    odd = 'half a surrogate pair: \ud83d, a nul: \x00, "quotes", é'
    prompt = replace(PROMPT, messages=({"role": "user", "content": odd},))
    with FaultyServer(in_order(chat_reply("\ud83d"))) as server:
        (completion,) = request(server, [prompt])
    assert server.requests[0]["messages"][0]["content"] == odd
    assert isinstance(completion, Completion) and completion.text == "�"


FAULTS = {
    "busy": api_error(429, "slow down", Retry_After="0.02"),
    "broken": Answer("<html>Internal Server Error</html>", 500),
    "connection closed": Answer(drops_connection=True),
    "too slow": Answer(chat_reply().body, wait_s=0.3),
    "truncated body": Answer(chat_reply().body, length=10_000),
    "failed in the middle": chat_reply("half", finish="error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_temporary_errors_are_retried_and_lasting_ones_lose_the_completion(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first completion succeeds at the third try; the second fails at every try."""
    monkeypatch.setattr(endpoint, "TRIES", 3)
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)
    bad = FAULTS[fault]
    with FaultyServer(in_order(bad, bad, chat_reply(), bad)) as server:
        good, lost = request(server, [PROMPT, PROMPT], timeout_s=0.2 if bad.wait_s else 60.0)
    assert isinstance(good, Completion) and good.text == GOOD
    assert isinstance(lost, NoCompletion) and lost.stop_reason == "request"
    assert "\n" not in str(lost) and "gave no completion: " in str(lost)
    assert len(server.requests) == 6
    assert all(body == server.requests[0] for body in server.requests), "the same seed each time"


def test_a_server_that_stops_answering_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "TRIES", 1)
    monkeypatch.setattr(endpoint, "MAX_LOST", 3)
    with FaultyServer(in_order(chat_reply(), Answer("", 502))) as server:
        results = request(server, [PROMPT] * 4)
    kinds = [type(result) for result in results]
    assert kinds == [Completion, NoCompletion, NoCompletion, RagenError]
    assert "no longer answers: HTTP 502; what was played is kept" in str(results[-1])


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
def test_permanent_errors_are_raised_without_a_retry(
    answer: Answer, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.KEY_ENV, KEY)
    with FaultyServer(in_order(answer)) as server:
        (error,) = request(server)
    assert isinstance(error, RagenError) and words in str(error)
    assert len(server.requests) == 1
    assert KEY not in str(error) and server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_a_refused_prompt_ends_only_its_episode() -> None:
    """Once the server has answered a request, a 400 concerns the prompt alone."""
    with FaultyServer(
        in_order(
            chat_reply(),
            api_error(400, "odd characters"),
            api_error(400, "maximum context length is 4096 tokens", "context_length_exceeded"),
            api_error(400, "This model's context length is 4096"),
            api_error(400, "filtered", "content_filter"),
        )
    ) as server:
        _, odd, long, longer, filtered = request(server, [PROMPT] * 5)
    assert isinstance(odd, NoCompletion) and odd.stop_reason == "request"
    assert isinstance(long, NoCompletion) and long.stop_reason == "context"
    assert isinstance(longer, NoCompletion) and longer.stop_reason == "context"
    assert isinstance(filtered, Completion) and filtered.text == ""


def test_unsupported_parameters_are_replaced_once() -> None:
    def script(_: int, body: dict[str, Any]) -> Answer:
        if "max_tokens" in body:
            return api_error(400, "Unsupported parameter: use 'max_completion_tokens' instead.")
        if "seed" in body:
            return Answer({"detail": [{"loc": ["body", "seed"], "msg": "extra"}]}, 422)
        return chat_reply()

    with FaultyServer(script) as server:
        first, second = request(server, [PROMPT, PROMPT])
    assert isinstance(first, Completion) and isinstance(second, Completion)
    sizes = [len(body) for body in server.requests]
    assert sizes == [5, 5, 4, 4]
    assert server.requests[-1]["max_completion_tokens"] == 64


def test_retry_after_is_waited_for() -> None:
    busy = api_error(429, "slow", Retry_After="0.2")
    with FaultyServer(in_order(busy, chat_reply())) as server:
        start = time.monotonic()
        request(server)
    assert time.monotonic() - start >= 0.2


def test_a_wait_beyond_the_limit_is_not_started() -> None:
    with FaultyServer(
        in_order(chat_reply(), api_error(429, "tomorrow", Retry_After="86400"))
    ) as server:
        start = time.monotonic()
        _, lost = request(server, [PROMPT, PROMPT])
    assert isinstance(lost, NoCompletion) and "tomorrow" in str(lost)
    assert time.monotonic() - start < 5 and len(server.requests) == 2


def test_retry_after_formats() -> None:
    assert [retry_after(text) for text in ("3", "0.5", "-1", "soon")] == [3, 0.5, 0, 0]
    assert [retry_after(text) for text in ("", "nan", "inf")] == [0, 0, 0]
    assert retry_after("1" + "0" * 400) == retry_after("Thu, 01 Jan 1970 00:01:40 GMT") == 0


def test_backoff_doubles_to_its_bound_with_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.5)
    # ½, 1, 2, … 32, then the bound of 60; a random number of 0 halves each.
    assert [wait_s(n, 1.0) for n in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [wait_s(n, 0.0) for n in range(3)] == [0.25, 0.5, 1.0]


def test_requests_start_at_the_given_rate() -> None:
    """600 a minute are one every 0.1 s: the fourth starts 0.3 s after the first."""

    async def start_four(pace: Pace) -> float:
        start = time.monotonic()
        await asyncio.gather(*(pace.turn() for _ in range(4)))
        return time.monotonic() - start

    assert 0.3 <= asyncio.run(start_four(Pace(600))) < 2.0
    assert asyncio.run(start_four(Pace(0))) < 0.3


def test_a_pause_applies_to_waiting_requests() -> None:
    """600 a minute: the second would start after 0.1 s, but the server asks for 0.3."""

    async def held() -> float:
        pace, start = Pace(600), time.monotonic()
        await pace.turn()
        second = asyncio.create_task(pace.turn())
        await asyncio.sleep(0)
        pace.hold(0.3)
        await second
        return time.monotonic() - start

    assert 0.3 <= asyncio.run(held()) < 2.0


UP, THOUGHT = "<answer>Up</answer>", "<think>so</think>"
# message, finish reason, whether a thought is requested; expected text and finish reason
REPLIES: dict[str, tuple[dict[str, Any], str, bool, str, str]] = {
    "plain": ({"content": UP}, "stop", False, UP, "stop"),
    "parts": (
        {"content": [{"type": "text", "text": text} for text in (UP[:8], UP[8:])]},
        *("stop", False, UP, "stop"),
    ),
    "reasoning": ({"content": UP, "reasoning": "so"}, "stop", True, THOUGHT + UP, "stop"),
    "reasoning_content": (
        {"content": f"\n{UP}", "reasoning_content": "so"},
        *("stop", True, f"{THOUGHT}\n{UP}", "stop"),
    ),
    "reasoning that quotes the form": (
        {"content": UP, "reasoning": "say <answer>…</answer> after </think>"},
        *("stop", True, f"<think>say answer…/answer after /think</think>{UP}", "stop"),
    ),
    "reasoning next to a thought": (
        {"content": GOOD, "reasoning": "hidden"},
        *("stop", True, GOOD, "stop"),
    ),
    "reasoning without a request": ({"content": UP, "reasoning": "so"}, "stop", False, UP, "stop"),
    "the template wrote <think>": (
        {"content": f"so</think>{UP}"},
        *("stop", True, THOUGHT + UP, "stop"),
    ),
    "cut in the reasoning": (
        {"content": None, "reasoning": "so"},
        *("length", True, THOUGHT, "length"),
    ),
    "cut": ({"content": "<think>on"}, "length", True, "<think>on", "length"),
    "refusal": ({"content": None, "refusal": "I cannot."}, "stop", True, "I cannot.", "stop"),
    "content filter": ({"content": None}, "content_filter", True, "", "stop"),
    "tool call": (
        {"content": None, "tool_calls": [{"function": {"name": "move"}}]},
        *("tool_calls", True, "", "stop"),
    ),
}


@pytest.mark.parametrize("name", REPLIES)
def test_replies_are_read(name: str) -> None:
    message, finish, think, text, expected = REPLIES[name]
    body = json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode()
    assert read_reply(body, think) == Completion(None, None, text, expected, 0)  # type: ignore[arg-type]


def test_impossible_token_counts_are_ignored() -> None:
    for count in (-1, 10**30, "7", None, 1.5):
        usage = {"prompt_tokens": count, "completion_tokens": 1}
        choice = {"message": {"content": "go"}, "finish_reason": "stop"}
        body = json.dumps({"choices": [choice], "usage": usage}).encode()
        assert read_reply(body, False).usage is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"error": {"message": "a\\n b", "code": "c"}}', "a b"),
        ('{"object": "error", "message": "too long", "code": 400}', "too long"),
        ('{"error": "down"}', "down"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"detail": [{"msg": "x"}]}', '[{"msg": "x"}]'),
        ("<html>\nBad Gateway</html>", "<html> Bad Gateway</html>"),
        ("", ""),
        ("{}", ""),
        ("x" * 301, "x" * 299 + "…"),
    ],
)
def test_error_messages_are_read_in_all_formats(text: str, expected: str) -> None:
    assert Server("http://host/v1").shown(error_message(text.encode())) == expected


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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"base_url": "localhost:8000"}, "is not an address"),
        ({"base_url": "ftp://host/v1"}, "is not an address"),
        ({"base_url": "http://"}, "is not an address"),
        ({"base_url": "http://user:secret@host/v1"}, "neither a password nor a query"),
        ({"base_url": "http://host/v1?key=secret"}, "neither a password nor a query"),
        ({"base_url": "http://host:port/v1"}, "is not an address"),
        ({"base_url": "http://host/v1", "timeout_s": 0.0}, "--timeout 0: expected seconds"),
        ({"base_url": "http://host/v1", "requests_per_minute": -1.0}, "--rpm -1: expected"),
    ],
)
def test_invalid_servers_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RagenError, match=words) as caught:
        Server(**values)
    assert "secret" not in str(caught.value)
