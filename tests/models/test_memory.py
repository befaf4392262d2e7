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
from ragen.config.reading import changed, merge
from ragen.core.errors import RagenError
from ragen.core.types import Prompt
from ragen.engines.local import LocalEngine
from ragen.models import memory
from ragen.models.loading import save_model
from ragen.models.memory import Plan, plans, refuse_too_large
from ragen.networks.fast_decoder import Qwen2Decoder
from ragen.networks.machine import container_rooms
from ragen.networks.model import padded_hidden_states
from ragen.sampling.local_sampler import Sampler
from tests.bandit_model import settings
from tests.learning.recorded import held, master_bytes, optimizer_bytes
from tests.learning.test_sharded import two_processes, with_critic_and_reference
from tests.tiny import ends, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer("chatml")
MODES: dict[str, dict[str, Any]] = {
    "ppo, one backbone": {"model__critic": "shared"},
    "ppo in bfloat16": {"model__dtype": "bfloat16"},
    "grpo without reference": {"algorithm": "starpo/grpo", "loss__kl": 0.0},
}


def make_config(**more: Any) -> Config:
    """A run with critic and reference by default."""
    return merge("bandit", settings(**({"algorithm": "starpo/ppo", "loss__kl": 0.001} | more)))


def plan(config: Config) -> Plan:
    (planned,) = plans(config)
    return planned


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_of_weights_gradients_and_optimisers_is_exact(mode: str) -> None:
    config = make_config(**MODES[mode])
    planned = plan(config)
    engine = LocalEngine(config, config.model.path)
    learner = engine.learner
    states = sum(map(optimizer_bytes, learner.optimizers))
    gradients, masters = master_bytes(learner.masters)
    assert planned.of("optimiser") == states + masters
    assert planned.of("gradients") == gradients
    assert planned.of("weights") == held(engine.model)
    assert planned.of("reference") == (held(learner.reference) if learner.reference else 0)
    critic = sum(map(optimizer_bytes, learner.critic_optimizers))
    if learner.critic is not None:
        critic += held(learner.critic) + sum(master_bytes(learner.critic_masters))
    assert planned.of("critic") == critic


RAY: dict[str, Any] = {"engine__name": "ray", "engine__learners": 2, "engine__samplers": 3}


def first_learner(config: Config, monkeypatch: pytest.MonkeyPatch, learners: int) -> Plan:
    """The plan of a learner alone, as it is told for machines that are not known."""
    with monkeypatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "auto")
        changes = {"engine.name": "ray", "engine.learners": learners}
        return plans(changed(config, changes))[0]


@pytest.mark.slow
def test_the_plan_of_the_first_of_two_learners_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_critic_and_reference()
    planned = first_learner(config, monkeypatch, 2)
    _, first, _ = two_processes()
    assert first["held"] == {name: planned.of(name) for name in first["held"]}
    alone = first_learner(config, monkeypatch, 1).of("weights")
    assert alone / 2 <= planned.of("weights") < 0.52 * alone


def test_learners_and_samplers_on_ray_share_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(**RAY)
    learner = first_learner(config, monkeypatch, 2)
    alone, planned = plan(make_config()), plan(config)
    weights = held(tiny_model(TOKENIZER))
    assert planned.of("weights") == 2 * learner.of("weights") + 3 * weights
    assert planned.of("optimiser") == 2 * learner.of("optimiser")
    assert all(planned.of(what) == 3 * alone.of(what) for what in ("copies", "cache"))
    assert planned.of("published") == 4 * weights
    assert planned.of("libraries") == 6 * memory.LIBRARIES
    assert " for 2 learners and 3 samplers on the cpu" in planned.lines()[0]
    monkeypatch.setattr(memory, "available", lambda _: planned.certain - 1)
    with pytest.raises(RagenError, match="optimiser of 2 learners and 3 samplers take"):
        refuse_too_large(plans(config), print)
    refuse_too_large(plans(changed(config, {"engine.samplers": 2})), print)


def test_local_processes_have_all_of_a_run_each(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, planned = plan(make_config()), plan(make_config(engine__processes=3))
    assert planned.total == 3 * alone.total and planned.certain == 3 * alone.certain
    assert " for 3 processes on the cpu" in planned.lines()[0]
    monkeypatch.setattr(memory, "available", lambda _: planned.certain - 1)
    with pytest.raises(RagenError, match="optimiser of 3 processes take"):
        refuse_too_large(plans(make_config(engine__processes=3)), print)


def test_a_run_on_other_machines_is_told_what_each_process_needs_and_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 10**6)
    monkeypatch.setattr(memory, "WORTH_TELLING", 0)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    printed: list[str] = []
    refuse_too_large(plans(make_config(**RAY)), printed.append)
    heads = [line.partition(" for ")[2] for line in printed if line.startswith("memory")]
    assert heads == ["each of 2 learners on the cpu", "each of 3 samplers on the cpu"]
    assert not any("are free" in line for line in printed)


def test_a_gpu_has_a_learner_or_a_sampler_or_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    config = make_config(**RAY)
    learner, sampler = plans(config)
    assert (learner.of("optimiser"), sampler.of("optimiser")) == (
        plans(config)[0].of("optimiser"),
        0,
    )
    assert sampler.of("weights") == held(tiny_model(TOKENIZER)) and learner.of("cache") == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    (both,) = plans(config)
    assert both.certain == learner.certain + sampler.certain
    assert both.processes == "a learner and a sampler on each GPU"
    vllm = make_config(rollout__sampler="vllm", rollout__gpu_memory=0.25, **RAY)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert (plans(vllm)[1].certain, plans(vllm)[1].of("cache")) == (0, 250)


def test_the_plan_of_the_sampler_is_exact() -> None:
    config = make_config()
    engine = LocalEngine(config, config.model.path)
    decoder = engine.policy._decoder  # type: ignore[attr-defined]
    assert isinstance(decoder, Qwen2Decoder)
    decoder.prefill([0], [0], [[1]])
    fused, stored = map(chain.from_iterable, (decoder.weights, decoder.store.memory))
    copied = held((*stored, *fused, decoder.head, decoder.embedding))
    planned = plan(config)
    assert planned.of("cache") + planned.of("copies") == copied


def llama(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    size = {"vocab_size": len(TOKENIZER), "num_hidden_layers": 3, "intermediate_size": 160}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **size, **more}))


def test_the_plan_of_the_cache_is_exact_for_any_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(num_hidden_layers=3)
    sampler = Sampler(model, ends(0), slots=5, max_length=40)
    asyncio.run(sampler.complete(Prompt((), (1, 2), 0, 2, 1.0, 0)))
    stored = sampler._decoder.store.memory  # type: ignore[union-attr]
    # 5 slots · 40 tokens · 3 layers · 2 heads · 16 wide · 2 · 4 bytes
    assert held(chain.from_iterable(stored)) == 153_600
    save_model(model, TOKENIZER, tmp_path)
    sizes = {"rollout__slots": 5, "rollout__max_tokens": 8, "model__max_length": 40}
    config = make_config(model__path=str(tmp_path), **sizes)
    assert plan(config).of("cache") == 153_600
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    assert plan(config).of("cache") == 6 * 153_600 // 5  # a spare slot for graphs


def test_plan_with_lora_golden() -> None:
    """Inputs plus outputs of a layer: q 64, k 48, v 48, o 64, and three times 96."""
    lora = {"lora__rank": 4}
    planned = plan(make_config(**lora))
    numbers, tensors = 2 * 4 * (64 + 48 + 48 + 64 + 3 * 96), 2 * 7 * 2
    assert planned.of("weights") == held(tiny_model(TOKENIZER)) + 4 * numbers
    assert planned.of("gradients") == 4 * numbers
    assert planned.of("optimiser") == 8 * numbers + 4 * tensors
    assert planned.of("reference") == 0
    two = plan(make_config(**lora, lora__targets="q_proj, v_proj"))
    assert two.of("gradients") == 4 * 2 * 4 * (64 + 48)
    # The critic has its own adapter and the head.
    assert planned.of("critic") == 16 * (numbers + 33) + 4 * (tensors + 2)


def test_the_plan_includes_the_share_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(rollout__sampler="vllm", rollout__gpu_memory=0.25)
    # vLLM's own weights, and 1 GiB for keys and values.
    planned = plan(config)
    assert (planned.of("copies"), planned.of("cache")) == (held(tiny_model(TOKENIZER)), 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (600, 1000))
    planned = plan(config)
    assert (planned.device, planned.available, planned.of("cache")) == ("cuda", 600, 250)
    server = make_config(rollout__sampler="http://127.0.0.1:8000")
    assert plan(server).of("cache") == 0


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
    assert plan(config).of("activations") == pytest.approx(measured, rel=0.15)
    config = make_config(model__gradient_checkpointing=True, **room)
    assert plan(config).of("activations") < measured / 2


def test_only_a_large_plan_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    refuse_too_large(plans(make_config()), printed.append)
    assert printed == []
    monkeypatch.setattr(memory, "WORTH_TELLING", 0)
    monkeypatch.setattr(memory, "available", lambda _: 10**12)
    refuse_too_large(plans(make_config()), printed.append)
    assert printed == plan(make_config()).lines()
    assert printed[0].startswith("memory: up to ") and "are free" in printed[0]


def test_a_run_that_fits_only_with_short_episodes_is_told_and_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = plan(make_config())
    printed: list[str] = []
    monkeypatch.setattr(memory, "available", lambda _: planned.needed)
    refuse_too_large(plans(make_config()), printed.append)
    assert printed == []
    monkeypatch.setattr(memory, "available", lambda _: planned.needed - 1)
    refuse_too_large(plans(make_config()), printed.append)
    assert printed[0].startswith("memory: up to ") and "set update.microbatch_tokens" in printed[-1]


@pytest.mark.parametrize(
    ("mode", "largest", "keys"),
    [
        ({}, "critic", "change model.critic, lora.rank, "),
        (
            {"model__critic": "shared", "loss__kl": 0.0},
            "optimiser",
            "change lora.rank, model.dtype",
        ),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_the_largest_rows_and_their_keys(
    mode: dict[str, Any], largest: str, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(make_config(**mode))
    monkeypatch.setattr(memory, "available", lambda _: planned.certain)
    refuse_too_large(plans(make_config(**mode)), print)
    monkeypatch.setattr(memory, "available", lambda _: planned.certain - 1)
    with pytest.raises(RagenError) as refusal:
        refuse_too_large(plans(make_config(**mode)), print)
    text = str(refusal.value)
    assert text.startswith(f"weights, gradients and optimiser take {memory.size(planned.certain)},")
    assert f"the largest are {largest} {memory.size(planned.of(largest))}, " in text
    assert keys in text and text.endswith("or use a smaller model")


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
    # Version 1, with the names of a container that sees only its own group.
    group("memory", memory__limit_in_bytes="900\n", memory__usage_in_bytes="500\n")
    group("memory", memory__stat="inactive_file 1\ntotal_inactive_file 300\n")
    membership.write_text("7:cpu,cpuacct:/c\n5:memory:/docker/0123\n0::/\n")
    assert list(container_rooms(membership, tmp_path)) == [900 - (500 - 300)]
    membership.write_text("0::/not/to/be/seen\n")
    assert list(container_rooms(membership, tmp_path)) == []
    assert list(container_rooms(tmp_path / "nowhere", tmp_path)) == []
    free = memory.available("cpu")
    assert free is None or 0 < free < 2**50
