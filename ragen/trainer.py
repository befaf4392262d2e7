"""The loop: play, choose, credit, update, publish, record.

It knows neither algorithm nor machine: the config names the one, the engine hides the other.
"""

from __future__ import annotations

import faulthandler
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from ragen.advantages import COMPARES_MEMBERS, NEEDS_VALUES
from ragen.batch import Batch, collate, minibatches
from ragen.checkpoint import (
    checkpoint_of,
    drop_after,
    drop_old,
    folders,
    newest,
    newest_whole,
    read_state,
    regular,
    replace_state,
    resolve_model,
    set_aside,
    step_of,
    verified_state,
    write_state,
    writing,
)
from ragen.config import Config
from ragen.credit import credit, weighed
from ragen.diagnosis import gradients_by_std, information
from ragen.diagnostics import (
    Sign,
    averaged,
    echo_trap_signs,
    explained_variance,
    reference_kl,
    smooth,
    summarize,
)
from ragen.engine import Engine
from ragen.engine_local import LocalEngine
from ragen.errors import GuardStop, RagenError
from ragen.evaluation import Evaluation, evaluate_policy, evaluations_of, refuse_unplayable
from ragen.exactness import with_births
from ragen.filters import group_weights, reward_std, select
from ragen.guard import (
    DETECTORS,
    GRACE,
    REACH,
    REMEDIES,
    Alarm,
    GuardState,
    changed,
    look,
    read_alarms,
    read_history,
)
from ragen.metrics import Metrics, last, merge, total, values
from ragen.progress import Watcher
from ragen.recorder import (
    CONFIG,
    Recorder,
    append_event,
    new_run_folder,
    read_evaluations,
    read_metrics,
    refuse_existing,
)
from ragen.rollout import Setup, run_groups, setup_of
from ragen.samples import to_samples, trainable
from ragen.seeding import derive, refill_level, train_level
from ragen.settings import dump, read_config
from ragen.stopping import Stop, StopRequested, run_async
from ragen.threads import use_threads
from ragen.types import Episode, Group
from ragen.watchdog import Watchdog

STACKS = "stalled.txt"
"""Where a run that hangs leaves the stacks of its threads."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run: its evaluations before and after, the guard's alarms, signs of collapse."""

    run: Path
    world: str
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
    `began`; the guard raises it when it rolls back.
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

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.asked.guard.stalled_s, lambda s: stalled(self, s))


async def loop(run: Run) -> None:
    """Train until the run's budget is spent."""
    while spent(run.state, run.config) < run.config.steps:
        config, engine, state, recorder = run.config, run.engine, run.state, run.recorder
        clock = Clock(run.watchdog.beat)
        with clock("rollout"):
            groups = await run.stop.or_finish(play(run))
        kept = select(groups, **chosen_by(config))
        chosen = [groups[index] for index in kept]
        diagnosis = await diagnose(run, groups, clock)
        updates: list[Metrics] = []
        if trainable(chosen):
            with clock("score"):
                batch = await learnable(engine, chosen, config)
                batch = weighed(batch, weights_of(config, groups, kept))
            with clock("update"):
                for part, at in planned(batch, state, config):
                    updates.append(await engine.update(part, at))
                    run.watchdog.beat()
            with clock("publish"):
                await engine.publish()
        advance(state, groups, updates)
        with clock("record"):
            await record(run, groups, kept, chosen, batch if updates else None)
        counted = counters(state) | refilled(groups, config)
        metrics = merge([summarize(groups, kept), *updates, diagnosis, counted])
        metrics |= judged(batch) if updates else {}
        metrics |= clock.metrics(run.setup.world_time.seconds, metrics["tokens/sampled"].value)
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
    refuse_unplayable([episode for group in groups for episode in group.episodes])
    return groups


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
    num_prompts = config.rollout.prompts
    engine.forget()
    setup.world_time.seconds = 0.0
    groups: list[Group] = []
    levels = [train_level(step, group, num_prompts) for group in range(num_prompts)]
    for _ in range(1 + config.rollout.refill):
        fresh = await run_groups(
            engine.policy,
            setup,
            levels,
            config.rollout.members,
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


async def learnable(engine: Engine, groups: Sequence[Group], config: Config) -> Batch:
    """The groups' tokens with all that the loss needs: logprobs, values, credit."""
    episodes = [episode for _, episode in trainable(groups)]
    batch = with_births(collate(to_samples(groups)), episodes)
    if config.model.dtype == "float32":
        # The local sampler's arithmetic is the learner's: what it reported are the old logprobs.
        batch = replace(batch, old_logprobs_BT=batch.sampled_logprobs_BT)
    else:
        batch = await engine.score(batch, "policy")
    if config.loss.kl > 0:
        batch = await engine.score(batch, "reference")
    if config.advantage.name in NEEDS_VALUES:
        batch = await engine.score(batch, "critic")
    return credit(batch, episodes, config.reward, config.advantage, config.loss)


async def diagnose(run: Run, groups: Sequence[Group], clock: Clock) -> Metrics:
    """What is looked at closer in this step, by the weights that the groups were played with."""
    config, step, metrics = run.config, run.state.step, Metrics()
    if config.prompt.think and due(step, config.diagnose.information_every):
        with clock("information"):
            path = (config.seed, step)
            metrics |= await information(run.engine, groups, config.diagnose.thoughts, path)
    if due(step, config.diagnose.gradients_every):
        with clock("gradients"):
            metrics |= await gradients(run.engine, groups, config)
    return metrics


async def gradients(engine: Engine, groups: Sequence[Group], config: Config) -> Metrics:
    """Gradient norms by reward std over all groups, those that the filter would leave too."""
    everything = chosen_by(config) | {"rule": "all", "include_zero": True}
    chosen = [groups[index] for index in select(groups, **everything)]
    if not trainable(chosen):
        return {}
    return await gradients_by_std(engine, await learnable(engine, chosen, config), chosen)


def chosen_by(config: Config) -> dict[str, Any]:
    """The filter's settings as `select` takes them."""
    compares = config.advantage.name in COMPARES_MEMBERS
    settings = config.filter.model_dump(exclude={"max_empty", "scale", "reweight"})
    return settings | {"min_played": 2 if compares else 1}


def weights_of(config: Config, groups: Sequence[Group], kept: Sequence[int]) -> list[float]:
    """How much each kept group counts, by the filter's settings."""
    scale, reweight = config.filter.scale, config.filter.reweight
    return group_weights(groups, kept, scale=scale, reweight=reweight)


def spent(state: LoopState, config: Config) -> int:
    """How much of `config.steps` is used up.

    ``budget = "steps"`` counts collections. A filter changes how many updates a collection makes,
    so runs that are compared at equal work on the weights count ``"updates"``.
    """
    return state.updates if config.budget == "updates" else state.step


def planned(batch: Batch, state: LoopState, config: Config) -> list[tuple[Batch, int]]:
    """The step's minibatches, each with where the run stands when its turn comes.

    Where updates are counted, the last collection gives only as many as are left.
    """
    update, seed = config.update, derive(config.seed, "minibatches", state.step)
    parts = minibatches(batch, update.minibatch_episodes, update.passes, seed)
    if config.budget == "steps":
        return [(part, state.step) for part in parts]
    left = config.steps - state.updates
    return [(part, at) for at, part in enumerate(parts[:left], state.updates)]


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


def refilled(groups: Sequence[Group], config: Config) -> Metrics:
    """How many of the step's groups replaced others, in runs that do so."""
    if not config.rollout.refill:
        return {}
    return {"rollout/refilled_groups": total(len(groups) - config.rollout.prompts)}


def due(step: int, every: int) -> bool:
    """Whether something that happens each `every` steps happens after `step` (0: never)."""
    return every > 0 and step % every == 0


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

    def metrics(self, world_s: float, num_tokens: float) -> Metrics:
        """``time/rollout_s`` and so on, their sum ``time/step_s``, and the step's speed.

        Args:
            world_s: Seconds of the rollout that the worlds took; the rest of it is generation.
            num_tokens: Tokens that were sampled.
        """
        phases = self._seconds | {
            "world": world_s,
            "generate": self._seconds["rollout"] - world_s,
            "step": self.seconds,
        }
        speed = {"time/tokens_per_s": last(num_tokens / self.seconds)}
        return {f"time/{name}_s": total(seconds) for name, seconds in phases.items()} | speed


async def record(
    run: Run,
    groups: Sequence[Group],
    kept: Sequence[int],
    chosen: Sequence[Group],
    batch: Batch | None,
) -> None:
    """Write the step's episodes, and now and then its tokens, as `config.record` asks."""
    step, wanted = run.state.step, run.config.record
    if due(step, wanted.episodes_every):
        chosen_ones = set(kept)
        flags = [index in chosen_ones for index in range(len(groups))]
        run.recorder.episodes(step, groups, flags)
    if batch is not None and due(step, wanted.tokens_every):
        after = await run.engine.score(batch, "policy")
        episodes = [episode for _, episode in trainable(chosen)]
        rows = [tokens_of(batch, after, row, episodes) for row in range(batch.num_rows)]
        run.recorder.samples(step, rows)


def judged(batch: Batch) -> Metrics:
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
            config.world.params,
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
    if temperature == config.eval.temperature and evaluation.success > run.state.best_success:
        run.state.best_step, run.state.best_success = step, evaluation.success
    return evaluation


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
    keep = run.config.checkpoint.keep
    if "rollback" in run.config.guard.responses.values():
        keep = max(keep, 1 + math.ceil(REACH / spacing(run)))
    # A stop may come before the guard has looked at the step, and pushes none out.
    return keep + (run.guard.looked < run.state.step)


async def guarded(run: Run) -> bool:
    """Look for trouble in the step that ended, and respond; whether the run was rolled back.

    Raises:
        GuardStop: A response is to stop, or to roll back where that cannot be done.
    """
    state, config = run.state, run.config
    if state.step <= run.guard.looked:  # a resumed run: it was looked at before
        return False
    # All of it once, then what is new: reading the whole at every step would grow with the run.
    after = (state.attempt, run.guard.looked) if run.history else None
    for name, series in read_history(run.folder, config.eval.temperature, after).items():
        run.history.setdefault(name, {}).update(series)
    alarms = look(
        run.history,
        state.step,
        run.guard,
        off=[name for name in DETECTORS if config.guard.response(name) == "off"],
        max_empty=config.filter.max_empty,
    )
    for alarm in alarms:
        run.recorder.event(alarm.step, "alarm", str(alarm), asdict(alarm))
        run.watcher.alarm(alarm.step, str(alarm))
    wanted = {config.guard.response(alarm.detector): alarm for alarm in reversed(alarms)}
    if "stop" in wanted:
        await halt(run, str(wanted["stop"]))
    if "rollback" in wanted:
        await roll_back(run, wanted["rollback"])
    return "rollback" in wanted


async def halt(run: Run, reason: str) -> NoReturn:
    """Save the run and stop it.

    Raises:
        GuardStop: Always.
    """
    run.recorder.event(run.state.step, "guard", f"stopped: {reason}")
    await save(run)
    raise GuardStop(
        f"the guard stopped the run: {reason}; it is saved, to look into or to go on with all the "
        f"same: ragen resume {run.folder}"
    )


async def roll_back(run: Run, alarm: Alarm) -> None:
    """Go on from the newest checkpoint from before the alarm's onset, with one setting changed.

    It is a resume in another attempt: rows of the attempt that is given up stay, its later
    checkpoints go. A kill on the way leaves a run that comes to the same alarm again.

    Raises:
        GuardStop: There is no such checkpoint, or the run took all its rollbacks.
        RagenError: The checkpoint is damaged.
    """
    # Only regular ones: a run that was stopped in between must come back to the same.
    good = [p for p in regular(run.folder, spacing(run)) if step_of(p) < alarm.onset]
    if not good or run.guard.rollbacks >= run.asked.guard.rollbacks:
        why = "no rollback is left" if good else f"no checkpoint before step {alarm.onset} is left"
        await halt(run, f"{alarm}; {why}")
    checkpoint = good[-1]
    saved = verified_state(checkpoint)
    attempt, began, seen = run.state.attempt + 1, step_of(checkpoint), run.state.step
    changes = REMEDIES[run.asked.guard.remedy](run.config, attempt)
    guard = GuardState(**saved["guard"])
    guard.rollbacks, guard.grace = run.guard.rollbacks + 1, began + GRACE
    guard.changes = run.guard.changes | changes
    state = replace(
        LoopState(**saved["loop"]), attempt=attempt, began=began, seconds=run.state.seconds
    )
    drop_after(run.folder, began)
    replace_state(checkpoint, saved | {"loop": asdict(state), "guard": asdict(guard)})
    text = f"rolled back to step {began}, attempt {attempt}: " + ", ".join(
        f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in changes.items()
    )
    run.recorder.event(seen, "guard", text, {"to": began, "attempt": attempt, "changes": changes})
    run.watcher.alarm(seen, text)
    await run.engine.close()
    run.config, run.state = changed(run.asked, guard.changes), state
    run.guard, run.history = guard, {}
    run.engine = run.build(run.config)
    await run.engine.load(checkpoint, saved["engine"])
    run.recorder.attempt = attempt


def stalled(run: Run, seconds: float) -> None:
    """What the watchdog does, from its own thread: say where the run hangs, and end the process.

    Whatever hangs may hang on anything: the file with all threads' stacks comes first, then the
    database, then the screen.
    """
    state, file = run.state, run.folder / STACKS
    alarm = Alarm("stalled", state.step, state.step, seconds, 0.0)
    complete = folders(run.folder)
    last = f"the last checkpoint is {complete[-1].name}" if complete else "there is no checkpoint"
    text = f"{alarm}; {last}; all stacks are in {file}"
    try:
        with file.open("a") as stacks:
            stacks.write(f"{alarm}; {last}\n")
            stacks.flush()
            faulthandler.dump_traceback(stacks, all_threads=True)
        append_event(run.folder, state.attempt, state.step, "alarm", text, asdict(alarm))
    except (OSError, RagenError) as error:  # it may be the disk or the database that hangs
        text = f"{text}; {error}"
    run.watcher.alarm(state.step, text)
    if run.asked.guard.response("stalled") == "stop":
        os._exit(GuardStop.exit_code)  # what hangs could not be asked to end


def local_engine(config: Config) -> Engine:
    """The engine of one process, with the model that the config names."""
    return LocalEngine(config, resolve_model(config.model.path, config.world.name))


def train(
    config: Config,
    out: Path | None = None,
    *,
    root: Path = Path("runs"),
    watcher: Watcher | None = None,
) -> Result:
    """Train an agent and evaluate it before and after.

    Args:
        config: What to do (`ragen.settings.resolve` makes it from a recipe).
        out: The run's folder, which must not exist; ``None`` numbers one under `root`.
        root: Where numbered runs go.
        watcher: Who is told of the progress.

    Raises:
        RagenError: The settings, the world, the model or the disk do not allow it. The run's folder
            is made when all of them are known to, the disk excepted.
        GuardStop: The run got into trouble for which `config.guard` asks to stop; it is saved.
        StopRequested: SIGINT or SIGTERM came; the run is saved as of its last finished step.
    """
    refuse_existing(out)
    config = rooted(config)
    changed(config, REMEDIES[config.guard.remedy](config, 1))  # it is known to work
    state = LoopState(threads=use_threads(config.threads))
    engine = local_engine(config)
    setup = setup_of(config, engine.chat)
    folder = new_run_folder(root, config.recipe, out)
    recorder = Recorder.create(folder, dump(config))
    seen = watcher or Watcher()
    return run_async(
        whole(Run(folder, config, config, local_engine, engine, setup, recorder, state, seen))
    )


def rooted(config: Config) -> Config:
    """The config with its files named from the root, so that it can be read from any folder."""
    model, world = config.model, config.world
    if Path(model.path).exists():
        model = model.model_copy(update={"path": str(Path(model.path).resolve())})
    if ".py:" in world.name:
        file, _, name = world.name.rpartition(":")
        world = world.model_copy(update={"name": f"{Path(file).resolve()}:{name}"})
    return config.model_copy(update={"model": model, "world": world})


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
    checkpoint, saved, damaged = newest_whole(folder)
    try:
        state, engine_state = LoopState(**saved["loop"]), saved["engine"]
        guard = GuardState(**saved["guard"])
    except (KeyError, TypeError) as error:
        raise RagenError(
            f"{checkpoint} was written by another version of RAGEN ({error})"
        ) from error
    use_threads(state.threads)
    config = changed(asked, guard.changes)
    engine = local_engine(config)
    setup = setup_of(config, engine.chat)
    seen = watcher or Watcher()

    async def go_on() -> Result:
        await engine.load(checkpoint, engine_state)
        recorder = Recorder.open(folder, state.attempt)
        recorder.forget_after(state.attempt, state.step)
        recorder.event(state.step, "resume", f"resumed after step {state.step}")
        run = Run(folder, asked, config, local_engine, engine, setup, recorder, state, seen, guard)
        for later, reason in damaged.items():
            text = f"going on from {checkpoint.name}: in {set_aside(later)}, {reason}"
            recorder.event(state.step, "damaged checkpoint", text)
            run.watcher.alarm(state.step, text)
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
    step = int(saved["loop"]["step"])
    use_threads(int(saved["loop"]["threads"]))
    engine = local_engine(config)
    setup = setup_of(config, engine.chat)

    async def look() -> Metrics:
        await engine.load(checkpoint, saved["engine"])
        groups = await groups_of(engine, setup, config, step)
        path = (config.seed, step)
        told = await information(engine, groups, config.diagnose.thoughts, path)
        return told | await gradients(engine, groups, config)

    try:
        return values(run_async(look()))
    finally:
        setup.close()


async def whole(run: Run) -> Result:
    """Evaluate, train, evaluate; a stop in between leaves a run that can be gone on with."""
    both = dict.fromkeys((run.config.eval.temperature, 0.0))
    run.watcher.begin(run.folder, run.config, run.state.step)
    try:
        with run.recorder, run.stop.listening(), run.watchdog:
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


async def evaluate_missing(run: Run, *temperatures: float) -> None:
    """Evaluate at each temperature, unless this attempt or what it began from did so before."""
    step, attempt, began = run.state.step, run.state.attempt, run.state.began
    done = {
        each["temperature"]
        for each in read_evaluations(run.folder)
        if each["step"] == step and (each["attempt"] == attempt or step <= began)
    }
    for temperature in temperatures:
        if temperature not in done:
            await evaluate(run, temperature)


def result(run: Run) -> Result:
    """What a finished run's database says of it."""
    temperature, steps = run.config.eval.temperature, run.state.step
    found = {
        (each.step, each.evaluation.temperature): each.evaluation
        for each in evaluations_of(run.folder)
    }
    return Result(
        run=run.folder,
        world=run.config.world.name,
        before=found.get((0, temperature)),
        after=found.get((steps, temperature)),
        before_greedy=found.get((0, 0.0)),
        after_greedy=found.get((steps, 0.0)),
        seconds=run.state.seconds,
        signs=tuple(echo_trap_signs(read_metrics(run.folder))),
        alarms=tuple(read_alarms(run.folder)),
    )
