"""What a step of the papers' size costs on a GPU: speed of rollout and update, and memory.

The model has the configuration of Qwen2.5-0.5B and random weights, in bfloat16; the tokenizer is
made on the spot, so nothing is downloaded.

First come the parts of a step by themselves: decoding with and without CUDA graphs and by
transformers' own `generate`, transfers from pinned and from other memory, and AdamW fused and not.
Then come whole steps: the papers' batch (arXiv:2504.20073) of 8 levels × 16 episodes of 5 turns,
each of exactly 400 sampled tokens, under the papers' prompts. It is played, scored, trained and
published by the engine of `ragen train`; only evaluation and checkpoints are left out. A plain
training step of transformers on rows of the same lengths comes last. How often the host waits for
the GPU is what torch notes.

    python benchmarks/gpu.py [--steps 2] [--modes full lora]
    python benchmarks/gpu.py --tiny       # every phase on a CPU, with a tiny model, in a minute

It prints one line of JSON for the parts and for each mode.

MFU is the share of the card's own bfloat16 matrix rate, measured at the start, that the update's
needed operations come to; what checkpointing computes twice, and padding, is not counted as needed.
"""

# mypy: allow-untyped-calls
import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import ragen
from ragen.algorithms.samples import to_samples
from ragen.config import reading
from ragen.config.config import Config
from ragen.config.sections import UpdateConfig
from ragen.core.metrics import Metrics, merge
from ragen.core.seeding import derive
from ragen.engines.local import LocalEngine
from ragen.models.memory import plans
from ragen.networks.decoder import HFDecoder
from ragen.networks.graphs import GraphDecoder, recorder
from ragen.rollout.setup import make_setup
from ragen.sampling.local_sampler import Sampler, draw
from ragen.training.collection import collect_groups, make_batch, split_batch
from ragen.training.mixture import first_starts

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, 32k": {"update.microbatch_tokens": 32_768},
    "full, recomputed": {"model.gradient_checkpointing": True},
    "lora": {"lora.rank": 64, "lora.alpha": 64},
}
"""What is trained, as a recipe would say it; rank and alpha are the papers'."""

WARM_UP = 1
"""Steps at the start that are not counted."""

PROMPT, DECODED = 1024, 64
"""Tokens in each slot, and those that are then decoded, where decoding is measured alone: about the
middle of an episode."""

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Of the model and of a step."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    prompts: int
    members: int
    turns: int
    turn_tokens: int
    max_length: int
    matrix: int


PAPER = Size(896, 24, 14, 2, 4864, 151_936, 8, 16, 5, 400, 4096, 8192)
TINY = Size(64, 2, 4, 2, 128, 2048, 2, 2, 2, 8, 2048, 128)


def make_model(folder: Path, size: Size) -> None:
    """A random model, and a tokenizer that has learnt the words of RAGEN's prompts."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    package = Path(ragen.__file__).parent
    sources = [package / "rollout" / "prompt.py", *package.glob("envs/*.py")]
    texts = [path.read_text() for path in sources]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.mlp,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_config(model: Path, size: Size, mode: str) -> Config:
    """StarPO with GRPO's advantage and the papers' prompts."""
    return reading.merge(
        None,
        {
            "algorithm": "starpo/grpo",
            "env.name": "sokoban",
            "env.max_turns": size.turns,
            "prompt.style": "paper",
            "model.path": str(model),
            "model.dtype": "bfloat16",
            "model.max_length": size.max_length,
            "rollout.num_groups": size.prompts,
            "rollout.group_size": size.members,
            "rollout.slots": size.prompts * size.members,
            "rollout.max_tokens": size.turn_tokens,
        }
        | MODES[mode],
    )


class Phases:
    """Seconds and peak memory of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.peak_gb: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 1e9
            self.peak_gb[name] = max(peak, self.peak_gb.get(name, 0.0))
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def mean(self, name: str) -> float:
        return statistics.mean(self.seconds[name][WARM_UP:])


@contextmanager
def waits() -> Iterator[list[str]]:
    """Where the host waited for the GPU, as torch notes it; none on a CPU."""
    found: list[str] = []
    if not torch.cuda.is_available():
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = (
        f"{each.filename}:{each.lineno}"
        for each in caught
        if "called a synchronizing" in str(each.message)
    )
    found.extend(places)


def measure_parts(folder: Path, size: Size, device: str) -> dict[str, float]:
    """Rates of decoding, transfers and the optimiser, each by itself."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    rows, length = size.prompts * size.members, PROMPT + DECODED
    prompt = torch.ones(rows, PROMPT, dtype=torch.long, device=device)
    about = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "attention_mask": prompt}
    record = recorder() if device == "cuda" else lambda compute: compute
    decoders = {
        "": HFDecoder(model, rows, length),
        "_graphs": GraphDecoder(model, rows, length, record),
    }
    found: dict[str, float] = {}
    for name, decoder in decoders.items():
        seconds = []
        for _ in range(3):  # the first is not counted
            logits_NV = decoder.prefill(range(rows), [0] * rows, [[1] * PROMPT] * rows)
            with waits() as waited:
                seconds.append(timed(partial(decode, decoder, rows, logits_NV)))
        found[f"decode{name}_tokens_per_s"] = rows * DECODED / min(seconds[1:])
        found[f"decode{name}_waits_per_token"] = len(waited) / DECODED
    del decoders
    limits = [{"min_new_tokens": count, "max_new_tokens": count} for count in (1, 1 + DECODED)]
    first, both = (best(partial(model.generate, prompt, **about, **each), 1) for each in limits)
    found["generate_tokens_per_s"] = rows * DECODED / (both - first)
    here = torch.zeros(size.matrix, size.matrix)
    found["transfer_gb_per_s"] = here.nbytes / best(lambda: here.to(device, copy=True)) / 1e9
    if device == "cuda":
        pinned = here.pin_memory()
        seconds = best(lambda: pinned.to(device, non_blocking=True))
        found["transfer_pinned_gb_per_s"] = here.nbytes / seconds / 1e9
    weights = [torch.zeros_like(each, dtype=torch.float32) for each in model.parameters()]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    for name, fused in (("", False), ("_fused", True)):
        found[f"adamw{name}_s"] = best(torch.optim.AdamW(weights, fused=fused).step)
    return found


def decode(decoder: HFDecoder, rows: int, logits_NV: torch.Tensor) -> None:
    """Sample from every slot, as the sampler does."""
    ones, slots = np.ones(rows), torch.arange(rows)
    for at in range(PROMPT, PROMPT + DECODED):
        tokens, _ = draw(logits_NV, ones, ones / 2)
        starts = torch.full((rows,), at)
        logits_NV = decoder.decode(slots, starts, torch.from_numpy(tokens))


def best(work: Callable[[], Any], times: int = 10) -> float:
    """Seconds of the best of some calls, after one that is not counted."""
    return min([timed(work) for _ in range(1 + times)][1:])


def timed(work: Callable[[], Any]) -> float:
    """Seconds of a call and of what it leaves to the GPU, when all earlier work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_plain(folder: Path, lengths: Sequence[int], device: str) -> dict[str, float]:
    """A training step of transformers on padded rows of these lengths, in the dtype of the run."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows = max(1, UpdateConfig().microbatch_tokens // max(lengths))

    def step() -> None:
        for start in range(0, len(lengths), rows):
            part = torch.tensor(lengths[start : start + rows], device=device)
            mask = (torch.arange(int(part.max()), device=device) < part[:, None]).long()
            labels = mask.masked_fill(mask == 0, -100)
            model(input_ids=mask, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = {"update_tokens_per_s": sum(lengths) / best(step, 1)}
    if device == "cuda":
        found["peak_gb_update"] = torch.cuda.max_memory_allocated() / 1e9
    return found


async def measure(
    config: Config, size: Size, steps: int, rate: float
) -> tuple[dict[str, float], list[int]]:
    """Rates and memory of some training steps, and the lengths of the last one's rows."""
    phases, operations, tokens, sampled = Phases(), 0.0, 0, 0
    metrics: Metrics = {}
    waits_per_update = 0.0
    with phases("load"):
        engine = LocalEngine(config, config.model.path)
    assert isinstance(engine.policy, Sampler)
    engine.policy.last_ids = frozenset()  # every completion has `max_tokens`
    setup = make_setup(config, engine.chat)
    optimizers = engine.learner.named_optimizers().values()
    groups_of_weights = [group["params"] for each in optimizers for group in each.param_groups]
    trained = sum(weight.numel() for weights in groups_of_weights for weight in weights)
    for step in range(WARM_UP + steps):
        with phases("rollout"):
            starts = first_starts({config.env.name: setup}, config.rollout, {}, step, {})
            groups = await collect_groups(
                engine, starts, config.rollout, config.seed, step, config.episodes_at_once
            )
        with phases("score"):
            batch = await make_batch(engine, *to_samples(groups), config)
        with phases("update"), waits() as waited:
            seed = derive(config.seed, "minibatches", step)
            parts = split_batch(batch, config.update, seed)
            for part in parts:
                metrics = merge([metrics, await engine.update(part, step)])
        waits_per_update = len(waited) / len(parts)
        with phases("publish"):
            await engine.publish()
        tokens, sampled = int(batch.lengths_B.sum()), batch.num_tokens
        lengths = batch.lengths_B.tolist()
        operations = needed_operations(lengths, sampled, size, frozen=config.lora.rank > 0)
    assert sampled == size.prompts * size.members * size.turns * size.turn_tokens
    setup.close()
    await engine.close()
    result = {
        "trained_parameters": trained,
        "tokens_sampled": sampled,
        "tokens_trained_on": tokens,
        "rollout_tokens_per_s": sampled / phases.mean("rollout"),
        "update_tokens_per_s": tokens / phases.mean("update"),
        "update_mfu": operations / phases.mean("update") / rate,
        "padding_fraction": 0.0,
        "mismatch_kl": metrics["mismatch/kl"].value,
        "waits_per_update": waits_per_update,
        "planned_gb": plans(config)[0].total / 1e9,
    }
    if "update/padding_fraction" in metrics:
        result["padding_fraction"] = metrics["update/padding_fraction"].value
    result |= {f"{name}_s": phases.mean(name) for name in ("rollout", "score", "update", "publish")}
    result |= {f"peak_gb_{name}": peak for name, peak in phases.peak_gb.items()}
    return result, lengths


def needed_operations(lengths: Sequence[int], sampled: int, size: Size, *, frozen: bool) -> float:
    """Floating-point operations of one pass over the batch, forward and backward.

    A weight costs 2 operations a token forward, 2 for the gradient of its input, 2 for its own
    (not if it is frozen); causal attention 2·D·T² forward and twice that backward; the output layer
    is needed at sampled tokens only.

    Args:
        lengths: Tokens of each row.
        sampled: Tokens that the loss looks at.
        size: Of the model.
        frozen: Whether the base is, under adapters (whose own few operations are left out).
    """
    kv_width = size.width * size.kv_heads // size.heads
    layer = 2 * size.width**2 + 2 * size.width * kv_width + 3 * size.width * size.mlp
    linear = size.layers * layer * sum(lengths) + size.width * size.vocabulary * sampled
    attention = 6.0 * size.layers * size.width * sum(length**2 for length in lengths)
    return (4 if frozen else 6) * linear + attention


def matrix_rate(width: int, device: str) -> float:
    """Operations a second of the best of several bfloat16 products of square matrices."""
    a, b = torch.randn(2, width, width, device=device).bfloat16()
    return 2 * width**3 / best(lambda: a @ b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="steps that are counted")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--tiny", action="store_true", help="a tiny model and step, on any machine")
    args = parser.parse_args()
    size, device = (TINY if args.tiny else PAPER), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        print("torch sees no GPU here: nothing is measured (--tiny runs every phase on a CPU)")
        return
    if args.tiny:
        torch.set_num_threads(1)
    rate = matrix_rate(size.matrix, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}: {rate / 1e12:.3g} TFLOP/s in bfloat16", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch), size)
        report("parts", measure_parts(Path(scratch), size, device))
        for mode in args.modes:
            config = make_config(Path(scratch), size, mode)
            found, lengths = asyncio.run(measure(config, size, args.steps, rate))
            gc.collect()
            report(mode, found)
        rows = lengths[: UpdateConfig().minibatch_episodes]
        report("plain transformers", measure_plain(Path(scratch), rows, device))


def report(mode: str, found: dict[str, float]) -> None:
    rounded = {name: float(f"{value:.4g}") for name, value in found.items()}
    print(json.dumps({"mode": mode} | rounded), flush=True)


if __name__ == "__main__":
    main()
