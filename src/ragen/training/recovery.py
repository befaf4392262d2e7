"""The responses to a run in trouble: an alarm, a stop, a rollback, or a new engine.

docs/reproducibility.md has the whole list, also of what stands elsewhere: `rollout.endpoint` sends
a request again, and after a loss the processes of an engine wait for each other
(`cluster.lost.GRACE_S`).
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from ragen.algorithms.batch import Batch
from ragen.config.reading import changed
from ragen.core.errors import (
    EngineLost,
    GuardStop,
    MismatchError,
    NotFiniteError,
    RagenError,
    last_line,
)
from ragen.core.metrics import Metrics
from ragen.core.stopping import StopRequested
from ragen.core.types import Episode, Group
from ragen.diagnostics.collapse import WINDOW, since_advance
from ragen.diagnostics.detectors import active_detectors
from ragen.diagnostics.guard import (
    Alarm,
    GuardState,
    changed_on_purpose,
    raise_alarms,
    read_history,
    remedy,
)
from ragen.diagnostics.step_metrics import untrained
from ragen.evaluation.outcomes import outcome_of, refuse_unplayable
from ragen.settings.first_model import find_first
from ragen.storage.checkpoint import (
    drop_after,
    folders,
    is_intact,
    newest_intact,
    regular,
    replace_state,
    set_aside,
    step_of,
    verified_state,
)
from ragen.storage.journal import forget_journals
from ragen.storage.recorder import Recorder
from ragen.training.progress import Watcher
from ragen.training.running import LoopState, Run, make_engine, save

FAILED_FRACTION = 0.5
"""An alarm is raised if at least this share of a step's episodes failed."""
UNTRAINED_FRACTION = 0.2
"""An alarm is raised if more than this share of an agent's sampled tokens is not trained on."""
MOST_ROLLBACKS = 2
GRACE_STEPS = 2 * WINDOW
"""Steps after a rollback or a stop in which no detector fires: trailing means still mix in old
values."""
MOST_LOSSES = 3
"""How often a new engine continues from the same checkpoint."""


def check_episodes(run: Run, groups: Sequence[Group]) -> None:
    """Raise an alarm if many episodes of the next step failed.

    Another one if much of what was sampled for an agent is not trained on.

    Raises:
        UnplayableError: All episodes failed, or none had room for its first prompt.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    refuse_unplayable([outcome_of(episode) for episode in episodes])
    failed = sum(episode.failed for episode in episodes) / len(episodes)
    left, _ = untrained(episodes)
    complaints: dict[str, tuple[float, str]] = {}
    if failed >= FAILED_FRACTION:
        complaints["failed_episodes"] = failed, describe_failed(episodes)
    if left > UNTRAINED_FRACTION:
        text = (
            f"{left:.0%} of the sampled tokens are not trained on: summaries that were rejected, "
            "and an agent's calls that offer no tools, were lost or say so (docs/agents.md)"
        )
        complaints["untrained_calls"] = left, text
    for name, (share, complaint) in complaints.items():
        step = run.state.step + 1
        alarm = Alarm(name, step, step, share, 0.0)
        run.report("alarm", f"step {step}, {name}: {complaint}", asdict(alarm), step)


def describe_failed(episodes: Sequence[Episode]) -> str:
    """How many episodes failed, of which some did, with the commonest reason."""
    reasons = Counter(last_line(each.error) for each in episodes if each.failed)
    ((reason, count),) = reasons.most_common(1)
    failed = reasons.total()
    return (
        f"{failed} of {len(episodes)} episodes ({failed / len(episodes):.0%}) failed and are not "
        f"trained on, {count} of them with: {reason}"
    )


async def run_guard(run: Run) -> bool:
    """Respond to trouble in the step that ended; True if the run was rolled back."""
    state, config = run.state, run.config
    if state.step <= run.guard.checked_step:  # a resumed run: the guard has seen this step
        return False
    if not run.history:
        run.recorder.commit()
        run.history = read_history(run.folder, config.eval.temperature)
    history = since_advance(run.history)
    alarms = raise_alarms(history, state.step, run.guard, active_detectors(config.guard))
    for alarm in alarms:
        run.report("alarm", str(alarm), asdict(alarm))
    responses = {config.guard.response(alarm.detector): alarm for alarm in reversed(alarms)}
    if "stop" in responses:
        await stop(run, str(responses["stop"]))
    if "rollback" in responses:
        await roll_back(run, responses["rollback"])
    return "rollback" in responses


async def respond(run: Run, failure: EngineLost | NotFiniteError, losses: Counter[str]) -> None:
    """Bring a run back into a state from which it goes on (`restore`, `recover`), or end it."""
    if isinstance(failure, EngineLost):
        await restore(run, failure, losses)
    else:
        await recover(run, failure)


async def recover(run: Run, failure: NotFiniteError) -> None:
    """Roll back a run whose policy is broken, or stop it in its state before the policy broke.

    The updates of the last finished step or of an earlier one have broken the policy. So that step
    counts as the onset, and no checkpoint from then on is kept.
    """
    step, config = run.state.step, run.config
    run.recorder.discard()
    alarm = Alarm("non_finite", step, step, 0.0, 0.0)
    key = "critic_lr" if failure.of_critic else "lr"
    text = (
        f"step {step}, non_finite: {failure.numbers} are not finite; update.{key} = "
        f"{getattr(config.update, key):g} may be too high"
    )
    run.report("alarm", text, asdict(alarm))
    if config.guard.response(alarm.detector) == "rollback":
        await roll_back(run, alarm, is_broken=True)
    else:
        stop_before(run, step, f'{text}; guard.responses.non_finite = "rollback" lowers it')


def stop_before(run: Run, onset: int, reason: str) -> NoReturn:
    """Stop a run whose policy is broken from the step `onset` on; earlier checkpoints stay."""
    good = [step_of(path) for path in folders(run.folder) if step_of(path) < onset]
    if good:
        drop_after(run.folder, good[-1])
    kept = f"kept as it was after step {good[-1]}" if good else "not saved: no checkpoint is left"
    _record_stop(run, reason)
    raise GuardStop(
        f"the guard stopped the run: {reason}; the run is {kept}; train again with a lower rate"
    )


async def update(run: Run, minibatch: Batch) -> Metrics:
    """One optimiser step (`Engine.update`).

    If sampler and learner give a token different logprobs with the same weights, `GuardStop` stops
    the run before it, saved as it was after the last step.
    """
    try:
        return await run.engine.update(minibatch, run.state.used(run.config.budget))
    except MismatchError as failure:
        run.recorder.discard()
        step = run.state.step + 1
        if run.ahead is not None:
            await run.ahead.drop()
        forget_journals(run.folder, step + run.config.engine.max_staleness)
        spelled = ascii(run.engine.chat.text_of(failure.token))
        text = (
            f"step {step}, mismatch: sampler and learner are {failure.difference:.3g} nats apart: "
            f"{failure}; the token is {spelled}"
        )
        data = Alarm("mismatch", step, step, failure.difference, failure.bound)
        run.recorder.event(run.state.step, "alarm", text, asdict(data))
        _record_stop(run, text)
        await save(run)
        raise GuardStop(
            f"the guard stopped the run: {text}; suspect code that changes the logits of one of "
            "the two (a patched sampler or model), a kernel that depends on the batch, or faulty "
            f"memory; the run is saved as it was after step {run.state.step}; "
            'guard.responses.mismatch = "log" would train on'
        ) from failure


async def stop(run: Run, reason: str) -> NoReturn:
    """Save the run and stop it.

    After a resume, no detector fires for `GRACE_STEPS` steps. If the trouble persists, the
    run stops again.
    """
    run.guard.grace = run.state.step + GRACE_STEPS
    run.guard.last_held.clear()
    _record_stop(run, reason)
    await save(run)
    raise GuardStop(
        f"the guard stopped the run: {reason}; the run is saved, to inspect it or to continue "
        f"anyway: ragen resume {shlex.quote(str(run.folder))}"
    )


def _record_stop(run: Run, reason: str) -> None:
    run.recorder.event(run.state.step, "guard", f"stopped: {reason}", {"action": "stop"})


async def roll_back(run: Run, alarm: Alarm, is_broken: bool = False) -> None:
    """Continue from the newest checkpoint before the alarm's onset, with one setting changed.

    This is a resume in another attempt. The rows of the abandoned attempt stay, but its later
    checkpoints are deleted. If the process is killed in between, the resumed run raises the same
    alarm again. If the policy `is_broken` and no rollback is possible, its weights are not saved.
    """
    checkpoint = await _checkpoint_before(run, alarm, is_broken)
    saved, began = verified_state(checkpoint), step_of(checkpoint)
    attempt = run.state.attempt + 1
    changes = remedy(run.config, attempt)
    state = replace(
        LoopState(**saved["loop"]),
        attempt=attempt,
        begins=[*run.state.begins, began],
        seconds=run.state.seconds,
    )
    guard = replace(
        GuardState(**saved["guard"]),
        rollbacks=run.guard.rollbacks + 1,
        grace=began + GRACE_STEPS,
        changes=run.guard.changes | changes,
    )
    drop_after(run.folder, began)
    replace_state(checkpoint, saved | {"loop": asdict(state), "guard": asdict(guard)})
    settings = ", ".join(
        f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in changes.items()
    )
    text = f"rolled back to step {began}, attempt {attempt}: {settings}"
    data = {"action": "rollback", "to": began, "attempt": attempt, "changes": changes}
    run.report("guard", text, data)
    await continue_from(run, checkpoint, saved, state, guard)


async def _checkpoint_before(run: Run, alarm: Alarm, is_broken: bool) -> Path:
    """The newest intact checkpoint before the alarm's onset; without one, the run stops."""
    # Only regular ones: a run that was stopped in between must return to the same checkpoint.
    before = [path for path in regular(run.folder, run.spacing) if step_of(path) < alarm.onset]
    good = [path for path in before if is_intact(path)]
    if good and run.guard.rollbacks < MOST_ROLLBACKS:
        return good[-1]
    why = "no rollback is left" if good else f"no checkpoint before step {alarm.onset} is left"
    if is_broken:
        stop_before(run, alarm.onset, f"{alarm}; {why}")
    await stop(run, f"{alarm}; {why}")


async def restore(run: Run, loss: EngineLost, losses: Counter[str]) -> None:
    """Continue from the newest intact checkpoint with a new engine, after the loss of the old one.

    This is a resume within the process and the attempt. A run without a checkpoint starts again: it
    has not recorded anything. If the user has requested a stop, if too many engines were lost since
    the checkpoint (`losses`, by its name), or if none can be made, the run ends; it can be resumed.
    """
    start, step = time.monotonic(), run.state.step
    then = f"continue with: ragen resume {shlex.quote(str(run.folder))}"
    run.recorder.discard()
    text = f"after step {step}, the engine is lost: {loss}"

    def report(follows: str) -> None:
        data = {"process": loss.process, "what": "lost", "details": loss.details}
        run.report("engine", f"{text}; {follows}", data)

    try:
        run.stop.check()
    except StopRequested as stop:
        report("the run stops")
        raise StopRequested(stop.signal_number, f"stopped, and {text}; {then}") from None
    newest = "".join(path.name for path in folders(run.folder)[-1:])
    losses[newest] += 1
    if losses[newest] > MOST_LOSSES:
        report("the run ends")
        count = f"{losses[newest]} engines were lost since the last checkpoint"
        raise RagenError(f"{text}; {count}; {then}")
    report("a new one takes the last checkpoint")
    run.beat()
    try:
        if folders(run.folder, complete=False):
            checkpoint, saved, damaged = newest_intact(run.folder)
            state, guard = states_of(run.folder, checkpoint, saved)
            state.seconds = run.state.seconds
            forget_later(run.recorder, run.watcher, checkpoint, state, damaged)
            await continue_from(run, checkpoint, saved, state, guard)
        else:
            await run.engine.close()
            run.engine = make_engine(run.config, after=run.engine)
    except EngineLost:
        raise
    except RagenError as error:
        raise RagenError(f"{text}; no new one could be made: {error}; {then}") from error
    run.beat()
    seconds = time.monotonic() - start
    text = f"a new engine continues after step {run.state.step}; it took {seconds:.1f} s"
    data = {"what": "restored", "from": step, "to": run.state.step, "seconds": seconds}
    run.report("engine", text, data, step)


def states_of(
    folder: Path, checkpoint: Path, saved: Mapping[str, Any]
) -> tuple[LoopState, GuardState]:
    """The states of the loop and of the guard with which a run continues from a checkpoint."""
    try:
        state, guard = LoopState(**saved["loop"]), GuardState(**saved["guard"])
    except (KeyError, TypeError) as error:
        raise RagenError(
            f"{checkpoint} was written by another version of RAGEN ({error}); use that version"
        ) from error
    guard.leave(changed_on_purpose(folder))
    return state, guard


def forget_later(
    recorder: Recorder,
    watcher: Watcher,
    checkpoint: Path,
    state: LoopState,
    damaged: Mapping[Path, str],
) -> None:
    """Delete the rows later than a checkpoint, and set the later checkpoints aside.

    `damaged` says for each of these what is wrong with it.
    """
    recorder.forget_after(state.attempt, state.step)
    for later, reason in damaged.items():
        aside = set_aside(later)
        text = f"resuming from {checkpoint.name}: in {aside}, {reason}"
        data = {"checkpoint": checkpoint.name, "damaged": later.name, "set_aside": aside.name}
        recorder.event(state.step, "damaged checkpoint", text, data | {"reason": reason})
        watcher.alarm(state.step, text)


async def continue_from(
    run: Run, checkpoint: Path, saved: Mapping[str, Any], state: LoopState, guard: GuardState
) -> None:
    """Give the run a new engine with the weights of a checkpoint, and these states."""
    if run.ahead is not None:
        await run.ahead.drop()
    await run.engine.close()
    run.config, run.state = changed(run.original, guard.changes), state
    run.guard, run.history = guard, {}
    run.recorder.attempt = state.attempt
    if run.judge is not None:
        run.judge.attempt = state.attempt
        run.judge.metrics()  # drops the questions of abandoned plays, which are cancelled
    run.engine = make_engine(run.config, find_first(run.config, checkpoint), run.engine)
    await run.engine.load(checkpoint, saved["engine"])
