"""One recorded collection, and processes that train on it together."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ragen.algorithms.batch import Batch
from ragen.algorithms.samples import to_samples
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.core.metrics import Metrics
from ragen.engines.local import LocalEngine
from ragen.engines.sharded import Rank
from ragen.learning.learner import Learner
from ragen.networks.lora import adapter_of, has_adapters
from ragen.networks.precision import Masters
from ragen.networks.sharding import local, whole
from ragen.rollout.groups import run_groups
from ragen.rollout.setup import make_setup
from ragen.training.collection import make_batch
from tests.bandit_model import bandit_model, settings

PATIENCE_S = 120
"""Seconds after which processes are killed, and the test fails."""

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage.name": "grpo", "loss.kl": 0.01},
    "ppo": {"advantage.name": "gae", "update.critic_lr": 1e-2},
    "ppo-shared": {"advantage.name": "gae", "update.critic_lr": 1e-2, "model.critic": "shared"},
    "lora": {"advantage.name": "gae", "update.critic_lr": 1e-2, "lora.rank": 4},
}
"""A critic's head begins at zero; it learns fast, so that gradients reach its backbone."""


def config_of(recipe: str, **more: Any) -> Config:
    """A run of Bandit with small microbatches."""
    small = {"update.microbatch_tokens": 256}
    return merge("bandit", settings(**more) | small | RECIPES[recipe])


class Answering:
    """A learner in the place of an engine that only scores."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def score(self, batch: Batch, role: Any) -> Batch:
        return self._learner.score(batch, role)


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


def batch_for(learner: Learner, config: Config, **size: int) -> Batch:
    """The recorded collection as a batch, scored by `learner`."""
    samples, episodes = collection(**size)
    return asyncio.run(make_batch(Answering(learner), samples, episodes, config))


@contextmanager
def gradients() -> Iterator[list[list[Tensor]]]:
    """The whole gradients of each optimiser's weights in the updates of the body, unclipped."""
    found: list[list[Tensor]] = []
    clip = torch.nn.utils.clip_grad_norm_

    def noted(weights: Iterable[Tensor], bound: float) -> Tensor:
        given = list(weights)
        found.append([whole(each.grad).clone() for each in given if each.grad is not None])
        return clip(given, bound)

    with patch.object(torch.nn.utils, "clip_grad_norm_", noted):
        yield found


def relative(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest difference, as a share of the largest number expected."""
    pairs = [(a.float(), b.float()) for a, b in zip(actual, expected, strict=True)]
    top = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / top


@dataclass(frozen=True)
class Outcome:
    """What a rank computed on the recorded collection."""

    batch: Batch
    gradients: list[list[Tensor]]
    metrics: list[Metrics]
    norms: Metrics
    scores_NM: Tensor
    weights: dict[str, Tensor]


def outcome(
    config: Config, steps: int, rank: int = 0, size: int = 1, address: str = "", **work: int
) -> Outcome:
    """`outcome_of` a rank that is closed afterwards."""
    one = Rank(config, str(bandit_model()), rank, size, address)
    found = outcome_of(one, batch_for(one.learner, config, **work), steps)
    one.close()
    return found


def outcome_of(one: Rank, batch: Batch, steps: int) -> Outcome:
    """Scores, the gradients of the first update, and the weights after some."""
    with gradients() as found:
        metrics = [one.learner.update(batch, 0)]
    norms = one.learner.gradient_norms(batch, torch.arange(batch.num_rows) % 2)
    metrics += [one.learner.update(batch, step) for step in range(1, steps)]
    scores_NM = one.learner.cross_scores([[1, 2, 3], [4, 5, 6, 7]], [[9, 8], [7], [6, 5, 4]])
    weights, critic = one.weights(), one.learner.critic
    for name, weight in critic.named_parameters() if critic is not None else ():
        weights[f"critic.{name}"] = whole(weight)
    return Outcome(batch, found, metrics, norms, scores_NM, weights)


def held(owner: nn.Module | Iterable[Tensor]) -> int:
    """Bytes here of tensors, or of a module's parameters; shared ones count once."""
    tensors = owner.parameters() if isinstance(owner, nn.Module) else owner
    return sum(local(tensor).nbytes for tensor in tensors)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimiser's states after a step with all gradients."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = chain.from_iterable(state.values() for state in optimizer.state.values())
    return held(state for state in states if isinstance(state, Tensor))


def master_bytes(masters: Masters) -> tuple[int, int]:
    """Bytes of the gradients, and of the masters that are not weights of a model."""
    gradients = (weight.grad for weight in masters.trained.values())
    return held(each for each in gradients if each is not None), held(masters.tensors().values())


def held_by(one: Rank) -> dict[str, int]:
    """Bytes of one learner's parts, by the names of the plan."""
    learner = one.learner
    states = sum(map(optimizer_bytes, learner.optimizers))
    gradients, masters = master_bytes(learner.masters)
    weights = held(learner.model)
    if has_adapters(learner.model):  # the critic's adapter is part of the critic
        weights -= held(adapter_of(learner.model, "critic"))
    found = {"weights": weights, "gradients": gradients, "optimiser": states + masters}
    found["reference"] = (
        held(learner.reference) if learner.reference not in (None, one.model) else 0
    )
    if learner.critic is not None:
        states = sum(map(optimizer_bytes, learner.critic_optimizers))
        found["critic"] = held(learner.critic) + states + sum(master_bytes(learner.critic_masters))
    return found


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
