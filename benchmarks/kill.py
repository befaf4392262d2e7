"""Is a run that was killed and resumed the run that was not? Counted over random moments.

    python benchmarks/kill.py 30

Each trial trains an embedded model in a process of its own, by turns with each of `CONFIGS`: GRPO
with a filter, PPO with its critic, a rollback of the guard on FrozenLake with thoughts, Sokoban in
isolated workers, GSPO with LoRA, and GiGPO in bfloat16.
The process gets SIGKILL at a random moment and is resumed, and so on, at most three times; then it
is left to its end. Compared with a run that nobody killed: all rows of the database (those about
seconds excepted), and every tensor of the last checkpoint, bit for bit.
Prints a line a trial and at the end one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.core.errors import RagenError
from ragen.engines.local import LocalEngine
from ragen.storage.checkpoint import newest_intact
from ragen.storage.database import DATABASE
from ragen.training import loop, running
from ragen.training.trainer import resume, train

MOST_KILLS = 3
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "steps": 4,
    "rollout.num_groups": 4,
    "rollout.group_size": 8,
    "update.minibatch_episodes": 8,
    "update.epochs": 2,
    "eval.every": 2,
    "eval.episodes": 8,
    "checkpoint.every": 1,
    "record.tokens_every": 1,
}
DETECTOR = """
from ragen.diagnostics.detectors import Detection


def third_step(history):
    steps = history.get("reward/mean", {})
    return Detection(2, 1.0, 0.0) if max(steps, default=0) == 3 else None
"""
"""A detector that fires after step 3; the rollback to step 1 gives it a period of grace."""

FEW = {"rollout.num_groups": 2, "rollout.group_size": 4, "rollout.max_tokens": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("bandit", {"algorithm": "starpo-s/grpo", "filter.value": 0.5}),
    "ppo": ("bandit", {"algorithm": "starpo/ppo", "update.lr_end": 0.1}),
    "rollback": ("frozen-lake-still", FEW | {"diagnose.information_every": 2}),
    "isolated": ("sokoban", FEW | {"env.isolate": True, "env.max_turns": 2, "steps": 3}),
    "lora": ("bandit", {"algorithm": "gspo", "lora.rank": 4}),
    "bfloat16": ("frozen-lake-still", FEW | {"algorithm": "gigpo", "model.dtype": "bfloat16"}),
}
"""A recipe and its changes, besides `SETTINGS`."""

IDENTICAL = "identical"
PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (loop, "next_groups"),
    "score": (loop, "make_batch"),
    "update": (LocalEngine, "update"),
    "record": (loop, "record_step"),
    "checkpoint": (loop, "save"),
    "evaluation": (running, "evaluate_envs"),
}
PHASES = ("between", *PLACES)
here = mmap.mmap(-1, 1)
"""The phase that the run is in, told across processes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    for phase, (owner, name) in PLACES.items():
        setattr(owner, name, watched(phase, getattr(owner, name)))
    chooser = random.Random(args.seed)
    outcomes: list[str] = []
    killed_in: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "detector.py").write_text(DETECTOR)
        configs = {name: config_of(name, Path(scratch)) for name in CONFIGS}
        whole: dict[str, tuple[dict[str, Any], float]] = {}
        for trial in range(args.trials):
            name = list(CONFIGS)[trial % len(CONFIGS)]
            if name not in whole:
                whole[name] = uninterrupted(configs[name], Path(scratch) / name)
            wanted, seconds = whole[name]
            run = Path(scratch) / "run"
            places = kill_and_resume(configs[name], run, seconds, chooser)
            outcomes.append(difference(wanted, contents(run)))
            killed_in.update(places)
            print(f"{trial + 1:3} {name:10} killed {', '.join(places)}: {outcomes[-1]}", flush=True)
            shutil.rmtree(run)
    found = {"trials": len(outcomes), IDENTICAL: outcomes.count(IDENTICAL)}
    print(json.dumps(found | {"kills": sum(killed_in.values()), "in": dict(killed_in)}))


def config_of(name: str, scratch: Path) -> Config:
    recipe, changes = CONFIGS[name]
    if name == "rollback":
        changes = changes | {
            "guard.responses": {f"{scratch / 'detector.py'}:third_step": "rollback"}
        }
    return resolve(recipe, SETTINGS | changes)


def uninterrupted(config: Config, run: Path) -> tuple[dict[str, Any], float]:
    """What a run comes to, and the seconds it takes."""
    start = time.perf_counter()
    pid = in_a_process(lambda: train(config, run))
    assert os.waitpid(pid, 0)[1] == 0
    return contents(run), time.perf_counter() - start


def in_a_process(work: Callable[[], object]) -> int:
    """A copy of this process: it has the libraries loaded, which would take most of the time."""
    here[0] = 0
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return pid


def kill_and_resume(config: Config, run: Path, seconds: float, chooser: random.Random) -> list[str]:
    """Run to the end through kills at random moments; returns the phases they fell into."""
    places: list[str] = []
    while True:
        pid = in_a_process(lambda: go_on(config, run))
        if len(places) < MOST_KILLS:
            time.sleep(chooser.uniform(0, seconds))
            place = PHASES[here[0]]
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if status == 0:
            return places
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the run failed by itself"
        places.append(place)


def go_on(config: Config, run: Path) -> None:
    """Resume, or begin anew where the kill came before the first checkpoint."""
    try:
        newest_intact(run)
    except RagenError:
        shutil.rmtree(run, ignore_errors=True)
        train(config, run)
    else:
        resume(run)


def watched(phase: str, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The same, leaving word of where the process is."""

    async def then(*arguments: Any, **named: Any) -> Any:
        before, here[0] = here[0], PHASES.index(phase)
        try:
            return await work(*arguments, **named)
        finally:
            here[0] = before

    return then


def contents(run: Path) -> dict[str, Any]:
    """All that a run came to, except for the time it took and what happened on its way."""
    checkpoint, state, _ = newest_intact(run)
    del state["loop"]["seconds"]
    tables = {
        "metrics": "SELECT * FROM metrics WHERE name NOT LIKE 'time/%'",
        "episodes": "SELECT * FROM episodes",
        "turns": "SELECT * FROM turns",
        "tokens": "SELECT * FROM tokens",
        "samples": "SELECT * FROM samples",
        "cross-scores": "SELECT * FROM cross_scores",
    }
    with closing(sqlite3.connect(run / DATABASE)) as connection:
        rows = {name: connection.execute(query).fetchall() for name, query in tables.items()}
        records = connection.execute("SELECT record FROM evaluations ORDER BY id").fetchall()
    evaluations = [json.loads(record) for (record,) in records]
    for each in evaluations:
        del each["seconds"], each["target"]
    weights = {
        path.name: hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.glob("*.safetensors"))
    }
    return rows | {"evaluations": evaluations, "weights": weights, "state": state}


def difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    """``identical``, or the parts that differ."""
    parts = [name for name in wanted if wanted[name] != found[name]]
    return f"DIFFERS in {', '.join(parts)}" if parts else IDENTICAL


if __name__ == "__main__":
    main()
