"""One whole training step on the real path of `ragen train`, beside TRL's if asked.

The work of a step is known in advance: 8 levels × 16 episodes, each exactly 5 turns of exactly 24
sampled tokens (no token ends a reply here, so every reply is cut, none is valid and no episode ends
early), about 382 tokens at the end; then one GRPO loss and one AdamW step over
all of them. Environment, prompts, parser and recorder take part as in any run; the mutual
information of thoughts and prompts, which the peer does not measure, is off. The model is that of
the peer's script: Qwen2 with 1.12M random parameters.

All seconds are CPU seconds of the process, on one thread: they can be compared on a shared machine.

    python benchmarks/step.py [--steps 10] [--json]
    python benchmarks/step.py --peer trl_step.py --peer-python PYTHON_OF_ITS_ENVIRONMENT

With a peer, both run three times in turn, each time in a process of its own; medians of the three
are printed.
"""

# mypy: allow-untyped-calls
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from typing_extensions import override

from ragen.config.config import Config
from ragen.core import user_code
from ragen.core.types import Episode
from ragen.engines import factory
from ragen.engines.sampler import Sampler
from ragen.envs.frozen_lake import FrozenLake
from ragen.training import running, trainer
from ragen.training.progress import Watcher

GROUPS, MEMBERS, TURNS, TURN_TOKENS = 8, 16, 5, 24
EPISODES = GROUPS * MEMBERS
SAMPLED = EPISODES * TURNS * TURN_TOKENS
LENGTH = 382
"""Tokens of an episode at its end, the peer's mean; ours may differ by 5 %."""
ROUNDS, WARM_UP = 3, 2
"""Runs of each side, and steps at the start of each that are not counted."""

LOCAL_SAMPLER = factory.Sampler

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Lake(FrozenLake):
    """FrozenLake under a longer title, which brings the prompts to the peer's length."""

    goal = (
        "You are solving the FrozenLake puzzle. Move P to G, avoid O. "
        "Answer with Left, Down, Right or Up, at most five."
    )


def make_model(folder: Path, model: PreTrainedModel | None = None) -> None:
    """A random model, by default of the peer's shape, with a byte-level tokenizer of our words."""
    torch.manual_seed(0)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    text = f"user\nassistant\n<think>\n{Lake.goal}\nreward 0\ninvalid\nturns 5 actions 10 max 5"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [text] * 50,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    (model or Qwen2ForCausalLM(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_config(model: Path, steps: int) -> Config:
    """StarPO with GRPO's advantage, as a recipe would say it; the peer's loss has no KL either."""
    return Config.model_validate(
        {
            "algorithm": "starpo/grpo",
            "steps": steps,
            "threads": 1,
            "env": {"name": f"{__file__}:Lake", "max_turns": TURNS},
            "model": {"path": str(model), "max_length": 512},
            "rollout": {
                "num_groups": GROUPS,
                "group_size": MEMBERS,
                "max_tokens": TURN_TOKENS,
                "slots": EPISODES,
            },
            "advantage": {"name": "grpo"},
            "loss": {"kl": 0.0},
            "update": {"minibatch_episodes": EPISODES, "lr": 1e-3},
            "eval": {"episodes": 0},
            "diagnose": {"information_every": 0},
            "checkpoint": {"every": 0},
        }
    )


class Meter(Watcher):
    """Seconds by phase and lengths of the episodes, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.lengths: list[int] = []
        self.prompts: list[int] = []
        self._since = time.process_time()

    @override
    def episode(self, episode: Episode) -> None:
        first, last = episode.turns[0].prompt.token_ids, episode.turns[-1].prompt.token_ids
        assert first is not None and last is not None
        assert [len(turn.completion.token_ids or ()) for turn in episode.turns] == (
            [TURN_TOKENS] * TURNS
        )
        self.lengths.append(len(last) + TURN_TOKENS)
        self.prompts.append(len(first))

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.process_time()
        assert step == 1 or metrics["tokens/sampled"] == SAMPLED
        phases = {
            name.removeprefix("time/"): value
            for name, value in metrics.items()
            if name.startswith("time/") and name != "time/step_s"
        }
        self.steps.append(phases | {"step_s": now - self._since})
        self._since = now


def endless(model: Any, _: Any, decode: Any, *, control_ids: object, **sizes: int) -> Sampler:
    """The local sampler, with no token that ends a completion: each has `TURN_TOKENS`."""
    return LOCAL_SAMPLER(model, (), decode, **sizes)


def patched_sampler() -> Any:
    """A context in which the local sampler is `endless`."""
    return patch.object(factory, "Sampler", endless)


def operations(lengths: list[int], prompts: list[int] | None = None) -> float:
    """Floating-point operations of one update: 6·N·tokens and, for attention, 6·D·T² a layer.

    Args:
        lengths: Tokens of each episode.
        prompts: Tokens of each one's first prompt: leaves out what need not be done. That is a
            group's prompt in all members but one and, in the last layer, queries and all behind
            them (logits too) at positions whose next token was not sampled.
    """
    width, mlp, layers, vocabulary, kv_width = 128, 512, 4, 512, 64
    kv, rest, head = 2 * width * kv_width, 2 * width**2 + 3 * width * mlp, width * vocabulary
    tokens, pairs = float(sum(lengths)), float(sum(length**2 for length in lengths))
    last_layer = tokens
    if prompts is not None:
        shared = 1 - 1 / MEMBERS
        tokens -= shared * sum(prompts)
        pairs -= shared * sum(prompt**2 for prompt in prompts)
        last_layer = SAMPLED
    linear = ((layers - 1) * (kv + rest) + kv) * tokens + (rest + head) * last_layer
    return 6 * linear + 6 * width * pairs * (layers - 1 + last_layer / sum(lengths))


def mm_rate() -> float:
    """Operations a second of the best of several float32 2048³ products."""
    square, seconds = torch.randn(2048, 2048), []
    for _ in range(8):
        start = time.process_time()
        square @ square
        seconds.append(time.process_time() - start)
    return 2 * 2048**3 / min(seconds)


def ours(steps: int) -> dict[str, float]:
    """Train in a temporary folder; means over the steps behind the warm-up.

    The recorder keeps tokens at every tenth step, for which they are scored once more: the mean of
    ten steps charges each with its share, a median would hide it.
    """
    torch.set_num_threads(1)
    rate, meter = mm_rate(), Meter()
    # The loop's own clock by phase, and that of the environments, running on CPU seconds.
    clock = SimpleNamespace(perf_counter=time.process_time)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(running, "time", clock),
        patch.object(user_code, "perf_counter", time.process_time),
        patched_sampler(),
    ):
        make_model(Path(folder, "model"))
        config = make_config(Path(folder, "model"), WARM_UP + steps)
        trainer.train(config, Path(folder, "run"), watcher=meter)
    counted = meter.steps[WARM_UP:]
    mean = {name: statistics.mean(step[name] for step in counted) for name in counted[0]}
    lengths = meter.lengths[-EPISODES:]
    mean_length = statistics.mean(lengths)
    assert abs(mean_length / LENGTH - 1) <= 0.05, f"episodes of {mean_length} tokens"
    spent = mean["update_s"] * rate
    return {
        "tokens_per_cpu_s_rollout": SAMPLED / mean["rollout_s"],
        "tokens_per_cpu_s_step": SAMPLED / mean["step_s"],
        "mean_length": mean_length,
        **{name: mean[name] for name in sorted(mean)},
        "mm_gflops": rate / 1e9,
        "update_share_of_mm": operations(lengths) / spent,
        "update_share_of_mm_done": operations(lengths, meter.prompts[-EPISODES:]) / spent,
    }


def last_line(command: list[str], folder: str) -> dict[str, float]:
    """Run a program whose last line of output is JSON."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def beside(peer: Path, python: Path, steps: int) -> dict[str, float]:
    """Ours and the peer in turn; medians of both and their ratios."""
    mine, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            again = [sys.executable, os.path.abspath(__file__), "--json", "--steps", str(steps)]
            mine.append(last_line(again, folder))
            theirs.append(last_line([str(python), str(peer.absolute())], folder))
    result = {name: statistics.median(run[name] for run in mine) for name in mine[0]}
    for name in ("tokens_per_cpu_s_rollout", "tokens_per_cpu_s_step"):
        result[f"peer_{name}"] = statistics.median(run[name] for run in theirs)
        result[name.replace("tokens_per_cpu_s", "ratio")] = result[name] / result[f"peer_{name}"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps that are counted")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--peer", type=Path, help="the peer's script")
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable))
    args = parser.parse_args()
    steps = args.steps
    result = beside(args.peer, args.peer_python, steps) if args.peer else ours(steps)
    result = {name: float(f"{value:.4g}") for name, value in result.items()}
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:32} {value:>12g}")


if __name__ == "__main__":
    main()
