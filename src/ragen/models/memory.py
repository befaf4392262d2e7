"""The memory of a run, as a table: what × where → bytes.

It is computed before weights are loaded or anything is written. Parameters are counted from the
headers of the weights' files, so that gradients, optimisers and the sampler's cache are exact.
Logits and activations are estimates. Loads torch only for a GPU.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from ragen.config.config import Config
from ragen.config.extensions import ESTIMATOR, JUDGE, load
from ragen.config.rules import CRITIC
from ragen.config.sections import EngineConfig, LoraConfig, ModelConfig, RolloutConfig
from ragen.core.errors import RagenError
from ragen.core.inputs import names_input
from ragen.models.hub import read_sizes
from ragen.models.names import base_of, resolve_model
from ragen.networks.machine import available, is_amd, usable_device
from ragen.networks.sizes import (
    BLOCK,
    KEPT_LOGITS,
    KEPT_LOGITS_GPU,
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
ADDRESS_ENV = "RAY_ADDRESS"
"""The environment variable from which Ray takes the address of a running cluster."""

ESTIMATED = "cache", "activations", "logits", "programs", "libraries"
"""Rows that depend on how long episodes are; the program itself is one of them."""
SMALLER = {
    "gradients": "lora.rank",
    "optimiser": "lora.rank",
    "gathered": "lora.rank",
    "published": "lora.rank",
    "weights": "model.dtype",
    "copies": "model.dtype",
    "reference": "loss.kl",
    "critic": "model.critic",
    "judge": "judge.url",
}
"""The key that makes each row smaller."""
NUM_NAMED = 3
"""The largest rows that a refusal names."""


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one thing in a process of one kind: `where` is learner, sampler or driver."""

    what: str
    where: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of what shares one memory, of a machine or a GPU, and its free bytes (or ``None``).

    `processes` names the processes that the plan is for, if there are several.
    """

    rows: Sequence[Row] = ()
    device: str = "cpu"
    available: int | None = None
    processes: str = ""

    def of(self, what: str) -> int:
        """Bytes of one thing in all processes."""
        return sum(row.bytes for row in self.rows if row.what == what)

    @property
    def certain(self) -> int:
        """Bytes that are always held, however small the batches are."""
        return sum(row.bytes for row in self.rows if row.what not in ESTIMATED)

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(row.bytes for row in self.rows)

    @property
    def needed(self) -> int:
        """Bytes at the peak of full episodes; the program is taken when free memory is read."""
        return self.total - self.of("libraries")

    def lines(self) -> list[str]:
        r"""The plan as text.

        Example:
            >>> parts = {"weights": GIB, "optimiser": 2 * GIB, "cache": GIB // 3}
            >>> plan = Plan([Row(what, "learner", size) for what, size in parts.items()])
            >>> print("\n".join(plan.lines()))
            memory: up to 3.33 GiB on the cpu
              weights 1.00 GiB, optimiser 2.00 GiB
              and at most, estimated: cache 341 MiB
        """
        there = "" if self.available is None else f", where {size(self.available)} are free"
        for_them = f" for {self.processes}" if self.processes else ""
        lines = [f"memory: up to {size(self.total)}{for_them} on the {self.device}{there}"]
        parts = {row.what: self.of(row.what) for row in self.rows if row.bytes}
        for is_estimated, label in ((False, ""), (True, "and at most, estimated: ")):
            chosen = [what for what in parts if (what in ESTIMATED) == is_estimated]
            if chosen:
                listed = ", ".join(f"{what} {size(parts[what])}" for what in chosen)
                lines.append(f"  {label}{listed}")
        return lines


def plans(config: Config) -> list[Plan]:
    """The memory of all processes of a run: a plan for each memory, of a machine or a GPU.

    Learners and samplers on Ray, and local processes, share this machine's memory. On GPUs, each
    has its own, or a learner and a sampler share one. What is free on another machine is not known.

    Raises:
        RagenError: The model does not exist, or LoRA does not suit it.
    """
    name, env, engine = config.local_models.get("judge.model"), config.env.name, config.engine
    sizes = read_sizes(base_of(resolve_model(config.model.path, env)))
    judge = 0
    if name is not None and JUDGE in config.reward.terms:
        judge = ITEM[config.model.dtype] * read_sizes(base_of(resolve_model(name, env))).numbers
    run = Run(
        sizes,
        adapter_shapes(config.lora, sizes),
        config.model,
        config.rollout,
        engine,
        usable_device(),
        config.threads,
        config.update.microbatch_tokens,
        has_reference=config.loss.kl > 0,
        has_critic=_needs_critic(config.advantage.name),
    )
    rows = [*rows_of(run), Row("judge", "driver", judge)]
    is_elsewhere = engine.name == "ray" and bool(os.environ.get(ADDRESS_ENV))
    free = None if is_elsewhere else available(run.device)

    def shared(processes: str, **counts: int) -> Plan:
        held = [replace(row, bytes=counts.get(row.where, 0) * row.bytes) for row in rows]
        return Plan(held, run.device, free, processes)

    if engine.name == "local":
        count = max(1, engine.processes)
        words = f"{count} processes" if count > 1 else ""
        return [shared(words, learner=count, sampler=count, driver=1)]
    learners, samplers = processes_of(engine)
    if run.device == "cpu" and not is_elsewhere:
        counts = {"learner": engine.learners, "sampler": engine.samplers}
        return [shared(f"{learners} and {samplers}", driver=1, **counts)]
    if not is_elsewhere:
        import torch

        wanted = engine.learners + engine.samplers * engine.tensor_parallel
        if torch.cuda.device_count() < wanted:
            return [shared("a learner and a sampler on each GPU", learner=1, sampler=1)]
    return [shared(f"each of {learners}", learner=1), shared(f"each of {samplers}", sampler=1)]


def processes_of(engine: EngineConfig) -> list[str]:
    """The kinds of processes on Ray with their numbers: learners and samplers.

    Example:
        >>> processes_of(EngineConfig(name="ray", samplers=2))
        ['1 learner', '2 samplers']
    """
    counts = {"learner": engine.learners, "sampler": engine.samplers}
    return [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items()]


@dataclass(frozen=True, slots=True)
class Run:
    """Facts for the table.

    `adapter` has a role's LoRA shapes, `tokens` counts a microbatch's.
    """

    sizes: Sizes
    adapter: Sequence[Shape]
    model: ModelConfig
    rollout: RolloutConfig
    engine: EngineConfig
    device: str
    threads: int
    tokens: int
    has_reference: bool
    has_critic: bool

    @property
    def item(self) -> int:
        """Bytes of a number of the weights."""
        return ITEM[self.model.dtype]

    @property
    def is_fast(self) -> bool:
        """True if the learner computes with `ragen.networks.fast_qwen2`."""
        is_qwen2 = self.sizes.is_qwen2 and self.item == FLOAT and self.device == "cpu"
        return is_qwen2 and not self.model.gradient_checkpointing


def rows_of(run: Run) -> list[Row]:
    """The table for one process of each kind; with the engine ``local``, all are one process.

    A learner is the first of those among which all weights are split.
    """
    sizes, adapter, item, on_ray = run.sizes, run.adapter, run.item, run.engine.name == "ray"
    split = run.engine.learners if on_ray else 1
    part, own = _parts(sizes.weights.values(), split), _parts(adapter, split)
    base, all_weights = item * _numbers(part), item * sizes.numbers
    trained = part if run.model.train_vision else _parts(sizes.language.values(), split)
    gradients, optimiser = _trained(own, FLOAT) if adapter else _trained(trained, item)
    # With one thread on AMD's processors, oneDNN computes float32 products (`use_threads`).
    may_use_onednn = item < FLOAT or (run.threads < 2 and is_amd())
    programs = PROGRAMS if run.device == "cpu" and may_use_onednn else 0
    libraries = LIBRARIES if run.device == "cpu" else 0
    published = FLOAT * _numbers(adapter) if adapter else all_weights
    is_share = run.device == "cuda" and run.rollout.sampler == "vllm"  # weights and all
    rows = [
        Row("weights", "learner", base + FLOAT * _numbers(own)),
        Row("gradients", "learner", gradients),
        Row("optimiser", "learner", optimiser),
        Row("reference", "learner", base if run.has_reference and not adapter else 0),
        Row("critic", "learner", _critic(run, split) if run.has_critic else 0),
        Row("gathered", "learner", _gathered(run) if split > 1 else 0),
        Row("copies", "sampler", _copies(run)),
        Row("cache", "sampler", _cache(run)),
        Row("activations", "learner", _activations(run)),
        Row("logits", "learner", _logits(run)),
        Row("programs", "learner", programs),
        Row("libraries", "learner", libraries),
    ]
    if on_ray:
        rows += [
            Row("weights", "sampler", 0 if is_share else all_weights + FLOAT * _numbers(adapter)),
            Row("programs", "sampler", programs),
            Row("libraries", "sampler", libraries),
            # The last publication, the next one, and the next one as packed.
            Row("published", "driver", (3 + (split > 1)) * published),
            Row("libraries", "driver", libraries),
        ]
    return rows


def _copies(run: Run) -> int:
    """The weights that the sampler has for itself, if they are not the learner's."""
    sizes, sampler = run.sizes, run.rollout.sampler
    if run.device != "cpu":
        return 0
    if sampler == "vllm":
        return run.item * sizes.numbers
    if sampler == "local" and run.item == FLOAT and sizes.is_qwen2:
        # The fast decoder's: fused layers with biases, the embedding and the output layer.
        biases = sizes.num_layers * (sizes.heads + 2 * sizes.key_heads) * sizes.head_width
        words = 2 * sizes.vocabulary * sizes.width
        return FLOAT * (_numbers(sizes.linear.values()) + biases + words)
    return 0


def _cache(run: Run) -> int:
    """The sampler's keys and values (vLLM: its share of a GPU); a server's are elsewhere."""
    rollout, sizes = run.rollout, run.sizes
    if rollout.sampler == "vllm" and run.device == "cuda":
        import torch

        return int(rollout.gpu_memory * torch.cuda.mem_get_info()[1])
    if rollout.sampler != "local":
        return CPU_CACHE_BYTES if rollout.sampler == "vllm" else 0
    # slots · tokens · layers · key–value heads · head width · bytes of a key and a value
    slots = rollout.slots + (run.device == "cuda")  # one for a graph's rows beyond a call's
    places = slots * run.model.max_length * sizes.num_layers
    key = FLOAT if run.device == "cpu" else run.item
    return places * sizes.key_heads * sizes.head_width * (key + run.item)


def _critic(run: Run, split: int) -> int:
    """A critic's backbone or adapter, unless it shares the policy's, and its head."""
    own, item = _parts(run.adapter, split), FLOAT
    if run.model.critic == "shared":
        own = []
    elif not own:
        own, item = _parts(run.sizes.backbone, split), run.item
    head: list[Shape] = [(1, run.sizes.width), (1,)]
    parts = (own, item), (head, FLOAT)
    return sum(_numbers(part) * item + sum(_trained(part, item)) for part, item in parts)


def _gathered(run: Run) -> int:
    """Estimate for weights and gradients that are whole while a learner computes (`sharding`).

    Off the fast path, at most two layers are whole: one computes while the next is fetched.
    """
    sizes, adapter = run.sizes, _numbers(run.adapter)
    if run.is_fast:
        has_own = run.has_critic and run.model.critic == "separate" and not adapter
        whole = (1 + has_own) * sizes.numbers
    else:
        layers = Counter[str]()
        for name, shape in sizes.weights.items():
            if found := BLOCK.search(name):
                layers[found.group(1)] += prod(shape)
        whole = sizes.numbers - layers.total() + 2 * max(layers.values(), default=0)
        adapter = 2 * adapter // sizes.num_layers
    return run.item * whole + (2 * FLOAT * adapter if adapter else run.item * whole)


def _logits(run: Run) -> int:
    """Estimate for one chunk five times, the output layer's gradient, and a tied embedding's."""
    sizes = run.sizes
    kept = KEPT_LOGITS_GPU if run.device == "cuda" else KEPT_LOGITS
    is_tied = len(sizes.backbone) == len(sizes.language)
    layer = 0 if run.adapter else (1 + is_tied) * sizes.vocabulary * sizes.width
    return FLOAT * (5 * min(kept, run.tokens * sizes.vocabulary) + layer)


def _activations(run: Run) -> int:
    """Estimate for the activations of one microbatch, kept for its backward pass.

    With width D, H · d for queries, K · d for keys and I for the feed-forward block, a Qwen2 or
    Llama keeps, in numbers per token and layer,

        6 D + 2 H d + 2 K d + 4 I

    plus 2 D in bfloat16, because its norms compute in float32, plus 2 H times the length if
    attention stores its scores (eager). In float32, an adapted linear layer has a temporary with as
    many numbers as the layer has outputs; larger tensors cannot use its place in the heap later. In
    bfloat16 the layer keeps that temporary and its input. With gradient checkpointing D per layer
    and one full layer are kept. The fast path (`ragen.networks.fast_qwen2`) keeps half of these
    numbers, and weights of attention that are as large in long rows.
    """
    sizes, model = run.sizes, run.model
    norms = 6 if run.item == FLOAT else 8
    heads = sizes.heads + sizes.key_heads
    layer = norms * sizes.width + 2 * heads * sizes.head_width + 4 * sizes.inner
    if sizes.stores_scores:
        layer += 2 * sizes.heads * model.max_length
    adapters = sum(rows for rows, _ in run.adapter[1::2])
    if run.item < FLOAT:
        adapters += sum(columns for _, columns in run.adapter[::2])
    kept = run.item * layer * sizes.num_layers + FLOAT * adapters
    if model.gradient_checkpointing:
        kept = run.item * sizes.width * sizes.num_layers + kept // sizes.num_layers
    return kept * max(run.tokens, model.max_length)


def adapter_shapes(lora: LoraConfig, sizes: Sizes) -> list[Shape]:
    """The shapes of a role's LoRA matrices, A and B of each layer; none without LoRA.

    Raises:
        RagenError: LoRA does not suit the model.
    """
    if not lora.rank:
        return []
    names = adapted(sizes.linear, lora.targets, lora.rank)
    layers = [shape for name, shape in sizes.linear.items() if name.rpartition(".")[2] in names]
    return [
        shape for rows, columns in layers for shape in ((lora.rank, columns), (rows, lora.rank))
    ]


def _needs_critic(estimator: str) -> bool:
    if estimator in ESTIMATOR.names:
        return estimator in CRITIC  # known without torch
    return names_input(load(estimator, ESTIMATOR).object, "values_ES")


def _trained(shapes: Sequence[Shape], item: int) -> tuple[int, int]:
    """Bytes of gradients, and of AdamW's moments, counts and masters (float32 needs no masters)."""
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


def refuse_too_large(planned: Sequence[Plan], tell: Callable[[str], None]) -> None:
    """Refuse a run if its weights and optimiser cannot fit; `tell` gets the plan of a large run.

    A run that fits only with episodes shorter than the settings allow gets a warning instead.

    Raises:
        RagenError: They need more than is free. The message names the largest rows and the keys
            that make them smaller.
    """
    for each in planned:
        if each.available is not None and each.certain > each.available:
            of_them = f" of {each.processes}" if each.processes else ""
            largest = sorted(SMALLER, key=each.of, reverse=True)[:NUM_NAMED]
            named = ", ".join(f"{what} {size(each.of(what))}" for what in largest if each.of(what))
            keys = ", ".join(dict.fromkeys(SMALLER[what] for what in largest if each.of(what)))
            raise RagenError(
                f"weights, gradients and optimiser{of_them} take {size(each.certain)}, and "
                f"{size(each.available)} are free on the {each.device}; the largest are {named}: "
                f"change {keys}, or use a smaller model"
            )
    scarce = [
        each for each in planned if each.available is not None and each.needed > each.available
    ]
    for each in planned:
        if each in scarce or each.total >= WORTH_TELLING:
            for line in each.lines():
                tell(line)
    if scarce:
        tell(
            "memory: this fits only if episodes stay short: set update.microbatch_tokens or "
            "rollout.slots lower, or model.gradient_checkpointing = true"
        )
