"""How much memory a run needs, computed before weights are loaded or anything is written.

The model is built without storage, from its config alone, so that its parameters are counted
exactly: weights, gradients, optimisers and the sampler's cache are exact; logits and activations
are estimates.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.estimator import needs_values
from ragen.config.config import Config
from ragen.config.reading import changed, flatten
from ragen.core.errors import RagenError
from ragen.engines.factory import prepare_model
from ragen.engines.machine import available
from ragen.engines.vllm_engine import CPU_CACHE_BYTES
from ragen.models import fast_qwen2
from ragen.models.fast_decoder import Qwen2Decoder
from ragen.models.loading import usable_device
from ragen.models.lora import adapter_of
from ragen.models.model import KEPT_LOGITS, KEPT_LOGITS_GPU, Critic
from ragen.models.names import base_of, resolve_model
from ragen.models.precision import Masters
from ragen.models.pretrained import load_errors, model_config, model_folder

GIB = 2**30
WORTH_TELLING = GIB
"""Plans below this fit every machine and are not printed."""
FLOAT = 4
"""Bytes of a float32, the dtype of gradients, masters and optimiser states for every model."""
EPISODE = 4096
"""Bytes of a short episode of one turn, as measured."""
CHANGES: tuple[tuple[str, Any], ...] = (
    ("model.dtype", "bfloat16"),
    ("lora.rank", 64),
    ("model.critic", "shared"),
)
"""Changes that are tried to make a run fit, in this order; 64 is the rank in RAGEN's paper."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of each part of a run, and of free memory.

    `critic` includes its weights, gradients and optimiser. `sampler` is its cache of keys and
    values, and its copy of the weights if it has one. `available` is ``None`` if this machine does
    not report it.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    sampler: int
    logits: int
    activations: int
    device: str = "cpu"
    available: int | None = None

    @property
    def certain(self) -> int:
        """Bytes that are always held, however small the batches are."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.certain + self.sampler + self.logits + self.activations

    def lines(self) -> list[str]:
        r"""The plan as text.

        Example:
            >>> third = 2**30 // 3
            >>> print("\n".join(Plan(GIB, GIB, 2 * GIB, GIB, 0, third, 0, third).lines()))
            memory: up to 5.67 GiB on the cpu
              weights 1.00 GiB, gradients 1.00 GiB, optimiser 2.00 GiB, reference 1.00 GiB
              and at most, estimated: sampler 341 MiB, activations 341 MiB
        """
        there = "" if self.available is None else f", where {size(self.available)} are free"
        return [
            f"memory: up to {size(self.total)} on the {self.device}{there}",
            f"  {_listed(self, 'weights', 'gradients', 'optimizer', 'reference', 'critic')}",
            "  and at most, estimated: " + _listed(self, "sampler", "activations", "logits"),
        ]


def plan(config: Config) -> Plan:
    """The memory that a run with this config needs.

    For a model of the Hub only its config is downloaded.

    Raises:
        RagenError: The model does not exist or cannot be trained.
    """
    asked, device = config.model, usable_device()
    path = base_of(resolve_model(asked.path, config.env.name))
    read = model_config(model_folder(path, weights=False), path, asked.max_length)
    with load_errors(path, "config.json"), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            read, dtype=getattr(torch, asked.dtype)
        )
    base, sampler = held(model), sampler_bytes(model, config, device)
    has_critic = needs_values(find_estimator(config.advantage.name))
    with torch.device("meta"):
        model = prepare_model(config, path, model, has_critic)
    adapted = config.lora.rank > 0
    policy = adapter_of(model, "policy") if adapted else model
    gradients, optimizer = trained_bytes(Masters(policy.named_parameters()))
    critic = 0
    if has_critic:
        own = Critic(model, shared=asked.critic == "shared")
        critic = held(own) + sum(trained_bytes(Masters(own.named_parameters())))
    return Plan(
        weights=base + (held(policy) if adapted else 0),
        gradients=gradients,
        optimizer=optimizer,
        reference=base if config.loss.kl > 0 and not adapted else 0,
        critic=critic,
        sampler=sampler,
        logits=logits_bytes(model, config, device),
        activations=activations_bytes(model, config),
        device=device,
        available=available(device),
    )


def refuse_too_large(config: Config, tell: Callable[[str], None]) -> None:
    """Refuse a run whose weights and optimiser cannot fit; `tell` the plan of a large one.

    Raises:
        RagenError: They need more than is free (the smallest change that fits is named), or the
            model cannot be trained.
    """
    planned = plan(config)
    free = planned.available
    if free is not None and planned.certain > free:
        need = (
            f"weights, gradients and optimiser take {size(planned.certain)}, and {size(free)} "
            f"are free on the {planned.device}"
        )
        change = smallest_change(config, free)
        if change is None:
            raise RagenError(f"{need}; no setting makes them fit; use a smaller model")
        options = " ".join(f"--{key} {value}" for key, value in change.items())
        raise RagenError(f"{need}; they fit with {options}")
    refuse_too_many(config)
    if planned.total >= WORTH_TELLING:
        for line in planned.lines():
            tell(line)


def refuse_too_many(config: Config) -> None:
    """Refuse steps of more episodes than the main memory can hold, however short they are.

    Raises:
        RagenError: It cannot.
    """
    rollout, free = config.rollout, available("cpu")
    need = rollout.num_groups * rollout.group_size * EPISODE
    if free is not None and need > free:
        raise RagenError(
            f"the episodes of a step take {size(need)} at least, and {size(free)} are free: set "
            "rollout.num_groups or rollout.group_size lower"
        )


def smallest_change(config: Config, free: int) -> dict[str, Any] | None:
    """The fewest of `CHANGES`, earlier ones first, with which weights and optimiser fit."""
    settings = flatten(config)
    new = [(key, value) for key, value in CHANGES if settings[key] != value]
    sizes = range(1, len(new) + 1)
    for change in map(dict, chain.from_iterable(combinations(new, size) for size in sizes)):
        try:
            fits = plan(changed(config, change)).certain <= free
        except RagenError:  # the values exclude each other, or do not suit the model
            continue
        if fits:
            return change
    return None


def trained_bytes(masters: Masters) -> tuple[int, int]:
    """Bytes of the gradients, and of the float32 masters and AdamW's moments and step counts."""
    numbers = sum(weight.numel() for weight in masters.trained.values())
    optimizer = held(masters.tensors().values()) + FLOAT * (2 * numbers + len(masters.trained))
    return FLOAT * numbers, optimizer


def sampler_bytes(model: PreTrainedModel, config: Config, device: str) -> int:
    """Bytes of the sampler: its cache of keys and values, and its copy of the weights if any.

    vLLM takes its configured share of a GPU, or a cache of fixed size on a CPU. A server uses
    another process's memory.
    """
    sampler = config.rollout.sampler
    if sampler == "vllm" and device == "cuda":
        return int(config.rollout.gpu_memory * torch.cuda.mem_get_info()[1])
    if sampler == "vllm":
        return held(model) + CPU_CACHE_BYTES
    if sampler != "local":
        return 0
    slots, length = config.rollout.slots, config.model.max_length
    if device == "cpu" and fast_qwen2.supports(model):
        decoder = Qwen2Decoder(model, slots, length)
        fused = (decoder.head, decoder.embedding, *chain.from_iterable(decoder.weights))
        return held((*decoder.cached, *fused))
    return cache_bytes(model, slots, length)


def cache_bytes(model: PreTrainedModel, slots: int, max_length: int) -> int:
    """Keys and values: slots · tokens · layers · key–value heads · head width · 2."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = _head_width(config)
    numbers = slots * max_length * config.num_hidden_layers * heads * width * 2
    return int(numbers) * model.dtype.itemsize


def logits_bytes(model: PreTrainedModel, config: Config, device: str) -> int:
    """Estimate for the logits: one chunk three times, and the output layer's gradient."""
    head: Any = model.get_output_embeddings()
    vocabulary, width = head.weight.shape
    kept = KEPT_LOGITS_GPU if device == "cuda" else KEPT_LOGITS
    chunk = min(kept, config.update.microbatch_tokens * vocabulary)
    layer = 0 if config.lora.rank else vocabulary * width
    return int(3 * chunk + layer) * FLOAT


def activations_bytes(model: PreTrainedModel, config: Config) -> int:
    """Estimate for the activations of one microbatch, kept for its backward pass.

    With width D, H · d for queries, K · d for keys and I for the feed-forward block, a Qwen2 or
    Llama keeps, in numbers per token and layer,

        6 D + 2 H d + 2 K d + 4 I

    plus 2 D in bfloat16, whose norms compute in float32, plus 2 H times the length if attention
    stores its scores (eager). With gradient checkpointing it is D per layer and one full layer.
    """
    read: Any = model.config.get_text_config()
    width, heads = read.hidden_size, read.num_attention_heads
    keys = getattr(read, "num_key_value_heads", None) or heads
    inner = getattr(read, "intermediate_size", None) or 4 * width
    norms = 6 if model.dtype == torch.float32 else 8
    layer = norms * width + 2 * (heads + keys) * _head_width(read) + 4 * inner
    if model.config._attn_implementation == "eager":
        layer += 2 * heads * config.model.max_length
    numbers = layer * read.num_hidden_layers
    if config.model.gradient_checkpointing:
        numbers = width * read.num_hidden_layers + layer
    tokens = max(config.update.microbatch_tokens, config.model.max_length)
    return int(tokens * numbers) * model.dtype.itemsize


def held(owner: nn.Module | Iterable[Tensor]) -> int:
    """Bytes of tensors, or of a module's parameters and buffers; shared ones count once."""
    if isinstance(owner, nn.Module):
        owner = chain(owner.parameters(), owner.buffers())
    return sum(tensor.nbytes for tensor in owner)


def _head_width(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def size(number: int) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


def _listed(plan: Plan, *names: str) -> str:
    """The parts that are not empty, with their sizes."""
    parts = ((name, getattr(plan, name)) for name in names)
    return ", ".join(f"{name.replace('z', 's')} {size(number)}" for name, number in parts if number)
