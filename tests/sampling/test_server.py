"""A vLLM server as policy, with a fake on loopback: requests, answers and errors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pretend import Answer, pretend_server
from tiny import tiny_model, tiny_tokenizer

from ragen.chat.chat import Chat
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.pictures import Picture
from ragen.core.types import Prompt
from ragen.networks.lora import attach
from ragen.sampling.server import VllmServer
from ragen.training.trainer import train
from tests.limits import largest_file

MODEL = {"id": "m", "parent": None, "max_model_len": 64}
PROMPT = Prompt((), (5, 6, 7), 0, 4, 0.7, 11)


def completion(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [8, 9],
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
        "prompt_token_ids": [5, 6, 7],
    }
    cached = {"prompt_tokens_details": {"cached_tokens": 2}}
    return {"choices": [choice | changes], "usage": cached}


def answers(**changes: Answer) -> dict[str, Any]:
    """The answers of a suitable server by path; `changes` replace some."""
    suitable: dict[str, Any] = {
        "/version": (200, {"version": "0.33.0"}),
        "/v1/models": (200, {"data": [{"id": "ragen", "parent": "m"}, MODEL]}),
        "/collective_rpc": (200, {"results": [None]}),
        "/v1/load_lora_adapter": (200, b"Success"),
        "/reset_prefix_cache": (200, {"success": True}),
        "/v1/completions": (200, completion()),
    }
    return suitable | changes


@cache
def model_and_chat() -> tuple[Any, Chat]:
    return tiny_model(tiny_tokenizer()), Chat(tiny_tokenizer())


def connect(url: str, model: Any = None) -> VllmServer:
    served, chat = model_and_chat()
    return VllmServer(url, model or served, chat, 64)


def test_requests_and_completions_hold_tokens() -> None:
    requests: list[dict[str, Any]] = []

    def complete(body: dict[str, Any]) -> Answer:
        requests.append(body)
        return 200, completion()

    with pretend_server(answers() | {"/v1/completions": complete}) as url:
        server = connect(url + "/v1/")
        completed = asyncio.run(server.complete(PROMPT))
        assert server.ask(PROMPT) == completed
    assert (completed.token_ids, completed.logprobs) == ((8, 9), (-0.5, -0.25))
    assert completed.finish_reason == "length" and completed.fingerprint is not None
    assert (server.stats.prefilled, server.stats.reused, server.stats.sampled) == (1, 2, 2)
    chat = Chat(tiny_tokenizer())
    assert requests[0] == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "seed": 11,
        "stop_token_ids": [*sorted(chat.end_ids), *sorted(chat.control_ids - chat.end_ids)],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def test_a_prompt_with_pictures_is_refused_in_one_line() -> None:
    shown = Picture.of(np.zeros((2, 2), np.uint8))
    prompt = replace(PROMPT, token_ids=(5, *shown.token_ids(2), 7), pictures=(shown,))
    with pretend_server(answers()) as url:
        server = connect(url)
        with pytest.raises(RagenError, match=r'rollout\.sampler = "local"'):
            server.ask(prompt)


def test_weights_are_published_through_a_temporary_folder() -> None:
    seen: list[tuple[Path, list[str]]] = []

    def load(body: dict[str, Any]) -> Answer:
        assert body["method"] == "reload_weights"
        folder = Path(body["kwargs"]["weights_path"])
        seen.append((folder, sorted(path.suffix for path in folder.iterdir())))
        return 200, {"results": [None]}

    with pretend_server(answers() | {"/collective_rpc": load}) as url:
        server = connect(url)
        asyncio.run(server.publish(tiny_model(tiny_tokenizer(), seed=1), 4))
        assert asyncio.run(server.complete(PROMPT)).policy_version == server.version == 4
    assert len(seen) == 2
    assert all(".safetensors" in kinds and not folder.exists() for folder, kinds in seen)


def test_an_adapter_is_published_under_its_own_name() -> None:
    loaded: list[dict[str, Any]] = []
    models: list[str] = []

    def load(body: dict[str, Any]) -> Answer:
        config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        assert (config["r"], config["base_model_name_or_path"]) == (4, "base")
        loaded.append(body)
        return 200, b"Success: LoRA adapter 'ragen' added successfully."

    def complete(body: dict[str, Any]) -> Answer:
        models.append(body["model"])
        return 200, completion()

    model = tiny_model(tiny_tokenizer())
    attach(model, ("policy",), rank=4, alpha=8, targets="q_proj", seed=0, base="base")
    routes = answers() | {"/v1/load_lora_adapter": load, "/v1/completions": complete}
    with pretend_server(routes) as url:
        server = connect(url, model)
        asyncio.run(server.complete(PROMPT))
    assert [(body["lora_name"], body["load_inplace"]) for body in loaded] == [("ragen", True)]
    assert models == ["ragen"]


UNSUITABLE: list[tuple[str, Answer, str]] = [
    ("/version", (200, {"version": "0.10.2"}), "runs vLLM 0.10.2, and RAGEN knows 0.32"),
    ("/version", (200, b"<html>"), "not a vLLM server .HTTP 200 and no JSON object"),
    ("/version", (404, {"detail": "Not Found"}), "refuses: .*Not Found"),
    ("/v1/models", (200, []), "not a vLLM server .HTTP 200 and no JSON object"),
    ("/v1/models", (200, {"data": [{"id": "x"}]}), "no list of models"),
    ("/v1/models", (200, {"data": [MODEL | {"max_model_len": 32}]}), "--max-model-len 64"),
    ("/collective_rpc", (404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
    (
        "/collective_rpc",
        (500, {"error": {"message": "no module 'layers.2'\nstack"}}),
        r"layers\.2'; does it serve the model that is trained\? .* restart it",
    ),
    ("/collective_rpc", (500, {"error": {"message": " "}}), "refuses: HTTP 500; does it"),
    ("/reset_prefix_cache", (200, {"success": False}), "samples for another client"),
]


def test_an_unsuitable_server_is_refused_in_one_line_and_its_connections_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, make = list[httpx.Client](), httpx.Client

    def noted(**settings: Any) -> httpx.Client:
        opened.append(make(**settings))
        return opened[-1]

    monkeypatch.setattr(httpx, "Client", noted)
    routes = answers()
    with pretend_server(routes) as url:
        for path, answer, words in UNSUITABLE:
            routes[path], suitable = answer, routes[path]
            with pytest.raises(RagenError, match=words) as caught:
                connect(url)
            routes[path] = suitable
            assert "\n" not in str(caught.value)
    assert [each.is_closed for each in opened] == [True] * len(UNSUITABLE)


INVALID: list[Answer] = [
    (200, {"choices": []}),
    (200, {"error": "busy"}),
    (200, b"not json"),
    (200, completion(token_ids=None)),
    (200, completion(token_ids=[8])),
    (200, completion(token_ids=[], logprobs={"token_logprobs": []})),
    (200, completion(logprobs=None)),
    (200, completion(prompt_token_ids=[5, 6])),
    (200, completion(token_ids=[8, 10**30])),
    (200, completion(token_ids=[8, -1])),
    (200, completion(token_ids=[8, float("inf")])),
    (200, completion(logprobs={"token_logprobs": [-0.5, float("nan")]})),
    (200, b"[" * 200_000),
    (200, {"choices": {"choice": 1}, "usage": 1}),
    (400, {"error": {"message": "the prompt is too long"}}),
]


def test_an_invalid_completion_is_reported_in_one_line() -> None:
    routes = answers()
    with pretend_server(routes) as url:
        server = connect(url)

        async def complete() -> None:
            for answer in INVALID:
                routes["/v1/completions"] = answer
                with pytest.raises(RagenError, match=url) as caught:
                    await server.complete(PROMPT)
                assert "\n" not in str(caught.value)

        asyncio.run(complete())


def test_a_server_that_stops_or_is_down_is_reported_before_the_run_folder_is_made(
    tmp_path: Path,
) -> None:
    with pretend_server(answers()) as url:
        server = connect(url)
    with pytest.raises(RagenError, match="cannot be reached"):  # the server is stopped
        asyncio.run(server.complete(PROMPT))
    asyncio.run(server.close())
    with pytest.raises(RagenError, match="cannot be reached"):
        connect(url)
    config = merge("bandit", {"rollout.sampler": url, "threads": 1})
    with pytest.raises(RagenError, match="cannot be reached"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_invalid_address_is_refused() -> None:
    for url in ("http://127.0.0.1:port", "http://[::1", "http:///v1", "http://127.0.0.1:99999"):
        with pytest.raises(RagenError, match="is not an address"):
            connect(url)
    with pytest.raises(RagenError, match="neither a password") as caught:
        connect("http://user:secret@127.0.0.1:8000/v1")
    assert "secret" not in str(caught.value)


def test_weights_that_the_disk_does_not_take_are_one_line() -> None:
    """safetensors reports what the system refuses in a class of its own."""
    with pretend_server(answers()) as url:
        server = connect(url)
        refused = pytest.raises(RagenError, match=r"cannot write \S+: file too large; free space")
        with largest_file(1000), refused:
            server.push(tiny_model(tiny_tokenizer()))
