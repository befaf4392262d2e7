"""The training loop: play, filter, credit, update, publish, record, guard.

It knows neither algorithm nor machine: the config names the first, the engine hides the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragen.algorithms.batch import Batch
from ragen.algorithms.filters import group_weights, select
from ragen.algorithms.samples import to_samples
from ragen.core.metrics import Metrics, last, merge, values
from ragen.core.seeding import derive
from ragen.core.types import Episode, Group
from ragen.diagnostics.information import CrossScores, measure_thoughts
from ragen.diagnostics.step_metrics import averaged, batch_metrics, smooth, summarize
from ragen.evaluation.outcomes import outcome_of, refuse_unplayable
from ragen.training.collection import (
    collect_groups,
    filter_settings,
    gradient_norms,
    make_batch,
    record_step,
    refill_metrics,
    split_batch,
)
from ragen.training.recovery import run_guard
from ragen.training.running import Clock, LoopState, Run, evaluate, is_due, save


async def loop(run: Run) -> None:
    """Train until the run's budget is used up."""
    while not run.is_complete:
        config, engine, state = run.config, run.engine, run.state
        clock = Clock(run.beat)
        with clock("rollout"):
            groups = await run.stop.or_finish(play(run))
        kept = select(groups, **filter_settings(config.filter, config.advantage))
        kept_groups = [groups[index] for index in kept]
        diagnosis, matrices = await diagnose(run, groups, clock)
        batch: Batch | None = None
        updates: list[Metrics] = []
        samples, episodes = to_samples(kept_groups)
        if samples:
            with clock("score"):
                weights = group_weights(kept_groups, config.filter.rule)
                batch = await make_batch(engine, samples, episodes, config, weights)
            with clock("update"):
                seed = derive(config.seed, "minibatches", state.step)
                for part in split_batch(batch, config.update, seed):
                    updates.append(await engine.update(part, run.progress))
                    state.updates += 1
                    run.beat()
                    if run.is_complete:  # the budget counts updates, and this was the last one
                        break
            with clock("publish"):
                await engine.publish()
        count_step(state, groups)
        with clock("record"):
            await record_step(run, groups, kept, episodes, batch, matrices)
        counters = progress_metrics(state) | refill_metrics(groups, config.rollout)
        metrics = merge([summarize(groups, kept), *updates, diagnosis, counters, engine.metrics()])
        metrics |= batch_metrics(batch) if batch else {}
        metrics |= clock.metrics(run.setup.env_time.seconds, metrics["tokens/sampled"].value)
        state.averages = smooth(state.averages, metrics)
        run.recorder.log(state.step, metrics | averaged(state.averages, metrics))
        run.recorder.commit()
        state.seconds += clock.seconds
        run.watcher.step(state.step, values(metrics))
        if is_due(state.step, config.eval.every) and not run.is_complete:
            await evaluate(run, config.eval.temperature)
        rolled_back = await run_guard(run)
        if not rolled_back and is_due(state.step, config.checkpoint.every) and not run.is_complete:
            await save(run)


async def play(run: Run) -> list[Group]:
    """Play the groups of the next step.

    Raises:
        RagenError: Every episode failed, or no first prompt leaves room for a reply.
    """

    def on_episode(episode: Episode) -> None:
        run.beat()
        run.watcher.episode(episode)

    config = run.config
    groups = await collect_groups(
        run.engine, run.setup, config.rollout, config.seed, run.state.step, on_episode
    )
    refuse_unplayable([outcome_of(episode) for group in groups for episode in group.episodes])
    return groups


async def diagnose(
    run: Run, groups: Sequence[Group], clock: Clock
) -> tuple[Metrics, list[CrossScores]]:
    """The diagnostics that are due in this step, by the weights that played the groups."""
    config, step = run.config, run.state.step
    metrics, matrices = Metrics(), list[CrossScores]()
    if config.prompt.think and is_due(step, config.diagnose.information_every):
        with clock("information"):
            metrics, matrices = await measure_thoughts(run.engine, groups, config.seed, step)
    if is_due(step, config.diagnose.gradients_every):
        with clock("gradients"):
            metrics |= await gradient_norms(run.engine, groups, config)
    return metrics, matrices


def count_step(state: LoopState, groups: Sequence[Group]) -> None:
    """Count a finished step, its episodes and its sampled tokens."""
    episodes = [episode for group in groups for episode in group.episodes]
    state.step += 1
    state.episodes += len(episodes)
    state.tokens += sum(
        len(turn.completion.token_ids or ()) for episode in episodes for turn in episode.turns
    )


def progress_metrics(state: LoopState) -> Metrics:
    """Updates, episodes and tokens so far: the other units that a curve may be drawn against."""
    counts = {"updates": state.updates, "episodes": state.episodes, "tokens": state.tokens}
    return {f"progress/{name}": last(count) for name, count in counts.items()}
