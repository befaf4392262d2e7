"""The curriculum: training moves to harder levels once the agent succeeds on the present ones."""

from __future__ import annotations

from statistics import fmean

from ragen.core.metrics import Metrics, last
from ragen.diagnostics.collapse import STAGE
from ragen.training.ahead import Played
from ragen.training.running import LoopState, Run

STEPS = 5
"""Steps over which success is averaged, all of which were played in the present stage."""


def update_stage(run: Run, played: Played) -> Metrics:
    """Count the success of a finished step, and begin the next stage if it is high enough.

    The moving averages restart with each stage. A step that was played in an earlier stage does not
    count. The metrics are the stage in which the step was played, and the success that is compared
    with ``curriculum.success``.
    """
    state, settings = run.state, run.config.curriculum
    stage, num_stages = state.stage, len(settings.stages) + 1
    episodes = [each for group in played.groups for each in group.episodes if not each.failed]
    if played.stage != stage or not episodes:
        return {STAGE: last(played.stage)}
    reached = count_success(state, fmean(each.success for each in episodes))
    if advances(state, settings.success, num_stages):
        state.stage, state.stage_success = stage + 1, []
        state.averages = {}  # of easier levels
        params = settings.stages[stage] if stage < len(settings.stages) else {}
        levels = ", ".join(f"{k} = {v}" for k, v in params.items()) or "the full task"
        text = (
            f"stage {state.stage} of {num_stages} begins: {levels}, after success of {reached:.1%} "
            f"in {STEPS} steps"
        )
        data = {"stage": state.stage, "success": reached}
        run.recorder.event(state.step, "curriculum", text, data, once=True)
        run.watcher.note(text)
    return {STAGE: last(stage), "curriculum/success": last(reached)}


def count_success(state: LoopState, success: float) -> float:
    """Add the success of a step to its stage; returns the mean over the last `STEPS` steps."""
    state.stage_success = [*state.stage_success, success][-STEPS:]
    return fmean(state.stage_success)


def advances(state: LoopState, success: float, num_stages: int) -> bool:
    """True if the stage has lasted `STEPS` steps and their mean success is enough."""
    is_full = len(state.stage_success) == STEPS
    return state.stage < num_stages and is_full and fmean(state.stage_success) >= success
