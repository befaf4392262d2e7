"""One recorded collection, and processes that train on it together."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from contextlib import closing
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ragen.algorithms.batch import Batch
from ragen.algorithms.samples import to_samples
from ragen.config.config import Config
from ragen.config.reading import resolve
from ragen.engines.local import LocalEngine
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import make_setup
from ragen.training.collection import make_batch
from tests.bandit_model import bandit_model, settings

PATIENCE_S = 240
"""Seconds after which processes are killed, and the test fails."""

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage.name": "grpo", "loss.kl": 0.01},
    "ppo": {"advantage.name": "gae"},
    "ppo-shared": {"advantage.name": "gae", "model.critic": "shared"},
    "lora": {"advantage.name": "gae", "lora.rank": 4},
}


def config_of(recipe: str, **more: Any) -> Config:
    """A run of Bandit with small microbatches."""
    small = {"update.microbatch_tokens": 256}
    return resolve("bandit", settings(**more) | small | RECIPES[recipe])


class Answering:
    """A `Rank` or a learner in the place of an engine that only scores."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    async def score(self, batch: Batch, role: Any) -> Batch:
        return self._rank.score(batch, role)


@cache
def collection(groups: int = 3, members: int = 4) -> tuple[Any, ...]:
    """Samples and episodes that the local engine has sampled."""
    config = config_of("grpo")
    engine = LocalEngine(config, str(bandit_model()))
    with closing(make_setup(config, engine.chat)) as setup:
        played = asyncio.run(
            run_groups(engine.policy, setup, range(groups), members, (0, "train", 0))
        )
    asyncio.run(engine.close())
    return to_samples(played)


def batch_for(rank: Any, config: Config, **size: int) -> Batch:
    """The recorded collection as a batch, scored by `rank`."""
    samples, episodes = collection(**size)
    return asyncio.run(make_batch(Answering(rank), samples, episodes, config))


def in_processes(size: int, work: Callable[[int, str], Any]) -> list[Any]:
    """What `work`, given rank and address, returns in each of `size` forks of this process.

    In the place of a result, an exception of a process is returned as its text.
    """
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:

        def run(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                found = work(rank, f"file://{folder}/store")
            except Exception as error:  # noqa: BLE001
                found = f"{type(error).__name__}: {error}"
            torch.save(found, f"{folder}/{rank}")

        processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
        for each in processes:
            each.start()
        for each in processes:
            each.join(PATIENCE_S)
        late = [each for each in processes if each.is_alive()]
        for each in late:
            each.kill()
        assert not late, f"{len(late)} of {size} processes have not ended"
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(size)]
