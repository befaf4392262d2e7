"""LoRA against training all weights, on the embedded models: success, memory, seconds a step.

    python benchmarks/lora.py                                    # Bandit and the still lake
    python benchmarks/lora.py bandit --ranks 0 8 --lr 5e-3 --seeds 5
    python benchmarks/lora.py --paths                            # the CPU's paths under LoRA

Rank 0 is the recipe as it is. α is the rank, as in the paper. Memory is exact: the bytes of weights
(the reference's and the critic's too), gradients and optimiser, once with the recipe's GRPO and
once with PPO, where LoRA saves two copies of the base. Seconds are CPU seconds on one thread.
Prints one JSON line a run, then a Markdown table.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from typing_extensions import override

import ragen
from ragen.config.reading import resolve
from ragen.core.errors import GuardStop
from ragen.core.statistics import wilson
from ragen.engines.local import LocalEngine
from ragen.evaluation.evaluation import evaluate_target
from ragen.evaluation.results import Evaluation
from ragen.models import fast_qwen2
from ragen.training.progress import Watcher
from ragen.training.running import make_engine

RATES = {0: None, 8: 5e-3, 64: 5e-4}
"""Learning rate by rank: the recipe's own for rank 0, the best of four on Bandit's seed 0 for 8, of
three on two seeds for 64."""
WARM_UP, PATH_STEPS = 2, 10
"""First steps whose seconds are not counted; steps that a path is measured over."""


class Meter(Watcher):
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = time.process_time()

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.process_time()
        self.seconds.append(now - self._since)
        self._since = now


def changes(rank: int, lr: float | None, **more: Any) -> dict[str, Any]:
    """What a run changes of its recipe."""
    adapters = {"lora.rank": rank, "lora.alpha": rank} if rank else {}
    rate = {} if lr is None else {"update.lr": lr}
    return {"threads": 1} | adapters | rate | {k.replace("__", "."): v for k, v in more.items()}


def trained(recipe: str, values: dict[str, Any], folder: Path) -> tuple[Evaluation, float]:
    """A whole run: how it ends, whoever ends it, and its median CPU seconds a step."""
    meter = Meter()
    try:
        after = ragen.train(recipe, values, out=folder, watcher=meter).evaluations.get("after")
    except GuardStop:  # a collapse is a result too
        after = None
    episodes = values["eval.episodes"]
    found = after or evaluate_target(str(folder), {"threads": 1}, episodes=max(1, episodes))[0]
    return found, statistics.median(meter.seconds[WARM_UP:])


def run(recipe: str, rank: int, lr: float | None, seed: int, episodes: int) -> dict[str, Any]:
    """One run: success after it on held-out levels, CPU seconds a step."""
    values = changes(rank, lr, seed=seed, eval__episodes=episodes, record__episodes_every=0)
    with tempfile.TemporaryDirectory() as folder:
        after, seconds = trained(recipe, values, Path(folder, "run"))
    return {
        "recipe": recipe,
        "rank": rank,
        "lr": resolve(recipe, values).update.lr,
        "seed": seed,
        "after": after.success,
        "step_cpu_s": round(seconds, 3),
        "episodes": episodes,
    }


def memory(recipe: str, rank: int, algorithm: str) -> dict[str, int]:
    """Bytes of weights, gradients and optimiser of a run after its first update."""
    more = {"algorithm": algorithm, "loss.kl": 1e-3} if algorithm else {}
    engine = make_engine(resolve(recipe, changes(rank, None) | more))
    assert isinstance(engine, LocalEngine)
    learner = engine.learner
    modules = [m for m in (learner.model, learner.critic, learner.reference) if m is not None]
    weights = {id(p): p for module in modules for p in module.parameters()}
    trained = {
        id(p): p
        for optimizer in learner.named_optimizers().values()
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    states = 0
    for optimizer in learner.named_optimizers().values():
        optimizer.step()
        states += sum(
            value.nbytes for state in optimizer.state.values() for value in state.values()
        )
    return {
        "weights": sum(p.nbytes for p in weights.values()),
        "gradients": sum(p.nbytes for p in trained.values()),
        "optimiser": states,
    }


def table(runs: list[dict[str, Any]]) -> str:
    """One row for each recipe, rank and learning rate; success pooled over the seeds."""
    lines = [
        "| recipe | trains | lr | success (95 %) | seeds | CPU s a step "
        "| MB with GRPO | MB with PPO |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((each["recipe"], each["rank"], each["lr"]) for each in runs):
        recipe, rank, lr = key
        mine = [each for each in runs if (each["recipe"], each["rank"], each["lr"]) == key]
        episodes = sum(each["episodes"] for each in mine)
        wins = round(sum(each["after"] * each["episodes"] for each in mine))
        interval = wilson(wins, episodes)
        grpo, ppo = (
            sum(memory(recipe, rank, algorithm).values()) / 1e6 for algorithm in ("", "starpo/ppo")
        )
        lines.append(
            f"| {recipe} | {f'LoRA, rank {rank}' if rank else 'all weights'} | {lr:g} "
            f"| **{wins / episodes:.1%}** ({interval.low:.1%} – {interval.high:.1%}) "
            f"| {', '.join(format(each['after'], '.1%') for each in mine)} "
            f"| {statistics.median(each['step_cpu_s'] for each in mine):.2f} "
            f"| {grpo:.2f} | {ppo:.2f} |"
        )
    return "\n".join(lines)


def paths(recipe: str) -> None:
    """CPU seconds a step: all weights, LoRA on the fast path, LoRA on the general one."""

    def seconds(rank: int) -> float:
        values = changes(rank, None, steps=PATH_STEPS, eval__episodes=1)
        with tempfile.TemporaryDirectory() as folder:
            return trained(recipe, values, Path(folder, "run"))[1]

    whole, fast = seconds(0), seconds(8)
    with patch.object(fast_qwen2, "supports", lambda _: False):
        general = seconds(8)
    print(f"{recipe}: all weights {whole:.3f} s, LoRA {fast:.3f} s, ", end="")
    print(f"LoRA through transformers and peft {general:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recipes", nargs="*", default=("bandit", "frozen-lake-still"))
    parser.add_argument("--ranks", type=int, nargs="+", default=sorted(RATES))
    parser.add_argument("--lr", type=float, nargs="+", help="instead of those found")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=512, help="held-out levels")
    parser.add_argument("--paths", action="store_true", help="measure the CPU's paths instead")
    args = parser.parse_args()
    if args.paths:
        for recipe in args.recipes:
            paths(recipe)
        return
    runs = []
    for recipe in args.recipes:
        for rank in args.ranks:
            for lr in args.lr or [RATES.get(rank, 5e-3)]:
                for seed in range(args.seeds):
                    runs.append(run(recipe, rank, lr, seed, args.episodes))
                    print(json.dumps(runs[-1]), flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
