"""A run in progress: what it holds, how it is evaluated and saved, and its result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ragen.cluster.process_engine import ProcessEngine
from ragen.config.config import Config
from ragen.config.sections import CheckpointConfig, EvalConfig, GuardConfig
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics, last, total
from ragen.core.stopping import Stop
from ragen.diagnostics.collapse import WINDOW, Sign, echo_trap_signs
from ragen.diagnostics.detectors import EVALUATED, LEVELS
from ragen.diagnostics.guard import Alarm, GuardState, read_alarms
from ragen.engines.engine import Engine
from ragen.engines.local import LocalEngine
from ragen.evaluation.evaluation import Levels, evaluate_envs
from ragen.evaluation.outcomes import phase_of
from ragen.evaluation.results import Evaluation, load_evaluations
from ragen.models.names import resolve_model
from ragen.rollout.judge import Judge
from ragen.rollout.setup import Setup
from ragen.storage.checkpoint import (
    checkpoint_of,
    drop_old,
    read_state,
    replace_state,
    write_state,
    writing,
)
from ragen.storage.journal import forget_journals
from ragen.storage.reader import read_evaluations, read_metrics
from ragen.storage.recorder import Recorder
from ragen.training.ahead import Buffer
from ragen.training.progress import Watcher

REACH_STEPS = 2 * WINDOW
"""How far checkpoints reach back for a rollback: an onset lies a window before its alarm."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run: its evaluations, the guard's alarms, and signs of collapse.

    `evaluations` has the keys ``before``, ``after``, ``before_greedy`` and ``after_greedy``; it is
    empty where ``eval.episodes`` is 0. `seconds` is the time that the steps took, without start-up
    and evaluations.
    """

    run: Path
    env: str
    seconds: float
    evaluations: Mapping[str, Evaluation]
    signs: tuple[Sign, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    @property
    def before(self) -> Evaluation:
        """The evaluation of the untrained policy, at ``eval.temperature``."""
        return self._evaluation("before")

    @property
    def after(self) -> Evaluation:
        """The evaluation of the trained policy, at ``eval.temperature``."""
        return self._evaluation("after")

    def _evaluation(self, name: str) -> Evaluation:
        if name not in self.evaluations:
            raise RagenError(f"{self.run} was not evaluated: set eval.episodes above 0")
        return self.evaluations[name]


@dataclass(slots=True)
class LoopState:
    """Where the loop stands; saved with every checkpoint.

    `step`, `updates`, `episodes` and `tokens` count finished steps, optimiser steps, training
    episodes and sampled tokens.

    Attributes:
        attempt: Number of rollbacks by the guard.
        begins: The step after which each attempt began.
        best_step: The evaluated step with a regular checkpoint that has the most success.
        best_success: Its success; −1 before the first evaluation.
        seconds: Time of the steps, those that were rolled back included.
        threads: Threads of torch in each process; a resumed run takes the same number.
        stage: Curriculum stage, from 1.
        stage_success: Success of the stage's last steps.
        groups: Groups so far by environment, without refilled ones.
    """

    step: int = 0
    attempt: int = 0
    begins: list[int] = field(default_factory=lambda: [0])
    updates: int = 0
    episodes: int = 0
    tokens: int = 0
    best_step: int = 0
    best_success: float = -1.0
    seconds: float = 0.0
    threads: int = 1
    averages: dict[str, float] = field(default_factory=dict)
    stage: int = 1
    stage_success: list[float] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)

    def used(self, budget: str) -> int:
        """How much of ``config.steps`` is used up, in the unit of ``config.budget``.

        The budget ``"steps"`` counts collections. A filter changes how many updates a collection
        makes, so runs that are compared at equal work on the weights count ``"updates"``, and those
        at equal play ``"tokens"``, in thousands.
        """
        used = {"steps": self.step, "updates": self.updates, "tokens": self.tokens // 1000}
        return used[budget]

    def counts(self, attempt: int, step: int) -> bool:
        """True if a row still counts: no later attempt began before it."""
        return all(step <= began for began in self.begins[attempt + 1 :])

    def is_best(self, success: float, spacing: int) -> bool:
        """True if the last step has a regular checkpoint, and its success is above all before."""
        return is_due(self.step, spacing) and success > self.best_success

    def compare_with_best(self, success: float, spacing: int) -> None:
        """Remember the last step if it is the best one; a second call changes nothing."""
        if self.is_best(success, spacing):
            self.best_step, self.best_success = self.step, success


def spacing_of(checkpoint: CheckpointConfig, steps: int) -> int:
    """Steps between regular checkpoints: those that do not depend on when a run is stopped."""
    return checkpoint.every or max(1, steps)


class Tasks(NamedTuple):
    """The set-ups of a run.

    `full` has each environment by name, as it is evaluated. `stages` has the stages of the
    curriculum but the last one, which has the full tasks.
    """

    full: Mapping[str, Setup]
    stages: Sequence[Setup]

    def at(self, stage: int) -> Mapping[str, Setup]:
        """The set-ups that training plays in a stage, counted from 1."""
        early = stage <= len(self.stages)
        return dict.fromkeys(self.full, self.stages[stage - 1]) if early else self.full

    def news(self) -> list[str]:
        """News of where environments run, each once."""
        found = []
        for each in (*self.full.values(), *self.stages):
            if each.venue.news:
                found.append(f"{each.env}: {each.venue.news}")
                each.venue.news = ""
        return found

    @property
    def env_seconds(self) -> float:
        """Seconds so far that the run's loop spent in environments."""
        return sum(each.venue.seconds for each in (*self.full.values(), *self.stages))


@dataclass(slots=True)
class Run:
    """All that a run holds while it is in progress.

    Attributes:
        original: The config that the run began with.
        config: The config in force; it differs from `original` by what the guard changed.
        history: The metrics so far, by name and step; empty until the guard reads the database.
        stop: The user's request to stop.
        beat: Tells the watchdog that the run is alive.
    """

    original: Config
    config: Config
    engine: Engine
    tasks: Tasks
    recorder: Recorder
    state: LoopState
    watcher: Watcher
    guard: GuardState = field(default_factory=GuardState)
    history: dict[str, dict[int, float]] = field(default_factory=dict)
    stop: Stop = field(default_factory=Stop)
    beat: Callable[[], None] = lambda: None
    judge: Judge | None = None
    ahead: Buffer | None = None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.recorder.folder

    @property
    def spacing(self) -> int:
        """Steps between regular checkpoints."""
        return spacing_of(self.config.checkpoint, self.config.steps)

    @property
    def is_complete(self) -> bool:
        """True if the budget is used up."""
        return self.state.used(self.config.budget) >= self.config.steps

    def report(self, kind: str, text: str, data: Mapping[str, Any], step: int = -1) -> None:
        """Record an event, of the last step unless another is given, and show it as an alarm."""
        step = self.state.step if step < 0 else step
        self.recorder.event(step, kind, text, data)
        self.watcher.alarm(step, text)

    def remember(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the recorded metrics of a step to the history, if the guard has read it."""
        for name in sorted(numbers) if self.history else ():
            if not math.isnan(numbers[name]):  # the database has no NaN either
                self.history.setdefault(name, {})[step] = numbers[name]


class Clock:
    """Seconds of a step by phase; `beat` is called when a phase begins and ends."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._seconds: dict[str, float] = {}
        self._beat = beat

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase`."""
        self._beat()
        start = time.perf_counter()
        yield
        self._beat()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """Sum of the phases."""
        return sum(self._seconds.values())

    def metrics(self, parts: Mapping[str, float], num_tokens: float) -> Metrics:
        """``time/rollout_s`` and the other phases, their sum ``time/step_s``, and tokens a second.

        Environments and a judge took the `parts` of the rollout; the rest is generation.
        """
        phases = {**self._seconds, **parts, "step": self.seconds}
        if parts:
            phases["generate"] = self._seconds["rollout"] - sum(parts.values())
        speed = {"time/tokens_per_s": last(num_tokens / self.seconds)}
        return {f"time/{name}_s": total(seconds) for name, seconds in phases.items()} | speed


def make_engine(config: Config, path: str | None = None, after: Engine | None = None) -> Engine:
    """The engine of a config, in place of `after`, which is closed; `path` overrides its model.

    Raises:
        RagenError: No such engine can be made.
    """
    path = path or resolve_model(config.model.path, config.env.name)
    if config.engine.name == "ray":
        from ragen.cluster.ray_engine import RayEngine  # Ray is an extra

        return RayEngine(config, path, after)
    if config.engine.processes > 1:
        return ProcessEngine(config, path)
    return LocalEngine(config, path)


def is_due(step: int, every: int) -> bool:
    """True if something that happens every `every` steps (0: never) happens after `step`."""
    return every > 0 and step % every == 0


async def evaluate(run: Run, temperature: float) -> None:
    """Evaluate the policy as it is now, and record the result."""
    config, step = run.config, run.state.step
    if config.eval.episodes == 0:
        return
    run.engine.forget()
    setups = {name: replace(each, temperature=temperature) for name, each in run.tasks.full.items()}
    slots, seed = config.episodes_at_once, run.original.seed
    levels = Levels(config.eval.episodes, slots, str(run.folder), seed)
    evaluation, groups = await run.stop.or_finish(
        evaluate_envs(run.engine.policy, setups, levels, lambda _: run.beat())
    )
    run.recorder.evaluation(step, evaluation.record())
    if config.record.episodes_every:
        run.recorder.episodes(step, groups, phase=phase_of(temperature))
    run.recorder.commit_later()
    run.watcher.evaluated(step, evaluation)
    if temperature == config.eval.temperature:
        run.remember(step, {EVALUATED: evaluation.success, LEVELS: evaluation.episodes})
        run.state.compare_with_best(evaluation.success, run.spacing)


def evaluated(folder: Path, state: LoopState) -> dict[float, float]:
    """The success of the last step by temperature, in the evaluations that still count."""
    return {
        each["temperature"]: each["success"]
        for each in read_evaluations(folder)
        if each["step"] == state.step and state.counts(each["attempt"], state.step)
    }


def is_evaluated(folder: Path, state: LoopState, settings: EvalConfig, spacing: int) -> bool:
    """True if a run has neither an evaluation of its last step nor the best checkpoint to do."""
    if settings.episodes == 0:
        return True
    done = evaluated(folder, state)
    return {settings.temperature, 0.0} <= done.keys() and not state.is_best(
        done[settings.temperature], spacing
    )


async def evaluate_missing(run: Run, *temperatures: float) -> None:
    """Evaluate at each temperature for which this step has no evaluation that still counts."""
    run.recorder.commit()
    done = evaluated(run.folder, run.state)
    for temperature in temperatures:
        if temperature not in done:
            await evaluate(run, temperature)
        elif temperature == run.config.eval.temperature:
            # The run may have been killed before the comparison.
            run.state.compare_with_best(done[temperature], run.spacing)


async def save(run: Run) -> None:
    """Write a checkpoint of the last finished step.

    If the step has one, its weights are the same: only the states of loop and guard are written.
    """
    state, keep, every = run.state, kept_checkpoints(run), run.spacing
    own: dict[str, Any] = {"loop": asdict(state), "guard": asdict(run.guard)}
    existing = checkpoint_of(run.folder, state.step)
    if existing is not None:
        run.recorder.commit()
        replace_state(existing, read_state(existing) | own)
        forget_journals(run.folder, state.step)
        drop_old(run.folder, keep, state.best_step, every)
        return
    start = time.perf_counter()
    with writing(run.folder, state.step, keep, state.best_step, every) as folder:
        engine_state = await run.engine.save(folder)
        run.recorder.commit()  # the database is never behind a checkpoint
        write_state(folder, own | {"engine": engine_state})
    forget_journals(run.folder, state.step)
    run.recorder.log(state.step, {"time/save_s": total(time.perf_counter() - start)})
    run.recorder.commit_later()


def kept_checkpoints(run: Run) -> int:
    """How many of the regular checkpoints stay: as many as a rollback may reach back."""
    config = run.config
    reach = kept_for_rollback(config.guard, config.eval.every, run.spacing)
    # A run may stop before the guard has checked the step: its checkpoint must push no other out.
    return max(config.checkpoint.keep, reach) + (run.guard.checked_step < run.state.step)


def kept_for_rollback(guard: GuardConfig, eval_every: int, spacing: int) -> int:
    """Regular checkpoints, `spacing` steps apart, that a rollback may need."""
    if "rollback" not in guard.responses.values():
        return 0
    # A drop of success shows in two evaluations in a row, and its onset lies before both.
    evaluations = 2 * eval_every * (guard.responses.get("reward_drop") == "rollback")
    return 1 + math.ceil(max(REACH_STEPS, evaluations) / spacing)


def result_of(folder: Path, env: str, temperature: float, state: LoopState) -> Result:
    """The result of a run as it is, from its database; `temperature` is ``eval.temperature``."""
    found = {
        (each.step, each.evaluation.temperature): each.evaluation
        for each in load_evaluations(folder)
    }
    wanted = {"before": (0, temperature), "after": (state.step, temperature)}
    wanted |= {"before_greedy": (0, 0.0), "after_greedy": (state.step, 0.0)}
    return Result(
        run=folder,
        env=env,
        seconds=state.seconds,
        evaluations={name: found[key] for name, key in wanted.items() if key in found},
        signs=tuple(echo_trap_signs(read_metrics(folder))),
        alarms=tuple(read_alarms(folder)),
    )
