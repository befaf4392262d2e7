"""Parity of the engines: the same episodes, the same gradients and weights; and runs learn alike.

    python benchmarks/parity.py               # recorded episodes: local beside Ray's 1×1, 2×1, 2×2
    python benchmarks/parity.py --seeds 5     # instead, whole short runs of Bandit, of five seeds

Ray's engines are learners × samplers, on this machine. The local engine samples once; each engine
scores these episodes, trains on them ten times, and publishes, for which every sampler has to hold
the learners' weights. The first update's gradients, which are AdamW's first moments, and the
weights, the critic's among them, are read from checkpoints. The table has the largest difference of
a gradient from the local engine's, as a share of the largest gradient of the same optimiser, and
the largest difference of a weight after ten updates, beside how far the weights have moved.

A run is compared as `ragen compare` does it: success on held-out levels, and the difference from
the local runs, with intervals over seeds and levels.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import ragen
from ragen.algorithms.samples import to_samples
from ragen.config.config import Config
from ragen.config.reading import changed, merge
from ragen.core.statistics import Interval
from ragen.core.types import Episode, Sample
from ragen.engines.local import LocalEngine
from ragen.learning.optimizers import optimizer_tensors
from ragen.models.names import resolve_model
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import make_setup
from ragen.training.collection import make_batch
from ragen.training.running import make_engine

PPO = {"advantage.name": "gae", "update.critic_lr": 1e-2}
"""A critic's head begins at zero; it learns fast, so that gradients reach its backbone."""
METHODS: Mapping[str, dict[str, Any]] = {
    "GRPO": {"advantage.name": "grpo", "loss.kl": 0.01},
    "PPO": PPO,
    "PPO, shared critic": PPO | {"model.critic": "shared"},
    "PPO, layer by layer": PPO | {"model.gradient_checkpointing": True},
    "PPO, LoRA": PPO | {"lora.rank": 8, "update.lr": 1e-3},
}
LAYOUTS: Mapping[str, tuple[int, int]] = {"1×1": (1, 1), "2×1": (2, 1), "2×2": (2, 2)}
UPDATES = 10
GROUPS, MEMBERS = 4, 8
STEPS = 15
"""Of a run: Bandit's success is then between chance and all."""


class Learned(NamedTuple):
    """Gradients of the first update by optimiser; weights after it and after all, by name."""

    gradients: dict[str, list[Tensor]]
    first: dict[str, Tensor]
    last: dict[str, Tensor]


def on_ray(config: Config, learners: int, samplers: int) -> Config:
    """The config with an engine on Ray."""
    counts = {"engine.learners": learners, "engine.samplers": samplers}
    return changed(config, {"engine.name": "ray"} | counts)


def local_engine(config: Config) -> LocalEngine:
    """A local engine with the first weights."""
    return LocalEngine(config, resolve_model(config.model.path, config.env.name))


async def sample(config: Config) -> tuple[Sequence[Sample], Sequence[Episode]]:
    """What the local engine samples with the first weights."""
    engine = local_engine(config)
    with closing(make_setup(config, engine.chat)) as setup:
        played = await run_groups(engine.policy, setup, range(GROUPS), MEMBERS, (0, "train", 0))
    await engine.close()
    return to_samples(played)


async def learn(config: Config, played: tuple[Sequence[Sample], Sequence[Episode]]) -> Learned:
    """Train an engine on the played episodes; a local engine reads its checkpoints."""
    engine, reader = make_engine(config), local_engine(config)
    try:
        batch = await make_batch(engine, *played, config)
        await engine.update(batch, 0)
        await copy(engine, reader)
        optimizers = reader.learner.named_optimizers()
        gradients = {name: moments(each) for name, each in optimizers.items()}
        first = weights(reader)
        for step in range(1, UPDATES):
            await engine.update(batch, step)
        await copy(engine, reader)
        await engine.publish()
        return Learned(gradients, first, weights(reader))
    finally:
        await engine.close()
        await reader.close()


async def copy(engine: Any, reader: LocalEngine) -> None:
    """Let a local engine have what another has learned."""
    with tempfile.TemporaryDirectory(prefix="ragen-parity-") as name:
        await reader.load(Path(name), await engine.save(Path(name)))


def moments(optimizer: Any) -> list[Tensor]:
    """AdamW's first moments; after one update they are its gradients, times 1 − β₁."""
    tensors = optimizer_tensors(optimizer).items()
    return [each.clone() for name, each in tensors if name.endswith(".exp_avg")]


def weights(engine: LocalEngine) -> dict[str, Tensor]:
    """Copies of the weights that are trained."""
    trained = engine.learner.trained_weights()
    return {name: weight.detach().clone() for name, weight in trained}


def difference(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of a number."""
    pairs = zip(ones, others, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def relative(found: Learned, expected: Learned) -> float:
    """The largest difference of gradients; of each optimiser as a share of its largest."""
    return max(
        difference(found.gradients[name], each) / max(float(g.abs().max()) for g in each)
        for name, each in expected.gradients.items()
    )


def between(ones: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of a weight."""
    return difference(list(ones.values()), [others[name] for name in ones])


def on_episodes() -> None:
    """Print a row for each method and layout."""
    print("| method | learners × samplers | gradient | weight | moved by |\n|---|---|---|---|---|")
    small = {"threads": 1, "update.microbatch_tokens": 1024}
    for name, method in METHODS.items():
        config = merge("bandit", small | method)
        played = asyncio.run(sample(config))
        local = asyncio.run(learn(config, played))
        moved = between(local.last, local.first)
        for layout, counts in LAYOUTS.items():
            found = asyncio.run(learn(on_ray(config, *counts), played))
            gradient, weight = relative(found, local), between(found.last, local.last)
            print(
                f"| {name} | {layout} | {gradient:.1e} | {weight:.1e} | {moved:.1e} |", flush=True
            )


def of_runs(seeds: int, episodes: int, out: Path) -> None:
    """Train runs with each engine, and print a row for each layout."""
    print("| learners × samplers | success | local | difference |\n|---|---|---|---|")
    settings = {"steps": STEPS, "threads": 1, "eval.episodes": 0}
    folders = dict[str, list[str]]()
    for layout in ("local", *LAYOUTS):
        folders[layout] = [str(out / f"{layout}-{seed}") for seed in range(seeds)]
        for seed, folder in enumerate(folders[layout]):
            config = merge("bandit", settings | {"seed": seed})
            if layout != "local":
                config = on_ray(config, *LAYOUTS[layout])
            ragen.train(config, out=folder)
        if layout != "local":
            found = ragen.compare(folders[layout], folders["local"], episodes=episodes)
            rates = " | ".join(map(written, (found.a.success, found.b.success, found.difference)))
            print(f"| {layout} | {rates} |", flush=True)


def written(interval: Interval) -> str:
    """Such as ``0.966 [0.922, 0.991]``."""
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=0, help="runs of each engine")
    parser.add_argument("--episodes", type=int, default=128, help="evaluation levels of a run")
    args = parser.parse_args()
    if args.seeds:
        with tempfile.TemporaryDirectory(prefix="ragen-parity-") as out:
            of_runs(args.seeds, args.episodes, Path(out))
    else:
        on_episodes()


if __name__ == "__main__":
    main()
