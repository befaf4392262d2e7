"""A run while it goes on: what it holds, how it is evaluated and saved, and what it comes to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ragen.config.config import Config
from ragen.core.metrics import Metrics, last, total
from ragen.core.stopping import Stop
from ragen.diagnostics.guard import REACH, Alarm, GuardState, read_alarms
from ragen.diagnostics.signals import Sign, echo_trap_signs
from ragen.engines.engine import Engine
from ragen.evaluation.evaluation import Evaluation, evaluate_policy, evaluations_of
from ragen.rollout.rollout import Setup
from ragen.storage.checkpoint import (
    checkpoint_of,
    drop_old,
    read_state,
    replace_state,
    write_state,
    writing,
)
from ragen.storage.reader import read_evaluations, read_metrics
from ragen.storage.recorder import Recorder
from ragen.training.progress import Watcher
from ragen.training.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run: its evaluations before and after, the guard's alarms, signs of collapse."""

    run: Path
    env: str
    before: Evaluation | None
    after: Evaluation | None
    before_greedy: Evaluation | None
    after_greedy: Evaluation | None
    seconds: float
    signs: tuple[Sign, ...] = ()
    alarms: tuple[Alarm, ...] = ()


@dataclass(slots=True)
class LoopState:
    """Where the loop stands, saved with every checkpoint: `step` steps are finished.

    `averages` are the moving averages of the metrics. The present `attempt` began after step
    `began`; the guard raises it when it rolls back. `best_step` is the best evaluated one of those
    with a regular checkpoint.
    """

    step: int = 0
    attempt: int = 0
    began: int = 0
    updates: int = 0
    episodes: int = 0
    tokens: int = 0
    best_step: int = 0
    best_success: float = -1.0
    seconds: float = 0.0
    threads: int = 1
    averages: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """All that a run holds while it goes on.

    `asked` is the config the run began with, `config` the one in force: they differ by what the
    guard changed. `build` makes the engine of a config. `history` is what the guard has read.
    """

    folder: Path
    asked: Config
    config: Config
    build: Callable[[Config], Engine]
    engine: Engine
    setup: Setup
    recorder: Recorder
    state: LoopState
    watcher: Watcher
    guard: GuardState = field(default_factory=GuardState)
    history: dict[str, dict[int, float]] = field(default_factory=dict)
    stop: Stop = field(default_factory=Stop)
    watchdog: Watchdog = field(init=False)


class Clock:
    """Seconds by phase; `beat` is called where one begins and ends."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._seconds: dict[str, float] = {}
        self._beat = beat

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what is inside to `phase`."""
        self._beat()
        start = time.perf_counter()
        yield
        self._beat()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """Sum of the phases."""
        return sum(self._seconds.values())

    def metrics(self, env_s: float, num_tokens: float) -> Metrics:
        """``time/rollout_s`` and so on, their sum ``time/step_s``, and the step's speed.

        Args:
            env_s: Seconds of the rollout that the environments took; the rest of it is generation.
            num_tokens: Tokens that were sampled.
        """
        phases = self._seconds | {
            "env": env_s,
            "generate": self._seconds["rollout"] - env_s,
            "step": self.seconds,
        }
        speed = {"time/tokens_per_s": last(num_tokens / self.seconds)}
        return {f"time/{name}_s": total(seconds) for name, seconds in phases.items()} | speed


def due(step: int, every: int) -> bool:
    """Whether something that happens each `every` steps happens after `step` (0: never)."""
    return every > 0 and step % every == 0


def spent(state: LoopState, config: Config) -> int:
    """How much of `config.steps` is used up.

    ``budget = "steps"`` counts collections. A filter changes how many updates a collection makes,
    so runs that are compared at equal work on the weights count ``"updates"``.
    """
    return state.updates if config.budget == "updates" else state.step


async def evaluate(run: Run, temperature: float) -> Evaluation | None:
    """Evaluate the policy as it is, and write the result down."""
    config, step = run.config, run.state.step
    if config.eval.episodes == 0:
        return None
    run.engine.forget()
    evaluation, groups = await run.stop.or_finish(
        evaluate_policy(
            run.engine.policy,
            replace(run.setup, temperature=temperature, min_tokens=0),
            config.env.params,
            target=str(run.folder),
            episodes=config.eval.episodes,
            seed=run.asked.seed,
            concurrency=config.rollout.slots,
            on_episode=lambda _: run.watchdog.beat(),
        )
    )
    run.recorder.evaluation(step, evaluation.record())
    if config.record.episodes_every:
        run.recorder.episodes(step, groups, phase="eval" if temperature else "eval greedy")
    run.recorder.commit()
    run.watcher.evaluated(step, evaluation)
    compare_with_best(run, temperature, evaluation.success)
    return evaluation


def compare_with_best(run: Run, temperature: float, success: float) -> None:
    """Remember the step if its checkpoint stays and none did better; twice is as good as once."""
    state = run.state
    stays = state.step % spacing(run) == 0 and temperature == run.config.eval.temperature
    if stays and success > state.best_success:
        state.best_step, state.best_success = state.step, success


async def evaluate_missing(run: Run, *temperatures: float) -> None:
    """Evaluate at each temperature, unless this attempt or what it began from did so before."""
    step, attempt, began = run.state.step, run.state.attempt, run.state.began
    done = {
        each["temperature"]: each["success"]
        for each in read_evaluations(run.folder)
        if each["step"] == step and (each["attempt"] == attempt or step <= began)
    }
    for temperature in temperatures:
        if temperature in done:
            compare_with_best(run, temperature, done[temperature])  # it was killed before it did
        else:
            await evaluate(run, temperature)


async def save(run: Run) -> None:
    """Write a checkpoint of the last finished step.

    Where that step has one, its weights are these already, and only the loop's state may be new.
    """
    state, best, keep, every = run.state, run.state.best_step, kept_checkpoints(run), spacing(run)
    own = {"loop": asdict(state), "guard": asdict(run.guard)}
    there = checkpoint_of(run.folder, state.step)
    if there is not None:
        replace_state(there, read_state(there) | own)
        drop_old(run.folder, keep, best, every)
        return
    start = time.perf_counter()
    with writing(run.folder, state.step, keep, best, every) as folder:
        engine_state = await run.engine.save(folder)
        write_state(folder, own | {"engine": engine_state})
    run.recorder.log(state.step, {"time/save_s": total(time.perf_counter() - start)})
    run.recorder.commit()


def spacing(run: Run) -> int:
    """Steps between the checkpoints that are written whether the run is stopped or not."""
    return run.config.checkpoint.every or max(1, run.config.steps)


def kept_checkpoints(run: Run) -> int:
    """How many of the regular checkpoints stay: enough to go back to."""
    keep, responses = run.config.checkpoint.keep, run.config.guard.responses
    if "rollback" in responses.values():
        # Success is seen to fall by two evaluations in a row, and the onset lies before both.
        evaluations = 2 * run.config.eval.every * (responses.get("reward_drop") == "rollback")
        keep = max(keep, 1 + math.ceil(max(REACH, evaluations) / spacing(run)))
    # A stop may come before the guard has looked at the step, and pushes none out.
    return keep + (run.guard.looked < run.state.step)


def result(run: Run) -> Result:
    """What a finished run's database says of it."""
    temperature, steps = run.config.eval.temperature, run.state.step
    found = {
        (each.step, each.evaluation.temperature): each.evaluation
        for each in evaluations_of(run.folder)
    }
    return Result(
        run=run.folder,
        env=run.config.env.name,
        before=found.get((0, temperature)),
        after=found.get((steps, temperature)),
        before_greedy=found.get((0, 0.0)),
        after_greedy=found.get((steps, 0.0)),
        seconds=run.state.seconds,
        signs=tuple(echo_trap_signs(read_metrics(run.folder))),
        alarms=tuple(read_alarms(run.folder)),
    )
