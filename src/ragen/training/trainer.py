"""A run from its start or its checkpoint to its result: `train` and `resume`."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.estimator import needs_values
from ragen.cluster.process_engine import with_processes
from ragen.config.config import Config
from ragen.config.extensions import JUDGE, load, short_name
from ragen.config.reading import changed, dump, flatten, unread, with_preset
from ragen.config.rules import READ_WITH
from ragen.core.errors import RagenError
from ragen.core.stopping import run_async
from ragen.core.user_code import can_interrupt
from ragen.diagnostics.guard import GuardState, remedy
from ragen.engines.engine import Engine
from ragen.engines.judges import check_judge, open_judge
from ragen.models.memory import plans, refuse_too_large
from ragen.networks.machine import use_threads
from ragen.rollout.episode import require_room
from ragen.rollout.setup import forget_facts, open_setups, open_stages
from ragen.settings.code import load_code, refuse_changed, resolve_paths
from ragen.settings.first_model import find_first, pin_first
from ragen.settings.model import advice
from ragen.settings.saved import (
    changes_in_words,
    differing,
    run_config,
    write_settings,
)
from ragen.settings.target import is_measured
from ragen.storage.checkpoint import newest_intact
from ragen.storage.database import (
    DATABASE,
    check_run_folder,
    new_run_folder,
    refuse_existing,
)
from ragen.storage.recorder import Recorder
from ragen.training.ahead import Buffer
from ragen.training.code_check import refuse_unfit
from ragen.training.loop import run_to_the_end
from ragen.training.progress import Watcher
from ragen.training.recovery import forget_later, states_of
from ragen.training.running import (
    LoopState,
    Result,
    Run,
    Tasks,
    is_evaluated,
    make_engine,
    result_of,
    spacing_of,
)
from ragen.training.trackers import with_trackers

TASK = ("env.name", "env.params", "env.mix", "curriculum.stages")
WEIGHTS = ("model.path", "model.dtype", "model.critic", "lora")
FIXED = ("recipe", "algorithm", "seed", "threads", "sources", *TASK, *WEIGHTS)
"""Keys and sections that cannot change on a resume: they say which run it is. What its evaluations
measure (`is_measured`) cannot change either."""


CANNOT_INTERRUPT = (
    "an environment that hangs cannot be interrupted on Windows and outside the main thread, as in "
    "a notebook, and one that takes too long fails its episode afterwards; env.isolate = true "
    "stops it in time"
)
"""A note to the user where `can_interrupt` is false."""


def train(config: Config, out: Path | None = None, *, watcher: Watcher | None = None) -> Result:
    """Train an agent and evaluate it before and after.

    Args:
        config: The settings. `ragen.settings.resolve` makes them from a recipe; what a
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
    config = with_processes(pin_first(load_code(resolve_paths(with_preset(config)))))
    refuse_unfit(config)
    changed(config, remedy(config, 1))  # refuse a remedy that cannot work
    state = LoopState(threads=use_threads(config.threads, config.engine.processes))
    watcher = with_trackers(watcher, config.record.trackers)
    if warning := advice(config.prompt.style, config.model.path):
        watcher.note(warning)
    refuse_too_large(plans(config), watcher.note)
    engine = make_engine(config)

    async def start() -> Result:
        async with opened(engine, config, watcher.note) as tasks:
            for setup in (*tasks.full.values(), *tasks.stages):
                require_room(setup)
            of_env = config.recipe == Config().recipe  # no recipe, so the environment names it
            name = short_name(config.env.name) if of_env else config.recipe
            folder = new_run_folder(Path("runs"), name, out)
            with Recorder.create(folder, dump(config), engine.chat.text_of) as recorder:
                if engine.chat.warning is not None:
                    watcher.note(engine.chat.warning)
                run = Run(config, config, engine, tasks, recorder, state, watcher)
                await _complete(run)
        return _result(run)

    return run_async(start())


@dataclass(frozen=True, slots=True)
class Saved:
    """A run as its folder has it, to be continued from `checkpoint` with the states in it.

    `damaged` has the later checkpoints, with what is wrong with each. The run had the settings
    `own` and gets `original`; with the guard's changes this is `config`. `changes` are the old and
    the new value of each key.
    """

    folder: Path
    checkpoint: Path
    damaged: Mapping[Path, str]
    engine: dict[str, Any]
    state: LoopState
    guard: GuardState
    own: Config
    original: Config
    config: Config
    changes: Mapping[str, tuple[Any, Any]]

    @property
    def is_over(self) -> bool:
        """True if the run has neither a step nor an evaluation nor a checkpoint left to do."""
        config, state = self.config, self.state
        spacing = spacing_of(config.checkpoint, config.steps)
        is_trained = not self.damaged and state.used(config.budget) >= config.steps
        return is_trained and is_evaluated(self.folder, state, config.eval, spacing)


def resume(
    folder: Path, watcher: Watcher | None = None, overrides: Mapping[str, Any] | None = None
) -> Result:
    """Continue a run from its newest intact checkpoint, as if it had never stopped.

    Database rows later than the checkpoint are deleted first. Later checkpoints that are damaged
    are renamed. A finished run is left as it is. `overrides` are settings that change from this
    step on, by key; they are recorded as an event.

    Raises:
        RagenError: There is no run or no intact checkpoint, the model it began with is gone,
            `config.toml` is damaged or has other values than the run, or a change is impossible or
            has no effect.
        GuardStop, StopRequested: As `train`.
    """
    saved = _load(folder, overrides or {})
    config = saved.config
    watcher = with_trackers(watcher, config.record.trackers)
    if saved.is_over:
        watcher.note(
            f"the run is finished at step {saved.state.step}; to train its model further: "
            f"ragen train RECIPE --model {folder}"
        )
        return result_of(folder, config.env.name, config.eval.temperature, saved.state)
    before, now = saved.own.engine.processes, config.engine.processes
    saved.state.threads = use_threads(max(1, saved.state.threads * before // now))
    path = find_first(config, saved.checkpoint)
    refuse_too_large(plans(changed(config, {"model.path": path})), watcher.note)
    engine = make_engine(config, path)

    async def restart() -> Result:
        async with opened(engine, config, watcher.note) as tasks:
            await engine.load(saved.checkpoint, saved.engine)
            with Recorder.open(folder, saved.state.attempt, engine.chat.text_of) as recorder:
                _repair(saved, recorder, watcher)
                both = saved.original, config
                run = Run(*both, engine, tasks, recorder, saved.state, watcher, saved.guard)
                await _complete(run)
        return _result(run)

    return run_async(restart())


def _load(folder: Path, overrides: Mapping[str, Any]) -> Saved:
    """Read a run that is to be resumed with some settings changed; nothing is written."""
    check_run_folder(folder, DATABASE)
    checkpoint, saved, damaged = newest_intact(folder)
    own = run_config(folder, overrides)
    original = _with_changes(own, overrides, folder)
    state, guard = states_of(folder, checkpoint, saved)
    before = changed(own, guard.changes)
    guard.leave(overrides)
    config = changed(original, guard.changes)
    changes, engine = differing(flatten(before), flatten(config)), saved["engine"]
    found = Saved(folder, checkpoint, damaged, engine, state, guard, own, original, config, changes)
    without_effect = changes.keys() - (() if found.is_over else {"steps"})
    if without_effect and state.used(config.budget) >= config.steps:
        raise RagenError(
            f"nothing is left to train after step {state.step}, so a change has no effect: give "
            "more --steps, too"
        )
    return found


def _repair(saved: Saved, recorder: Recorder, watcher: Watcher) -> None:
    """Let the run's files fit its checkpoint and its settings, and record that it resumes."""
    step, checkpoint = saved.state.step, saved.checkpoint
    if saved.original != saved.own:
        write_settings(recorder, dump(saved.original))
    if saved.changes:
        words = f"changed {changes_in_words(saved.changes)}"
        recorder.event(step, "settings", words, {"changes": saved.changes})
        watcher.alarm(step, words)
    data = {"checkpoint": checkpoint.name}
    recorder.event(step, "resume", f"resumed after step {step}", data)
    forget_later(recorder, watcher, checkpoint, saved.state, saved.damaged)


async def _complete(run: Run) -> None:
    config = run.config
    if not (can_interrupt() or config.env.isolate):
        run.watcher.note(CANNOT_INTERRUPT)
    if config.engine.max_staleness:
        run.ahead = Buffer(config.engine.max_staleness, config.episodes_at_once)
    async with open_judge(config, run.folder, run.state.attempt) as run.judge:
        await run_to_the_end(run)


def _result(run: Run) -> Result:
    config = run.config
    return result_of(run.folder, config.env.name, config.eval.temperature, run.state)


def _with_changes(before: Config, overrides: Mapping[str, Any], folder: Path) -> Config:
    load.cache_clear()
    refuse_changed(before)
    if not overrides:
        return before
    config = changed(before, overrides)
    for key in set(overrides).intersection(unread(config)):
        raise RagenError(f"{key} has no effect: it takes {READ_WITH[key].words}")
    run = shlex.quote(str(folder))
    for key in differing(flatten(before), flatten(config)):
        anew = f"train its policy further in a new run: ragen train RECIPE --model {run}"
        if key in FIXED or key.startswith(tuple(f"{fixed}." for fixed in FIXED)):
            raise RagenError(f"{key} cannot change when a run is resumed; to change it, {anew}")
        if is_measured(key):
            raise RagenError(
                f"{key} decides what an evaluation of the run measures, and cannot change when it "
                f"is resumed; evaluate its policy otherwise: ragen eval {run}, or {anew}"
            )
    config = with_processes(load_code(resolve_paths(config)))
    refuse_unfit(config)
    names = before.advantage.name, config.advantage.name
    had_critic, has_critic = (needs_values(find_estimator(name)) for name in names)
    if had_critic != has_critic:
        raise RagenError(
            f"advantage.name = {names[1]!r} {'needs a' if has_critic else 'has no'} critic, unlike "
            "the run's; it cannot change when a run is resumed"
        )
    return config


@asynccontextmanager
async def opened(
    engine: Engine, config: Config, note: Callable[[str], None]
) -> AsyncIterator[Tasks]:
    """The tasks of a run; at the end, closes them and the engine (it may hold a GPU).

    `note` receives what the user has to tell an agent outside.
    """
    try:
        if JUDGE in config.reward.terms:  # before the run's folder is made
            check_judge(config.judge, config.env.name)
        with ExitStack() as stack:
            setups = open_setups(config, engine.chat, stack)
            for each in setups.values():
                if said := each.invite():
                    note(said)
            stages = open_stages(config, engine.chat, stack)
            if stages:  # an agent of the full tasks plays these, too
                full = setups[config.env.name]
                stages = [replace(each, agent=full.agent) for each in stages]
            yield Tasks(setups, stages)
    finally:
        forget_facts()
        await engine.close()
