"""One step's collection: its groups, their batch, its minibatches, and what the database keeps.

Here the config's settings meet the functions that need them; the loop only sees the results.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.batch import Batch, collate, minibatches, num_minibatches
from ragen.algorithms.credit import credit
from ragen.algorithms.estimator import compares_group, needs_continuations, needs_values
from ragen.algorithms.filters import reward_std, scores_of, select
from ragen.algorithms.samples import to_samples
from ragen.config.config import Config
from ragen.config.reading import dump
from ragen.config.sections import AdvantageConfig, FilterConfig, RolloutConfig, UpdateConfig
from ragen.core.metrics import Metrics
from ragen.core.seeding import refill_level
from ragen.core.types import Episode, Group, Sample
from ragen.diagnostics.information import CrossScores
from ragen.diagnostics.step_metrics import gradients_by_std
from ragen.engines.engine import Engine
from ragen.learning.exactness import verify_split, with_fingerprints
from ragen.rollout.continuations import value_turns
from ragen.rollout.episode_terms import apply_episode_terms
from ragen.rollout.groups import run_groups
from ragen.rollout.judge import Judge
from ragen.storage.journal import Journal
from ragen.training.ahead import Buffer, Played
from ragen.training.mixture import Start, first_starts
from ragen.training.running import Run, is_due


async def play_step(run: Run) -> Played:
    """The groups of the next step, played with the policy's present weights."""
    if run.judge is not None:
        run.judge.metrics()  # drops the metrics of an abandoned step
    config, state = run.config, run.state
    playing = run.tasks.at(state.stage)
    starts = first_starts(playing, config.rollout, config.env.mix, state.step, state.groups)
    return await _play(run, starts, state.step, state.stage, config.episodes_at_once)


async def play_ahead(run: Run, buffer: Buffer) -> Played:
    """The groups of the next step from the buffer, in which the steps after it are queued."""
    config, state = run.config, run.state
    playing = run.tasks.at(state.stage)
    while len(buffer.entries) <= buffer.max_staleness:
        step = state.step + len(buffer.entries)
        if buffer.entries and config.budget == "steps" and step >= config.steps:
            break
        counts = Counter(state.groups) + buffer.planned()
        starts = first_starts(playing, config.rollout, config.env.mix, step, counts)
        buffer.add(starts, partial(_play, run, starts, step, state.stage))
    played, version = await buffer.take(), run.engine.version
    stale = buffer.stale(played.groups, version)
    if stale:
        text = (
            f"{len(stale)} of {len(played.groups)} groups are staler than "
            f"{buffer.max_staleness}: not trained on"
        )
        data = {"what": "stale", "groups": sorted(stale)}
        run.recorder.event(state.step + 1, "engine", text, data)
    return replace(played, version=version, stale=stale)


async def _play(
    run: Run,
    starts: Sequence[Start],
    step: int,
    stage: int,
    concurrency: int | asyncio.Semaphore,
) -> Played:
    def ended(episode: Episode) -> None:
        run.beat()
        run.watcher.episode(episode)

    began, rollout, seed = time.perf_counter(), run.config.rollout, run.config.seed
    origin = f"{dump(run.config)}{run.state.attempt} {step} {stage}"
    with closing(Journal(run.folder, step + 1, origin)) as journal:
        groups = await collect_groups(
            run.engine, starts, rollout, seed, step, concurrency, ended, run.judge, journal
        )
    return Played(groups, stage, time.perf_counter() - began)


async def collect_groups(
    engine: Engine,
    starts: Sequence[Start],
    rollout: RolloutConfig,
    seed: int,
    step: int,
    concurrency: int | asyncio.Semaphore,
    on_episode: Callable[[Episode], None] | None = None,
    judge: Judge | None = None,
    journal: Journal | None = None,
) -> list[Group]:
    """Play the groups of a step with the engine's policy, and add their terms to their rewards.

    A group that has ended is judged while others are still played.

    A group without any spread of reward teaches nothing. DAPO's dynamic sampling (arXiv:2503.14476)
    plays another group for each of them, in at most `rollout.refill` rounds. The flat groups stay
    in the result, counted and recorded as all others; the filter leaves them out.

    `starts` has the first groups (`first_starts`); a group is replaced by one of the same
    environment. `seed` is the run's, and `step` the number of finished steps. `journal` is as in
    `run_groups`.
    """
    engine.forget()
    groups: list[Group] = []
    ended = time.perf_counter()

    def note(episode: Episode) -> None:
        nonlocal ended
        ended = time.perf_counter()
        if on_episode is not None:
            on_episode(episode)

    async def finish(group: Group) -> Group:
        return await apply_episode_terms(group, starts[0].setup.reward_terms, judge, seed, step)

    for _ in range(1 + rollout.refill):
        setups, levels = zip(*starts, strict=True)
        what = engine.policy, setups, levels, rollout.group_size, (seed, "train", step)
        fresh = await run_groups(*what, concurrency, note, len(groups), finish, journal)
        if judge is not None:
            judge.seconds += time.perf_counter() - ended
        groups += fresh
        whole = zip(starts, fresh, strict=True)
        flat = [start.setup for start, group in whole if reward_std(group) == 0]
        if not flat:
            break
        first = len(groups) - rollout.num_groups
        starts = [
            Start(setup, refill_level(step, index, rollout.num_groups))
            for index, setup in enumerate(flat, first)
        ]
    return groups


async def with_continuations(
    run: Run, kept: Sequence[Group], stage: int
) -> tuple[Sequence[Group], int | None]:
    """The groups to train on with the values that the estimator needs, and the tokens they took.

    Without such an estimator there are no continuations. They are neither trained on nor recorded.
    """
    config = run.config
    if not needs_continuations(find_estimator(config.advantage.name)):
        return kept, None
    return await value_turns(
        run.engine.policy,
        run.tasks.at(stage),
        kept,
        (config.seed, "continue", run.state.step),
        config.advantage.continuations,
        config.advantage.gamma,
        config.episodes_at_once,
        lambda _: run.beat(),
    )


def filter_settings(settings: FilterConfig, advantage: AdvantageConfig) -> dict[str, Any]:
    """The keyword arguments of `select`; an estimator that compares needs two episodes a group."""
    is_compared = compares_group(find_estimator(advantage.name))
    return settings.model_dump() | {"min_played": 2 if is_compared else 1}


async def make_batch(
    engine: Engine,
    samples: Sequence[Sample],
    episodes: Sequence[Episode],
    config: Config,
    group_weights: Sequence[float] | None = None,
    score: bool = True,
) -> Batch:
    """The samples as a batch with all that the loss needs: logprobs, values and advantages.

    `samples` and `episodes` are what `to_samples` made of the kept groups, `group_weights` are as
    in `credit`. Without `score` the batch gets no old logprobs: the update computes them.
    """
    batch = with_fingerprints(collate(samples), episodes)
    if config.one_arithmetic:
        batch = replace(batch, old_logprobs_BT=batch.sampled_logprobs_BT)
    elif score:
        batch = await engine.score(batch, "policy")
    if config.loss.kl > 0:
        batch = await engine.score(batch, "reference")
    if needs_values(find_estimator(config.advantage.name)):
        batch = await engine.score(batch, "critic")
    return credit(batch, episodes, config.reward, config.advantage, config.loss, group_weights)


async def gradient_norms(engine: Engine, groups: Sequence[Group], config: Config) -> Metrics:
    """Gradient norms by reward std, over all groups: also those that the filter leaves out."""
    settings = filter_settings(config.filter, config.advantage)
    every = select(groups, **settings | {"rule": "all", "include_zero": True})
    kept = [groups[index] for index in every]
    samples, episodes = to_samples(kept)
    if not samples:
        return {}
    batch = await make_batch(engine, samples, episodes, config)
    return await gradients_by_std(engine, batch, kept)


def needs_scores(kl: float, update: UpdateConfig, num_episodes: int) -> bool:
    """True if a KL term or a second update needs old logprobs; the first one computes its own."""
    num_parts = num_minibatches(num_episodes, update.minibatch_episodes)
    return kl > 0 or update.epochs > 1 or num_parts > 1


def split_batch(batch: Batch, update: UpdateConfig, seed: int) -> list[Batch]:
    """The minibatches of a step, one for each optimiser step."""
    parts = minibatches(batch, update.minibatch_episodes, update.epochs, seed)
    verify_split(batch, parts, update.epochs)
    return parts


async def record_step(
    run: Run,
    groups: Sequence[Group],
    kept: Sequence[int],
    episodes: Sequence[Episode],
    batch: Batch | None,
    matrices: Sequence[CrossScores],
) -> None:
    """Write what `config.record` asks for in the step that ended.

    `kept` indexes the `groups` that the filter kept, and `Batch.episode_B` the trained `episodes`.
    Without a `batch`, nothing was trained. `matrices` are the scores of thoughts under prompts.
    """
    step, record, recorder = run.state.step, run.config.record, run.recorder
    if is_due(step, record.episodes_every):
        kept_set = set(kept)
        flags = [index in kept_set for index in range(len(groups))]
        recorder.episodes(step, groups, flags, scores=scores_of(groups, run.config.filter.score))
    if batch is not None and is_due(step, record.tokens_every):
        updated = await run.engine.score(batch, "policy")
        rows = [sample_record(batch, updated, row, episodes) for row in range(batch.num_rows)]
        recorder.samples(step, rows)
    for scores in matrices:
        recorder.cross_scores(step, *scores)


def sample_record(
    batch: Batch, updated: Batch, row: int, episodes: Sequence[Episode]
) -> dict[str, Any]:
    """One row of a batch as the recorder stores it; `updated` is the batch scored after updates."""
    assert batch.old_logprobs_BT is not None and updated.old_logprobs_BT is not None
    length = int(batch.lengths_B[row])
    episode = episodes[int(batch.episode_B[row])]
    ratios_T = (updated.old_logprobs_BT[row, :length] - batch.old_logprobs_BT[row, :length]).exp()
    arrays = {
        "token_ids": batch.token_ids_BT,
        "loss_mask": batch.mask_BT,
        "turn_index": batch.turn_BT,
        "sampled_logprobs": batch.sampled_logprobs_BT,
        "old_logprobs": batch.old_logprobs_BT,
        "entropies": updated.entropies_BT,
        "values": batch.values_BT,
        "advantages": batch.advantages_BT,
        "returns": batch.returns_BT,
    }
    stored = {k: v[row, :length].numpy() for k, v in arrays.items() if v is not None}
    stored["ratios"] = ratios_T.numpy()
    return {"group": episode.group, "member": episode.member} | stored
