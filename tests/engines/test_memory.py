"""The memory plan: equal to what is allocated where it claims to be exact, near it elsewhere."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ragen.config.config import Config
from ragen.config.reading import changed, resolve
from ragen.core.errors import RagenError
from ragen.core.types import Prompt
from ragen.engines import memory
from ragen.engines.engine import Engine
from ragen.engines.machine import container_rooms
from ragen.engines.memory import CHANGES, cache_bytes, held, plan, refuse_too_large
from ragen.engines.sampler import Sampler
from ragen.models.fast_decoder import Qwen2Decoder
from ragen.models.loading import save_model
from ragen.models.model import padded_hidden_states
from ragen.models.precision import Masters
from tests.bandit_model import settings
from tests.tiny import tiny_model, tiny_tokenizer

WORDS = tiny_tokenizer("chatml")
MODES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, one backbone": {"model__critic": "shared"},
    "ppo in bfloat16": {"model__dtype": "bfloat16"},
    "grpo": {"algorithm": "starpo/grpo", "loss__kl_kind": "k3"},
    "grpo without reference": {"algorithm": "starpo/grpo", "loss__kl": 0.0},
}


def config_of(**more: Any) -> Config:
    """A run with critic and reference, unless asked otherwise."""
    return resolve("bandit", settings(**({"algorithm": "starpo/ppo", "loss__kl": 0.001} | more)))


def of_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of its states, after a step with gradients everywhere."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = chain.from_iterable(state.values() for state in optimizer.state.values())
    return held(state for state in states if isinstance(state, Tensor))


def of_masters(masters: Masters) -> tuple[int, int]:
    """Bytes of the gradients, which are theirs, and of those that are no model's own weights."""
    gradients = (weight.grad for weight in masters.trained.values())
    return held(each for each in gradients if each is not None), held(masters.tensors().values())


@pytest.mark.parametrize("mode", MODES)
def test_weights_gradients_and_optimisers_are_exact(mode: str) -> None:
    config = config_of(**MODES[mode])
    planned = plan(config)
    engine = Engine(config, config.model.path)
    learner = engine.learner
    states = sum(map(of_optimizer, learner.optimizers))
    gradients, masters = of_masters(learner.masters)
    assert planned.optimizer == states + masters
    assert planned.gradients == gradients
    assert planned.weights == held(engine.model)
    assert planned.reference == (held(learner.reference) if learner.reference else 0)
    critic = sum(map(of_optimizer, learner.critic_optimizers))
    if learner.critic is not None:
        critic += held(learner.critic) + sum(of_masters(learner.critic_masters))
    assert planned.critic == critic


def test_the_sampler_is_exact() -> None:
    config = config_of()
    engine = Engine(config, config.model.path)
    decoder = engine.policy._decoder  # type: ignore[attr-defined]
    assert isinstance(decoder, Qwen2Decoder)
    fused = chain.from_iterable(decoder.weights)
    copied = held((*decoder.cached, *fused, decoder.head, decoder.embedding))
    assert plan(config).sampler == copied
    assert held(decoder.cached) == cache_bytes(engine.model, 8, 128)


def llama(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    size = {"vocab_size": len(WORDS), "num_hidden_layers": 3, "intermediate_size": 160}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **size, **more}))


def test_the_cache_of_any_model_is_exact(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=3)
    sampler = Sampler(model, {0}, WORDS.decode, slots=5, max_length=40)
    asyncio.run(sampler.complete(Prompt((), (1, 2), 0, 2, 1.0, 0)))
    stored = sampler._decoder.cache.stored  # type: ignore[attr-defined]
    # 5 slots · 40 tokens · 3 layers · 2 heads · 16 wide · 2 · 4 bytes
    assert held(chain.from_iterable(stored)) == cache_bytes(model, 5, 40) == 153_600
    save_model(model, WORDS, tmp_path)
    sizes = {"rollout__slots": 5, "rollout__max_tokens": 8, "model__max_length": 40}
    assert plan(config_of(model__path=str(tmp_path), **sizes)).sampler == 153_600


def test_bfloat16_by_hand() -> None:
    model = tiny_model(WORDS)
    numbers = sum(weight.numel() for weight in model.parameters())
    tensors = len(list(model.parameters()))
    config = config_of(model__dtype="bfloat16")
    planned = plan(config)
    rotations = held(model.buffers())  # stay in float32
    assert planned.weights == planned.reference == 2 * numbers + rotations
    assert planned.gradients == 4 * numbers
    assert planned.optimizer == (4 + 8) * numbers + 4 * tensors  # masters, moments; step counts


def test_lora_by_hand() -> None:
    """Of inputs and outputs together, a layer has q 64, k 48, v 48, o 64, and three times 96."""
    lora = {"lora__rank": 4}
    planned = plan(config_of(**lora))
    numbers, tensors = 2 * 4 * (64 + 48 + 48 + 64 + 3 * 96), 2 * 7 * 2
    assert planned.weights == held(tiny_model(WORDS)) + 4 * numbers
    assert planned.gradients == 4 * numbers
    assert planned.optimizer == 8 * numbers + 4 * tensors
    assert planned.reference == 0
    two = plan(config_of(**lora, lora__targets="q_proj, v_proj"))
    assert two.gradients == 4 * 2 * 4 * (64 + 48)
    assert planned.critic == 16 * (numbers + 33) + 4 * (
        tensors + 2
    )  # an adapter of its own, and the head


def test_vllm_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(rollout__sampler="vllm", rollout__gpu_memory=0.25)
    # Weights of its own, and 1 GiB for keys and values.
    assert plan(config).sampler == held(tiny_model(WORDS)) + 2**30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    planned = plan(config)
    assert (planned.device, planned.available, planned.sampler) == ("cuda", 600, 250)
    server = config_of(rollout__sampler="http://127.0.0.1:8000")
    assert plan(server).sampler == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_about_right(dtype: str, tmp_path: Path) -> None:
    model = llama().to(getattr(torch, dtype))
    save_model(model, WORDS, tmp_path)
    rows, length = 3, 64
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    lengths_B = torch.full((rows,), length)
    wanted_BT = torch.ones(rows, length, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        padded_hidden_states(model, torch.ones(rows, length).long(), lengths_B, wanted_BT)
    for weight in model.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    room = {"model__max_length": 64, "update__microbatch_tokens": rows * length}
    room |= {"model__path": str(tmp_path), "model__dtype": dtype}
    asked = config_of(**room)
    assert plan(asked).activations == pytest.approx(measured, rel=0.15)
    again = config_of(model__gradient_checkpointing=True, **room)
    assert plan(again).activations < measured / 2


def test_a_large_plan_is_told_and_a_small_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    refuse_too_large(config_of(), told.append)
    assert told == []
    monkeypatch.setattr(memory, "WORTH_TELLING", 0)
    monkeypatch.setattr(memory, "available", lambda _: 10**12)
    refuse_too_large(config_of(), told.append)
    assert told == plan(config_of()).lines()
    assert told[0].startswith("memory: up to ") and "are free" in told[0]


BIT, THIN, ONE = (f"--{key} {value}" for key, value in CHANGES)


@pytest.mark.parametrize(
    ("begins_with", "free_as", "offered"),
    [
        ({}, {"lora.rank": 64}, THIN),
        ({}, {"model.dtype": "bfloat16", "lora.rank": 64}, f"{BIT} {THIN}"),
        ({}, dict(CHANGES), f"{BIT} {THIN} {ONE}"),
        ({"lora.rank": 64}, {"model.dtype": "bfloat16"}, BIT),
        ({"lora.rank": 64, "model.dtype": "bfloat16"}, {"model.critic": "shared"}, ONE),
        ({}, None, None),
    ],
)
def test_what_cannot_fit_is_refused_with_the_smallest_change(
    begins_with: dict[str, Any],
    free_as: dict[str, Any] | None,
    offered: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Free is just as much as one other run would take, or next to nothing."""
    save_model(tiny_model(WORDS, hidden_size=512, intermediate_size=2048), WORDS, tmp_path)
    config = changed(config_of(model__path=str(tmp_path)), begins_with)
    free = 1000
    if free_as is not None:
        free = plan(changed(config, free_as)).certain
    monkeypatch.setattr(memory, "available", lambda _: free)
    with pytest.raises(RagenError) as refusal:
        refuse_too_large(config, print)
    text = str(refusal.value)
    assert "weights, gradients and optimiser take" in text and "free on the cpu" in text
    remedy = f"they fit with {offered}" if offered else "use a smaller model"
    assert text.endswith(remedy)


def test_room_in_control_groups(tmp_path: Path) -> None:
    """Version 2: the tightest around the process counts; version 1 has other names."""

    def group(place: str, **files: str) -> None:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / place / name.replace("__", ".")).write_text(text)

    group("a", memory__max="1000\n", memory__current="700\n", memory__stat="inactive_file 200\n")
    group("a/b", memory__max="max\n", memory__current="600\n", memory__stat="inactive_file 0\n")
    group(
        "memory/c",
        memory__limit_in_bytes="50",
        memory__usage_in_bytes="90",
        memory__stat="total_inactive_file 10",
    )
    membership = tmp_path / "membership"
    membership.write_text("1:cpu:/c\n0::/a/b\n")
    assert list(container_rooms(membership, tmp_path)) == [1000 - (700 - 200)]
    membership.write_text("4:memory:/c\n0::/not/to/be/seen\n")
    assert list(container_rooms(membership, tmp_path)) == [0]
    assert list(container_rooms(tmp_path / "nowhere", tmp_path)) == []
    free = memory.available("cpu")
    assert free is None or 0 < free < 2**50
