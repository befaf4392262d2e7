"""vLLM's server with the embedded model plays like the local sampler."""

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
"""What the embedded model knows. Its ``<think>`` is pre-filled by its template (`folder`)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a template that begins a thought, as reasoning models have."""
    path = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(base_folder("frozen-lake-still"), path)
    template = path / "chat_template.jinja"
    asks = "{% if add_generation_prompt %}<|assistant|>"
    text = template.read_text("utf-8")
    assert text.count(asks) == 1
    template.write_text(text.replace(asks, f"{asks}<think>"), "utf-8")
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
    own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | own, start_new_session=True
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


def test_the_server_s_agent_is_the_local_one(url: str, folder: Path, tmp_path: Path) -> None:
    """Greedy, in float32: the same words, so the same episodes, and the same count of tokens."""
    how = {"episodes": 16, "temperature": 0.0, "out": tmp_path}
    here, local = evaluate_target(str(folder), SETTINGS, **how)
    there, served = evaluate_target(MODEL, SETTINGS, server=Server(url), **how)
    assert served == local
    assert there.success == here.success > 0 and there.mean_turns > 1
    assert there.valid_fraction > 0.9 and there.total_completion_tokens > 0


def test_a_sampled_evaluation_repeats(url: str, tmp_path: Path) -> None:
    """The seed of each request is the server's, too."""
    how = {"episodes": 8, "server": Server(url)}
    _, first = evaluate_target(MODEL, SETTINGS, out=tmp_path / "a", concurrency=1, **how)
    _, again = evaluate_target(MODEL, SETTINGS, out=tmp_path / "b", concurrency=1, **how)
    _, other = evaluate_target(MODEL, SETTINGS, out=tmp_path / "a", seed=1, **how)
    assert first == again != other


def test_errors_of_vllm_are_understood(url: str, tmp_path: Path) -> None:
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
