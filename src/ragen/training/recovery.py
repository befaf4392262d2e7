"""What follows when a run is in trouble: an alarm, a stop, a rollback, or the end of a hang."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NoReturn, Self

from ragen.algorithms.batch import Batch
from ragen.config.reading import changed
from ragen.core.errors import GuardStop, MismatchError, NotFiniteError, RagenError
from ragen.core.metrics import Metrics
from ragen.diagnostics.collapse import since_advance
from ragen.diagnostics.detectors import active_detectors
from ragen.diagnostics.guard import (
    GRACE_STEPS,
    REMEDIES,
    ROLLBACKS,
    Alarm,
    GuardState,
    raise_alarms,
    read_history,
)
from ragen.engines.first_model import find_first
from ragen.storage.checkpoint import (
    drop_after,
    folders,
    is_intact,
    regular,
    replace_state,
    step_of,
    verified_state,
)
from ragen.storage.recorder import append_event
from ragen.training.running import (
    LoopState,
    Run,
    compare_with_best,
    evaluated,
    make_engine,
    save,
    take_evaluation,
)

STACKS = "stalled.txt"
"""The file to which a run that hangs writes the stacks of its threads."""


async def run_guard(run: Run) -> bool:
    """Look for trouble in the step that ended, and respond to it.

    Returns:
        Whether the run was rolled back.

    Raises:
        GuardStop: The response is to stop, or to roll back where that is impossible.
    """
    state, config = run.state, run.config
    if state.step <= run.guard.checked_step:  # a resumed run: the guard has seen this step
        return False
    if not run.history:
        run.recorder.commit()
        run.history = read_history(run.folder, config.eval.temperature)
    history = since_advance(run.history)
    alarms = raise_alarms(history, state.step, run.guard, active_detectors(config.guard))
    for alarm in alarms:
        run.recorder.event(alarm.step, "alarm", str(alarm), asdict(alarm))
        run.watcher.alarm(alarm.step, str(alarm))
    responses = {config.guard.response(alarm.detector): alarm for alarm in reversed(alarms)}
    if "stop" in responses:
        await stop(run, str(responses["stop"]))
    if "rollback" in responses:
        await roll_back(run, responses["rollback"])
    return "rollback" in responses


async def recover(run: Run, failure: NotFiniteError) -> None:
    """Roll a run back whose policy is broken, or stop it as it was before the policy broke.

    The step whose updates broke the policy is the last finished one at the latest. So it counts as
    the onset, and no checkpoint from then on stays.

    Raises:
        GuardStop: `config.guard` does not ask for a rollback, or none is possible.
        NotFiniteError: The run has not trained yet: the model that it began with is broken.
    """
    state, config = run.state, run.config
    if state.step == 0:
        raise failure
    run.recorder.discard()
    alarm = Alarm("non_finite", state.step, state.step, 0.0, 0.0)
    key = "critic_lr" if "critic" in failure.numbers else "lr"
    rate = getattr(config.update, key)
    text = (
        f"step {alarm.step}, non_finite: {failure.numbers} are not finite; update.{key} = {rate:g} "
        "may be too high"
    )
    run.recorder.event(alarm.step, "alarm", text, asdict(alarm))
    run.watcher.alarm(alarm.step, text)
    if config.guard.response(alarm.detector) == "rollback":
        await roll_back(run, alarm, is_broken=True)
    else:
        stop_before(run, alarm.step, f'{text}; guard.responses.non_finite = "rollback" lowers it')


def stop_before(run: Run, onset: int, reason: str) -> NoReturn:
    """Stop a run whose policy is broken since the step `onset`: the checkpoint before it is left.

    Raises:
        GuardStop: Always.
    """
    good = [step_of(path) for path in folders(run.folder) if step_of(path) < onset]
    if good:
        drop_after(run.folder, good[-1])
    kept = f"kept as it was after step {good[-1]}" if good else "not saved: no checkpoint is left"
    run.recorder.event(run.state.step, "guard", f"stopped: {reason}", {"action": "stop"})
    raise GuardStop(
        f"the guard stopped the run: {reason}; the run is {kept}; train again with a lower rate"
    )


async def update(run: Run, minibatch: Batch) -> Metrics:
    """One optimiser step (`Engine.update`), unless the sampler does not agree with the learner.

    Raises:
        GuardStop: They give a token different logprobs with the same weights. The run is saved as
            it was after the last step.
    """
    try:
        return await run.engine.update(minibatch, run.progress)
    except MismatchError as failure:
        run.recorder.discard()
        step = run.state.step + 1
        spelled = ascii(run.engine.chat.text_of(failure.token))
        text = (
            f"step {step}, mismatch: sampler and learner are {failure.difference:.3g} nats apart: "
            f"{failure}; the token is {spelled}"
        )
        data = Alarm("mismatch", step, step, failure.difference, failure.bound)
        run.recorder.event(run.state.step, "alarm", text, asdict(data))
        run.recorder.event(run.state.step, "guard", f"stopped: {text}", {"action": "stop"})
        await save(run)
        raise GuardStop(
            f"the guard stopped the run: {text}; suspect code that changes the logits of one of "
            "the two (a patched sampler or model), a kernel that depends on the batch, or faulty "
            f"memory; the run is saved as it was after step {run.state.step}; "
            'guard.responses.mismatch = "log" would train on'
        ) from failure


async def stop(run: Run, reason: str) -> NoReturn:
    """Save the run and stop it.

    After a resume, no detector fires for `GRACE_STEPS` steps. If the trouble persists, the run
    stops again.

    Raises:
        GuardStop: Always.
    """
    run.guard.grace = run.state.step + GRACE_STEPS
    run.guard.last_held.clear()
    run.recorder.event(run.state.step, "guard", f"stopped: {reason}", {"action": "stop"})
    await save(run)
    raise GuardStop(
        f"the guard stopped the run: {reason}; the run is saved, to inspect it or to continue "
        f"anyway: ragen resume {run.folder}"
    )


async def roll_back(run: Run, alarm: Alarm, is_broken: bool = False) -> None:
    """Continue from the newest checkpoint before the alarm's onset, with one setting changed.

    This is a resume in another attempt. The rows of the attempt that is given up stay, its later
    checkpoints are deleted. If the process is killed in between, the resumed run raises the same
    alarm again. If the policy `is_broken`, its weights are not saved where no rollback is possible.

    Raises:
        GuardStop: There is no such checkpoint, or all rollbacks are used up.
    """
    # Only regular ones: a run that was stopped in between must return to the same checkpoint.
    before = [path for path in regular(run.folder, run.spacing) if step_of(path) < alarm.onset]
    good = [path for path in before if is_intact(path)]
    if not good or run.guard.rollbacks >= ROLLBACKS:
        why = "no rollback is left" if good else f"no checkpoint before step {alarm.onset} is left"
        if is_broken:
            stop_before(run, alarm.onset, f"{alarm}; {why}")
        await stop(run, f"{alarm}; {why}")
    await take_evaluation(run)  # so that none is missing of the steps that still count
    checkpoint = good[-1]
    saved = verified_state(checkpoint)
    attempt, began, step = run.state.attempt + 1, step_of(checkpoint), run.state.step
    changes = REMEDIES[run.original.guard.remedy](run.config, attempt)
    guard = GuardState(**saved["guard"])
    guard.rollbacks, guard.grace = run.guard.rollbacks + 1, began + GRACE_STEPS
    guard.changes = run.guard.changes | changes
    state = replace(
        LoopState(**saved["loop"]), attempt=attempt, began=began, seconds=run.state.seconds
    )
    if state.evaluating is not None:  # it has ended since
        run.recorder.commit()
        for temperature, success in evaluated(run.folder, run.state, state.evaluating).items():
            compare_with_best(run.config, state, state.evaluating, temperature, success)
        state.evaluating = None
    drop_after(run.folder, began)
    replace_state(checkpoint, saved | {"loop": asdict(state), "guard": asdict(guard)})
    settings = ", ".join(
        f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in changes.items()
    )
    text = f"rolled back to step {began}, attempt {attempt}: {settings}"
    data = {"action": "rollback", "to": began, "attempt": attempt, "changes": changes}
    run.recorder.event(step, "guard", text, data)
    run.watcher.alarm(step, text)
    await run.engine.close()
    run.config, run.state = changed(run.original, guard.changes), state
    run.guard, run.history = guard, {}
    first = find_first(run.config, checkpoint, saved["engine"])
    run.engine = make_engine(run.config, first)
    await run.engine.load(checkpoint, saved["engine"])
    run.recorder.attempt = attempt


STALLED_S = 1800.0
"""Seconds without progress of any phase after which a run counts as stalled."""


class Watchdog:
    """Calls `on_stall` once, in a thread of its own, when no beat came for `limit` seconds.

    The thread also runs while the event loop is blocked, but not while other code holds the
    interpreter's lock. It counts its own waking time, not the clock: a process that was suspended
    has not stalled.

    A `limit` of 0 turns the watchdog off. `on_stall` is called with the seconds.
    """

    def __init__(self, limit: float, on_stall: Callable[[float], None]) -> None:
        self._limit, self._on_stall = limit, on_stall
        self._over = threading.Event()
        self._silent, self._called = 0.0, False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """Report progress."""
        self._silent, self._called = 0.0, False

    def _watch(self) -> None:
        tick = min(1.0, self._limit / 4)
        while not self._over.wait(tick):
            self._silent += tick
            if self._silent >= self._limit and not self._called:
                self._called = True
                self._on_stall(self._silent)

    def __enter__(self) -> Self:
        if self._limit:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._limit:
            self._thread.join()


def report_stall(run: Run, seconds: float) -> None:
    """Say where a run hangs, and end the process if the guard's response is to stop.

    The watchdog calls it from its own thread. Anything may be what hangs, so the file with the
    stacks of all threads comes first, then the database, then the screen.
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
    except (OSError, RagenError) as error:  # the disk or the database may be what hangs
        text = f"{text}; {error}"
    run.watcher.alarm(state.step, text)
    if run.original.guard.response("stalled") == "stop":
        os._exit(GuardStop.exit_code)  # the hanging code cannot be asked to end
