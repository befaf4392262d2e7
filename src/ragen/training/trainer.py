"""A run from its start or its checkpoint to its result: `train`, `resume`, `examine`."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.estimator import needs_values
from ragen.config.config import Config
from ragen.config.extensions import load, short_name
from ragen.config.reading import changed, dump, with_preset
from ragen.config.sources import refuse_changed
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, values
from ragen.core.seeding import train_level
from ragen.core.stopping import run_async
from ragen.core.user_code import can_interrupt
from ragen.diagnostics.guard import REMEDIES
from ragen.diagnostics.information import measure_envs
from ragen.engines.engine import Engine
from ragen.engines.judges import check_judge, open_judge
from ragen.evaluation.targets import is_measured
from ragen.models.memory import plans, refuse_too_large
from ragen.networks.machine import use_threads
from ragen.rollout.episode import require_room
from ragen.rollout.setup import Setup, open_setups, open_stages
from ragen.settings.first_model import find_first, pin_first
from ragen.settings.model import advice
from ragen.settings.saved import Settings, differing, find_settings, run_config
from ragen.storage.checkpoint import SETTINGS_HASH, newest, newest_intact, sound
from ragen.storage.database import (
    DATABASE,
    check_run_folder,
    new_run_folder,
    refuse_existing,
)
from ragen.storage.recorder import Recorder
from ragen.training.code_check import load_code, resolve_paths
from ragen.training.collection import collect_groups, gradient_norms
from ragen.training.loop import run_to_the_end
from ragen.training.mixture import first_starts
from ragen.training.progress import Watcher
from ragen.training.recovery import forget_later, states_of
from ragen.training.running import (
    LoopState,
    Result,
    Run,
    in_stage,
    is_finished,
    make_engine,
    progress_of,
    result_of,
)
from ragen.training.trackers import with_trackers

FIXED = (
    *("recipe", "algorithm", "seed", "threads", "sources", "env.name", "env.params"),
    *("env.mix", "curriculum.stages"),
    *("model.path", "model.dtype", "model.critic", "lora"),
)
"""Keys and sections that cannot change on a resume: they say which run it is, or what its weights
are. What its evaluations measure (`is_measured`) cannot change either."""


CANNOT_INTERRUPT = (
    "the run is not in the main thread, as in a notebook: an environment that hangs cannot be "
    "interrupted, and one that takes too long fails its episode afterwards; env.isolate = true "
    "stops it in time"
)
"""A note to the user where `can_interrupt` is false."""


def train(config: Config, out: Path | None = None, *, watcher: Watcher | None = None) -> Result:
    """Train an agent and evaluate it before and after.

    Args:
        config: The settings. `ragen.config.reading.resolve` makes them from a recipe; what a
            `Config` built in Python leaves unset comes from the preset of its algorithm.
        out: The run's folder, which must not exist; ``None`` numbers one under ``runs/``.
        watcher: Shows progress; by default nothing does.

    Raises:
        RagenError: The settings, the environment, the model or the disk do not allow it. The run's
            folder is made after all of them but the disk have been checked.
        GuardStop: The run is in trouble and `config.guard` asks to stop; the run is saved.
        StopRequested: SIGINT or SIGTERM came; the run is saved as of its last finished step.
    """
    refuse_existing(out)
    config = pin_first(load_code(resolve_paths(with_preset(config))))
    changed(config, REMEDIES[config.guard.remedy](config, 1))  # refuse a remedy that cannot work
    state = LoopState(threads=use_threads(config.threads))
    watcher = with_trackers(watcher, config.record.trackers)
    if warning := advice(config.prompt.style, config.model.path):
        watcher.note(warning)
    refuse_too_large(plans(config), watcher.note)
    engine = make_engine(config)

    async def start() -> Result:
        async with opened(engine, config) as (setups, stages):
            for setup in (*setups.values(), *stages):
                require_room(setup, train_level(0))
            of_env = config.recipe == Config().recipe  # no recipe, so the environment names it
            name = short_name(config.env.name) if of_env else config.recipe
            folder = new_run_folder(Path("runs"), name, out)
            with Recorder.create(folder, dump(config), engine.chat.text_of) as recorder:
                if engine.chat.warning is not None:
                    watcher.note(engine.chat.warning)
                if not (can_interrupt() or config.env.isolate):
                    watcher.note(CANNOT_INTERRUPT)
                played = config, config, engine, setups, stages
                run = Run(folder, *played, recorder, state, watcher)
                async with open_judge(config, folder) as run.judge:
                    await run_to_the_end(run)
        return result_of(folder, run.config, run.state)

    return run_async(start())


def resume(
    folder: Path, watcher: Watcher | None = None, overrides: Mapping[str, Any] | None = None
) -> Result:
    """Continue a run from its newest intact checkpoint, as if it had never stopped.

    Database rows later than the checkpoint are deleted first. Later checkpoints that are damaged
    are renamed. A `config.toml` that is damaged or missing is written again. A finished run is left
    as it is.

    Args:
        folder: The run's folder.
        watcher: Shows progress; by default nothing does.
        overrides: Settings that change from this step on, by key. They are recorded as an event.

    Raises:
        RagenError: There is no run or no intact checkpoint, the model it began with is gone,
            `config.toml` has other values than the run, or a change is impossible or has no effect.
        GuardStop, StopRequested: As `train`.
    """
    check_run_folder(folder, DATABASE)
    checkpoint, saved, damaged = newest_intact(folder)
    settings = find_settings(folder, saved[SETTINGS_HASH], overrides or {})
    original = _changed_settings(settings, overrides or {})
    state, guard = states_of(folder, checkpoint, saved)
    engine_state = saved["engine"]
    use_threads(state.threads)
    before = changed(settings.config, guard.changes)
    guard.leave(overrides or ())
    config = changed(original, guard.changes)
    watcher = with_trackers(watcher, config.record.trackers)

    changes = differing(before, config)
    is_over = not damaged and is_finished(folder, config, state)
    without_effect = changes.keys() - (() if is_over else {"steps"})
    if without_effect and progress_of(state, config) >= config.steps:
        raise RagenError(
            f"nothing is left to train after step {state.step}, so a change has no effect: give "
            "more --steps, too"
        )

    def write_settings(recorder: Recorder) -> None:
        for line in settings.write(recorder, state.step, original, changes):
            watcher.alarm(state.step, line)

    if is_over:
        if settings.damage:
            with Recorder.open(folder, state.attempt) as recorder:
                write_settings(recorder)
        watcher.note(
            f"the run is finished at step {state.step}; to train its model further: "
            f"ragen train RECIPE --model {folder}"
        )
        return result_of(folder, config, state)
    path = find_first(config, checkpoint)
    refuse_too_large(plans(changed(config, {"model.path": path})), watcher.note)
    engine = make_engine(config, path)

    async def restart() -> Result:
        async with opened(engine, config) as (setups, stages):
            await engine.load(checkpoint, engine_state)
            with Recorder.open(folder, state.attempt, engine.chat.text_of) as recorder:
                if not (can_interrupt() or config.env.isolate):
                    watcher.note(CANNOT_INTERRUPT)
                write_settings(recorder)
                text, data = f"resumed after step {state.step}", {"checkpoint": checkpoint.name}
                recorder.event(state.step, "resume", text, data)
                forget_later(recorder, watcher, checkpoint, state, damaged)
                played = original, config, engine, setups, stages
                run = Run(folder, *played, recorder, state, watcher, guard)
                async with open_judge(config, folder, state.attempt) as run.judge:
                    await run_to_the_end(run)
        return result_of(folder, run.config, run.state)

    return run_async(restart())


def _changed_settings(settings: Settings, overrides: Mapping[str, Any]) -> Config:
    """The settings with those that change on purpose."""
    load.cache_clear()
    refuse_changed(settings.config)
    if not overrides:
        return settings.config
    config = settings.with_changes(overrides)
    run = shlex.quote(str(settings.run))
    for key in differing(settings.config, config):
        anew = f"train its policy further in a new run: ragen train RECIPE --model {run}"
        if key in FIXED or key.startswith(tuple(f"{fixed}." for fixed in FIXED)):
            raise RagenError(f"{key} cannot change when a run is resumed; to change it, {anew}")
        if is_measured(key):
            raise RagenError(
                f"{key} decides what an evaluation of the run measures, and cannot change when it "
                f"is resumed; evaluate its policy otherwise: ragen eval {run}, or {anew}"
            )
    config = load_code(resolve_paths(config))
    name = config.advantage.name
    needs = [needs_values(find_estimator(each)) for each in (settings.config.advantage.name, name)]
    if needs[0] != needs[1]:
        raise RagenError(
            f"advantage.name = {name!r} {'needs a' if needs[1] else 'has no'} critic, unlike the "
            "run's; it cannot change when a run is resumed"
        )
    return config


def examine(folder: Path) -> dict[str, float]:
    """Run the diagnostics of `config.diagnose` on a run's newest checkpoint.

    The episodes of the next step are played. The result has the metrics ``information/…`` and
    ``gradient_by_std/…``. Nothing is written, and the run can be resumed as before.

    Raises:
        RagenError: There is no run or no checkpoint, the model it began with is gone, or another
            version of RAGEN wrote the checkpoint.
    """
    checkpoint = newest(folder)
    saved = sound(checkpoint, ())
    state, guard = states_of(folder, checkpoint, saved)
    config = changed(run_config(folder), guard.changes)
    if config.rollout.sampler != "vllm":  # a server may hold the weights of a run in progress
        config = changed(config, {"rollout.sampler": "local"})
    use_threads(state.threads)
    engine = make_engine(config, find_first(config, checkpoint))

    async def measure() -> Metrics:
        async with opened(engine, config) as found, open_judge(config, None) as judge:
            await engine.load(checkpoint, saved["engine"])
            starts = first_starts(in_stage(*found, state.stage), config, state)
            groups = await collect_groups(engine, starts, config, state.step, judge=judge)
            metrics: Metrics = {}
            if config.prompt.think:
                of_step = config.seed, state.step
                metrics, _ = await measure_envs(engine, groups, *of_step, config.env.mix)
            return metrics | await gradient_norms(engine, groups, config)

    return values(run_async(measure()))


@asynccontextmanager
async def opened(
    engine: Engine, config: Config
) -> AsyncIterator[tuple[dict[str, Setup], list[Setup]]]:
    """`Run.setups` and `Run.stages`; at the end, closes them and the engine (it may hold a GPU)."""
    try:
        check_judge(config)  # before the run's folder is made
        with ExitStack() as stack:
            setups = open_setups(config, engine.chat, stack)
            env_time = next(iter(setups.values())).env_time
            yield setups, open_stages(config, engine.chat, stack, env_time)
    finally:
        await engine.close()
