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
from ragen.models.names import base_of, resolve_model
from ragen.models.sizes import read_sizes
from ragen.networks.machine import available, is_amd, usable_device
from ragen.networks.sizes import (
    BLOCK,
    KEPT_LOGITS,
    KEPT_LOGITS_GPU,
    KEPT_SCORES,
    Shape,
    Sizes,
    adapted,
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

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    critic: int = 0
    copies: int = 0
    gathered: int = 0
    published: int = 0
    judge: int = 0
    sampler: int = 0
    activations: int = 0
    logits: int = 0
    programs: int = 0
    libraries: int = 0
    device: str = "cpu"
    available: int | None = None
    processes: str = ""

    @property
    def certain(self) -> int:
        """Bytes that are always held, however small the batches are."""
        return sum(getattr(self, name) for name in CERTAIN)

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        estimated: int = sum(getattr(self, name) for name in ESTIMATED)
        return self.certain + estimated

    @property
    def needed(self) -> int:
        """Bytes at the peak beyond the program itself, if episodes fill what settings allow."""
        return self.total - self.libraries

    def lines(self) -> list[str]:
        r"""The plan as text.

        Example:
            >>> plan = Plan(weights=GIB, optimizer=2 * GIB, sampler=GIB // 3)
            >>> print("\n".join(plan.lines()))
            memory: up to 3.33 GiB on the cpu
              weights 1.00 GiB, optimiser 2.00 GiB
              and at most, estimated: sampler 341 MiB
        """
        there = "" if self.available is None else f", where {size(self.available)} are free"
        for_them = f" for {self.processes}" if self.processes else ""
        lines = [f"memory: up to {size(self.total)}{for_them} on the {self.device}{there}"]
        for names, label in ((CERTAIN, ""), (ESTIMATED, "and at most, estimated: ")):
            parts = [(name.replace("z", "s"), getattr(self, name)) for name in names]
            if listed := ", ".join(f"{name} {size(number)}" for name, number in parts if number):
                lines.append(f"  {label}{listed}")
        return lines


def plan(config: Config) -> Plan:
    """The memory that a run with this config needs in one process.

    For a model of the Hub only its config and the headers of its weights are downloaded.

    Raises:
        RagenError: The model does not exist, or LoRA does not suit it.
    """
    needs = _needs(config)
    copies, cache = needs.copies(), needs.cache()
    free, judge = available(needs.device), judge_bytes(config)
    return replace(needs.learner(), copies=copies, sampler=cache, judge=judge, available=free)


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
    needs = _needs(config)
    learner, sampler = needs.learner(engine.learners), needs.sampler()
    learners, samplers = processes_of(engine)
    each = [
        replace(learner, processes=f"each of {learners}"),
        replace(sampler, processes=f"each of {samplers}"),
    ]
    if os.environ.get(ADDRESS_ENV):
        return each
    free = available(needs.device)
    if needs.device == "cpu":
        published, judge = needs.published(), judge_bytes(config)
        driver = Plan(libraries=LIBRARIES, published=published, judge=judge)
        together = _sum((1, driver), (engine.learners, learner), (engine.samplers, sampler))
        return [replace(together, available=free, processes=f"{learners} and {samplers}")]
    if _num_gpus() < engine.learners + engine.samplers * engine.tensor_parallel:
        shared = replace(_sum((1, learner), (1, sampler)), device=needs.device, available=free)
        return [replace(shared, processes="a learner and a sampler on each GPU")]
    return [replace(alone, available=free) for alone in each]


def _needs(config: Config) -> Needs:
    sizes = read_sizes(base_of(resolve_model(config.model.path, config.env.name)))
    return Needs(config, sizes, usable_device())


def _sum(*parts: tuple[int, Plan]) -> Plan:
    names = *CERTAIN, *ESTIMATED
    return Plan(**{name: sum(num * getattr(each, name) for num, each in parts) for name in names})


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


class Needs:
    """What the processes of a run hold, in bytes, for a model of these sizes on this device.

    Raises:
        RagenError: LoRA does not suit the model.
    """

    def __init__(self, config: Config, sizes: Sizes, device: str) -> None:
        self.config, self.sizes, self.device = config, sizes, device
        self.item = ITEM[config.model.dtype]
        self.adapter = adapter_shapes(config, sizes)
        plain = sizes.is_plain_qwen2 and self.item == FLOAT and device == "cpu"
        # It computes with `ragen.networks.fast_qwen2`.
        self.is_fast = plain and not config.model.gradient_checkpointing
        self.has_critic = uses_critic(config)

    def learner(self, split: int = 1) -> Plan:
        """The first of `split` learners, among which all weights are split."""
        config, sizes = self.config, self.sizes
        weights, adapter = _parts(sizes.weights.values(), split), _parts(self.adapter, split)
        base = self.item * _numbers(weights)
        trained = trained_bytes(adapter, FLOAT) if adapter else trained_bytes(weights, self.item)
        return Plan(
            weights=base + FLOAT * _numbers(adapter),
            gradients=trained[0],
            optimizer=trained[1],
            reference=base if config.loss.kl > 0 and not adapter else 0,
            critic=self._critic(split) if self.has_critic else 0,
            gathered=self._gathered() if split > 1 else 0,
            activations=self._fast_activations() if self.is_fast else self._activations(),
            logits=self._logits(),
            programs=self._programs(),
            libraries=0 if self.device == "cuda" else LIBRARIES,
            device=self.device,
        )

    def sampler(self) -> Plan:
        """A sampler in a separate process; vLLM's share of a GPU includes its weights."""
        own = 0
        if self.device == "cpu" or self.config.rollout.sampler != "vllm":
            own = self.item * self.sizes.numbers + FLOAT * _numbers(self.adapter)
        return Plan(
            weights=own,
            copies=self.copies(),
            sampler=self.cache(),
            programs=self._programs(),
            libraries=0 if self.device == "cuda" else LIBRARIES,
            device=self.device,
        )

    def copies(self) -> int:
        """The weights that the sampler has for itself, if they are not the learner's."""
        sizes, sampler = self.sizes, self.config.rollout.sampler
        if self.device != "cpu":
            return 0
        if sampler == "vllm":
            return self.item * sizes.numbers
        if sampler == "local" and self.item == FLOAT and sizes.is_plain_qwen2:
            # The fast decoder's: fused layers with biases, the embedding and the output layer.
            biases = sizes.num_layers * (sizes.heads + 2 * sizes.key_heads) * sizes.head_width
            words = 2 * sizes.vocabulary * sizes.width
            return FLOAT * (_numbers(sizes.linear.values()) + biases + words)
        return 0

    def cache(self) -> int:
        """The sampler's cache of keys and values.

        vLLM takes its configured share of a GPU, weights included, or a cache of fixed size on a
        CPU. A server uses another process's memory.
        """
        rollout, sizes = self.config.rollout, self.sizes
        if rollout.sampler == "vllm" and self.device == "cuda":
            import torch

            return int(rollout.gpu_memory * torch.cuda.mem_get_info()[1])
        if rollout.sampler != "local":
            return CPU_CACHE_BYTES if rollout.sampler == "vllm" else 0
        # slots · tokens · layers · key–value heads · head width · bytes of a key and a value
        slots = rollout.slots + (self.device == "cuda")  # one for a graph's rows beyond a call's
        places = slots * self.config.model.max_length * sizes.num_layers
        key = FLOAT if self.device == "cpu" else self.item
        return places * sizes.key_heads * sizes.head_width * (key + self.item)

    def published(self) -> int:
        """Maximum of publications: the last one, the next one, and the next one as packed."""
        one = FLOAT * _numbers(self.adapter) if self.adapter else self.item * self.sizes.numbers
        return (3 + (self.config.engine.learners > 1)) * one

    def _critic(self, split: int) -> int:
        """A critic's backbone or adapter, unless it shares the policy's, and its head."""
        own, item = _parts(self.adapter, split), FLOAT
        if self.config.model.critic == "shared":
            own = []
        elif not own:
            own, item = _parts(self.sizes.backbone, split), self.item
        head: list[Shape] = [(1, self.sizes.width), (1,)]
        parts = (own, item), (head, FLOAT)
        return sum(_numbers(part) * item + sum(trained_bytes(part, item)) for part, item in parts)

    def _gathered(self) -> int:
        """Estimate for weights and gradients that are whole while a learner computes (`sharding`).

        On the fast path these are all weights. Elsewhere they are those outside of the layers and
        those of two layers: one layer computes while the next is fetched.
        """
        config, sizes, adapter = self.config, self.sizes, _numbers(self.adapter)
        if self.is_fast:
            has_own = self.has_critic and config.model.critic == "separate" and not adapter
            models = (1 + has_own) * sizes.numbers
            return self.item * models + FLOAT * (adapter + (adapter or models))
        layers = Counter[str]()
        for name, shape in sizes.weights.items():
            if found := BLOCK.search(name):
                layers[found.group(1)] += prod(shape)
        whole = sizes.numbers - layers.total() + 2 * max(layers.values(), default=0)
        if not adapter:
            return 2 * self.item * whole
        return self.item * whole + 2 * FLOAT * (2 * adapter // sizes.num_layers)

    def _programs(self) -> int:
        # With one thread on AMD's processors, oneDNN computes float32 products (`use_threads`).
        may_use_onednn = self.item < FLOAT or (self.config.threads < 2 and is_amd())
        return PROGRAMS if self.device == "cpu" and may_use_onednn else 0

    def _logits(self) -> int:
        """Estimate for the logits: one chunk five times, and the output layer's gradient.

        A tied layer has the gradient of the embedding beside it, before both are summed.
        """
        sizes, tokens = self.sizes, self.config.update.microbatch_tokens
        kept = KEPT_LOGITS_GPU if self.device == "cuda" else KEPT_LOGITS
        is_tied = len(sizes.backbone) == len(sizes.weights)
        layer = 0 if self.adapter else (1 + is_tied) * sizes.vocabulary * sizes.width
        return FLOAT * (5 * min(kept, tokens * sizes.vocabulary) + layer)

    def _tokens(self) -> int:
        return max(self.config.update.microbatch_tokens, self.config.model.max_length)

    def _activations(self) -> int:
        """Estimate for the activations of one microbatch, kept for its backward pass.

        With width D, H · d for queries, K · d for keys and I for the feed-forward block, a Qwen2 or
        Llama keeps, in numbers per token and layer,

            6 D + 2 H d + 2 K d + 4 I

        plus 2 D in bfloat16, because its norms compute in float32, plus 2 H times the length if
        attention stores its scores (eager). In float32, an adapted linear layer has a temporary
        with as many numbers as the layer has outputs; larger tensors cannot use its place in the
        heap later. In bfloat16 the layer keeps that temporary and its input. With gradient
        checkpointing D per layer and one full layer are kept.
        """
        sizes, model = self.sizes, self.config.model
        norms = 6 if self.item == FLOAT else 8
        heads = sizes.heads + sizes.key_heads
        layer = norms * sizes.width + 2 * heads * sizes.head_width + 4 * sizes.inner
        if sizes.stores_scores:
            layer += 2 * sizes.heads * model.max_length
        adapters = sum(rows for rows, _ in self.adapter[1::2])
        if self.item < FLOAT:
            adapters += sum(columns for _, columns in self.adapter[::2])
        kept = self.item * layer * sizes.num_layers + FLOAT * adapters
        if model.gradient_checkpointing:
            kept = self.item * sizes.width * sizes.num_layers + kept // sizes.num_layers
        return kept * self._tokens()

    def _fast_activations(self) -> int:
        """Estimate for the activations of `ragen.networks.fast_qwen2`.

        Numbers per token and layer are, with I of gate and of up,

            2 D + 2 H d + 3 K d + 2 I

        and half of the attention's weights, at most `KEPT_SCORES` a layer. In addition, each layer
        keeps the weights with which it computes: those after a norm times its gain, and the
        original ones if the gain is trained; with LoRA, the sums of the others and their adapters.
        """
        sizes, tokens = self.sizes, self._tokens()
        width, queries, keys = sizes.width, sizes.heads, sizes.key_heads
        numbers = 2 * width + (2 * queries + 3 * keys) * sizes.head_width + 2 * sizes.inner
        pairs = min(KEPT_SCORES, sizes.heads * tokens * self.config.model.max_length // 2)
        others = width * (queries * sizes.head_width + sizes.inner)  # behind attention, and down
        fused = _numbers(sizes.linear.values()) // sizes.num_layers - others
        weights = fused + others if self.adapter else 2 * fused
        return FLOAT * sizes.num_layers * (numbers * tokens + pairs + weights)


def judge_bytes(config: Config) -> int:
    """Bytes of the weights of a judge that is not behind a server."""
    name = config.local_models.get("judge.model")
    if name is None or JUDGE not in config.reward.terms:
        return 0
    path = base_of(resolve_model(name, config.env.name))
    return ITEM[config.model.dtype] * read_sizes(path).numbers


def adapter_shapes(config: Config, sizes: Sizes) -> list[Shape]:
    """The shapes of a role's LoRA matrices, A and B of each layer; none without LoRA.

    Raises:
        RagenError: LoRA does not suit the model.
    """
    rank = config.lora.rank
    if not rank:
        return []
    names = adapted(sizes.linear, config.lora.targets, rank)
    layers = [shape for name, shape in sizes.linear.items() if name.rpartition(".")[2] in names]
    return [shape for rows, columns in layers for shape in ((rank, columns), (rows, rank))]


def uses_critic(config: Config) -> bool:
    """True if the run's estimator needs a critic."""
    name = config.advantage.name
    if name in ESTIMATOR.names:
        return name in CRITIC
    return names_input(load(name, ESTIMATOR).object, "values_ES")


def trained_bytes(shapes: Sequence[Shape], item: int) -> tuple[int, int]:
    """Bytes of gradients, and of AdamW's moments, step counts and masters, all in float32.

    `item` is the bytes of a number of the weights: those in float32 are their own masters.
    """
    numbers = _numbers(shapes)
    masters = 0 if item == FLOAT else FLOAT * numbers
    return FLOAT * numbers, masters + FLOAT * (2 * numbers + len(shapes))


def _parts(shapes: Iterable[Shape], split: int) -> list[Shape]:
    """The first learner's part of each weight, which is split by rows."""
    return [(-(-shape[0] // split), *shape[1:]) if shape else shape for shape in shapes]


def _numbers(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))


def size(number: int) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


def refuse_too_large(config: Config, tell: Callable[[str], None]) -> None:
    """Refuse a run if its weights and optimiser cannot fit; `tell` gets the plan of a large run.

    Episodes may be shorter than the settings allow. So a run that fits only with short episodes is
    not refused, but `tell` gets a warning.

    Raises:
        RagenError: They need more than is free, and the message names the smallest change with
            which they fit; or the model cannot be trained.
    """
    fits_only_if_short = False
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
    for each in planned:
        is_too_little = each.available is not None and each.needed > each.available
        fits_only_if_short |= is_too_little
        if is_too_little or each.total >= WORTH_TELLING:
            for line in each.lines():
                tell(line)
    if fits_only_if_short:
        tell(
            "memory: this fits only if episodes stay short: set update.microbatch_tokens or "
            "rollout.slots lower, or model.gradient_checkpointing = true"
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
