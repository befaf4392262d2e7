"""The loop: play, choose, credit, update, publish, record.

It knows neither algorithm nor machine: the config names the one, the engine hides the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ragen.algorithms.batch import Batch
from ragen.algorithms.filters import scores_of, select
from ragen.algorithms.samples import to_samples
from ragen.config.config import Config
from ragen.config.reading import changed, dump, read_config
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, last, merge, values
from ragen.core.seeding import train_level
from ragen.core.stopping import StopRequested, run_async
from ragen.core.types import Episode, Group
from ragen.diagnostics.diagnosis import information
from ragen.diagnostics.guard import REMEDIES, GuardState
from ragen.diagnostics.information import CrossScores
from ragen.diagnostics.signals import averaged, explained_variance, reference_kl, smooth, summarize
from ragen.engines.engine import Engine
from ragen.engines.local import LocalEngine
from ragen.engines.memory import refuse_too_large
from ragen.engines.threads import use_threads
from ragen.evaluation.evaluation import refuse_unplayable
from ragen.evaluation.outcomes import outcome_of
from ragen.models.names import resolve_model
from ragen.rollout.rollout import Setup, refuse_cramped, setup_of
from ragen.storage.checkpoint import newest, newest_intact, read_state, set_aside
from ragen.storage.database import CONFIG, new_run_folder, refuse_existing
from ragen.storage.recorder import Recorder
from ragen.training.collection import (
    chosen_by,
    gradients,
    groups_of,
    make_batch,
    planned,
    refilled,
    weights_of,
)
from ragen.training.progress import Watcher
from ragen.training.recovery import guarded, stalled
from ragen.training.running import (
    Clock,
    LoopState,
    Result,
    Run,
    due,
    evaluate,
    evaluate_missing,
    result,
    save,
    spent,
)
from ragen.training.trackers import tracked
from ragen.training.watchdog import Watchdog


async def loop(run: Run) -> None:
    """Train until the run's budget is spent."""
    while spent(run.state, run.config) < run.config.steps:
        config, engine, state, recorder = run.config, run.engine, run.state, run.recorder
        clock = Clock(run.watchdog.beat)
        with clock("rollout"):
            groups = await run.stop.or_finish(play(run))
        kept = select(groups, **chosen_by(config))
        chosen = [groups[index] for index in kept]
        diagnosis, matrices = await diagnose(run, groups, clock)
        updates: list[Metrics] = []
        samples, episodes = to_samples(chosen)
        if samples:
            with clock("score"):
                weights = weights_of(config, groups, kept)
                batch = await make_batch(engine, samples, episodes, config, weights)
            with clock("update"):
                for part, at in planned(batch, state, config):
                    updates.append(await engine.update(part, at))
                    run.watchdog.beat()
            with clock("publish"):
                await engine.publish()
        advance(state, groups, updates)
        with clock("record"):
            await record(run, groups, kept, episodes, batch if updates else None)
            record_scores(run, matrices)
        counted = counters(state) | refilled(groups, config) | engine.metrics()
        metrics = merge([summarize(groups, kept), *updates, diagnosis, counted])
        metrics |= critic_metrics(batch) if updates else {}
        metrics |= clock.metrics(run.setup.env_time.seconds, metrics["tokens/sampled"].value)
        state.averages = smooth(state.averages, metrics)
        recorder.log(state.step, metrics | averaged(state.averages, metrics))
        recorder.commit()
        state.seconds += clock.seconds
        run.watcher.step(state.step, values(metrics))
        if due(state.step, config.eval.every) and spent(state, config) < config.steps:
            await evaluate(run, config.eval.temperature)
        if await guarded(run):
            continue
        if due(state.step, config.checkpoint.every) and spent(state, config) < config.steps:
            await save(run)


async def play(run: Run) -> list[Group]:
    """The groups of the coming step."""

    def on_episode(episode: Episode) -> None:
        run.watchdog.beat()
        run.watcher.episode(episode)

    groups = await groups_of(run.engine, run.setup, run.config, run.state.step, on_episode)
    refuse_unplayable([outcome_of(episode) for group in groups for episode in group.episodes])
    return groups


async def diagnose(
    run: Run, groups: Sequence[Group], clock: Clock
) -> tuple[Metrics, list[CrossScores]]:
    """What is looked at closer in this step, by the weights that the groups were played with."""
    config, step = run.config, run.state.step
    metrics, matrices = Metrics(), list[CrossScores]()
    if config.prompt.think and due(step, config.diagnose.information_every):
        with clock("information"):
            count, path = config.diagnose.thoughts, (config.seed, step)
            metrics, matrices = await information(run.engine, groups, count, path)
    if due(step, config.diagnose.gradients_every):
        with clock("gradients"):
            metrics |= await gradients(run.engine, groups, config)
    return metrics, matrices


def advance(state: LoopState, groups: Sequence[Group], updates: Sequence[Metrics]) -> None:
    """Count a finished step."""
    turns = [turn for group in groups for e in group.episodes for turn in e.turns]
    state.step += 1
    state.updates += len(updates)
    state.episodes += sum(len(group.episodes) for group in groups)
    state.tokens += sum(len(turn.completion.token_ids or ()) for turn in turns)


def counters(state: LoopState) -> Metrics:
    """How far the run is, in each unit that a curve may be drawn against."""
    counted = {"updates": state.updates, "episodes": state.episodes, "tokens": state.tokens}
    return {f"progress/{name}": last(count) for name, count in counted.items()}


async def record(
    run: Run,
    groups: Sequence[Group],
    kept: Sequence[int],
    episodes: Sequence[Episode],
    batch: Batch | None,
) -> None:
    """Write the step's episodes, and now and then its tokens, as `config.record` asks."""
    step, wanted = run.state.step, run.config.record
    if due(step, wanted.episodes_every):
        chosen_ones = set(kept)
        flags = [index in chosen_ones for index in range(len(groups))]
        scores = scores_of(groups, run.config.filter.score)
        run.recorder.episodes(step, groups, flags, scores=scores)
    if batch is not None and due(step, wanted.tokens_every):
        after = await run.engine.score(batch, "policy")
        rows = [tokens_of(batch, after, row, episodes) for row in range(batch.num_rows)]
        run.recorder.samples(step, rows)


def record_scores(run: Run, matrices: Sequence[CrossScores]) -> None:
    """Write what the step's thoughts were measured by."""
    for found in matrices:
        scores, own = found.scores_NM.numpy(), found.own_N
        run.recorder.cross_scores(
            run.state.step, found.sampling, scores, own, found.thoughts, found.prompts
        )


def critic_metrics(batch: Batch) -> Metrics:
    """What critic and reference say of a step's tokens, where the run has them."""
    on, metrics = batch.mask_BT, Metrics()
    if batch.values_BT is not None and batch.returns_BT is not None:
        metrics |= explained_variance(batch.values_BT[on], batch.returns_BT[on])
    if batch.reference_logprobs_BT is not None and batch.old_logprobs_BT is not None:
        metrics |= reference_kl(batch.old_logprobs_BT[on], batch.reference_logprobs_BT[on])
    return metrics


def tokens_of(batch: Batch, after: Batch, row: int, episodes: Sequence[Episode]) -> dict[str, Any]:
    """One row of a batch as the recorder stores it; `after` is scored after the step's updates."""
    assert batch.old_logprobs_BT is not None and after.old_logprobs_BT is not None
    length = int(batch.lengths_B[row])
    episode = episodes[int(batch.episode_B[row])]
    arrays = {
        "token_ids": batch.token_ids_BT,
        "loss_mask": batch.mask_BT,
        "turn_index": batch.turn_BT,
        "sampled_logprobs": batch.sampled_logprobs_BT,
        "old_logprobs": batch.old_logprobs_BT,
        "ratios": (after.old_logprobs_BT - batch.old_logprobs_BT).exp(),
        "entropies": after.entropies_BT,
        "values": batch.values_BT,
        "advantages": batch.advantages_BT,
        "returns": batch.returns_BT,
    }
    here = {k: v[row, :length].numpy() for k, v in arrays.items() if v is not None}
    return {"group": episode.group, "member": episode.member} | here


def local_engine(config: Config) -> Engine:
    """The engine of one process, with the model that the config names."""
    return LocalEngine(config, resolve_model(config.model.path, config.env.name))


def train(
    config: Config,
    out: Path | None = None,
    *,
    root: Path = Path("runs"),
    watcher: Watcher | None = None,
) -> Result:
    """Train an agent and evaluate it before and after.

    Args:
        config: What to do (`ragen.config.reading.resolve` makes it from a recipe).
        out: The run's folder, which must not exist; ``None`` numbers one under `root`.
        root: Where numbered runs go.
        watcher: Who is told of the progress.

    Raises:
        RagenError: The settings, the environment, the model or the disk do not allow it. The run's
            folder is made when all of them are known to, the disk excepted.
        GuardStop: The run got into trouble for which `config.guard` asks to stop; it is saved.
        StopRequested: SIGINT or SIGTERM came; the run is saved as of its last finished step.
    """
    refuse_existing(out)
    config = rooted(config)
    changed(config, REMEDIES[config.guard.remedy](config, 1))  # it is known to work
    state = LoopState(threads=use_threads(config.threads))
    seen = tracked(watcher or Watcher(), config)
    refuse_too_large(config, seen.note)
    engine = local_engine(config)

    async def begin() -> Result:
        async with opened(engine, config) as (setup, stack):
            refuse_cramped(setup, train_level(0, 0, config.rollout.num_groups))
            folder = new_run_folder(root, config.recipe, out)
            recorder = Recorder.create(folder, dump(config), engine.chat.text_of)
            stack.callback(recorder.close)
            if engine.chat.warning is not None:
                seen.note(engine.chat.warning)
        run = Run(folder, config, config, local_engine, engine, setup, recorder, state, seen)
        return await whole(run)

    return run_async(begin())


@asynccontextmanager
async def opened(engine: Engine, config: Config) -> AsyncIterator[tuple[Setup, AsyncExitStack]]:
    """The set-up of a run that is about to begin, and what is closed again if it does not.

    Once it has begun, `whole` closes all of it. An engine may hold processes and a GPU, which a
    notebook would keep to its end.
    """
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        setup = setup_of(config, engine.chat)
        stack.callback(setup.close)
        yield setup, stack
        stack.pop_all()


def rooted(config: Config) -> Config:
    """The config with its files named from the root, so that it can be read from any folder."""
    model, env = config.model, config.env
    if Path(model.path).exists():
        model = model.model_copy(update={"path": str(Path(model.path).resolve())})
    if ".py:" in env.name:
        file, _, name = env.name.rpartition(":")
        env = env.model_copy(update={"name": f"{Path(file).resolve()}:{name}"})
    return config.model_copy(update={"model": model, "env": env})


def resume(folder: Path, watcher: Watcher | None = None) -> Result:
    """Go on with a run from its newest whole checkpoint, as if it had never stopped.

    Rows of the database that are later than the checkpoint are deleted first, and later checkpoints
    that turned out to be damaged are renamed.

    Args:
        folder: The run's folder.
        watcher: Who is told of the progress.

    Raises:
        RagenError: No run, no whole checkpoint, or the model it began with is gone.
        StopRequested: As in `train`.
    """
    asked = read_config(folder / CONFIG)
    checkpoint, saved, damaged = newest_intact(folder)
    try:
        state, engine_state = LoopState(**saved["loop"]), saved["engine"]
        guard = GuardState(**saved["guard"])
    except (KeyError, TypeError) as error:
        raise RagenError(
            f"{checkpoint} was written by another version of RAGEN ({error})"
        ) from error
    use_threads(state.threads)
    config = changed(asked, guard.changes)
    seen = tracked(watcher or Watcher(), config)
    refuse_too_large(config, seen.note)
    engine = local_engine(config)

    async def go_on() -> Result:
        async with opened(engine, config) as (setup, stack):
            await engine.load(checkpoint, engine_state)
            recorder = Recorder.open(folder, state.attempt, engine.chat.text_of)
            stack.callback(recorder.close)
            recorder.forget_after(state.attempt, state.step)
            recorder.event(state.step, "resume", f"resumed after step {state.step}")
            for later, reason in damaged.items():
                text = f"going on from {checkpoint.name}: in {set_aside(later)}, {reason}"
                recorder.event(state.step, "damaged checkpoint", text)
                seen.alarm(state.step, text)
        run = Run(folder, asked, config, local_engine, engine, setup, recorder, state, seen, guard)
        return await whole(run)

    return run_async(go_on())


def examine(folder: Path) -> dict[str, float]:
    """Look at a run's newest checkpoint as `config.diagnose` would, whatever its schedule.

    The coming step's episodes are played, their thoughts and gradients measured; nothing is
    written, and the run goes on from its checkpoint as if nobody had looked.

    Args:
        folder: The run's folder.

    Returns:
        ``information/…`` and ``gradient_by_std/…``.

    Raises:
        RagenError: As `resume`.
    """
    checkpoint = newest(folder)
    saved = read_state(checkpoint)
    config = changed(read_config(folder / CONFIG), saved["guard"]["changes"])
    if config.rollout.sampler != "vllm":  # a server has the weights of the run that goes on
        config = changed(config, {"rollout.sampler": "local"})
    step = int(saved["loop"]["step"])
    use_threads(int(saved["loop"]["threads"]))
    engine = local_engine(config)

    async def look() -> Metrics:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(engine.close)
            setup = setup_of(config, engine.chat)
            stack.callback(setup.close)
            await engine.load(checkpoint, saved["engine"])
            groups = await groups_of(engine, setup, config, step)
            path = (config.seed, step)
            told, _ = await information(engine, groups, config.diagnose.thoughts, path)
            return told | await gradients(engine, groups, config)

    return values(run_async(look()))


async def whole(run: Run) -> Result:
    """Evaluate, train, evaluate; a stop in between leaves a run that can be gone on with."""
    both = dict.fromkeys((run.config.eval.temperature, 0.0))
    guard = run.asked.guard
    limit = 0.0 if guard.response("stalled") == "off" else guard.stalled_s
    run.watchdog = Watchdog(limit, partial(stalled, run))
    try:
        with run.recorder, run.stop.listening(), run.watchdog:
            if run.state.step == 0:
                await save(run)  # whatever happens from here on, the run can be gone on with
            run.watcher.begin(run.folder, run.config, run.state.step)
            try:
                if run.state.step == 0:
                    await evaluate_missing(run, *both)
                    await save(run)
                elif due(run.state.step, run.config.eval.every):  # it may have been interrupted,
                    await evaluate_missing(run, run.config.eval.temperature)
                    await guarded(run)  # and then nobody looked at this step
                    await save(run)
                await loop(run)
                await evaluate_missing(run, *both)
                await save(run)
            except StopRequested as request:
                # Only what changes no weights is interrupted: they are those of the last step.
                run.recorder.discard()
                await save(run)
                raise request.with_text(
                    f"stopped after {run.state.step} steps; go on with: ragen resume {run.folder}"
                ) from None
    finally:
        run.watcher.end()
        run.setup.close()
        await run.engine.close()
    return result(run)
