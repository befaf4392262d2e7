"""Is a run that was killed and resumed the run that was not? Counted over random moments.

    python benchmarks/kill.py 30
    python benchmarks/kill.py --processes 2 30
    python benchmarks/kill.py --only waiting 30
    python benchmarks/kill.py --ray 10

Each trial trains an embedded model in a process of its own, by turns with each of `CONFIGS`: GRPO
with a filter, PPO with its critic, a rollback of the guard on FrozenLake with thoughts, Sokoban in
isolated workers, GSPO with LoRA, GiGPO in bfloat16, and GRPO where the environment waits.
The process gets SIGKILL at a random moment and is resumed, and so on, at most three times; then it
is left to its end. Compared with a run that nobody killed: all rows of the database (those about
seconds excepted), and every tensor of the last checkpoint, bit for bit.
Prints a line a trial and at the end one JSON line. With ``--processes`` the victim is one of them.

With ``--ray`` one run, of a learner and two samplers on a Ray cluster of three nodes, loses that
many of `VICTIMS` at random moments. A lost node comes back, and a driver by ``ragen resume``.
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
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.engines.local import LocalEngine
from ragen.models.names import base_folder
from ragen.settings.resolve import resolve
from ragen.storage.checkpoint import newest_intact
from ragen.storage.database import DATABASE
from ragen.storage.reader import read_events, read_metrics
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

ARMS = Path(__file__).parents[1] / "tests" / "waiting_envs.py:Arms"
FEW = {"rollout.num_groups": 2, "rollout.group_size": 4, "rollout.max_tokens": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("bandit", {"algorithm": "starpo-s/grpo", "filter.value": 0.5}),
    "ppo": ("bandit", {"algorithm": "starpo/ppo", "update.lr_end": 0.1}),
    "rollback": ("frozen-lake-still", FEW | {"diagnose.information_every": 2}),
    "isolated": ("sokoban", FEW | {"env.isolate": True, "env.max_turns": 2, "steps": 3}),
    "lora": ("bandit", {"algorithm": "gspo", "lora.rank": 4}),
    "bfloat16": ("frozen-lake-still", FEW | {"algorithm": "gigpo", "model.dtype": "bfloat16"}),
    "waiting": ("bandit", FEW | {"rollout.slots": 2, "eval.episodes": 2, "env.name": str(ARMS)}),
}
"""A recipe and its changes, besides `SETTINGS`."""

RAY: dict[str, Any] = {"engine.name": "ray", "engine.samplers": 2, "steps": 60, "eval.every": 0}
VICTIMS = ("learner", "sampler", "node", "driver")

IDENTICAL = "identical"
PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (loop, "play_step"),
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
    parser.add_argument("trials", type=int, nargs="?", default=30)
    parser.add_argument("--ray", type=int, default=0, help="kills in one run on Ray")
    parser.add_argument("--processes", type=int, default=1, help="of the engine")
    parser.add_argument("--only", choices=CONFIGS, help="one of the configs")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    if args.ray:
        with tempfile.TemporaryDirectory() as scratch:
            return kill_on_ray(args.ray, random.Random(args.seed), Path(scratch))
    del sys.modules["__main__"].__file__  # or each isolated worker would import torch with it
    for phase, (owner, name) in PLACES.items():
        setattr(owner, name, watched(phase, getattr(owner, name)))
    chooser = random.Random(args.seed)
    outcomes: list[str] = []
    killed_in: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "detector.py").write_text(DETECTOR)
        SETTINGS["engine.processes"] = args.processes
        names = [args.only] if args.only else list(CONFIGS)
        configs = {name: config_of(name, Path(scratch)) for name in names}
        whole: dict[str, tuple[dict[str, Any], float]] = {}
        for trial in range(args.trials):
            name = names[trial % len(names)]
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
    if name == "waiting":
        changes = changes | {"model.path": str(base_folder("bandit"))}
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
    pid, started = in_a_process(lambda: go_on(config, run)), dict[int, str]()
    while True:
        place = ""
        if len(places) < MOST_KILLS:
            time.sleep(chooser.uniform(0, seconds))
            place, started = PHASES[here[0]], below(pid)
            victim = chooser.choice([pid, *(p for p in started if "child_host" in started[p])])
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            if victim != pid:
                places.append(f"{place} of a child")
                continue
        status = os.waitpid(pid, 0)[1]
        if status == 0:
            return places
        was_killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert was_killed or places[-1] == "between of a child", "the run failed by itself"
        places += [place] if was_killed else []  # else a child was killed before the run began
        for _ in range(100):
            left = below(0).keys() & started
            time.sleep(0.1 if left else 0)
        assert not left, f"processes are left: {[started[each] for each in left]}"
        pid = in_a_process(lambda: go_on(config, run))


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


def kill_on_ray(kills: int, chooser: random.Random, scratch: Path) -> None:
    from ray.cluster_utils import Cluster

    of_head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=of_head)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    settings = SETTINGS | RAY
    os.environ["RAY_ADDRESS"] = cluster.address
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    whole, run = scratch / "whole", scratch / "run"
    assert ragen("train", "bandit", *options, "--out", whole).wait() == 0
    driver = ragen("train", "bandit", *options, "--out", run)
    wait_for_step(run, driver, 0)
    killed: Counter[str] = Counter()
    for number in range(1, kills + 1):
        time.sleep(chooser.uniform(0, 3))
        victim, step, known = chooser.choice(VICTIMS), last_step(run), len(recoveries(run))
        start = time.monotonic()
        if victim == "driver":
            driver.kill()
            driver.wait()
            driver = ragen("resume", run)
        elif victim == "node":
            cluster.remove_node(nodes.pop(chooser.randrange(3)), allow_graceful=False)
            nodes.append(cluster.add_node(num_cpus=1))
        else:
            title, every = f"ray::{victim.title()}Host", below(os.getpid())
            hosts = [pid for pid in every if every[pid].startswith(title)]
            os.kill(chooser.choice(hosts), signal.SIGKILL)
        wait_for_step(run, driver, known + 1)
        seconds, killed[victim] = time.monotonic() - start, killed[victim] + 1
        texts = "; ".join(each["text"] for each in recoveries(run)[known:])
        print(f"{number:3} {victim:7} after step {step}: {texts} ({seconds:.0f} s)", flush=True)
    assert driver.wait() == 0
    cluster.shutdown()
    wanted, found = contents(whole), contents(run)
    for each in (wanted, found):  # the idle shares of the processes are about seconds, too
        each["metrics"] = [row for row in each["metrics"] if "idle_fraction" not in row[2]]
        averages = each["state"]["loop"]["averages"]
        each["state"]["loop"]["averages"] = {
            name: value for name, value in averages.items() if "idle_fraction" not in name
        }
    episodes = Counter(row[1:6] for row in found["episodes"])  # their steps and places
    results = {
        "kills": dict(killed),
        "recoveries": len(recoveries(run)),
        "steps": len({row[1] for row in found["metrics"]} - {0}),
        "episodes": len(episodes),
        "counted twice": sum(number > 1 for number in episodes.values()),
        "success": [each["success"] for each in found["evaluations"]],
        "run": difference(wanted, found),
    }
    print(json.dumps(results))
    assert results["steps"] == RAY["steps"] and results["recoveries"] == kills
    assert results["run"] == IDENTICAL and not results["counted twice"]
    assert found["evaluations"][-1]["success"] == 1.0


def ragen(*arguments: str | Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ragen", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_step(run: Path, driver: subprocess.Popen[bytes], number: int) -> None:
    """Wait for the first step after this recovery."""
    while len(found := recoveries(run)) < number or last_step(run) <= back_to(found):
        assert driver.poll() is None, f"the run ended by itself, with exit code {driver.poll()}"
        time.sleep(0.1)


def recoveries(run: Path) -> list[dict[str, Any]]:
    """The events of new engines and of resumes."""
    events = read_events(run) if (run / DATABASE).exists() else []
    return [each for each in events if each["kind"] == "resume" or "seconds" in each["data"]]


def back_to(found: list[dict[str, Any]]) -> int:
    """The step that the last recovery went back to."""
    return found[-1]["data"].get("to", found[-1]["step"]) if found else 0


def last_step(run: Path) -> int:
    found = read_metrics(run) if (run / DATABASE).exists() else {}
    return max(found.get("reward/mean", {}), default=0)


def below(parent: int) -> dict[int, str]:
    """The processes that a process has started, directly or not, with their commands."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    found = {int(line.split()[0]): line.split(maxsplit=2) for line in listed.stdout.splitlines()}

    def is_below(pid: int) -> bool:
        return pid in found and (int(found[pid][1]) == parent or is_below(int(found[pid][1])))

    return {pid: found[pid][2] for pid in found if is_below(pid)}


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
