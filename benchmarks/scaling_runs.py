"""Real runs of one and two learners and samplers, beside the simulation at the same sizes.

    python benchmarks/scaling_runs.py                         # 30M parameters; 1 × 1, 2 × 1, 1 × 2
    python benchmarks/scaling_runs.py --engine local --model 1M
    python benchmarks/scaling_runs.py --sizes 1x1x0x4 1x2x0x8    # as many rows for each sampler

Each run is a process of its own, and its costs are measured in the same minutes
(`scaling_costs.py`). A process of Ray has one thread. On a quiet machine with a core for each
process the clock's seconds count. On a shared one they say nothing, and what a step would take on
cores of its own is put together from the CPU seconds of the processes,

    driver + slowest sampler + slowest learner,

which is a synchronous step, since these wait for each other. A size names learners, samplers,
staleness and the groups of a step, of 16 episodes each, of which there are 4 by default.

The first line says how fast one thread multiplies few rows with the matrices of the 30M model. Two
samplers have half of the rows each, and a product of fewer rows is slower for each of them.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import scaling_costs
import step
import torch
from cluster_simulation import Cluster, Costs, Spread, Work, simulate
from typing_extensions import override

from ragen.config.reading import changed
from ragen.core.types import Episode
from ragen.engines.machine import use_threads
from ragen.training import trainer
from ragen.training.progress import Watcher

TURNS = 3
WARM_UP = 1
TICKS = os.sysconf("SC_CLK_TCK")
KINDS = {"learner": "Learner", "sampler": "Sampler"}
"""A part of the name of each kind of process of Ray."""


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far of this process, ``driver``, and of those of Ray that it has started."""
    parents, names, seconds = dict[int, int](), dict[int, str](), dict[int, float]()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        number = int(folder.name)
        parents[number], names[number] = int(fields[1]), name
        seconds[number] = (int(fields[11]) + int(fields[12])) / TICKS
    found = {"driver": time.process_time()}
    for number, name in names.items():
        above = number
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and name.startswith("ray::"):
            found[f"{name.split()[0].removeprefix('ray::').partition('.')[0]} {number}"] = seconds[
                number
            ]
    return found


class Meter(Watcher):
    """Seconds of each step, by the clock and by process, and the lengths of its completions."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.completions: list[int] = []
        self.prompts: list[int] = []
        self.contexts: list[int] = []
        self._before = cpu_seconds()

    @override
    def episode(self, episode: Episode) -> None:
        sampled = [len(turn.completion.token_ids or ()) for turn in episode.turns]
        first, last = episode.turns[0].prompt.token_ids, episode.turns[-1].prompt.token_ids
        self.completions += sampled
        self.prompts.append(len(first or ()))
        self.contexts.append(len(last or ()) + sampled[-1])

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now, names = cpu_seconds(), ("step", "rollout", "score", "update", "publish", "record")
        spent = {name: now[name] - self._before.get(name, 0.0) for name in now}
        clock = {f"{name}_s": metrics.get(f"time/{name}_s", 0.0) for name in names}
        self.steps.append(clock | spent)
        self._before = now


def run(
    engine: str, model: str, learners: int, samplers: int, staleness: int, groups: int, steps: int
) -> dict[str, Any]:
    """Train in this process, which must be a fresh one; means of the steps behind the warm-up."""
    work, meter = step.Work(groups, 16, TURNS), Meter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        step.make_model(folder, scaling_costs.MODELS[model]())
        settings = {
            **{"engine.name": engine, "engine.learners": learners, "engine.samplers": samplers},
            **{"engine.max_staleness": staleness, "threads": 1, "steps": WARM_UP + steps},
            **{"model.max_length": 1024, "rollout.slots": 64, "record.tokens_every": 0},
            "update.lr": 1e-5,
        }
        config = changed(scaling_costs.config_of(folder, work, step.TURN_TOKENS, 0), settings)
        trainer.train(config, Path(name, "run"), watcher=meter)
    counted = meter.steps[WARM_UP:]
    mean = {name: statistics.mean(each.get(name, 0.0) for each in counted) for name in counted[-1]}
    lengths = {"completion": meter.completions, "prompt": meter.prompts, "context": meter.contexts}
    return mean | {name: statistics.mean(numbers) for name, numbers in lengths.items()}


def slowest(found: Mapping[str, float], kind: str) -> float:
    """CPU seconds a step of the busiest process of a kind."""
    return max((found[name] for name in found if KINDS[kind] in name), default=0.0)


def predicted(found: Mapping[str, float], costs: Costs, cluster: Cluster, groups: int) -> float:
    """Seconds of a step in the simulation, with the mean lengths of a real run."""
    answer = (found["context"] - found["prompt"] - TURNS * found["completion"]) / (TURNS - 1)
    completion = Spread(found["completion"])
    prompt = round(found["prompt"])
    scores = cluster.max_staleness > 0
    work = Work(groups, 16, TURNS, prompt, round(answer), completion, scores=scores)
    return simulate(work, costs, cluster, 2, 1).step_s


def compared(args: argparse.Namespace) -> Iterator[str]:
    """Lines of Markdown, one for each size; the costs are measured just before each."""
    use_threads(1)
    rates = ", ".join(f"{rows}: {product_rate(rows):.0f}" for rows in (16, 32, 64, 128))
    yield f"GFLOP/s of a product by its rows: {rates}\n"
    names = ("learners", "samplers", "staleness", "groups", "clock, s", "driver", "slowest sampler")
    names += ("slowest learner", "own cores, s", "simulated, s", "driver's share")
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for learners, samplers, staleness, groups in args.sizes:
        costs = measured(args)
        command = [sys.executable, os.path.abspath(__file__), "--run", args.engine, args.model]
        command += [str(learners), str(samplers), str(staleness), str(groups), str(args.steps)]
        found = last_line(command)
        seconds = [found["driver"], slowest(found, "sampler"), slowest(found, "learner")]
        own = sum(seconds)
        here = Cluster(learners, samplers, args.engine == "local", staleness)
        expected = predicted(found, costs, here, groups)
        cells = [f"{each:.2f}" for each in (found["step_s"], *seconds, own, expected)]
        sizes = f"{learners} | {samplers} | {staleness} | {groups}"
        yield f"| {sizes} | {' | '.join(cells)} | {100 * seconds[0] / own:.0f} % |"


def product_rate(rows: int, repeat: int = 200) -> float:
    """GFLOP/s of products of some rows with matrices that together are more than caches hold."""
    given, matrices = torch.randn(rows, 512), torch.randn(32, 1792, 512)
    for each in range(repeat + 1):
        if each == 1:  # behind the first product, which is slower
            begun = time.perf_counter()
        torch.nn.functional.linear(given, matrices[each % len(matrices)])
    return 2e-9 * given.numel() * matrices.shape[1] * repeat / (time.perf_counter() - begun)


def measured(args: argparse.Namespace) -> Costs:
    """What the parts cost in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = scaling_costs.engine_costs(folder, args.model, args.repeat, 0, TURNS)
        found |= scaling_costs.driver_costs(folder / "driver", step.Work(), step.TURN_TOKENS)
    if args.engine == "ray":
        parts = scaling_costs.publication_costs(args.model, args.repeat)
        found["publish_s"] = parts["pack_s"] + parts["checksums_s"] + parts["copy_s"]
        found["publish_sampler_s"] = parts["take_over_s"]
    print(json.dumps({name: float(f"{each:.3g}") for name, each in found.items()}), file=sys.stderr)
    return Costs(**found)


def last_line(command: list[str]) -> dict[str, float]:
    """Run a program whose last line of output is JSON."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def size(text: str) -> tuple[int, int, int, int]:
    """Learners, samplers, staleness and groups from a text such as 2x1x0x4; 4 may be left out."""
    learners, samplers, staleness, groups = map(int, f"{text}x4".split("x")[:4])
    return learners, samplers, staleness, groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("ray", "local"), default="ray")
    parser.add_argument("--model", choices=scaling_costs.MODELS, default="30M")
    default = [size(each) for each in ("1x1x0", "2x1x0", "1x2x0", "2x2x0", "1x1x1")]
    parser.add_argument(
        *("--sizes",),
        nargs="+",
        type=size,
        default=default,
        help="learners × samplers × staleness × groups",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted")
    parser.add_argument("--repeat", type=int, default=2, help="of the measured costs")
    parser.add_argument("--run", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        engine, model, *numbers = args.run
        print(json.dumps(run(engine, model, *map(int, numbers))))
        return
    for line in compared(args):
        print(line, flush=True)


if __name__ == "__main__":
    main()
