"""How often the guard's detectors fire where nothing is wrong.

    python benchmarks/false_alarms.py --runs 20 --out runs/healthy    # trains them
    python benchmarks/false_alarms.py --read runs/healthy             # only counts
    python benchmarks/false_alarms.py --recipe frozen-lake-still --out runs/healthy-lake

Healthy runs are those of the recipe, one seed each, evaluated every five steps. A run that ends
below the success in `HEALTHY` is named and left out of both counts: it is not healthy, so that an
alarm in it is not false. `mi_drop` asks for four distinct prompts, which only the lake has.

Histories are also drawn from them by a block bootstrap: ten steps at a time come from a run chosen
at random, at the same steps, all metrics together. So every curve keeps its course over training
and its noise within a block; where blocks meet, it jumps more than a run would. The intervals of
these draws are Wilson's too, and too narrow, since only the runs are independent.

Prints one JSON line and a Markdown table: runs with an alarm, per 100, by detector.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import ragen
from ragen.core.statistics import wilson
from ragen.diagnostics.detectors import DETECTORS, EVALUATED, History
from ragen.diagnostics.guard import Alarm, GuardState, raise_alarms, read_history

BLOCK = 10
HEALTHY = {"bandit": 0.9, "frozen-lake-still": 0.7}
"""Success at the end, by recipe."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--recipe", choices=HEALTHY, default="bandit")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/healthy"))
    parser.add_argument("--read", type=Path, help="count in a folder of runs, train none")
    parser.add_argument("--draws", type=int, default=1000)
    args = parser.parse_args()
    folder = args.read or train(args.recipe, args.out, args.runs)
    least = HEALTHY[args.recipe]
    runs = {path.name: read_history(path, 1.0) for path in sorted(folder.iterdir())}
    final = {name: list(history[EVALUATED].values())[-1] for name, history in runs.items()}
    healthy = [runs[name] for name in runs if final[name] >= least]
    counts = {
        "runs": alarms_in(healthy),
        "bootstrap": alarms_in(bootstrap(healthy, args.draws)),
    }
    sizes = {"runs": len(healthy), "bootstrap": args.draws}
    left_out = {name: share for name, share in final.items() if share < least}
    print(json.dumps({"of": sizes, "alarms": counts, "left_out": left_out}))
    for name in left_out:
        print(f"left out: {name}, alarms {[str(alarm) for alarm in replay(runs[name])]}")
    print(table(counts, sizes))


def train(recipe: str, folder: Path, runs: int) -> Path:
    """Train what is not there yet."""
    for seed in range(runs):
        if not (folder / f"seed-{seed}").exists():
            values = {
                "seed": seed,
                "threads": 1,
                "eval.every": 5,
                "eval.episodes": 128,
                "record.episodes_every": 0,
                "record.tokens_every": 0,
            }
            ragen.train(recipe, values, out=folder / f"seed-{seed}")
    return folder


def bootstrap(histories: Sequence[History], draws: int) -> list[History]:
    generator = np.random.Generator(np.random.PCG64(0))
    length = max(step for history in histories for step in history[EVALUATED])
    drawn = []
    for _ in range(draws):
        source = generator.integers(len(histories), size=length // BLOCK + 1)
        drawn.append(
            {
                name: {
                    step: histories[source[step // BLOCK]][name][step]
                    for step in histories[0][name]
                    if step in histories[source[step // BLOCK]][name]
                }
                for name in histories[0]
            }
        )
    return drawn


def replay(history: History) -> list[Alarm]:
    """The alarms that a run's metrics raise, step by step."""
    state, alarms = GuardState(), []
    past: dict[str, dict[int, float]] = {name: {} for name in history}
    last = max((step for series in history.values() for step in series), default=0)
    for now in range(last + 1):
        for name, series in history.items():
            if now in series:
                past[name][now] = series[now]
        alarms += raise_alarms(past, now, state)
    return alarms


def alarms_in(histories: Sequence[History]) -> dict[str, int]:
    """Histories in which each detector fired at least once, and in which any did."""
    fired = [{alarm.detector for alarm in replay(history)} for history in histories]
    counted = Counter(name for names in fired for name in names)
    return {name: counted[name] for name in DETECTORS} | {"any": sum(map(bool, fired))}


def table(counts: dict[str, dict[str, int]], sizes: dict[str, int]) -> str:
    heads = [f"{name} ({size})" for name, size in sizes.items()]
    lines = [f"| detector | {' | '.join(heads)} |", "|---|---|---|"]
    for name in counts["runs"]:
        cells = []
        for source, size in sizes.items():
            rate = wilson(counts[source][name], size)
            cells.append(f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
