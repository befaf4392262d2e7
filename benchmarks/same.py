"""Do two checkouts of RAGEN compute the same numbers? Five runs in each, compared bit for bit.

    git worktree add /tmp/before COMMIT && python benchmarks/same.py /tmp/before .

Each checkout trains Bandit with GRPO, FrozenLake with PPO and its critic, Sokoban with StarPO-S,
Bandit with LoRA and GSPO, and FrozenLake with GiGPO in bfloat16. Compared are all metrics but those
of time, episodes, turns, trained samples and cross-scores, and every tensor of the last checkpoint.
A column that only one checkout has is named and left out. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

FEW = {"threads": 1, "steps": 3, "rollout.num_groups": 4, "rollout.group_size": 4}
FEW |= {"eval.episodes": 8, "record.tokens_every": 1, "update.minibatch_episodes": 8}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "bandit, grpo": ("bandit", {"algorithm": "starpo/grpo"}),
    "lake, ppo": ("frozen-lake", {"algorithm": "starpo/ppo", "update.epochs": 2}),
    "sokoban, starpo-s": ("sokoban", {"algorithm": "starpo-s/grpo", "filter.value": 0.5}),
    "bandit, gspo with lora": ("bandit", {"algorithm": "gspo", "lora.rank": 4}),
    "lake, gigpo in bfloat16": (
        "frozen-lake-still",
        {"algorithm": "gigpo", "model.dtype": "bfloat16"},
    ),
}
"""A recipe and its changes, in addition to `FEW`."""
PROGRAM = """
import json, sys
from ragen import train
recipe, keys, folder = json.loads(sys.argv[1])
train(recipe, keys, out=folder)
"""
QUERIES = {
    "metrics": "FROM metrics WHERE name NOT LIKE 'time/%' AND name NOT LIKE '%_per_s'",
    "episodes": "FROM episodes",
    "turns": "FROM turns",
    "samples": "FROM samples",
    "cross_scores": "FROM cross_scores",
}
CLOCK = {"completion_s"}
"""Columns that hold seconds."""


def run(checkout: Path, recipe: str, keys: dict[str, Any], folder: Path) -> None:
    """Train in a process that imports RAGEN from a checkout."""
    arguments = json.dumps([recipe, keys, str(folder)])
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
    command = [sys.executable, "-c", PROGRAM, arguments]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)


def columns(run: Path, table: str) -> list[str]:
    with closing(sqlite3.connect(run / "run.sqlite")) as connection:
        return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def rows(run: Path, names: list[str], query: str) -> list[tuple[Any, ...]]:
    chosen = ", ".join(f'"{name}"' for name in names)
    with closing(sqlite3.connect(run / "run.sqlite")) as connection:
        return connection.execute(f"SELECT {chosen} {query}").fetchall()


def tensors(run: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, as bytes."""
    last = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    return {
        f"{file.name}:{name}": bytes(tensor.untyped_storage())
        for file in last.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two runs, one line each."""
    found = []
    for table, query in QUERIES.items():
        ours, theirs = columns(one, table), columns(other, table)
        if alone := sorted({*ours} ^ {*theirs}):
            print(f"  {table}: left out, since only one checkout has them: {', '.join(alone)}")
        common = [name for name in ours if name in theirs and name not in CLOCK]
        if rows(one, common, query) != rows(other, common, query):
            found.append(table)
    if tensors(one) != tensors(other):
        found.append("the last checkpoint")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    args = parser.parse_args()
    failed = False
    for name, (recipe, changes) in RUNS.items():
        with tempfile.TemporaryDirectory() as place:
            folders = [Path(place) / "before", Path(place) / "after"]
            for checkout, folder in zip((args.before, args.after), folders, strict=True):
                run(checkout, recipe, FEW | changes, folder)
            found = differences(*folders)
        print(f"{name}: {'different: ' + ', '.join(found) if found else 'the same'}", flush=True)
        failed = failed or bool(found)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
