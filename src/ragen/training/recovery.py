"""What the guard's findings lead to: a line in the log, a stop, a rollback, an end to a hang."""

from __future__ import annotations

import faulthandler
import os
from dataclasses import asdict, replace
from typing import NoReturn

from ragen.config.reading import changed
from ragen.core.errors import GuardStop, RagenError
from ragen.diagnostics.guard import (
    DETECTORS,
    GRACE,
    REMEDIES,
    Alarm,
    GuardState,
    look,
    read_history,
)
from ragen.storage.checkpoint import (
    drop_after,
    folders,
    regular,
    replace_state,
    step_of,
    verified_state,
)
from ragen.storage.recorder import append_event
from ragen.training.running import LoopState, Run, save, spacing

STACKS = "stalled.txt"
"""Where a run that hangs leaves the stacks of its threads."""


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

    Should it be gone on with, nothing fires for `GRACE` steps; what is no better then stops it
    again.

    Raises:
        GuardStop: Always.
    """
    run.guard.grace = run.state.step + GRACE
    run.guard.troubled.clear()
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
