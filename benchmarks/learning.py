"""What the recipes reach: each trained from its embedded model, several seeds, on held-out levels.

    python benchmarks/learning.py                                  # four environments, three seeds
    python benchmarks/learning.py collapse collapse-s --seeds 5    # collapse in a minute
    python benchmarks/learning.py collapse --set advantage.name=dr_grpo --name "no std"
    python benchmarks/learning.py sokoban --set reward.terms.grounding=0.1 --name "true facts"
    python benchmarks/learning.py smol/bandit smol/bandit-rev --episodes 256  # a real model

Prints one JSON line a run and at the end a Markdown table of medians; `--out` keeps the runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ragen
from ragen.config.keys import canonical_key, parse_value
from ragen.storage.reader import read_metrics

ENVS = ("bandit", "frozen-lake-still", "frozen-lake", "sokoban")
COLUMNS = ("before", "before_greedy", "after", "after_greedy", "random", "optimal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recipes", nargs="*", default=ENVS)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from --first")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--episodes", type=int, default=512, help="held-out levels")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", help="what the variant is called in the table")
    parser.add_argument("--out", type=Path, help="where the runs are kept")
    args = parser.parse_args()
    pairs = (text.split("=", 1) for text in args.set)
    changes = {canonical_key(k): parse_value(canonical_key(k), v) for k, v in pairs}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for recipe in args.recipes:
            runs = []
            for seed in range(args.first, args.first + args.seeds):
                values = {"seed": seed, "eval.episodes": args.episodes, "threads": args.threads}
                name = (args.name or recipe).replace("/", "-")
                folder = (args.out or Path(scratch)) / f"{name}-{seed}"
                runs.append(run(recipe, values | changes, folder))
                print(json.dumps(runs[-1]), flush=True)
            rows.append((args.name or recipe, runs))
    print(table(rows))


def run(recipe: str, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run: success before and after, seconds, and how it ended."""
    cpu = time.process_time()
    result = ragen.train(recipe, changes, out=folder)
    cpu = time.process_time() - cpu
    metrics = read_metrics(folder)
    training = sum(metrics["time/step_s"].values())
    return {
        "recipe": recipe,
        "seed": changes["seed"],
        **{name: each.success for name, each in result.evaluations.items()},
        "after_low": result.after.success_low,
        "after_high": result.after.success_high,
        "random": result.after.random,
        "optimal": result.after.optimal,
        "training_s": round(training, 1),
        "cpu_s": round(cpu, 1),
        "reward_std_end": last(metrics["reward/std_in_group"]),
        "flat_groups_end": last(metrics["reward/flat_group_fraction"]),
        **{
            f"{measure}_{end}": of(metrics[f"thought/{measure}_fraction"])
            for measure in ("hallucinated", "consistent", "read")
            for end, of in (("start", first), ("end", last))
            if f"thought/{measure}_fraction" in metrics
        },
        "gradient_norm_max": max(metrics["gradient/policy_norm_max"].values()),
        "signs": [f"{sign.name}@{sign.step}" for sign in result.signs],
    }


def first(series: dict[int, float], window: int = 5) -> float:
    """Mean of a metric's first steps."""
    return round(statistics.fmean(list(series.values())[:window]), 4)


def last(series: dict[int, float], window: int = 5) -> float:
    """Mean of a metric's last steps."""
    return round(statistics.fmean(list(series.values())[-window:]), 4)


def table(rows: list[tuple[str, list[dict[str, Any]]]]) -> str:
    """Medians over the seeds, the seeds' own values for what counts, in per cent."""
    lines = [
        "| recipe | random / optimal | base T=1 (greedy) | trained T=1, median | seeds "
        "| trained greedy | false facts, first → last 5 steps | training s | reward std "
        "| largest gradient norm |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in rows:

        def middle(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return statistics.median(each[key] for each in runs)

        seeds = ", ".join(
            f"{each['after']:.1%} [{100 * each['after_low']:.1f}, {100 * each['after_high']:.1f}]"
            for each in runs
        )
        false = "–"
        if "hallucinated_end" in runs[0]:
            false = f"{middle('hallucinated_start'):.1%} → {middle('hallucinated_end'):.1%}"
        optimal = f"{middle('optimal'):.1%}" if runs[0]["optimal"] is not None else "?"
        lines.append(
            f"| {name} | {middle('random'):.1%} / {optimal} "
            f"| {middle('before'):.1%} ({middle('before_greedy'):.1%}) "
            f"| **{middle('after'):.1%}** | {seeds} | {middle('after_greedy'):.1%} | {false} "
            f"| {middle('training_s'):.0f} | {middle('reward_std_end'):.3f} "
            f"| {middle('gradient_norm_max'):.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
