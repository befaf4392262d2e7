"""Rollouts of the embedded model by the local sampler and by vLLM, with and without its cache.

The same episodes of a recipe's step for each, on one thread; the best of several, in seconds of the
CPU and of the clock. vLLM is made for models a thousand times this size on a GPU: what is measured
here is what its scheduling costs, and what remembering the turns before saves.

    OMP_NUM_THREADS=1 python benchmarks/samplers.py [--recipe frozen-lake-still] [--repeat 5]
"""

import argparse
import asyncio
import json
import time
from typing import Any

import torch

from ragen.config.reading import resolve
from ragen.core.seeding import train_level
from ragen.engines.factory import make_policy
from ragen.engines.sampling import Stats
from ragen.models.names import resolve_model
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import make_setup

WAYS = ("local", "vllm", "vllm without its prefix cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="frozen-lake-still")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for way in WAYS:
        print(json.dumps({"sampler": way} | measured(way, args.recipe, args.repeat)), flush=True)


def measured(way: str, recipe: str, repeat: int) -> dict[str, Any]:
    if way.endswith("cache"):
        without_prefix_cache()
    config = resolve(recipe, {"rollout.sampler": way.split()[0]})
    policy, chat = make_policy(config, resolve_model("base", config.env.name))
    setup, size = make_setup(config, chat), config.rollout

    async def step(number: int) -> None:
        policy.forget()
        policy.stats = Stats()
        levels = [train_level(number, group, size.prompts) for group in range(size.prompts)]
        await run_groups(policy, setup, levels, size.members, (0, "train", number), size.slots)

    asyncio.run(step(0))  # what is made at first use
    best = dict.fromkeys(("cpu_s", "wall_s", "tokens"), float("inf"))
    for _ in range(repeat):
        cpu, wall = time.process_time(), time.perf_counter()
        asyncio.run(step(1))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if cpu < best["cpu_s"]:
            best = {"cpu_s": cpu, "wall_s": wall, "tokens": policy.stats.sampled}
    hits = policy.stats.metrics()["rollout/prefix_cache_hit_fraction"].value
    asyncio.run(policy.close())
    return {
        **{name: round(value, 2) for name, value in best.items()},
        "tokens_per_cpu_s": round(best["tokens"] / best["cpu_s"]),
        "tokens_per_s": round(best["tokens"] / best["wall_s"]),
        "prefix_cache_hit_fraction": round(hits, 3),
    }


def without_prefix_cache() -> None:
    import vllm

    made = vllm.EngineArgs
    vllm.EngineArgs = lambda **options: made(**options | {"enable_prefix_caching": False})


if __name__ == "__main__":
    main()
