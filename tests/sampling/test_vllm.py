"""The real vLLM on a CPU, in this process and as a server on loopback, by the same contract."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from ragen.chat.chat import Chat
from ragen.config.reading import merge
from ragen.core.errors import RagenError
from ragen.core.types import Completion, Prompt
from ragen.models.loading import save_model
from ragen.networks.lora import adapter_of, adapter_tensors, attach, scale_of
from ragen.networks.model import hidden_states, token_logprobs
from ragen.sampling.server import VllmServer
from ragen.sampling.vllm import VllmSampler
from ragen.sampling.vllm_engine import Vllm
from ragen.sampling.vllm_private import differing, differing_adapter
from ragen.storage.reader import read_metrics
from ragen.training.trainer import train

pytestmark = pytest.mark.vllm

MAX_LENGTH = 256
WIDTHS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of width 32, the narrowest for which vLLM has kernels."""
START_S = 300.0

Policy = VllmSampler | VllmServer


def model_of(seed: int = 0, **changes: Any) -> Any:
    # A server on a CPU does not update an output layer that is tied to the embedding.
    sizes = {**WIDTHS, "tie_word_embeddings": False, "initializer_range": 0.2, **changes}
    return tiny_model(tiny_tokenizer(), seed, **sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_model(model_of(), tiny_tokenizer(), path)
    return str(path)


def engine_of(folder: str, **changes: Any) -> VllmSampler:
    sizes = {"dtype": "float32", "max_length": MAX_LENGTH, "slots": 8, "gpu_memory": 0.3}
    vllm, chat = Vllm(folder, **{**sizes, **changes}), Chat(tiny_tokenizer())
    return VllmSampler(vllm, chat, MAX_LENGTH)


@pytest.fixture(scope="module")
def server_url(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", folder, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_LENGTH)]
    command += ["--block-size", "32", "--kv-cache-memory-bytes", str(2**28)]
    command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--enable-prompt-tokens-details"]
    own = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # this process may have set another value
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | own, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(process, url, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            if alive(process.pid):  # a worker outlived its server
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def embedded(folder: str) -> Iterator[VllmSampler]:
    sampler = engine_of(folder)
    yield sampler
    asyncio.run(sampler.close())


@pytest.fixture(scope="module", params=["embedded", "server"])
def policy(request: pytest.FixtureRequest, folder: str) -> Iterator[Policy]:
    if request.param == "embedded":
        yield request.getfixturevalue("embedded")
        return
    yield connect(request.getfixturevalue("server_url"))


def connect(url: str, model: Any = None) -> VllmServer:
    chat = Chat(tiny_tokenizer())
    model = model or model_of()
    return VllmServer(url, model, chat, MAX_LENGTH)


def make_prompt(seed: int, **changes: Any) -> Prompt:
    fields = {"max_tokens": 24, "temperature": 1.0, **changes}
    ids = tuple(5 + (7 * seed + 3 * k) % 300 for k in range(40 + seed % 9))
    return Prompt((), ids, 0, seed=seed, **fields)


def sampled(policy: Policy, prompts: list[Prompt]) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*[policy.complete(prompt) for prompt in prompts])

    policy.forget()
    return asyncio.run(asyncio.wait_for(together(), 120))


@torch.no_grad()
def difference(model: Any, prompt: Prompt, completion: Completion) -> float:
    """Largest distance of a logprob from that of the learner."""
    ids = torch.tensor([prompt.token_ids + completion.token_ids])
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    wanted[0, len(prompt.token_ids) - 1 : -1] = True
    states = hidden_states(model, ids, torch.tensor([ids.shape[1]]), wanted)
    targets = ids[0, len(prompt.token_ids) :]
    expected, _ = token_logprobs(model, states, targets, prompt.temperature or 1.0)
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_equal_those_of_the_learner(policy: Policy, temperature: float) -> None:
    model = model_of()
    asyncio.run(policy.publish(model, 1))
    prompts = [make_prompt(seed, temperature=temperature) for seed in range(12)]
    completions = sampled(policy, prompts)
    worst = max(difference(model, p, c) for p, c in zip(prompts, completions, strict=True))
    assert worst < 1e-3
    assert {c.policy_version for c in completions} == {1}
    again = sampled(policy, prompts)
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]  # the seeds decide
    if temperature == 0:
        ids = torch.tensor([prompts[0].token_ids])
        assert completions[0].token_ids[0] == int(model(ids).logits[0, -1].argmax())


def test_completions_end_at_an_end_token_a_control_token_or_the_limit(policy: Policy) -> None:
    chat = Chat(tiny_tokenizer())
    last = {*chat.end_ids, *chat.control_ids}
    completions = sampled(policy, [make_prompt(seed, max_tokens=100) for seed in range(24)])
    assert {c.finish_reason for c in completions} == {"stop", "control", "length"}
    for completion in completions:
        ids, reason = completion.token_ids, completion.finish_reason
        assert (ids[-1] in chat.end_ids) == (reason == "stop")
        assert (ids[-1] in last) == (reason != "length")
        assert reason != "length" or len(ids) == 100
        assert not last.intersection(ids[:-1])
        assert completion.text == chat.decode(ids)


def test_a_publication_changes_the_next_sample(policy: Policy) -> None:
    prompt, old, new = make_prompt(3), model_of(), model_of(seed=1)
    before = policy.ask(prompt)
    asyncio.run(policy.publish(new, 2))
    after = policy.ask(prompt)
    assert after.token_ids != before.token_ids and after.policy_version == 2
    assert difference(new, prompt, after) < 1e-3 < difference(old, prompt, after)
    asyncio.run(policy.publish(old, 3))
    assert policy.ask(prompt).token_ids == before.token_ids


def test_cache_hits_grow_over_turns_and_a_publication_resets_them(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "end_ids", [])  # every completion has its 24 tokens
    policy.forget()
    ids, hits = make_prompt(1).token_ids, []
    for turn in range(4):
        before = policy.stats.reused
        prompt = Prompt((), ids, 0, 24, 1.0, turn)
        ids += (*asyncio.run(policy.complete(prompt)).token_ids, *range(9, 18))
        hits.append(policy.stats.reused - before)
    assert hits[0] == 0 and hits[1] >= 32 and sorted(set(hits)) == hits  # they grow
    asyncio.run(policy.publish(model_of(), 4))
    before = policy.stats.reused
    asyncio.run(policy.complete(prompt))
    assert policy.stats.reused == before


def test_cancelled_requests_leave_nothing_behind(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "stop_ids", [])  # no request ends early
    monkeypatch.setattr(policy, "last_ids", frozenset[int]())

    async def cancel_eight() -> list[object]:
        prompts = [make_prompt(seed, max_tokens=150) for seed in range(12)]
        tasks = [asyncio.create_task(policy.complete(prompt)) for prompt in prompts]
        await asyncio.sleep(0.1)
        for task in tasks[:8]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(cancel_eight(), 120))
    assert all(isinstance(each, Completion) for each in results[8:])
    assert all(isinstance(each, asyncio.CancelledError) for each in results[:8])
    for _ in range(20):  # a server notices when the connection ends
        try:
            policy.forget()
            return
        except RagenError:
            time.sleep(0.1)
    policy.forget()


@pytest.fixture(scope="module")
def adapted(embedded: VllmSampler, folder: str) -> Iterator[tuple[VllmSampler, Any]]:
    model = model_of()
    attach(
        model, ("policy",), rank=4, alpha=12, targets="q_proj,v_proj,o_proj", seed=0, base=folder
    )
    for weight in adapter_of(model, "policy").parameters():
        torch.nn.init.normal_(weight, std=0.3)
    sampler = engine_of(folder, adapter_rank=4)
    yield sampler, model
    asyncio.run(sampler.close())


def test_an_adapter_is_replaced_in_place(adapted: tuple[VllmSampler, Any]) -> None:
    sampler, model = adapted
    prompt, generator = make_prompt(5), torch.Generator().manual_seed(0)
    for version in (1, 2):
        for weight in adapter_of(model, "policy").parameters():
            torch.nn.init.normal_(weight, std=0.3, generator=generator)
        asyncio.run(sampler.publish(model, version))
        completion = sampler.ask(prompt)
        off = difference(model_of(), prompt, completion)
        assert difference(model, prompt, completion) < 1e-3 < off
        assert completion.policy_version == version


def spoil(worker: Any, kind: str) -> None:
    """Change one number of what a worker computes with: of values, of a packed copy, or of B."""
    layer = worker.get_model().model.layers[1].self_attn
    if kind == "bias":
        layer.qkv_proj.bias.data[-1] += 1e-3
    elif kind == "packed":  # as if it computed with the weights of another publication
        multiply = layer.o_proj.cpu_linear
        layer.o_proj.cpu_linear = lambda x, weight, bias: multiply(x, weight, bias) * 1.001
    else:
        layer.qkv_proj.lora_b_stacked[2][0, 0, 0, 0] += 1e-3


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.detach()) for name, weight in model.named_parameters()]


@pytest.mark.parametrize(
    ("kind", "name"), [("bias", "v_proj.bias"), ("packed", "o_proj.weight"), ("", "")]
)
def test_a_weight_that_vllm_does_not_hold_is_named(
    embedded: VllmSampler, kind: str, name: str
) -> None:
    model = model_of(seed=2)
    weights = weights_of(model)
    assert embedded._vllm.load(weights) == []
    engine = embedded._vllm._engine
    if kind:
        engine.collective_rpc(spoil, args=(kind,))
    (found,) = engine.collective_rpc(lambda worker: differing(worker.get_model(), weights))
    assert found == ([f"model.layers.1.self_attn.{name}"] if kind else [])
    other = [(key, weight + (key == "model.norm.weight")) for key, weight in weights]
    (found,) = engine.collective_rpc(lambda worker: differing(worker.get_model(), other))
    assert "model.norm.weight" in found
    assert embedded._vllm.load(weights) == []


def test_tied_output_layers_follow_their_embedding(embedded: VllmSampler, tmp_path: Path) -> None:
    """On a CPU vLLM computes from a packed copy, which reloading alone does not update."""
    tied, other = (model_of(seed, tie_word_embeddings=True) for seed in (0, 1))
    save_model(tied, tiny_tokenizer(), tmp_path)
    sampler = engine_of(str(tmp_path))
    assert difference(tied, make_prompt(1), sampler.ask(make_prompt(1))) < 1e-3
    asyncio.run(sampler.publish(other, 1))
    assert difference(other, make_prompt(1), sampler.ask(make_prompt(1))) < 1e-3
    sampler._vllm._packs = False
    assert sampler._vllm.load(weights_of(tied)) == ["model.embed_tokens.weight"]
    asyncio.run(sampler.close())


def test_an_adapter_that_vllm_does_not_hold_is_named(adapted: tuple[VllmSampler, Any]) -> None:
    sampler, model = adapted
    sampler.push(model)
    tensors, scale = list(adapter_tensors(model).items()), scale_of(model)
    engine = sampler._vllm._engine
    engine.collective_rpc(spoil, args=("adapter",))
    (found,) = engine.collective_rpc(differing_adapter, args=(tensors, scale))
    assert found == ["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    sampler.push(model)
    (found,) = engine.collective_rpc(differing_adapter, args=(tensors, scale))
    assert found == []
    (found,) = engine.collective_rpc(differing_adapter, args=(tensors, scale / 2))
    assert len(found) == 6, "the scale of every B is another"


def test_a_model_that_vllm_cannot_serve_is_reported_in_one_line(
    embedded: VllmSampler, tmp_path: Path
) -> None:
    save_model(model_of(max_position_embeddings=128), tiny_tokenizer(), tmp_path)
    with pytest.raises(RagenError, match="vLLM cannot serve the model") as caught:
        engine_of(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_server_with_another_model_is_reported_in_one_line(server_url: str) -> None:
    with pytest.raises(RagenError, match="does it serve the model that is trained") as caught:
        connect(server_url, model_of(num_hidden_layers=3))
    assert "\n" not in str(caught.value)
    again = connect(server_url)  # it accepts the right model
    assert difference(model_of(), make_prompt(2), again.ask(make_prompt(2))) < 1e-3


def test_a_run_trains_with_a_server(server_url: str, folder: str, tmp_path: Path) -> None:
    settings = {
        "model.path": folder,
        "model.max_length": 200,
        "rollout.sampler": server_url,
        "rollout.num_groups": 2,
        "rollout.group_size": 4,
        "filter.rule": "all",
        "filter.include_zero": True,
        "eval.episodes": 0,
        "update.lr": 1e-3,
        "steps": 2,
        "threads": 1,
    }
    train(merge("bandit", settings), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics["publish/logprob_difference"]) == 2
    assert max(metrics["publish/logprob_difference"].values()) < 1e-3
    assert max(metrics["mismatch/max_abs"].values()) < 1e-3
