"""A run from its start or its checkpoint to its result: `train`, `resume`, `examine`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.estimator import compares_group
from ragen.config.config import Config
from ragen.config.kinds import KINDS, load
from ragen.config.reading import changed, dump, read_config, with_preset
from ragen.config.sources import absolute, refuse_changed, sources, value_of
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, values
from ragen.core.seeding import train_level
from ragen.core.stopping import StopRequested, run_async
from ragen.diagnostics.guard import REMEDIES, GuardState
from ragen.diagnostics.information import measure_thoughts
from ragen.engines.engine import Engine
from ragen.engines.machine import use_threads
from ragen.engines.memory import refuse_too_large
from ragen.models.names import resolve_model
from ragen.rollout.episode import require_room
from ragen.rollout.setup import Setup, make_setup
from ragen.storage.checkpoint import newest, newest_intact, read_state, set_aside
from ragen.storage.database import CONFIG, new_run_folder, refuse_existing
from ragen.storage.recorder import Recorder
from ragen.training.collection import collect_groups, gradient_norms
from ragen.training.loop import loop
from ragen.training.progress import Watcher
from ragen.training.recovery import STALLED_S, Watchdog, report_stall, run_guard
from ragen.training.running import (
    LoopState,
    Result,
    Run,
    evaluate_missing,
    is_due,
    result_of,
    save,
)
from ragen.training.trackers import with_trackers


def train(
    config: Config,
    out: Path | None = None,
    *,
    root: Path = Path("runs"),
    watcher: Watcher | None = None,
) -> Result:
    """Train an agent and evaluate it before and after.

    Args:
        config: The settings. `ragen.config.reading.resolve` makes them from a recipe; what a
            `Config` built in Python leaves unset comes from the preset of its algorithm.
        out: The run's folder, which must not exist; ``None`` numbers one under `root`.
        root: Where numbered runs go.
        watcher: Shows progress; by default nothing does.

    Raises:
        RagenError: The settings, the environment, the model or the disk do not allow it. The run's
            folder is made after all of them but the disk have been checked.
        GuardStop: The run is in trouble and `config.guard` asks to stop; the run is saved.
        StopRequested: SIGINT or SIGTERM came; the run is saved as of its last finished step.
    """
    refuse_existing(out)
    config = load_code(resolve_paths(with_preset(config)))
    changed(config, REMEDIES[config.guard.remedy](config, 1))  # refuse a remedy that cannot work
    state = LoopState(threads=use_threads(config.threads))
    watcher = with_trackers(watcher or Watcher(), config.record.trackers)
    refuse_too_large(config, watcher.note)
    engine = local_engine(config)

    async def start() -> Result:
        async with opened(engine, config) as (setup, stack):
            require_room(setup, train_level(0, 0, config.rollout.num_groups))
            folder = new_run_folder(root, config.recipe, out)
            recorder = Recorder.create(folder, dump(config), engine.chat.text_of)
            stack.callback(recorder.close)
            if engine.chat.warning is not None:
                watcher.note(engine.chat.warning)
        return await run_to_the_end(
            Run(folder, config, config, local_engine, engine, setup, recorder, state, watcher)
        )

    return run_async(start())


def resume(folder: Path, watcher: Watcher | None = None) -> Result:
    """Continue a run from its newest complete checkpoint, as if it had never stopped.

    Database rows later than the checkpoint are deleted first. Later checkpoints that are damaged
    are renamed.

    Raises:
        RagenError: There is no run or no complete checkpoint, or the model it began with is gone.
        GuardStop: As `train`.
        StopRequested: As `train`.
    """
    original = read_config(folder / CONFIG, to_resume=True)
    load.cache_clear()
    refuse_changed(original)
    checkpoint, saved, damaged = newest_intact(folder)
    try:
        state, engine_state = LoopState(**saved["loop"]), saved["engine"]
        guard = GuardState(**saved["guard"])
    except (KeyError, TypeError) as error:
        raise RagenError(
            f"{checkpoint} was written by another version of RAGEN ({error})"
        ) from error
    use_threads(state.threads)
    config = changed(original, guard.changes)
    watcher = with_trackers(watcher or Watcher(), config.record.trackers)
    refuse_too_large(config, watcher.note)
    engine = local_engine(config)

    async def restart() -> Result:
        async with opened(engine, config) as (setup, stack):
            await engine.load(checkpoint, engine_state)
            recorder = Recorder.open(folder, state.attempt, engine.chat.text_of)
            stack.callback(recorder.close)
            recorder.forget_after(state.attempt, state.step)
            about = {"checkpoint": checkpoint.name}
            recorder.event(state.step, "resume", f"resumed after step {state.step}", about)
            for later, reason in damaged.items():
                aside = set_aside(later)
                text = f"resuming from {checkpoint.name}: in {aside}, {reason}"
                data = about | {"damaged": later.name, "set_aside": aside.name, "reason": reason}
                recorder.event(state.step, "damaged checkpoint", text, data)
                watcher.alarm(state.step, text)
        return await run_to_the_end(
            Run(
                *(folder, original, config, local_engine, engine, setup, recorder, state),
                watcher,
                guard,
            )
        )

    return run_async(restart())


def examine(folder: Path) -> dict[str, float]:
    """Run the diagnostics of `config.diagnose` on a run's newest checkpoint.

    The episodes of the next step are played, their thoughts and gradients measured. Nothing is
    written, and the run can be resumed as before.

    Returns:
        ``information/…`` and ``gradient_by_std/…``.

    Raises:
        RagenError: There is no run or no checkpoint, or the model it began with is gone.
    """
    checkpoint = newest(folder)
    saved = read_state(checkpoint)
    config = changed(read_config(folder / CONFIG), saved["guard"]["changes"])
    if config.rollout.sampler != "vllm":  # a server may hold the weights of a run in progress
        config = changed(config, {"rollout.sampler": "local"})
    step = int(saved["loop"]["step"])
    use_threads(int(saved["loop"]["threads"]))
    engine = local_engine(config)

    async def measure() -> Metrics:
        async with opened(engine, config) as (setup, stack):
            await engine.load(checkpoint, saved["engine"])
            groups = await collect_groups(engine, setup, config.rollout, config.seed, step)
            metrics, _ = await measure_thoughts(engine, groups, config.seed, step)
            metrics |= await gradient_norms(engine, groups, config)
            await stack.aclose()  # nothing follows that would close it
        return metrics

    return values(run_async(measure()))


def local_engine(config: Config) -> Engine:
    """The engine of one process, with the model that the config names."""
    return Engine(config, resolve_model(config.model.path, config.env.name))


@asynccontextmanager
async def opened(engine: Engine, config: Config) -> AsyncIterator[tuple[Setup, AsyncExitStack]]:
    """The set-up of a run, and the stack that closes it if an error prevents the start.

    After the start, `run_to_the_end` closes everything. An engine may hold processes and a GPU, so
    a notebook must not keep one whose run failed to start.
    """
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        setup = make_setup(config, engine.chat)
        stack.callback(setup.close)
        yield setup, stack
        stack.pop_all()


def resolve_paths(config: Config) -> Config:
    """The config with absolute paths to the model and to files of code.

    The run can then be resumed from any working directory.
    """
    changes: dict[str, Any] = {}
    if config.model.path != "base" and Path(config.model.path).exists():
        changes["model.path"] = str(Path(config.model.path).resolve())
    for key in KINDS:
        value = value_of(config, key)
        if isinstance(value, str):
            changes[key] = absolute(value)
        else:
            changes[key] = {absolute(entry): each for entry, each in value.items()}
    return changed(config, changes)


def load_code(config: Config) -> Config:
    """The config with the sources of all code from outside, which is loaded and checked.

    Raises:
        RagenError: A name cannot be loaded, a signature is wrong, or an estimator that compares the
            episodes of a group would have one only.
    """
    load.cache_clear()  # What runs is what is recorded, also where a file was edited.
    found = changed(config, {"sources": sources(config)})
    estimator = find_estimator(config.advantage.name)
    if compares_group(estimator) and config.rollout.group_size < 2:
        raise RagenError(
            f"advantage.name = {config.advantage.name!r} compares the episodes of a group "
            "(group_E): set rollout.group_size to 2 or more"
        )
    return found


async def run_to_the_end(run: Run) -> Result:
    """Evaluate, train and evaluate again, then close the run.

    Raises:
        GuardStop: As `train`.
        StopRequested: As `train`; the run is saved and can be resumed.
    """
    both = dict.fromkeys((run.config.eval.temperature, 0.0))
    guard = run.original.guard
    limit = 0.0 if guard.response("stalled") == "off" else STALLED_S
    watchdog = Watchdog(limit, partial(report_stall, run))
    run.beat = watchdog.beat
    try:
        with run.recorder, run.stop.listening(), watchdog:
            if run.state.step == 0:
                await save(run)  # from here on the run can be resumed, whatever happens
            run.watcher.begin(run.folder, run.config, run.state.step)
            try:
                if run.state.step == 0:
                    await evaluate_missing(run, *both)
                    await save(run)
                elif is_due(run.state.step, run.config.eval.every):
                    # The run may have stopped between the step and its evaluation or the guard.
                    await evaluate_missing(run, run.config.eval.temperature)
                    await run_guard(run)
                    await save(run)
                await loop(run)
                await evaluate_missing(run, *both)
                await save(run)
            except StopRequested as request:
                # Only work that changes no weights is interrupted: they are the last step's.
                run.recorder.discard()
                await save(run)
                text = (
                    f"stopped after {run.state.step} steps; resume with: ragen resume {run.folder}"
                )
                raise StopRequested(request.signal_number, text) from None
    finally:
        run.watcher.end()
        run.setup.close()
        await run.engine.close()
    return result_of(run)
