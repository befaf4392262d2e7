"""What the learner and the sampler cost on this machine, each alone: CPU seconds, best of several.

The model and the work are those of `step.py`: 1.12M parameters, 128 episodes of 5 turns, 24 sampled
tokens a turn, about 382 tokens at the end. The best of several short runs is what an idle machine
would need; on a shared one no single run shows it. Rates are beside that of a float32 2048³
`torch.mm`. `environments.py` measures the environments. The rate of a bfloat16 layer is given for
torch's own and for the one that RAGEN loads (`ragen.models.precision.widen_products`).

    python benchmarks/speed.py [--repeat 5] [--slots 128] [--general]
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen.core.types import Prompt
from ragen.engines.sampler import Sampler
from ragen.models.decoder import make_decoder
from ragen.models.loading import keep_freed_memory
from ragen.models.model import hidden_states, padded_hidden_states, token_logprobs
from ragen.models.precision import widen_products

EPISODES, MEMBERS, TURNS, TURN_TOKENS = 128, 16, 5, 24
FIRST, ANSWER = 102, 40
"""Tokens of the first prompt, and of what the environment adds before each later turn."""
MICROBATCH = 16


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    return Qwen2ForCausalLM(config).eval()


def best(work: Callable[[], object], repeat: int) -> float:
    """CPU seconds of the fastest of several runs."""
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def rollout(model: Qwen2ForCausalLM, slots: int, fast: bool) -> Callable[[], Sampler]:
    source = random.Random(0)

    def words(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(3, 512) for _ in range(count))

    first = [words(FIRST) for _ in range(EPISODES // MEMBERS)]
    answers = [
        [words(source.randint(ANSWER - 4, ANSWER + 4)) for _ in range(TURNS)]
        for _ in range(EPISODES)
    ]

    async def episode(sampler: Sampler, index: int) -> None:
        ids = first[index // MEMBERS]
        for turn in range(TURNS):
            seed = TURNS * index + turn
            prompt = Prompt((), ids, 0, TURN_TOKENS, 1.0, seed, TURN_TOKENS)
            completion = await sampler.complete(prompt)
            ids += (completion.token_ids or ()) + answers[index][turn]

    async def everyone(sampler: Sampler) -> None:
        await asyncio.gather(*[episode(sampler, index) for index in range(EPISODES)])

    def nothing(_: Sequence[int]) -> str:
        return ""

    def work() -> Sampler:
        sampler = Sampler(model, [2], nothing, slots=slots, max_length=512, fast=fast)
        asyncio.run(everyone(sampler))
        return sampler

    return work


def update(
    model: Qwen2ForCausalLM, fast: bool
) -> tuple[Callable[[], None], Callable[[], None], float]:
    """Forward, and forward with backward, of one microbatch; its floating-point operations."""
    states = hidden_states if fast else padded_hidden_states
    lengths = torch.randint(370, 395, (MICROBATCH,))
    width = int(lengths.max())
    token_ids = torch.randint(0, 512, (MICROBATCH, width))
    wanted = torch.zeros(MICROBATCH, width, dtype=torch.bool)
    for turn in range(TURNS):
        start = FIRST - 1 + turn * (TURN_TOKENS + ANSWER)
        wanted[:, start : start + TURN_TOKENS] = True
    wanted &= torch.arange(width) < lengths[:, None]
    targets = token_ids.roll(-1, 1)[wanted]

    def forward() -> torch.Tensor:
        logprobs, entropy = token_logprobs(
            model, states(model, token_ids, lengths, wanted), targets
        )
        return logprobs.mean() + 0.01 * entropy.mean()

    def backward() -> None:
        model.zero_grad()
        forward().backward()

    weights = sum(p.numel() for p in model.model.layers.parameters())
    attention = 4 * 128 * float((lengths.double() ** 2).sum()) / 2 * len(model.model.layers)
    return (
        (lambda: (forward(), None)[1]),
        backward,
        6 * weights * float(lengths.sum()) + 3 * attention,
    )


def layer_gflops(layer: torch.nn.Linear, repeat: int) -> float:
    """The rate of forward and backward passes of a bfloat16 layer with 512 rows."""
    x = torch.randn(512, layer.in_features).bfloat16().requires_grad_()
    grad = torch.randn(512, layer.out_features).bfloat16()
    return 6 * 512 * layer.weight.numel() / best(lambda: layer(x).backward(grad), repeat) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--slots", type=int, default=EPISODES)
    parser.add_argument("--general", action="store_true", help="the path for any architecture")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_memory()
    model, fast = make_model(), not args.general

    square = torch.randn(2048, 2048)
    mm_rate = 2 * 2048**3 / best(lambda: square @ square, args.repeat)

    decoder = make_decoder(model, EPISODES, 512, fast=fast)
    slots, tokens = torch.arange(EPISODES), torch.randint(0, 512, (EPISODES,))
    middle = torch.full((EPISODES,), 240)
    decode_s = best(lambda: decoder.decode(slots, middle, tokens), 8 * args.repeat)
    new: list[Sequence[int]] = [range(ANSWER)] * 25
    prefill_s = best(lambda: decoder.prefill(range(25), [200] * 25, new), 4 * args.repeat)

    rollout_s = best(rollout(model, args.slots, fast), args.repeat)
    forward, backward, operations = update(model, fast)
    forward_s, update_s = best(forward, args.repeat), best(backward, args.repeat)
    share = EPISODES // MICROBATCH
    layer = torch.nn.Linear(576, 1536).bfloat16()  # of SmolLM2-135M
    of_torch = layer_gflops(layer, args.repeat)
    widen_products(layer)
    result = {
        "mm_gflops": mm_rate / 1e9,
        "decode_128_at_240_ms": decode_s * 1e3,
        "prefill_1000_at_200_ms": prefill_s * 1e3,
        "rollout_cpu_s": rollout_s,
        "tokens_per_cpu_s_rollout": EPISODES * TURNS * TURN_TOKENS / rollout_s,
        "forward_cpu_s": forward_s * share,
        "forward_backward_cpu_s": update_s * share,
        "update_share_of_mm": operations / update_s / mm_rate,
        "bfloat16_gflops_of_torch": of_torch,
        "bfloat16_gflops": layer_gflops(layer, args.repeat),
    }
    print(json.dumps({name: float(f"{value:.4g}") for name, value in result.items()}))


if __name__ == "__main__":
    main()
