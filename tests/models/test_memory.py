"""The memory plan: equal to allocations where it is exact, close to them elsewhere."""

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
from ragen.engines.local import LocalEngine
from ragen.models import memory
from ragen.models.loading import save_model
from ragen.models.memory import CHANGES, plan, plans, refuse_too_large
from ragen.models.sizes import read_sizes
from ragen.networks.fast_decoder import Qwen2Decoder
from ragen.networks.machine import container_rooms
from ragen.networks.model import padded_hidden_states
from ragen.sampling.local_sampler import Sampler
from tests.bandit_model import settings
from tests.learning.recorded import held, master_bytes, optimizer_bytes
from tests.learning.test_sharded import two_processes, with_critic_and_reference
from tests.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer("chatml")
MODES: dict[str, dict[str, Any]] = {
    "ppo, one backbone": {"model__critic": "shared"},
    "ppo in bfloat16": {"model__dtype": "bfloat16"},
    "grpo without reference": {"algorithm": "starpo/grpo", "loss__kl": 0.0},
}


def make_config(**more: Any) -> Config:
    """A run with critic and reference by default."""
    return resolve("bandit", settings(**({"algorithm": "starpo/ppo", "loss__kl": 0.001} | more)))


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_of_weights_gradients_and_optimisers_is_exact(mode: str) -> None:
    config = make_config(**MODES[mode])
    planned = plan(config)
    engine = LocalEngine(config, config.model.path)
    learner = engine.learner
    states = sum(map(optimizer_bytes, learner.optimizers))
    gradients, masters = master_bytes(learner.masters)
    assert planned.optimizer == states + masters
    assert planned.gradients == gradients
    assert planned.weights == held(engine.model)
    assert planned.reference == (held(learner.reference) if learner.reference else 0)
    critic = sum(map(optimizer_bytes, learner.critic_optimizers))
    if learner.critic is not None:
        critic += held(learner.critic) + sum(master_bytes(learner.critic_masters))
    assert planned.critic == critic


RAY: dict[str, Any] = {"engine__name": "ray", "engine__learners": 2, "engine__samplers": 3}


def test_the_plan_of_the_first_of_two_learners_is_exact() -> None:
    config = with_critic_and_reference()
    sizes = read_sizes(config.model.path)
    planned = memory.Needs(config, sizes, "cpu").learner(2)
    _, first, _ = two_processes()
    assert first["held"] == {name: getattr(planned, name) for name in first["held"]}
    alone = memory.Needs(config, sizes, "cpu").learner(1)
    assert alone.weights / 2 <= planned.weights < 0.52 * alone.weights


def test_learners_and_samplers_on_ray_share_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(**RAY)
    alone, sizes = plan(config), read_sizes(config.model.path)
    learner = memory.Needs(config, sizes, "cpu").learner(2)
    (planned,) = plans(config)
    assert planned.weights == 2 * learner.weights + 3 * held(tiny_model(TOKENIZER))
    assert planned.copies == 3 * alone.copies and planned.sampler == 3 * alone.sampler
    assert planned.optimizer == 2 * learner.optimizer
    assert planned.published == 4 * held(tiny_model(TOKENIZER))
    assert planned.libraries == 6 * memory.LIBRARIES
    assert " for 2 learners and 3 samplers on the cpu" in planned.lines()[0]
    monkeypatch.setattr(memory, "available", lambda _: planned.certain - 1)
    with pytest.raises(RagenError, match="optimiser of 2 learners and 3 samplers take"):
        refuse_too_large(config, print)
    refuse_too_large(changed(config, {"engine.samplers": 2}), print)


def test_a_run_on_other_machines_is_told_what_each_process_needs_and_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 10**6)
    monkeypatch.setattr(memory, "WORTH_TELLING", 0)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    printed: list[str] = []
    refuse_too_large(make_config(**RAY), printed.append)
    heads = [line.partition(" for ")[2] for line in printed if line.startswith("memory")]
    assert heads == ["each of 2 learners on the cpu", "each of 3 samplers on the cpu"]
    assert not any("are free" in line for line in printed)


def test_a_gpu_has_a_learner_or_a_sampler_or_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    config = make_config(**RAY)
    learner, sampler = plans(config)
    assert (learner.optimizer, sampler.optimizer) == (plans(config)[0].optimizer, 0)
    assert sampler.weights == held(tiny_model(TOKENIZER)) and learner.sampler == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    (both,) = plans(config)
    assert both.certain == learner.certain + sampler.certain
    assert both.processes == "a learner and a sampler on each GPU"
    vllm = make_config(rollout__sampler="vllm", rollout__gpu_memory=0.25, **RAY)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert (plans(vllm)[1].certain, plans(vllm)[1].sampler) == (0, 250)


def test_the_plan_of_the_sampler_is_exact() -> None:
    config = make_config()
    engine = LocalEngine(config, config.model.path)
    decoder = engine.policy._decoder  # type: ignore[attr-defined]
    assert isinstance(decoder, Qwen2Decoder)
    decoder.prefill([0], [0], [[1]])
    fused, stored = map(chain.from_iterable, (decoder.weights, decoder.store.memory))
    copied = held((*stored, *fused, decoder.head, decoder.embedding))
    planned = plan(config)
    assert planned.sampler + planned.copies == copied


def llama(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    size = {"vocab_size": len(TOKENIZER), "num_hidden_layers": 3, "intermediate_size": 160}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **size, **more}))


def test_the_plan_of_the_cache_is_exact_for_any_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(num_hidden_layers=3)
    sampler = Sampler(model, {0}, TOKENIZER.decode, slots=5, max_length=40)
    asyncio.run(sampler.complete(Prompt((), (1, 2), 0, 2, 1.0, 0)))
    stored = sampler._decoder.store.memory  # type: ignore[union-attr]
    # 5 slots · 40 tokens · 3 layers · 2 heads · 16 wide · 2 · 4 bytes
    assert held(chain.from_iterable(stored)) == 153_600
    save_model(model, TOKENIZER, tmp_path)
    sizes = {"rollout__slots": 5, "rollout__max_tokens": 8, "model__max_length": 40}
    config = make_config(model__path=str(tmp_path), **sizes)
    assert plan(config).sampler == 153_600
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    assert plan(config).sampler == 6 * 153_600 // 5  # a spare slot for graphs


def test_plan_in_bfloat16_golden() -> None:
    model = tiny_model(TOKENIZER)
    numbers = sum(weight.numel() for weight in model.parameters())
    tensors = len(list(model.parameters()))
    config = make_config(model__dtype="bfloat16")
    planned = plan(config)
    assert planned.weights == planned.reference == 2 * numbers
    assert planned.gradients == 4 * numbers
    assert planned.optimizer == (4 + 8) * numbers + 4 * tensors  # masters, moments; step counts


def test_plan_with_lora_golden() -> None:
    """Inputs plus outputs of a layer: q 64, k 48, v 48, o 64, and three times 96."""
    lora = {"lora__rank": 4}
    planned = plan(make_config(**lora))
    numbers, tensors = 2 * 4 * (64 + 48 + 48 + 64 + 3 * 96), 2 * 7 * 2
    assert planned.weights == held(tiny_model(TOKENIZER)) + 4 * numbers
    assert planned.gradients == 4 * numbers
    assert planned.optimizer == 8 * numbers + 4 * tensors
    assert planned.reference == 0
    two = plan(make_config(**lora, lora__targets="q_proj, v_proj"))
    assert two.gradients == 4 * 2 * 4 * (64 + 48)
    # The critic has its own adapter and the head.
    assert planned.critic == 16 * (numbers + 33) + 4 * (tensors + 2)


def test_the_plan_includes_the_share_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(rollout__sampler="vllm", rollout__gpu_memory=0.25)
    # vLLM's own weights, and 1 GiB for keys and values.
    planned = plan(config)
    assert (planned.copies, planned.sampler) == (held(tiny_model(TOKENIZER)), 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    planned = plan(config)
    assert (planned.device, planned.available, planned.sampler) == ("cuda", 600, 250)
    server = make_config(rollout__sampler="http://127.0.0.1:8000")
    assert plan(server).sampler == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_activations_are_close_to_measured_ones(dtype: str, tmp_path: Path) -> None:
    model = llama().to(getattr(torch, dtype))
    save_model(model, TOKENIZER, tmp_path)
    rows, length = 3, 64
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    lengths_B = torch.full((rows,), length)
    wanted_BT = torch.ones(rows, length, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        padded_hidden_states(model, torch.ones(rows, length).long(), lengths_B, wanted_BT)
    for weight in model.parameters():
        saved.pop(weight.untyped_storage().data_ptr(), None)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    room = {"model__max_length": 64, "update__microbatch_tokens": rows * length}
    room |= {"model__path": str(tmp_path), "model__dtype": dtype}
    config = make_config(**room)
    assert plan(config).activations == pytest.approx(measured, rel=0.15)
    config = make_config(model__gradient_checkpointing=True, **room)
    assert plan(config).activations < measured / 2


def test_only_a_large_plan_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    refuse_too_large(make_config(), printed.append)
    assert printed == []
    monkeypatch.setattr(memory, "WORTH_TELLING", 0)
    monkeypatch.setattr(memory, "available", lambda _: 10**12)
    refuse_too_large(make_config(), printed.append)
    assert printed == plan(make_config()).lines()
    assert printed[0].startswith("memory: up to ") and "are free" in printed[0]


def test_a_run_that_fits_only_with_short_episodes_is_told_and_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = plan(make_config())
    printed: list[str] = []
    monkeypatch.setattr(memory, "available", lambda _: planned.needed)
    refuse_too_large(make_config(), printed.append)
    assert printed == []
    monkeypatch.setattr(memory, "available", lambda _: planned.needed - 1)
    refuse_too_large(make_config(), printed.append)
    assert printed[0].startswith("memory: up to ") and "set update.microbatch_tokens" in printed[-1]


BFLOAT16, LORA, SHARED = (f"--{key} {value}" for key, value in CHANGES)


REMEDIES: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({}, {"lora.rank": 64}, LORA),
    ({}, {"model.dtype": "bfloat16", "lora.rank": 64}, f"{BFLOAT16} {LORA}"),
    ({}, dict(CHANGES), f"{BFLOAT16} {LORA} {SHARED}"),
    ({"lora.rank": 64}, {"model.dtype": "bfloat16"}, BFLOAT16),
    ({"lora.rank": 64, "model.dtype": "bfloat16"}, {"model.critic": "shared"}, SHARED),
    ({}, None, ""),
]
"""Settings of a run, those with which it just fits in the free memory, and what is offered."""


def test_a_run_that_cannot_fit_is_refused_with_the_smallest_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_model(tiny_model(TOKENIZER, hidden_size=512, intermediate_size=2048), TOKENIZER, tmp_path)
    for settings_of_run, fits_as, offered in REMEDIES:
        config = changed(make_config(model__path=str(tmp_path)), settings_of_run)
        free = 1000 if fits_as is None else plan(changed(config, fits_as)).certain
        monkeypatch.setattr(memory, "available", lambda _, free=free: free)
        with pytest.raises(RagenError) as refusal:
            refuse_too_large(config, print)
        text = str(refusal.value)
        assert "weights, gradients and optimiser take" in text and "free on the cpu" in text
        remedy = f"they fit with {offered}" if offered else "use a smaller model"
        assert text.endswith(remedy)


def test_free_memory_of_control_groups(tmp_path: Path) -> None:
    """The smallest limit above the process counts."""

    def group(place: str, **files: str) -> None:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / place / name.replace("__", ".")).write_text(text)

    group("a", memory__max="1000\n", memory__current="700\n", memory__stat="inactive_file 200\n")
    group("a/b", memory__max="max\n", memory__current="600\n", memory__stat="inactive_file 0\n")
    membership = tmp_path / "membership"
    membership.write_text("1:cpu:/c\n0::/a/b\n")
    assert list(container_rooms(membership, tmp_path)) == [1000 - (700 - 200)]
    membership.write_text("0::/not/to/be/seen\n")
    assert list(container_rooms(membership, tmp_path)) == []
    assert list(container_rooms(tmp_path / "nowhere", tmp_path)) == []
    free = memory.available("cpu")
    assert free is None or 0 < free < 2**50
