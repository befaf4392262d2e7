"""What watching costs: CPU seconds of the signals, of information and of gradient analysis.

Trains a recipe for a few steps on the real path and charges every call that makes, averages or
writes a signal. (Entropy is not among them: it falls out of the softmax that the loss needs.) The
closer looks have phases of their own; here each is taken at its default schedule, gradients, which
are off by default, at that of information.

    python benchmarks/signals.py [RECIPE] [--steps 10] [--json]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing_extensions import override

from ragen.config.reading import resolve
from ragen.engines import learner
from ragen.storage.recorder import Recorder
from ragen.training import loop, running, trainer
from ragen.training.progress import Watcher

EVERY = 5
SIGNALS: tuple[tuple[Any, str], ...] = (
    (loop, "summarize"),
    (loop, "batch_metrics"),
    (loop, "count_step"),
    (loop, "smooth"),
    (loop, "averaged"),
    (learner, "mismatch_kl"),
    (learner, "read"),
    (Recorder, "log"),
    (Recorder, "commit"),
)
"""Where signals are made and written; `commit` writes the episodes with them, so this is an upper
bound."""


class Meter(Watcher):
    """The metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))


def charged(work: Callable[..., Any], bill: list[float]) -> Callable[..., Any]:
    """`work`, its CPU seconds added to the bill."""

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.process_time()
        try:
            return work(*arguments, **named)
        finally:
            bill.append(time.process_time() - start)

    return timed


def measure(recipe: str, steps: int) -> dict[str, float]:
    config = resolve(
        recipe,
        {
            "steps": steps,
            "threads": 1,
            "eval.episodes": 0,
            "checkpoint.every": 0,
            "diagnose.information_every": EVERY,
            "diagnose.gradients_every": EVERY,
        },
    )
    meter, bill = Meter(), list[float]()
    clock = SimpleNamespace(perf_counter=time.process_time)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        patches.enter_context(patch.object(running, "time", clock))
        for place, name in SIGNALS:
            work = charged(getattr(place, name), bill)
            patches.enter_context(patch.object(place, name, work))
        trainer.train(config, Path(folder, "run"), watcher=meter)
    looks = ("time/information_s", "time/gradients_s")
    plain_s = statistics.mean(
        step["time/step_s"] - sum(step.get(look, 0.0) for look in looks) for step in meter.steps
    )
    found = {"step_s": plain_s, "signals_s": sum(bill) / steps}
    found["signals_percent"] = 100 * found["signals_s"] / plain_s
    for look in looks:
        name = look.removeprefix("time/").removesuffix("_s")
        found[f"{name}_s"] = statistics.mean(s[look] for s in meter.steps if look in s)
        found[f"{name}_percent_at_every_{EVERY}"] = 100 * found[f"{name}_s"] / EVERY / plain_s
    for sampling in ("first", "any"):
        for name in ("thoughts", "prompts"):
            metric = f"information/{sampling}/{name}"
            found[metric] = statistics.mean(s[metric] for s in meter.steps if metric in s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="frozen-lake-still")
    parser.add_argument("--steps", type=int, default=10, help="a multiple of 5 is fair to all")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    result = {
        name: float(f"{value:.4g}") for name, value in measure(args.recipe, args.steps).items()
    }
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:36} {value:>12g}")


if __name__ == "__main__":
    main()
