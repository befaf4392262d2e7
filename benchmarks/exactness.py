"""What the comparison of sampled and trained tokens costs, as a share of a run's steps.

    python benchmarks/exactness.py                     # three environments, four steps each
    python benchmarks/exactness.py sokoban --steps 10

Times the hashes taken at the sampler and the checks before each update in a real training run and
prints one JSON line a recipe.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragen.config.reading import resolve
from ragen.engines import exactness, learner, sampling
from ragen.storage.reader import read_metrics
from ragen.training.trainer import train

PLACES = {"sampler_s": (sampling, "fingerprint"), "batch_s": (exactness, "verify")}
PLACES["update_s"] = (learner, "verify")
SETTINGS = {"threads": 1, "eval.episodes": 0, "checkpoint.every": 0, "record.tokens_every": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recipes", nargs="*", default=("bandit", "frozen-lake-still", "sokoban"))
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    spent: dict[str, float] = dict.fromkeys(PLACES, 0.0)
    for name, (owner, function) in PLACES.items():
        setattr(owner, function, timed(getattr(owner, function), name, spent))
    for recipe in args.recipes:
        spent.update(dict.fromkeys(PLACES, 0.0))
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch) / "run"
            train(resolve(recipe, SETTINGS | {"steps": args.steps}), run)
            metrics = read_metrics(run)
        step_s = sum(metrics["time/step_s"].values())
        found = {
            "recipe": recipe,
            "steps": args.steps,
            "tokens_sampled": sum(metrics["tokens/sampled"].values()),
            "tokens_checked": sum(metrics["exactness/tokens_checked"].values()),
            "mismatch_max_abs": max(metrics["mismatch/max_abs"].values()),
            "step_s": round(step_s, 3),
            **{name: round(seconds, 4) for name, seconds in sorted(spent.items())},
            "share": round(sum(spent.values()) / step_s, 5),
        }
        print(json.dumps(found), flush=True)


def timed(work: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """The same function, its seconds added up under `name`."""

    def then(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            spent[name] += time.perf_counter() - start

    return then


if __name__ == "__main__":
    main()
