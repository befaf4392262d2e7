"""What servers refuse, how they say so, and what an endpoint does about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ragen.core.errors import RagenError
from ragen.core.types import Completion, Episode, Prompt
from ragen.envs.registry import make
from ragen.envs.worlds.sorting import Sorting
from ragen.rollout.dialects import read_refusal
from ragen.rollout.endpoint import ChatEndpoint, Server
from ragen.rollout.episode import play_episode
from ragen.rollout.policies import NoCompletion
from ragen.rollout.setup import EpisodeSpec, Setup
from tests.faulty import GOOD, Answer, FaultyServer, chat_reply
from tests.rollout.servers import SERVERS, google, older, openai, turns
from tests.rollout.test_endpoint import PROMPT, in_order, request

pytestmark = pytest.mark.usefixtures("short_waits")

AT_ONE = replace(PROMPT, temperature=1.0)

QUICK = ("OpenAI, reasoning", "Anthropic", "vLLM")
"""The servers of the default tests."""


def played(server: FaultyServer) -> Episode:
    """An episode at an endpoint."""
    env = make("sorting")
    setup = Setup(
        "sorting", Sorting, 4, 2, 6, "paper", think=False, prefilled=False, tools=env.tools
    )

    async def play() -> Episode:
        policy = ChatEndpoint(Server(server.url), "m", False, setup.tools)
        try:
            return await play_episode(policy, setup, EpisodeSpec(123, 0, 0, (0, "eval")))
        finally:
            await policy.close()

    return asyncio.run(play())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SERVERS],
)
def test_every_server_is_played_to_the_end_of_its_context(name: str) -> None:
    """Its refusals are learned once, its own messages go back, and a long prompt is no failure."""
    known = SERVERS[name]
    with FaultyServer(known.script()) as server:
        episode = played(server)
    assert (episode.stop_reason, episode.error, len(episode.turns)) == ("context", None, 2)
    assert all(turn.valid and turn.results for turn in episode.turns)
    refused = [body for body in server.requests if known.refuses(body) is not None]
    assert refused == server.requests[: len(refused)], "what it refuses is learned once"
    assert len(server.requests) == len(refused) + 1 + 3
    last = turns(server.requests[-1])
    assert last == [{"role": "assistant", **known.reply(turn)} for turn in range(2)]


def no_temperature(_: int, body: dict[str, Any]) -> Answer:
    if "temperature" in body:
        return openai(400, "no", param="temperature", code="unsupported_parameter")
    return chat_reply()


def only(value: float) -> Callable[[int, dict[str, Any]], Answer]:
    def answer(_: int, body: dict[str, Any]) -> Answer:
        if body.get("temperature", value) == value:
            return chat_reply()
        text = f"invalid temperature: only {value:g} is allowed for this model"
        return openai(400, text)

    return answer


@pytest.mark.parametrize(
    ("script", "temperature", "words"),
    [
        (no_temperature, 0.0, "it does not take temperature 0: set --temperature to 1"),
        (no_temperature, 0.7, "it does not take temperature 0.7: set --temperature to 1"),
        (only(1), 0.0, "set --temperature to 1"),
        (only(0.6), 1.0, "it does not take temperature 1: set --temperature to 0.6"),
        (
            in_order(Answer({"error": "`temperature` must be strictly positive"}, 422)),
            0.0,
            "it does not take temperature 0: set --temperature to 1",
        ),
        (
            in_order(openai(400, "temperature must be in the range (0, 1)")),
            1.0,
            "it does not take temperature 1: set --temperature to another value",
        ),
    ],
)
def test_another_temperature_than_the_servers_is_one_line(
    script: Callable[[int, dict[str, Any]], Answer], temperature: float, words: str
) -> None:
    with FaultyServer(script) as server:
        (error,) = request(server, [replace(PROMPT, temperature=temperature)])
    assert isinstance(error, RagenError) and words in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("script", [no_temperature, only(1), only(0.6)])
def test_a_judge_takes_the_servers_temperature(
    script: Callable[[int, dict[str, Any]], Answer],
) -> None:
    async def run(server: FaultyServer) -> list[Completion]:
        policy = ChatEndpoint(Server(server.url), "m", own_temperature=True)
        try:
            return [await policy.complete(replace(PROMPT, temperature=0.0)) for _ in range(2)]
        finally:
            await policy.close()

    with FaultyServer(script) as server:
        assert [each.text for each in asyncio.run(run(server))] == [GOOD, GOOD]
    assert [each.get("temperature") for each in server.requests] == [0.0, None, None]


def test_requests_that_are_on_their_way_learn_with_the_first() -> None:
    """Eight at once: each is refused once at most, and later ones never."""

    async def run(server: FaultyServer) -> None:
        policy = ChatEndpoint(Server(server.url), "m")
        try:
            await asyncio.gather(*(policy.complete(AT_ONE) for _ in range(8)))
            await policy.complete(AT_ONE)
        finally:
            await policy.close()

    refuses = SERVERS["OpenAI, reasoning"].refuses
    with FaultyServer(lambda _, body: refuses(body) or chat_reply()) as server:
        asyncio.run(run(server))
    kinds = [sorted(body) for body in server.requests]
    assert len(kinds) <= 8 * 3 + 1 and kinds[-1] == kinds[-2]


REFUSED = openai(400, "Unknown parameter: 'x'.", param="x", code="unknown_parameter")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (openai(400, "max_tokens is too large: 64. This model supports at most 16 completion "
                "tokens.", param="max_tokens", code="invalid_value"),
         "it takes no reply of up to 64 tokens: lower rollout.max_tokens"),
        (Answer({"error": "max_tokens: 64 > 16, which is the maximum allowed number of output "
                 "tokens"}, 400), "lower rollout.max_tokens"),
        (REFUSED, "it would refuse the same request again"),
        (openai(402, "Insufficient Balance"), "has no quota left"),
        (openai(400, "Your credit balance is too low to access the API."), "has no quota left"),
        (openai(429, "check your plan", "exceeded_current_quota_error"), "has no quota left"),
        (openai(429, "check your plan", code="insufficient_quota"), "has no quota left"),
    ],
)  # fmt: skip
def test_what_no_other_request_changes_is_one_line_at_once(answer: Answer, words: str) -> None:
    with FaultyServer(in_order(answer)) as server:
        (error,) = request(server)
    assert isinstance(error, RagenError) and words in str(error)
    assert len(server.requests) == 1


LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")


@pytest.mark.parametrize("name", LIMITS)
def test_the_name_of_the_limit_of_tokens_is_found(name: str) -> None:
    def script(_: int, body: dict[str, Any]) -> Answer:
        wrong = [each for each in LIMITS if each in body and each != name]
        return openai(400, f"Unrecognized request argument: {wrong[0]}") if wrong else chat_reply()

    with FaultyServer(script) as server:
        first, second = request(server, [PROMPT, PROMPT])
    assert isinstance(first, Completion) and isinstance(second, Completion)
    assert server.requests[-1][name] == 64 and len(server.requests) == LIMITS.index(name) + 2


LONG = [
    openai(400, "Your input exceeds the context window of this model.", param="input"),
    openai(413, "Request too large for model `llama` on tokens per minute (TPM): Limit 6000, "
           "Requested 14368, please reduce your message size.", "tokens"),
    Answer("<html>413 Request Entity Too Large</html>", 413),
    Answer({"type": "error", "error": {"type": "request_too_large", "message": "no"}}, 413),
    openai(400, "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000"),
    openai(400, "Input is too long for requested model."),
    openai(400, "This model's maximum prompt length is 131072 but the request contains 537812."),
    openai(400, "Please reduce the length of the messages.", code="context_length_exceeded"),
    openai(400, "prompt token count of 136632 exceeds the limit of 128000",
           code="model_max_prompt_tokens_exceeded"),
    openai(400, "Invalid request: Your request exceeded model token limit: 8192"),
    openai(400, "invalid params, context window exceeds limit (2013)"),
    openai(400, "Prompt exceeds max length", code="1261"),
    openai(400, "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, "
           "129024]"),
    openai(400, "prompt too long; exceeded max context length by 4096 tokens"),
    openai(400, 'litellm.BadRequestError: {"error":{"message":"prompt is too long: 2 > 1"}}'),
    openai(400, json.dumps({"error": {"code": "context_length_exceeded", "message": "no"}})),
    older(400, "Requested token count exceeds the model's maximum context length of 202752."),
    Answer({"error": {"code": 400, "message": "the request exceeds the available context size"}}),
    Answer({"error": "The number of tokens to keep from the initial prompt is greater than the "
            "context length (n_keep: 13055>= n_ctx: 4096)."}, 400),
    Answer({"error": "Context size has been exceeded."}, 400),
    older(400, "max_tokens must be at least 1, got -186."),
    Answer({"error": "`inputs` must have less than 1024 tokens. Given: 1872"}, 422),
]  # fmt: skip


@pytest.mark.parametrize("answer", LONG, ids=lambda answer: str(answer.body)[:60])
def test_a_prompt_that_is_too_long_is_no_fault(answer: Answer) -> None:
    with FaultyServer(in_order(answer)) as server:
        (lost,) = request(server, [AT_ONE])
    assert isinstance(lost, NoCompletion) and lost.stop_reason == "context"
    assert len(server.requests) == 1


PASSING = [
    openai(429, "This request would exceed your organization's rate limit of 30,000 input tokens "
           "per minute; reduce the prompt length", "rate_limit_error"),
    google(429, "Quota exceeded for metric: generate_content_free_tier_input_token_count, limit: "
           "250000", "RESOURCE_EXHAUSTED"),
    openai(500, "context deadline exceeded"),
    Answer({"error": "Request failed during generation", "error_type": "generation"}, 424),
    Answer({"error": {"code": 502, "message": "upstream"}}),
]  # fmt: skip


@pytest.mark.parametrize("answer", PASSING, ids=lambda answer: str(answer.body)[:60])
def test_what_passes_with_time_is_asked_again(answer: Answer) -> None:
    with FaultyServer(in_order(answer, chat_reply())) as server:
        (reply,) = request(server)
    assert isinstance(reply, Completion) and reply.text == GOOD


def test_a_field_that_a_server_refuses_in_its_own_reply_stays_away() -> None:
    """Some servers send fields that they do not take: then these alone are left out."""
    reply = chat_reply("<answer>Up</answer>", reasoning_content="so", other=1)
    refusal = openai(
        400, "'messages.1' : property 'reasoning_content' is unsupported", code="invalid"
    )

    def script(_: int, body: dict[str, Any]) -> Answer:
        return refusal if any("reasoning_content" in each for each in turns(body)) else reply

    said = Prompt(
        (*PROMPT.messages, {"role": "assistant", "content": "a"}, *PROMPT.messages),
        *(None, 0, 64, 1.0, 7),
        sent={1: {"role": "assistant", "content": "a", "reasoning_content": "so", "other": 1}},
    )
    with FaultyServer(script) as server:
        first, second = request(server, [said, said])
    assert isinstance(first, Completion) and isinstance(second, Completion)
    assert len(server.requests) == 3
    assert turns(server.requests[-1]) == [{"role": "assistant", "content": "a", "other": 1}]


@pytest.mark.parametrize(
    "refusal",
    [
        openai(400, "messages.1: all messages must have non-empty content"),
        older(400, "Assistant message must have either content or tool_calls, but not none."),
        openai(400, "no", param="messages[1].content", code="invalid_type"),
    ],
)
def test_a_server_that_takes_no_empty_reply_gets_words_for_it(refusal: Answer) -> None:
    said = ({"role": "user", "content": "go"}, {"role": "assistant", "content": ""})
    prompt = replace(AT_ONE, messages=(*said, said[0]))

    def script(_: int, body: dict[str, Any]) -> Answer:
        return chat_reply() if all(each["content"] for each in turns(body)) else refusal

    with FaultyServer(script) as server:
        replies = request(server, [prompt, prompt])
    assert all(isinstance(each, Completion) for each in replies) and len(server.requests) == 3
    assert turns(server.requests[-1])[0]["content"] == "(no text)"


def test_a_model_without_tools_is_one_line() -> None:
    refusal = openai(400, "registry.ollama.ai/library/gemma:2b does not support tools")
    with FaultyServer(in_order(refusal)) as server:
        with pytest.raises(RagenError, match="the environment needs tools: choose a model"):
            played(server)
        assert len(server.requests) == 1


def test_once_a_server_has_answered_a_refusal_ends_one_episode() -> None:
    about = [openai(400, f"odd {name} here") for name in ("max_tokens", "tools")]
    with FaultyServer(in_order(chat_reply(), *about, chat_reply())) as server:
        *_, third, last = request(server, [AT_ONE] * 4)
    assert isinstance(third, NoCompletion) and third.stop_reason == "request"
    assert isinstance(last, Completion)


def test_a_reply_that_thoughts_filled_is_cut_and_not_refused() -> None:
    text = "Could not finish the message because max_tokens or model output limit was reached. "
    text += "Please try again with higher max_tokens."
    cut = chat_reply("<think>o", finish="model_length")
    with FaultyServer(in_order(openai(400, text), cut)) as server:
        replies = request(server, [AT_ONE, AT_ONE])
    assert [each.finish_reason for each in replies if isinstance(each, Completion)] == [
        "length",
        "length",
    ]


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"[[[", b'{"error": ' + b"[" * 5000, b'{"error": [1, null]}', b"\xff",
     json.dumps({"error": "{" * 9999}).encode(), b'{"error": {"code": [[{"code": {}}]]}}'],
)  # fmt: skip
@pytest.mark.parametrize("status", [200, 400, 429])
def test_any_body_is_a_refusal_or_none(status: int, data: bytes) -> None:
    refusal = read_refusal(status, {}, data)
    assert refusal is None or (refusal.status == status and not refusal.is_too_long)
