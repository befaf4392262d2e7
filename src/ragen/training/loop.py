"""The training loop: play, filter, credit, update, publish, record, guard.

Evaluation runs before the first step, after every n-th and after the last. The loop knows neither
algorithm nor machine: the config names the first, the engine hides the second.
"""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Sequence
from functools import partial

from ragen.algorithms.batch import Batch
from ragen.algorithms.filters import group_weights, select
from ragen.algorithms.samples import to_samples
from ragen.config.sections import RolloutConfig
from ragen.core.errors import EngineLost, GuardStop, NotFiniteError, UnplayableError
from ragen.core.metrics import Metrics, last, merge, total, values
from ragen.core.seeding import derive
from ragen.core.stopping import StopRequested
from ragen.core.types import Group
from ragen.diagnostics.information import CrossScores, measure_envs
from ragen.diagnostics.step_metrics import (
    averaged,
    batch_metrics,
    smooth,
    summarize,
    summarize_envs,
)
from ragen.training.collection import (
    filter_settings,
    gradient_norms,
    make_batch,
    needs_scores,
    play_ahead,
    play_step,
    record_step,
    split_batch,
    with_continuations,
)
from ragen.training.curriculum import update_stage
from ragen.training.recovery import check_episodes, respond, run_guard, update
from ragen.training.running import (
    Clock,
    LoopState,
    Run,
    evaluate,
    evaluate_missing,
    is_due,
    save,
)
from ragen.training.watchdog import Watchdog, report_stall, stall_limit


async def loop(run: Run) -> None:
    """Train until the run's budget is used up."""
    while not run.is_complete:
        config, engine, state = run.config, run.engine, run.state
        clock, env_before = Clock(run.beat), run.tasks.env_seconds
        with clock("rollout"):
            play = play_step(run) if run.ahead is None else play_ahead(run, run.ahead)
            played = await run.stop.or_finish(play)
        groups = played.groups
        check_episodes(run, groups)
        for text in run.tasks.news():
            run.report("engine", text, {"what": "waits"})
        fresh = [index for index in range(len(groups)) if index not in played.stale]
        settings = filter_settings(config.filter, config.advantage)
        kept = [fresh[at] for at in select([groups[index] for index in fresh], **settings)]
        kept_groups: Sequence[Group] = [groups[index] for index in kept]
        with clock("rollout"):
            valued = with_continuations(run, kept_groups, played.stage)
            kept_groups, continued = await run.stop.or_finish(valued)
        diagnosis, matrices = await diagnose(run, groups, clock)
        batch: Batch | None = None
        updates: list[Metrics] = []
        samples, episodes = to_samples(kept_groups)
        if samples:
            with clock("score"):
                weights = group_weights(kept_groups, config.filter.rule)
                score = (
                    needs_scores(config.loss.kl, config.update, len(episodes))
                    or is_due(state.step + 1, config.record.tokens_every)
                    or run.ahead is not None  # earlier weights may have sampled
                )
                batch = await make_batch(engine, samples, episodes, config, weights, score)
            with clock("update"):
                seed = derive(config.seed, "minibatches", state.step)
                for part in split_batch(batch, config.update, seed):
                    updates.append(await update(run, part))
                    state.updates += 1
                    run.beat()
                    if run.is_complete:  # the budget counts updates, and this was the last one
                        break
            with clock("publish"):
                await engine.publish()
        counters = count_step(state, groups, config.rollout, continued)
        with clock("record"):
            await record_step(run, groups, kept, episodes, batch, matrices)
        metrics = merge([summarize(groups, kept), *updates, diagnosis, counters, engine.metrics()])
        metrics |= batch_metrics(batch) if batch else {}
        metrics |= summarize_envs(groups, kept, config.env.mix) if config.env.mix else {}
        parts: dict[str, float] = {}
        if run.ahead is not None:
            metrics |= run.ahead.metrics(played, kept)
        else:  # of steps that overlap, nobody knows whose part it is
            parts["env"] = run.tasks.env_seconds - env_before
            parts |= {} if run.judge is None else {"judge": run.judge.seconds}
        metrics |= clock.metrics(parts, metrics["tokens/sampled"].value + (continued or 0))
        metrics |= {} if run.judge is None else run.judge.metrics()
        averages = state.averages = smooth(state.averages, metrics)
        if config.curriculum.stages:
            metrics |= update_stage(run, played)
        recorded = metrics | averaged(averages, metrics)
        run.recorder.log(state.step, recorded)
        run.recorder.commit_later()
        run.remember(state.step, values(recorded))
        state.seconds += clock.seconds
        run.watcher.step(state.step, values(metrics))
        if is_due(state.step, config.eval.every) and not run.is_complete:
            await evaluate(run, config.eval.temperature)
        rolled_back = await run_guard(run)
        if not rolled_back and is_due(state.step, config.checkpoint.every) and not run.is_complete:
            await save(run)


async def diagnose(
    run: Run, groups: Sequence[Group], clock: Clock
) -> tuple[Metrics, list[CrossScores]]:
    """The diagnostics that are due in this step, with the weights before its updates."""
    config, step = run.config, run.state.step
    metrics, matrices = Metrics(), list[CrossScores]()
    if config.prompt.think and is_due(step, config.diagnose.information_every):
        with clock("information"):
            found = await measure_envs(run.engine, groups, config.seed, step, config.env.mix)
            metrics, matrices = found
    if is_due(step, config.diagnose.gradients_every):
        with clock("gradients"):
            metrics |= await gradient_norms(run.engine, groups, config)
    return metrics, matrices


def count_step(
    state: LoopState, groups: Sequence[Group], rollout: RolloutConfig, continued: int | None
) -> Metrics:
    """Count a finished step, its episodes and its sampled tokens, with those of continuations.

    The metrics are these counts, and the step's groups that were played in place of flat ones.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    state.step += 1
    state.episodes += len(episodes)
    for group in groups[: rollout.num_groups]:  # groups of a refill have levels of their own
        state.groups[group.env] = state.groups.get(group.env, 0) + 1
    state.tokens += (continued or 0) + sum(
        len(turn.completion.token_ids or ())
        for episode in episodes
        for turn in (*episode.turns, *episode.others)
    )
    counts = {"updates": state.updates, "episodes": state.episodes, "tokens": state.tokens}
    metrics = {f"progress/{name}": last(count) for name, count in counts.items()}
    if continued is not None:
        metrics["tokens/continuations"] = total(continued)
    if rollout.refill:
        metrics["rollout/refilled_groups"] = total(len(groups) - rollout.num_groups)
    return metrics


async def run_to_the_end(run: Run) -> None:
    """Evaluate, train and evaluate again; after each failure, respond to it and go on (`respond`).

    A policy that did not work before it was trained is no such failure: `NotFiniteError` is raised.
    """
    first = run.engine
    limit = stall_limit(run.original.guard.response("stalled"))
    watchdog = Watchdog(limit, partial(report_stall, run), run.watcher.hangs)
    run.beat = watchdog.beat
    trouble: EngineLost | NotFiniteError | None = None
    losses = Counter[str]()
    has_begun, is_over = False, False
    try:
        with run.stop.listening(), watchdog:
            while not is_over:
                try:
                    if trouble is not None:
                        await respond(run, trouble, losses)
                        trouble = None
                    if run.state.step == 0:
                        await save(run)  # from here on the run can be resumed, whatever happens
                    if not has_begun:
                        run.watcher.begin(run.folder, run.config, run.state.step)
                        has_begun = True
                    await evaluate_and_loop(run)
                    is_over = True
                except (EngineLost, NotFiniteError) as failure:
                    if isinstance(failure, NotFiniteError) and run.state.step == 0:
                        raise
                    trouble = failure
    except asyncio.CancelledError:
        if watchdog.reason:
            raise GuardStop(f"the guard stopped the run: {watchdog.reason}") from None
        raise
    finally:
        run.watcher.end()
        if run.engine is not first:  # the caller closes the first one
            await run.engine.close()


async def evaluate_and_loop(run: Run) -> None:
    """Do all that is left to do, from the evaluation before training to the one after it."""
    both = dict.fromkeys((run.config.eval.temperature, 0.0))
    try:
        if run.state.step == 0:
            await evaluate_missing(run, *both)
            await save(run)
        else:
            await catch_up(run)
        try:
            await loop(run)
        finally:
            if run.ahead is not None:
                await run.ahead.drop()
        await evaluate_missing(run, *both)
        await save(run)
    except (StopRequested, UnplayableError) as reason:
        # Only work that changes no weights is interrupted, so the last step's weights are saved.
        run.recorder.discard()
        await save(run)
        folder = shlex.quote(str(run.folder))
        done = f"stopped after {run.state.step} steps; resume with: ragen resume {folder}"
        if isinstance(reason, StopRequested):
            raise StopRequested(reason.signal_number, done) from None
        raise UnplayableError(f"{reason}; {done}") from None


async def catch_up(run: Run) -> None:
    """Do what the last finished step of a resumed run has left to do: its evaluation and guard."""
    settings = run.config.eval
    if is_due(run.state.step, settings.every):
        await evaluate_missing(run, settings.temperature)
        await run_guard(run)
        await save(run)
