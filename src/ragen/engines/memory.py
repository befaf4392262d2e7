"""How much memory a run needs, computed before weights are loaded or anything is written.

Parameters are counted from the headers of the weights' files, so that gradients, optimisers and the
sampler's cache are exact. Logits and activations are estimates. Loads torch only for a GPU.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import prod
from typing import Any

from ragen.config.config import Config
from ragen.config.extensions import ESTIMATOR, JUDGE, load
from ragen.config.reading import changed, flatten
from ragen.config.rules import CRITIC
from ragen.config.sections import EngineConfig
from ragen.core.errors import RagenError
from ragen.core.inputs import names_input
from ragen.engines.machine import available, is_amd, usable_device
from ragen.models.names import base_of, resolve_model
from ragen.models.sizes import (
    BLOCK,
    KEPT_LOGITS,
    KEPT_LOGITS_GPU,
    KEPT_SCORES,
    Shape,
    Sizes,
    adapted,
    read_sizes,
)

GIB = 2**30
WORTH_TELLING = GIB
"""Plans below this fit every machine and are not printed."""
FLOAT = 4
"""Bytes of a float32, the dtype of gradients, masters and optimiser states for every model."""
ITEM = {"float32": FLOAT, "bfloat16": 2}
"""Bytes of a weight, by the model's dtype."""
CPU_CACHE_BYTES = 2**30
"""Memory for vLLM's keys and values on a CPU, which has no share of GPU memory to set."""
LIBRARIES = 400 * 2**20
"""Resident memory of a process that has imported what a run needs, before it loads a model."""
PROGRAMS = 96 * 2**20
"""Memory of the programs that oneDNN compiles for products on a CPU, up to half a MB for each shape
that occurs: a run of a million parameters reaches 73 MB in float32 and 125 MB in bfloat16 in two
steps, and stays there."""
EPISODE = 4096
"""Bytes of a short episode of one turn, as measured."""
CHANGES: tuple[tuple[str, Any], ...] = (
    ("model.dtype", "bfloat16"),
    ("lora.rank", 64),
    ("model.critic", "shared"),
)
"""The changes that are tried, in this order, to make a run fit; 64 is the rank in RAGEN's paper."""
ADDRESS_ENV = "RAY_ADDRESS"
"""The environment variable from which Ray takes the address of a running cluster."""

CERTAIN = (
    *("weights", "gradients", "optimizer", "reference", "critic", "copies"),
    *("gathered", "published", "judge"),
)
ESTIMATED = "sampler", "activations", "logits", "programs", "libraries"


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of each part of a run, or of some of its processes, and of free memory.

    `critic` includes its weights, gradients and optimiser. `copies` are the sampler's own copies of
    the weights, `sampler` is its cache of keys and values. `gathered` is the memory of the weights
    that are whole while learners with split weights compute, `published` that of a publication,
    `judge` the weights of a judge in this process.
    `libraries` is the program itself, on a CPU; it counts as taken when free memory is read.
    `available` is ``None`` if this machine does not report it. `processes` names the processes that
    the plan is for, if there are several.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    copies: int
    sampler: int
    logits: int
    activations: int
    programs: int = 0
    libraries: int = 0
    gathered: int = 0
    published: int = 0
    judge: int = 0
    device: str = "cpu"
    available: int | None = None
    processes: str = ""

    @property
    def certain(self) -> int:
        """Bytes that are always held, however small the batches are."""
        return sum(getattr(self, name) for name in CERTAIN)

    @property
    def needed(self) -> int:
        """Bytes at the peak beyond the program itself, if episodes fill what settings allow."""
        return self.certain + self.sampler + self.logits + self.activations + self.programs

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.needed + self.libraries

    def lines(self) -> list[str]:
        r"""The plan as text.

        Example:
            >>> third = 2**30 // 3
            >>> print("\n".join(Plan(GIB, GIB, 2 * GIB, GIB, 0, 0, third, 0, third).lines()))
            memory: up to 5.67 GiB on the cpu
              weights 1.00 GiB, gradients 1.00 GiB, optimiser 2.00 GiB, reference 1.00 GiB
              and at most, estimated: sampler 341 MiB, activations 341 MiB
        """
        there = "" if self.available is None else f", where {size(self.available)} are free"
        for_them = f" for {self.processes}" if self.processes else ""
        listed = _listed(self, *CERTAIN), _listed(self, *ESTIMATED)
        return [
            f"memory: up to {size(self.total)}{for_them} on the {self.device}{there}",
            *(f"  {parts}" for parts in listed[:1] if parts),
            *(f"  and at most, estimated: {parts}" for parts in listed[1:] if parts),
        ]


NOTHING = Plan(0, 0, 0, 0, 0, 0, 0, 0, 0)


def plan(config: Config) -> Plan:
    """The memory that a run with this config needs in one process.

    For a model of the Hub only its config and the headers of its weights are downloaded.

    Raises:
        RagenError: The model does not exist, or LoRA does not suit it.
    """
    sizes, device = _sizes_of(config), usable_device()
    return replace(
        learner_plan(config, sizes, device, 1),
        copies=copied_bytes(sizes, config, device),
        sampler=sampler_bytes(sizes, config, device),
        judge=judge_bytes(config),
        available=available(device),
    )


def processes_of(engine: EngineConfig) -> list[str]:
    """The kinds of processes on Ray with their numbers: learners and samplers.

    Example:
        >>> processes_of(EngineConfig(name="ray", samplers=2))
        ['1 learner', '2 samplers']
    """
    counts = {"learner": engine.learners, "sampler": engine.samplers}
    return [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items()]


def plans(config: Config) -> list[Plan]:
    """The memory of all processes of a run: a plan for each memory, of a machine or a GPU.

    Learners and samplers on Ray share this machine's memory. On GPUs, each has its own memory, or a
    learner and a sampler share one. What is free on another machine is not known.
    """
    engine = config.engine
    if engine.name == "local":
        return [plan(config)]
    sizes, device = _sizes_of(config), usable_device()
    learner = learner_plan(config, sizes, device, engine.learners)
    sampler = sampler_plan(config, sizes, device)
    learners, samplers, *_ = processes_of(engine)
    learner = replace(learner, processes=f"each of {learners}")
    sampler = replace(sampler, processes=f"each of {samplers}")
    if os.environ.get(ADDRESS_ENV):
        return [learner, sampler]
    free = available(device)
    if device == "cpu":
        published, judge = published_bytes(config, sizes), judge_bytes(config)
        driver = replace(NOTHING, libraries=LIBRARIES, published=published, judge=judge)
        parts = (1, driver), (engine.learners, learner), (engine.samplers, sampler)
        return [replace(_sum(*parts), available=free, processes=f"{learners} and {samplers}")]
    if _num_gpus() < engine.learners + engine.samplers * engine.tensor_parallel:
        shared = _sum((1, learner), (1, sampler))
        return [replace(shared, available=free, processes="a learner and a sampler on each GPU")]
    return [replace(each, available=free) for each in (learner, sampler)]


def learner_plan(config: Config, sizes: Sizes, device: str, split: int) -> Plan:
    """The memory of the first of `split` learners, among which all weights are split."""
    width, adapter = ITEM[config.model.dtype], adapter_shapes(config, sizes)
    weights, adapters = _parts(sizes.weights.values(), split), _parts(adapter, split)
    base = width * _numbers(weights)
    gradients, optimizer = trained_bytes(adapters or weights, FLOAT if adapter else width)
    # With one thread on AMD's processors, oneDNN computes float32 products (`use_threads`).
    may_use_onednn = width < FLOAT or (config.threads < 2 and is_amd())
    return Plan(
        weights=base + FLOAT * _numbers(adapters),
        gradients=gradients,
        optimizer=optimizer,
        reference=base if config.loss.kl > 0 and not adapter else 0,
        critic=critic_bytes(config, sizes, adapters, split) if uses_critic(config) else 0,
        copies=0,
        sampler=0,
        logits=logits_bytes(sizes, config, device),
        activations=activations_bytes(sizes, config, device),
        programs=PROGRAMS if device == "cpu" and may_use_onednn else 0,
        libraries=0 if device == "cuda" else LIBRARIES,
        gathered=gathered_bytes(sizes, config, device) if split > 1 else 0,
        device=device,
    )


def sampler_plan(config: Config, sizes: Sizes, device: str) -> Plan:
    """The memory of a sampler in a separate process; vLLM's share of a GPU includes its weights."""
    learner = learner_plan(config, sizes, device, 1)
    own = 0
    if device == "cpu" or config.rollout.sampler != "vllm":
        adapters = _numbers(adapter_shapes(config, sizes))
        own = ITEM[config.model.dtype] * sizes.numbers + FLOAT * adapters
    return Plan(
        *(own, 0, 0, 0, 0),
        copies=copied_bytes(sizes, config, device),
        sampler=sampler_bytes(sizes, config, device),
        logits=0,
        activations=0,
        programs=learner.programs,
        libraries=learner.libraries,
        device=device,
    )


def gathered_bytes(sizes: Sizes, config: Config, device: str) -> int:
    """Estimate for weights and gradients that are whole while a learner computes (`sharding`).

    On the fast path these are all weights. Elsewhere they are those outside of the layers and those
    of two layers: one layer computes while the next is fetched.
    """
    item, adapter = ITEM[config.model.dtype], adapter_shapes(config, sizes)
    if _is_fast(sizes, config, device):
        models = 1 + (uses_critic(config) and config.model.critic == "separate" and not adapter)
        trained = _numbers(adapter) or models * sizes.numbers
        return item * models * sizes.numbers + FLOAT * (_numbers(adapter) + trained)
    layers = Counter[str]()
    for name, shape in sizes.weights.items():
        if found := BLOCK.search(name):
            layers[found.group(1)] += prod(shape)
    whole = sizes.numbers - layers.total() + 2 * max(layers.values(), default=0)
    adapters = 2 * _numbers(adapter) // sizes.num_layers
    return (item * whole + 2 * FLOAT * adapters) if adapter else 2 * item * whole


def published_bytes(config: Config, sizes: Sizes) -> int:
    """Maximum bytes of publications: the last one, the next one, and the next one as packed."""
    adapter = adapter_shapes(config, sizes)
    one = FLOAT * _numbers(adapter) if adapter else ITEM[config.model.dtype] * sizes.numbers
    return (3 + (config.engine.learners > 1)) * one


def judge_bytes(config: Config) -> int:
    """Bytes of the weights of a judge that is not behind a server."""
    name = config.local_models.get("judge.model")
    if name is None or JUDGE not in config.reward.terms:
        return 0
    path = base_of(resolve_model(name, config.env.name))
    return ITEM[config.model.dtype] * read_sizes(path).numbers


def _sizes_of(config: Config) -> Sizes:
    return read_sizes(base_of(resolve_model(config.model.path, config.env.name)))


def _parts(shapes: Iterable[Shape], split: int) -> list[Shape]:
    """The first learner's part of each weight, which is split by rows."""
    return [(-(-shape[0] // split), *shape[1:]) if shape else shape for shape in shapes]


def _sum(*parts: tuple[int, Plan]) -> Plan:
    names = *CERTAIN, *ESTIMATED
    total = {name: sum(number * getattr(each, name) for number, each in parts) for name in names}
    return Plan(**total, device=parts[-1][1].device)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _is_fast(sizes: Sizes, config: Config, device: str) -> bool:
    """True if the learner computes with `ragen.models.fast_qwen2`."""
    plain = sizes.is_plain_qwen2 and config.model.dtype == "float32"
    return plain and device == "cpu" and not config.model.gradient_checkpointing


def adapter_shapes(config: Config, sizes: Sizes) -> list[Shape]:
    """The shapes of a role's LoRA matrices; none without LoRA.

    Raises:
        RagenError: LoRA does not suit the model.
    """
    rank, layers = config.lora.rank, adapted_layers(config, sizes)
    return [shape for rows, columns in layers for shape in ((rank, columns), (rows, rank))]


def adapted_layers(config: Config, sizes: Sizes) -> list[Shape]:
    """The shapes of the linear layers that get LoRA matrices, (outputs, inputs).

    Raises:
        RagenError: LoRA does not suit the model.
    """
    if not config.lora.rank:
        return []
    names = adapted(sizes.linear, config.lora.targets, config.lora.rank)
    return [shape for name, shape in sizes.linear.items() if name.rpartition(".")[2] in names]


def uses_critic(config: Config) -> bool:
    """True if the run's estimator needs a critic."""
    name = config.advantage.name
    if name in ESTIMATOR.names:
        return name in CRITIC
    return names_input(load(name, ESTIMATOR).object, "values_ES")


def critic_bytes(config: Config, sizes: Sizes, adapters: list[Shape], split: int) -> int:
    """Bytes of the critic: its backbone or adapter, unless it shares the policy's, and its head.

    `adapters` are a learner's parts of a role's adapter, and `split` is the number of learners.
    """
    own, width = adapters, FLOAT
    if config.model.critic == "shared":
        own = []
    elif not adapters:
        own = _parts(sizes.backbone, split)
        width = ITEM[config.model.dtype]
    head: list[Shape] = [(1, sizes.width), (1,)]
    parts = ((own, width), (head, FLOAT))
    return sum(_numbers(part) * item + sum(trained_bytes(part, item)) for part, item in parts)


def refuse_too_large(config: Config, tell: Callable[[str], None]) -> None:
    """Refuse a run if its weights and optimiser cannot fit; `tell` gets the plan of a large run.

    Episodes may be shorter than the settings allow. So a run that fits only with short episodes is
    not refused, but `tell` gets a warning.

    Raises:
        RagenError: They need more than is free, and the message names the smallest change with
            which they fit; or the model cannot be trained.
    """
    planned = plans(config)
    for each in planned:
        if each.available is not None and each.certain > each.available:
            of_them = f" of {each.processes}" if each.processes else ""
            need = (
                f"weights, gradients and optimiser{of_them} take {size(each.certain)}, and "
                f"{size(each.available)} are free on the {each.device}"
            )
            change = smallest_change(config, each.available)
            if change is None:
                raise RagenError(f"{need}; no setting makes them fit; use a smaller model")
            options = " ".join(f"--{key} {value}" for key, value in change.items())
            raise RagenError(f"{need}; they fit with {options}")
    refuse_too_many(config)
    too_little = [
        each for each in planned if each.available is not None and each.needed > each.available
    ]
    for each in planned:
        if each in too_little or each.total >= WORTH_TELLING:
            for line in each.lines():
                tell(line)
    if too_little:
        tell(
            "memory: this fits only if episodes stay short: set update.microbatch_tokens or "
            "rollout.slots lower, or model.gradient_checkpointing = true"
        )


def refuse_too_many(config: Config) -> None:
    """Refuse steps of more episodes than the main memory can hold, even if all are short.

    Raises:
        RagenError: The memory cannot hold them.
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
            fits = all(each.certain <= free for each in plans(changed(config, change)))
        except RagenError:  # the values exclude each other, or do not suit the model
            continue
        if fits:
            return change
    return None


def trained_bytes(shapes: Sequence[Shape], item: int) -> tuple[int, int]:
    """Bytes of gradients, and of AdamW's moments, step counts and masters, all in float32.

    `item` is the bytes of a number of the weights: those in float32 are their own masters.
    """
    numbers = _numbers(shapes)
    masters = 0 if item == FLOAT else FLOAT * numbers
    return FLOAT * numbers, masters + FLOAT * (2 * numbers + len(shapes))


def copied_bytes(sizes: Sizes, config: Config, device: str) -> int:
    """Bytes of the weights that the sampler has for itself, if they are not the learner's."""
    item = ITEM[config.model.dtype]
    if device != "cpu":
        return 0
    if config.rollout.sampler == "vllm":
        return item * sizes.numbers
    if config.rollout.sampler == "local" and item == FLOAT and sizes.is_plain_qwen2:
        # The fast decoder's copies: fused layers with biases, the embedding and the output layer.
        biases = sizes.num_layers * (sizes.heads + 2 * sizes.key_heads) * sizes.head_width
        words = 2 * sizes.vocabulary * sizes.width
        return FLOAT * (_numbers(sizes.linear.values()) + biases + words)
    return 0


def sampler_bytes(sizes: Sizes, config: Config, device: str) -> int:
    """Bytes of the sampler's cache of keys and values.

    vLLM takes its configured share of a GPU, weights included, or a cache of fixed size on a CPU. A
    server uses another process's memory.
    """
    sampler, item = config.rollout.sampler, ITEM[config.model.dtype]
    if sampler == "vllm" and device == "cuda":
        import torch

        return int(config.rollout.gpu_memory * torch.cuda.mem_get_info()[1])
    if sampler != "local":
        return CPU_CACHE_BYTES if sampler == "vllm" else 0
    # slots · tokens · layers · key–value heads · head width · bytes of a key and a value
    slots = config.rollout.slots + (device == "cuda")  # one for a graph's rows beyond a call's
    places = slots * config.model.max_length * sizes.num_layers
    key = FLOAT if device == "cpu" else item
    return places * sizes.key_heads * sizes.head_width * (key + item)


def logits_bytes(sizes: Sizes, config: Config, device: str) -> int:
    """Estimate for the logits: one chunk five times, and the output layer's gradient.

    A tied layer has the gradient of the embedding beside it, before both are summed.
    """
    kept = KEPT_LOGITS_GPU if device == "cuda" else KEPT_LOGITS
    chunk = min(kept, config.update.microbatch_tokens * sizes.vocabulary)
    is_tied = len(sizes.backbone) == len(sizes.weights)
    layer = 0 if config.lora.rank else (1 + is_tied) * sizes.vocabulary * sizes.width
    return int(5 * chunk + layer) * FLOAT


def activations_bytes(sizes: Sizes, config: Config, device: str) -> int:
    """Estimate for the activations of one microbatch, kept for its backward pass.

    With width D, H · d for queries, K · d for keys and I for the feed-forward block, a Qwen2 or
    Llama keeps, in numbers per token and layer,

        6 D + 2 H d + 2 K d + 4 I

    plus 2 D in bfloat16, because its norms compute in float32, plus 2 H times the length if
    attention stores its scores (eager). In float32, an adapted linear layer has a temporary with as
    many numbers as the layer has outputs; larger tensors cannot use its place in the heap later. In
    bfloat16 the layer keeps that temporary and its input. With gradient checkpointing D per layer
    and one full layer are kept. For a model of the fast path see `fast_activations_bytes`.
    """
    item, width = ITEM[config.model.dtype], sizes.width
    tokens = max(config.update.microbatch_tokens, config.model.max_length)
    recomputes = config.model.gradient_checkpointing
    if _is_fast(sizes, config, device):
        return fast_activations_bytes(sizes, config, tokens)
    norms = 6 if item == FLOAT else 8
    heads = sizes.heads + sizes.key_heads
    layer = norms * width + 2 * heads * sizes.head_width + 4 * sizes.inner
    if sizes.stores_scores:
        layer += 2 * sizes.heads * config.model.max_length
    adapters = 0
    for rows, columns in adapted_layers(config, sizes):
        adapters += FLOAT * (rows if item == FLOAT else rows + columns)
    num_layers = sizes.num_layers
    kept = item * layer * num_layers + adapters
    if recomputes:
        kept = item * width * num_layers + kept // num_layers
    return kept * tokens


def fast_activations_bytes(sizes: Sizes, config: Config, tokens: int) -> int:
    """`activations_bytes` of `ragen.models.fast_qwen2`.

    Numbers per token and layer are, with I of gate and of up,

        2 D + 2 H d + 3 K d + 2 I

    and half of the attention's weights, at most `KEPT_SCORES` a layer. In addition, each layer
    keeps the weights with which it computes: those after a norm times its gain, and the original
    ones if the gain is trained; with LoRA, the sums of the others and their adapters.
    """
    width, queries, keys = sizes.width, sizes.heads, sizes.key_heads
    numbers = 2 * width + (2 * queries + 3 * keys) * sizes.head_width + 2 * sizes.inner
    pairs = min(KEPT_SCORES, sizes.heads * tokens * config.model.max_length // 2)
    others = width * (queries * sizes.head_width + sizes.inner)  # behind attention, and down
    fused = _numbers(sizes.linear.values()) // sizes.num_layers - others
    weights = fused + others if config.lora.rank else 2 * fused
    return FLOAT * sizes.num_layers * (numbers * tokens + pairs + weights)


def _numbers(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))


def size(number: int) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


def _listed(plan: Plan, *names: str) -> str:
    """The parts that are not empty, with their sizes and in British spelling: optimiser."""
    parts = ((name, getattr(plan, name)) for name in names)
    return ", ".join(f"{name.replace('z', 's')} {size(number)}" for name, number in parts if number)
