"""The memory plan beside the peak of a whole run: both in bytes, run by run.

    python benchmarks/memory.py                  # all models that fit this machine, some minutes
    python benchmarks/memory.py --models 1M 100M --json

Each run trains a random model in a process of its own, for two updates whose episodes fill the
microbatches that the settings allow. The peak is the largest resident memory of that process. A
run whose plan is larger than the free memory is left out.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import step
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from typing_extensions import override

from ragen.config.config import Config
from ragen.config.reading import changed
from ragen.models import memory
from ragen.training import trainer

MODELS: dict[str, Any] = {
    "1M": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=512,
            max_position_embeddings=2**16,
        )
    ),
    "100M": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            num_hidden_layers=20,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            tie_word_embeddings=True,
        )
    ),
    "0.5B": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151_936,
            hidden_size=896,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            intermediate_size=4864,
            tie_word_embeddings=True,
        )
    ),
}
"""Random models of the shapes of RAGEN's own, of SmolLM2 and of Qwen2.5."""
MODES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm": "starpo/ppo", "advantage.name": "gae"},
    "grpo, LoRA": {"lora.rank": 16},
    "ppo, LoRA": {"algorithm": "starpo/ppo", "advantage.name": "gae", "lora.rank": 16},
}
SETTINGS = {
    "env.name": f"{__file__}:Apart",
    "env.max_turns": 1,
    "rollout.num_groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 96,
    "rollout.slots": 4,
    "update.epochs": 2,
    "update.minibatch_episodes": 4,
    "update.microbatch_tokens": 768,
    "model.max_length": 256,
}

SMALLER = {"0.5B": {"update.microbatch_tokens": 384}}
"""Changes with which the largest runs fit 23 GiB."""


class Apart(step.Lake):
    """An environment in which no two episodes share a prompt, which would save activations."""

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return f"{(options or {}).get('noise_seed')}\n{observation}", info


def config_of(model: Path, changes: dict[str, Any]) -> Config:
    """The settings of a run with a model and a mode."""
    base = step.make_config(model, 1)
    return changed(base, SETTINGS | changes)


def run(model: Path, changes: dict[str, Any]) -> dict[str, int]:
    """Train in this process, which must be a fresh one; the plan's total and the peak."""
    config = config_of(model, changes)
    (planned,) = memory.plans(config)
    with tempfile.TemporaryDirectory() as folder, step.patched_sampler():
        trainer.train(config, Path(folder, "run"))
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    parts = {
        name: planned.of(name)
        for name in (
            "weights",
            "gradients",
            "optimiser",
            "critic",
            "cache",
            "activations",
            "logits",
        )
    }
    return {"plan": planned.total, "peak": peak, **parts}


def in_a_process(model: Path, changes: dict[str, Any]) -> dict[str, int]:
    """`run` in a fresh process."""
    command = [sys.executable, os.path.abspath(__file__), "--run", str(model), json.dumps(changes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", action="store_true", help="print one line of JSON a run")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(Path(args.run[0]), json.loads(args.run[1]))))
        return
    if not args.json:
        print(f"{'model':6} {'dtype':9} {'mode':12} {'plan':>8} {'peak':>8} {'plan / peak':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            path = Path(folder, name)
            step.make_model(path, MODELS[name]())
            for dtype, mode in product(args.dtypes, args.modes):
                changes = MODES[mode] | SMALLER.get(name, {}) | {"model.dtype": dtype}
                found = {"model": name, "dtype": dtype, "mode": mode}
                found |= compared(path, changes)
                print(json.dumps(found) if args.json else row(found), flush=True)


def compared(model: Path, changes: dict[str, Any]) -> dict[str, int]:
    """`run` in a fresh process; without a peak if it would not fit."""
    (planned,) = memory.plans(config_of(model, changes))
    if planned.available is not None and planned.needed > planned.available:
        return {"plan": planned.total}
    return in_a_process(model, changes)


def row(found: dict[str, Any]) -> str:
    """A line of the table, in MiB."""
    cells = [f"{found['model']:6} {found['dtype']:9} {found['mode']:12}"]
    cells += [f"{found[key] / 2**20:8,.0f}" for key in ("plan", "peak") if key in found]
    cells.append(f"{found['plan'] / found['peak']:12.2f}" if "peak" in found else "left out")
    return " ".join(cells)


if __name__ == "__main__":
    main()
