"""Chat servers as their documentation and users describe them, scripted.

Each server refuses what the real one refuses, wants back what the real one wants back, is busy
once, and has no room for the third turn. `source` says where its answers are written down.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faulty import Answer, chat_reply

Body = dict[str, Any]
PAIRS = ("A", "B"), ("C", "D"), ("A", "C")


def openai(status: int, text: str, type_: str = "invalid_request_error", **more: Any) -> Answer:
    """An error in OpenAI's form."""
    error = {"message": text, "type": type_, "param": None, "code": None} | more
    return Answer({"error": error}, status)


def google(status: int, text: str, name: str, *details: Any) -> Answer:
    """An error in Google's form, in a list as its OpenAI-compatible endpoint sends it."""
    error = {"code": status, "message": text, "status": name, "details": list(details)}
    return Answer([{"error": error}], status)


def older(status: int, text: Any, type_: str = "BadRequestError") -> Answer:
    """An error without the level ``error``: Mistral, older vLLM, SGLang."""
    body = {"object": "error", "message": text, "type": type_, "param": None, "code": status}
    return Answer(body, status)


def turns(body: Body) -> list[Body]:
    """The replies in a request."""
    return [each for each in body["messages"] if each["role"] == "assistant"]


def anything(body: Body) -> Answer | None:
    return None


@dataclass(frozen=True)
class ScriptedServer:
    """A server: what it says to a request that it refuses, when it is busy, and without room.

    `message` is added to each reply, `call` to each call of a reply.
    """

    source: str
    too_long: Answer
    busy: Answer
    refuses: Callable[[Body], Answer | None] = anything
    message: Body = field(default_factory=dict)
    call: Body = field(default_factory=dict)

    def reply(self, turn: int) -> Body:
        """The message of a turn."""
        first, second = PAIRS[turn]
        function = {"name": "compare", "arguments": json.dumps({"first": first, "second": second})}
        call = {"id": f"x{turn}", "type": "function", "function": function, **self.call}
        return {"content": None, "tool_calls": [call], **self.message}

    def script(self) -> Callable[[int, Body], Answer]:
        """The answers of a server that was just started."""
        taken: list[Body] = []

        def answer(_: int, body: Body) -> Answer:
            if (refusal := self.refuses(body)) is not None:
                return refusal
            taken.append(body)
            if len(taken) == 1:
                return self.busy
            if (turn := len(turns(body))) == 2:
                return self.too_long
            return chat_reply(finish="tool_calls", **self.reply(turn))

        return answer


def reasoning_model(body: Body) -> Answer | None:
    code = "unsupported_parameter"
    if "max_tokens" in body:
        text = "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        text += "'max_completion_tokens' instead."
        return openai(400, text, param="max_tokens", code=code)
    if "temperature" in body:
        text = "Unsupported parameter: 'temperature' is not supported with this model."
        return openai(400, text, param="temperature", code=code)
    return None


def first_reasoning_model(body: Body) -> Answer | None:
    if body["messages"][0]["role"] == "system":
        text = "Unsupported value: 'messages[0].role' does not support 'system' with this model."
        return openai(400, text, param="messages[0].role", code="unsupported_value")
    return reasoning_model(body)


def no_temperature(body: Body) -> Answer | None:
    if "temperature" in body:
        text = "`temperature` is deprecated for this model."
        return openai(400, text, code="invalid_request_error")
    return None


def signed(body: Body) -> Answer | None:
    if "seed" in body:
        text = 'Invalid JSON payload received. Unknown name "seed": Cannot find field.'
        return google(400, text, "INVALID_ARGUMENT", {"fieldViolations": [{"description": text}]})
    for reply in turns(body):
        if any("extra_content" not in call for call in reply["tool_calls"]):
            text = "Function call is missing a thought_signature in functionCall parts. This is "
            text += "required for tools to work correctly."
            return google(400, text, "INVALID_ARGUMENT")
    return None


def thoughts_with_calls(body: Body) -> Answer | None:
    if all("reasoning_content" in reply for reply in turns(body)):
        return None
    text = "The `reasoning_content` in the thinking mode must be passed back to the API."
    return openai(400, text, code="invalid_request_error")


def strict(body: Body) -> Answer | None:
    known = {"model", "messages", "tools", "max_tokens", "temperature"}
    extra = [["body", name] for name in body if name not in known]
    for number, message in enumerate(body["messages"]):
        fields = {"role", "content", "tool_calls", "tool_call_id", "prefix"}
        extra += [["body", "messages", number, name] for name in message if name not in fields]
    detail = [
        {"type": "extra_forbidden", "loc": each, "msg": "Extra inputs are not permitted"}
        for each in extra
    ]
    return older(422, {"detail": detail}, "invalid_request_error") if extra else None


def no_system_role(body: Body) -> Answer | None:
    system = body["messages"][0]["role"] == "system"
    return older(400, "System role not supported") if system else None


MISTRAL = "https://github.com/editor-code-assistant/eca/issues/231 (extra_forbidden), "
THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "Which?"}]}
OVERFLOW = {
    "code": 400,
    "message": "request (26528 tokens) exceeds the available context size (16384 tokens), try "
    "increasing it",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 26528,
    "n_ctx": 16384,
}
OPENAI_LONG = openai(
    400,
    "This model's maximum context length is 4096 tokens. However, you requested 4118 tokens (3118 "
    "in the messages, 1000 in the completion).",
    param="messages",
    code="context_length_exceeded",
)
BUSY = openai(
    429,
    "Rate limit reached for m on tokens per min (TPM): Limit 6000, Used 5034, Requested 1443. "
    "Please try again in 20ms.",
    "tokens",
    code="rate_limit_exceeded",
)

SERVERS: dict[str, ScriptedServer] = {
    "OpenAI": ScriptedServer(
        "https://github.com/Chanzhaoyu/chatgpt-web/issues/372",
        OPENAI_LONG,
        BUSY,
        message={"annotations": []},
    ),
    "OpenAI, reasoning": ScriptedServer(
        "https://github.com/simonw/llm/issues/724, "
        "https://github.com/BeehiveInnovations/pal-mcp-server/issues/78",
        OPENAI_LONG,
        BUSY,
        reasoning_model,
    ),
    "OpenAI, first reasoning models": ScriptedServer(
        "https://github.com/PowerShell/AIShell/pull/368",
        openai(
            429,
            "Request too large for o1-mini on tokens per min (TPM): Limit 30000, Requested 37313. "
            "The input or output tokens must be reduced in order to run successfully.",
            "tokens",
            code="rate_limit_exceeded",
        ),
        BUSY,
        first_reasoning_model,
    ),
    "Anthropic": ScriptedServer(
        "https://docs.anthropic.com/en/api/openai-sdk, "
        "https://github.com/sipeed/picoclaw/issues/2939, "
        "https://github.com/anthropics/claude-code/issues/11281",
        openai(400, "prompt is too long: 201130 tokens > 200000 maximum"),
        openai(529, "Overloaded", "overloaded_error"),
        no_temperature,
    ),
    "Gemini": ScriptedServer(
        "https://ai.google.dev/gemini-api/docs/thought-signatures, "
        "https://github.com/Vali-98/ChatterUI/issues/227, "
        "https://github.com/google-gemini/gemini-cli/issues/6678",
        google(
            400,
            "The input token count (1200293) exceeds the maximum number of tokens allowed "
            "(1048576).",
            "INVALID_ARGUMENT",
        ),
        google(
            429,
            "You exceeded your current quota. Please retry in 0.02s.",
            "RESOURCE_EXHAUSTED",
            {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.02s"},
        ),
        signed,
        call={"extra_content": {"google": {"thought_signature": "EpQB"}}},
    ),
    "DeepSeek": ScriptedServer(
        "https://api-docs.deepseek.com/guides/thinking_mode, "
        "https://github.com/evalstate/fast-agent/issues/621",
        openai(
            400,
            "This model's maximum context length is 131072 tokens. However, you requested 131134 "
            "tokens (122942 in the messages, 8192 in the completion).",
            code="invalid_request_error",
        ),
        openai(503, "Service is too busy."),
        thoughts_with_calls,
        message={"content": "", "reasoning_content": ""},
    ),
    "Mistral": ScriptedServer(
        MISTRAL + "https://docs.mistral.ai/resources/known-limitations",
        older(
            400,
            "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 "
            "maximum context length",
        ),
        older(429, "Requests rate limit exceeded", "rate_limited"),
        strict,
        message={"content": [THINKING, {"type": "text", "text": "I compare."}], "prefix": False},
    ),
    "vLLM": ScriptedServer(
        "https://github.com/vllm-project/vllm/pull/33425, "
        "https://github.com/vllm-project/vllm/pull/2964 (Gemma's template)",
        openai(
            400,
            "This model's maximum context length is 2048 tokens. However, your request has 2000 "
            "input tokens plus 1024 'max_tokens'. Please reduce one or the other.",
            "BadRequestError",
            param="input_tokens, max_tokens",
            code=400,
        ),
        Answer("Service Unavailable", 503),
        no_system_role,
        message={"reasoning": "Which?"},
    ),
    "SGLang": ScriptedServer(
        "https://github.com/QwenLM/Qwen3/issues/1321, "
        "https://github.com/anomalyco/opencode/issues/25231",
        older(
            400,
            "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
        ),
        Answer({"detail": "busy"}, 503),
        message={"reasoning_content": "Which?"},
    ),
    "llama.cpp": ScriptedServer(
        "https://github.com/ggml-org/llama.cpp/pull/15780",
        Answer({"error": {**OVERFLOW, "code": 500}}, 500),
        Answer({"error": {"code": 503, "message": "Loading model", "type": "unavailable"}}, 503),
    ),
    "Ollama": ScriptedServer(
        "https://github.com/microsoft/vscode/issues/320558",
        openai(400, json.dumps({"error": OVERFLOW})),
        openai(503, "server busy, please try again. maximum pending requests exceeded"),
        message={"content": "", "reasoning": "Which?"},
    ),
    "LM Studio": ScriptedServer(
        "https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/546 and 2322 (status 200)",
        Answer(
            {
                "error": "Trying to keep the first 5143 tokens when context the overflows. "
                "However, the model is loaded with context length of only 4096 tokens."
            },
        ),
        Answer({"error": "Model is loading"}, 503),
    ),
    "TGI": ScriptedServer(
        "https://github.com/huggingface/chat-ui/issues/340, "
        "https://github.com/huggingface/text-generation-inference/issues/439",
        Answer(
            {
                "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= "
                "1512. Given: 1000 `inputs` tokens and 1024 `max_new_tokens`",
                "error_type": "validation",
            },
            422,
        ),
        Answer({"error": "Model is overloaded", "error_type": "overloaded"}, 429),
    ),
}
