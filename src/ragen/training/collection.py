"""One collection: the groups that are played, those that are learnt from, and their minibatches.

Here the config's settings meet the functions that need them; the loop above only sees the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ragen.algorithms.advantages import ADVANTAGES
from ragen.algorithms.batch import Batch, collate, minibatches
from ragen.algorithms.credit import credit
from ragen.algorithms.estimator import compares_group, needs_values
from ragen.algorithms.filters import group_weights, reward_std, select
from ragen.algorithms.samples import to_samples
from ragen.config.config import Config
from ragen.core.metrics import Metrics, total
from ragen.core.seeding import derive, refill_level, train_level
from ragen.core.types import Episode, Group, Sample
from ragen.diagnostics.diagnosis import gradients_by_std
from ragen.engines.engine import Engine
from ragen.engines.exactness import verify_split, with_births
from ragen.rollout.rollout import Setup, run_groups
from ragen.training.running import LoopState


async def groups_of(
    engine: Engine,
    setup: Setup,
    config: Config,
    step: int,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Group]:
    """What the engine's policy plays after `step` steps, with what replaces groups without spread.

    DAPO's dynamic sampling (arXiv:2503.14476), in `rollout.refill` rounds at most: what is replaced
    stays among the groups, counted and recorded as all others, and the filter leaves it out.
    """
    num_prompts = config.rollout.num_groups
    engine.forget()
    setup.env_time.seconds = 0.0
    groups: list[Group] = []
    levels = [train_level(step, group, num_prompts) for group in range(num_prompts)]
    for _ in range(1 + config.rollout.refill):
        fresh = await run_groups(
            engine.policy,
            setup,
            levels,
            config.rollout.group_size,
            (config.seed, "train", step),
            config.rollout.slots,
            on_episode,
            first_group=len(groups),
        )
        groups += fresh
        flat = sum(reward_std(group) == 0 for group in fresh)
        first = len(groups) - num_prompts
        levels = [refill_level(step, index, num_prompts) for index in range(first, first + flat)]
        if not levels:
            break
    return groups


def chosen_by(config: Config) -> dict[str, Any]:
    """The filter's settings as `select` takes them."""
    compares = compares_group(ADVANTAGES[config.advantage.name])
    settings = config.filter.model_dump(exclude={"max_empty", "scale", "reweight"})
    return settings | {"min_played": 2 if compares else 1}


def weights_of(config: Config, groups: Sequence[Group], kept: Sequence[int]) -> list[float]:
    """How much each kept group counts, by the filter's settings."""
    scale, reweight = config.filter.scale, config.filter.reweight
    return group_weights(groups, kept, scale=scale, reweight=reweight)


async def make_batch(
    engine: Engine,
    samples: Sequence[Sample],
    episodes: Sequence[Episode],
    config: Config,
    group_weights: Sequence[float] | None = None,
) -> Batch:
    """The samples as a batch with all that the loss needs: logprobs, values, credit.

    Args:
        engine: Scores the tokens.
        samples: What `to_samples` made of the chosen groups.
        episodes: Their episodes.
        config: The run's settings.
        group_weights: As in `credit`.
    """
    batch = with_births(collate(samples), episodes)
    if config.one_arithmetic:
        batch = replace(batch, old_logprobs_BT=batch.sampled_logprobs_BT)
    else:
        batch = await engine.score(batch, "policy")
    if config.loss.kl > 0:
        batch = await engine.score(batch, "reference")
    if needs_values(ADVANTAGES[config.advantage.name]):
        batch = await engine.score(batch, "critic")
    return credit(batch, episodes, config.reward, config.advantage, config.loss, group_weights)


async def gradients(engine: Engine, groups: Sequence[Group], config: Config) -> Metrics:
    """Gradient norms by reward std over all groups, those that the filter would leave too."""
    everything = chosen_by(config) | {"rule": "all", "include_zero": True}
    chosen = [groups[index] for index in select(groups, **everything)]
    samples, episodes = to_samples(chosen)
    if not samples:
        return {}
    batch = await make_batch(engine, samples, episodes, config)
    return await gradients_by_std(engine, batch, chosen)


def planned(batch: Batch, state: LoopState, config: Config) -> list[tuple[Batch, int]]:
    """The step's minibatches, each with where the run stands when its turn comes.

    Where updates are counted, the last collection gives only as many as are left.

    Raises:
        RagenError: An episode was lost or doubled on the way.
    """
    update, seed = config.update, derive(config.seed, "minibatches", state.step)
    parts = minibatches(batch, update.minibatch_episodes, update.epochs, seed)
    verify_split(batch, parts, update.epochs)
    if config.budget == "steps":
        return [(part, state.step) for part in parts]
    left = config.steps - state.updates
    return [(part, at) for at, part in enumerate(parts[:left], state.updates)]


def refilled(groups: Sequence[Group], config: Config) -> Metrics:
    """How many of the step's groups replaced others, in runs that do so."""
    if not config.rollout.refill:
        return {}
    return {"rollout/refilled_groups": total(len(groups) - config.rollout.num_groups)}
