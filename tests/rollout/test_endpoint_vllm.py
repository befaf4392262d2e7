"""The embedded model plays on vLLM's server as in the local sampler."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from ragen.core.errors import RagenError
from ragen.core.types import Prompt
from ragen.evaluation.evaluation import evaluate_target
from ragen.models.names import base_folder
from ragen.rollout.endpoint import ChatEndpoint, Server
from ragen.rollout.policies import NoCompletion

pytestmark = pytest.mark.vllm

START_S = 300.0
MODEL = "embedded"
SETTINGS = {
    "env": "frozen-lake-still",
    "env.params.observation": "named",
    "prompt.style": "compact",
    "prompt.prefill": False,
    "rollout.max_tokens": 56,
    "model.max_length": 1024,
}
"""Prompts as in the training of the embedded model. Its template (`folder`) writes ``<think>``."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a template that opens a thought, as those of reasoning models do."""
    path = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(base_folder("frozen-lake-still"), path)
    template = path / "chat_template.jinja"
    generation_prompt = "{% if add_generation_prompt %}<|assistant|>"
    text = template.read_text("utf-8")
    assert text.count(generation_prompt) == 1
    template.write_text(text.replace(generation_prompt, f"{generation_prompt}<think>"), "utf-8")
    return path


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A vLLM server of that model on a free port."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "1024", "--generation-config", "vllm"]
    command += ["--block-size", "32", "--kv-cache-memory-bytes", str(2**28)]
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | variables, start_new_session=True
        )
    try:
        until = time.monotonic() + START_S
        while not _healthy(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _healthy(address: str) -> bool:
    try:
        return httpx.get(address).is_success
    except httpx.TransportError:
        return False


def test_served_model_plays_the_same_episodes_as_the_local_sampler(
    url: str, folder: Path, tmp_path: Path
) -> None:
    """Greedy decoding in float32 gives the same text and therefore the same episodes."""
    options = {"episodes": 16, "temperature": 0.0, "out": tmp_path}
    local, local_outcomes = evaluate_target(str(folder), SETTINGS, **options)
    served, served_outcomes = evaluate_target(MODEL, SETTINGS, server=Server(url), **options)
    assert served_outcomes == local_outcomes
    assert served.success == local.success > 0 and served.mean_turns > 1
    assert served.valid_fraction > 0.9 and served.total_completion_tokens > 0


def test_a_sampled_evaluation_is_reproducible(url: str, tmp_path: Path) -> None:
    """The server samples with the seed of each request."""
    options = {"episodes": 8, "server": Server(url)}
    _, first = evaluate_target(MODEL, SETTINGS, out=tmp_path / "a", concurrency=1, **options)
    _, again = evaluate_target(MODEL, SETTINGS, out=tmp_path / "b", concurrency=1, **options)
    _, other = evaluate_target(MODEL, SETTINGS, out=tmp_path / "a", seed=1, **options)
    assert first == again != other


def test_errors_of_vllm_are_recognised(url: str, tmp_path: Path) -> None:
    with pytest.raises(RagenError, match=r"refused 'another' \(HTTP 404: .*most end in /v1"):
        evaluate_target("another", SETTINGS, server=Server(url), out=tmp_path, episodes=1)

    async def too_long() -> None:
        policy = ChatEndpoint(Server(url), MODEL)
        try:
            long = ({"role": "user", "content": "Left " * 2000},)
            await policy.complete(Prompt(long, None, 0, 8, 1.0, 0))
        finally:
            await policy.close()

    with pytest.raises(NoCompletion) as caught:
        asyncio.run(too_long())
    assert caught.value.stop_reason == "context"
