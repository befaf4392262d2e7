"""What a run needs of memory, told before its weights are loaded or anything is written.

The model is built without storage, from its config alone, so that its parameters can be counted
exactly: weights, gradients, optimisers and the sampler's cache are what will be allocated; logits
and activations are estimates.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from ragen.engines.free_memory import available
from ragen.engines.vllm_engine import CPU_CACHE_BYTES
from ragen.models import fast_qwen2
from ragen.models.fast_decoder import Qwen2Decoder
from ragen.models.loading import usable_device
from ragen.models.lora import linear_layers, target_names
from ragen.models.model import KEPT_LOGITS, KEPT_LOGITS_GPU, backbone
from ragen.models.names import base_of, resolve_model
from ragen.models.pretrained import LOAD_ERRORS, cannot_load, model_config, model_folder

GIB = 2**30
WORTH_TELLING = GIB
"""Smaller plans are noise beside what any machine has."""
FLOAT = 4
"""Bytes of a float32: gradients, masters and optimiser states have them whatever the model has."""
CHANGES: tuple[tuple[str, Any], ...] = (
    ("model.dtype", "bfloat16"),
    ("lora.rank", 64),
    ("model.critic", "shared"),
)
"""What is tried to make a run fit, in this order; 64 is the rank that RAGEN's paper trains."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of each part of a run, and of what there is.

    `critic` holds its own weights, gradients and optimiser. `sampler` is its cache of keys and
    values, and its copy of the weights where it keeps one. `available` is ``None`` where this
    machine does not tell.
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
        """What is held all the time, however small the batches are."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def total(self) -> int:
        """All of it, at the moment when most is held."""
        return self.certain + self.sampler + self.logits + self.activations

    def lines(self) -> list[str]:
        r"""The plan in words.

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
    """What a run of these settings will take of memory.

    Of a model of the Hub only the config is fetched for it.

    Raises:
        RagenError: The model does not exist, or is none that can be trained.
    """
    asked, device = config.model, usable_device()
    path = base_of(resolve_model(asked.path, config.env.name))
    read = model_config(model_folder(path, weights=False), path, asked.max_length)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                read, dtype=getattr(torch, asked.dtype)
            )
    except LOAD_ERRORS as error:
        raise cannot_load(path, error) from error
    trained = dict(trained_weights(model, config))
    adapted = config.lora.rank > 0
    return Plan(
        weights=held(model) + (held(trained.values()) if adapted else 0),
        gradients=sum(weight.numel() * FLOAT for weight in trained.values()),
        optimizer=sum(map(optimizer_bytes, trained.values())),
        reference=held(model) if config.loss.kl > 0 and not adapted else 0,
        critic=critic_bytes(model, trained, config)
        if needs_values(find_estimator(config.advantage.name))
        else 0,
        sampler=sampler_bytes(model, config, device),
        logits=logits_bytes(model, config, device),
        activations=activations_bytes(model, config),
        device=device,
        available=available(device),
    )


def refuse_too_large(config: Config, tell: Callable[[str], None]) -> None:
    """Refuse a run whose weights and optimiser cannot fit; `tell` the plan of a large one.

    Raises:
        RagenError: They take more than is free; the smallest change with which they would not is
            named. Or the model cannot be trained at all.
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
            raise RagenError(f"{need}; no setting makes them fit, take a smaller model")
        options = " ".join(f"--{key} {value}" for key, value in change.items())
        raise RagenError(f"{need}; they fit with {options}")
    if planned.total >= WORTH_TELLING:
        for line in planned.lines():
            tell(line)


def smallest_change(config: Config, free: int) -> dict[str, Any] | None:
    """The fewest of `CHANGES`, the first of them first, with which weights and optimiser fit."""
    settings = flatten(config)
    new = [(key, value) for key, value in CHANGES if settings[key] != value]
    sizes = range(1, len(new) + 1)
    for change in map(dict, chain.from_iterable(combinations(new, size) for size in sizes)):
        try:
            smaller = changed(config, change)
        except RagenError:  # the values exclude each other
            continue
        if plan(smaller).certain <= free:
            return change
    return None


def trained_weights(model: PreTrainedModel, config: Config) -> Iterator[tuple[str, Tensor]]:
    """The policy's trained weights by name: the model's own, or the adapters'.

    Raises:
        RagenError: The model has no layer that `lora.targets` names.
    """
    lora = config.lora
    if not lora.rank:
        yield from model.named_parameters()
        return
    names = target_names(model, lora.targets, lora.rank)
    for name, layer in linear_layers(model).items():
        if name.rpartition(".")[2] in names:
            rows, columns = layer.weight.shape  # (of a Conv1D the other way round: the sum counts)
            yield f"{name}.lora_A", torch.empty(lora.rank, columns, device="meta")
            yield f"{name}.lora_B", torch.empty(rows, lora.rank, device="meta")


def optimizer_bytes(weight: Tensor) -> int:
    """Bytes that AdamW keeps of one weight: two moments, a count of steps, a float32 master."""
    master = 0 if weight.dtype == torch.float32 else FLOAT * weight.numel()
    return master + 2 * FLOAT * weight.numel() + FLOAT


def critic_bytes(model: PreTrainedModel, trained: dict[str, Tensor], config: Config) -> int:
    """Bytes of the critic: its head, and of a separate one its backbone or adapter; with states."""
    width = model.config.get_text_config().hidden_size
    head = {"head.weight": torch.empty(1, width, device="meta")}
    head["head.bias"] = torch.empty(1, device="meta")
    own, weights = head, held(head.values())
    if config.model.critic == "separate":
        seen = backbone(model)
        if config.lora.rank:
            own, weights = head | trained, weights + held(trained.values())
        else:
            own, weights = head | dict(seen.named_parameters()), weights + held(seen)
    states = sum(map(optimizer_bytes, own.values()))
    return weights + states + sum(weight.numel() * FLOAT for weight in own.values())


def sampler_bytes(model: PreTrainedModel, config: Config, device: str) -> int:
    """Bytes of what samples: its cache of keys and values, and a copy of the weights if it has one.

    vLLM on a GPU takes the share that it is given, on a CPU a cache of its own size. A server has a
    machine of its own.
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
    """Keys and values: slots · tokens · layers · heads that have their own · width · 2."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = _head_width(config)
    numbers = slots * max_length * config.num_hidden_layers * heads * width * 2
    return int(numbers) * model.dtype.itemsize


def logits_bytes(model: PreTrainedModel, config: Config, device: str) -> int:
    """Estimate of the logits: a chunk of them three times over, and their layer's gradient."""
    head: Any = model.get_output_embeddings()
    vocabulary, width = head.weight.shape
    kept = KEPT_LOGITS_GPU if device == "cuda" else KEPT_LOGITS
    chunk = min(kept, config.update.microbatch_tokens * vocabulary)
    layer = 0 if config.lora.rank else vocabulary * width
    return int(3 * chunk + layer) * FLOAT


def activations_bytes(model: PreTrainedModel, config: Config) -> int:
    """Estimate of what one microbatch keeps for its backward pass.

    In numbers a token and layer, D being the width, H · d and K · d those of queries and keys, and
    I that of the feed-forward block, a Qwen2 or Llama keeps

        6 D + 2 H d + 2 K d + 4 I

    with 2 D more in bfloat16, whose norms compute in float32, and 2 H times the length more where
    attention writes its scores out (eager). With gradient checkpointing, D a layer, and one layer
    whole.
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
    """Bytes of tensors, or of a module's parameters and buffers, each counted once."""
    if isinstance(owner, nn.Module):
        owner = chain(owner.parameters(), owner.buffers())
    return sum(tensor.nbytes for tensor in owner)


def _head_width(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def size(number: int) -> str:
    """Bytes in a unit that suits them.

    Example:
        >>> size(3 * 2**29), size(5 * 2**20)
        ('1.50 GiB', '5 MiB')
    """
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


def _listed(plan: Plan, *names: str) -> str:
    """The parts that there are, with their sizes."""
    parts = ((name, getattr(plan, name)) for name in names)
    return ", ".join(f"{name.replace('z', 's')} {size(number)}" for name, number in parts if number)
