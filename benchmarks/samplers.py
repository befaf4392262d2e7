"""Rollouts of a model by the local sampler and by vLLM, with and without its cache.

The same episodes of a recipe's step for each, by default on one thread; the best of several, in
seconds of the CPU and of the clock. vLLM is made for models a thousand times the embedded one's
size on a GPU: what is measured here is what its scheduling costs, and what remembering the turns
before saves. With --models, it is random models that play 64 episodes of two turns at once, which
shows from which size on vLLM's faster products pay for that.

    OMP_NUM_THREADS=1 python benchmarks/samplers.py [--recipe frozen-lake-still] [--repeat 5]
    OMP_NUM_THREADS=1 python benchmarks/samplers.py --models 1M 10M 100M --dtype bfloat16
"""

import argparse
import asyncio
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import growth
import step
import torch

from ragen.config.config import Config
from ragen.config.reading import changed, resolve
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
    parser.add_argument("--models", nargs="*", choices=growth.MODELS, default=[])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for way in WAYS if not args.models else ():
        print(json.dumps({"sampler": way} | measured(way, resolve(args.recipe), args.repeat)))
    for model, way in product(args.models, WAYS[:2]):
        with tempfile.TemporaryDirectory() as folder:
            step.make_model(Path(folder), growth.MODELS[model]())
            config = step.make_config(Path(folder), 1, step.Work(4, 16, 2, args.dtype))
            found = measured(way, config, args.repeat)
        about = {"model": model, "dtype": args.dtype, "threads": args.threads, "sampler": way}
        print(json.dumps(about | found), flush=True)


def measured(way: str, config: Config, repeat: int) -> dict[str, Any]:
    if way.endswith("cache"):
        without_prefix_cache()
    config = changed(config, {"rollout.sampler": way.split()[0]})
    policy, chat = make_policy(config, resolve_model(config.model.path, config.env.name))
    setup, size = make_setup(config, chat), config.rollout

    async def collect(number: int) -> None:
        policy.forget()
        policy.stats = Stats()
        levels = [train_level(number * size.num_groups + group) for group in range(size.num_groups)]
        await run_groups(policy, setup, levels, size.group_size, (0, "train", number), size.slots)

    asyncio.run(collect(0))  # what is made at first use
    best = dict.fromkeys(("cpu_s", "wall_s", "tokens"), float("inf"))
    for _ in range(repeat):
        cpu, wall = time.process_time(), time.perf_counter()
        asyncio.run(collect(1))
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
