"""A small synthetic run for the viewer: four steps, a rollback to step 2, and four more steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from records import turn

from ragen.config.reading import dump, merge
from ragen.core.metrics import last
from ragen.core.types import Call, CallRole, Completion, Episode, Group, Prompt, Turn
from ragen.storage.recorder import Recorder
from tests.cli.test_cli import evaluation
from tests.shared import once

THOUGHTS = ("the box is left", "Ünder the wall", 'she said "go" & <b>left</b>', "push it")


def episode(group: int, member: int, reward: float, level: int, thought: str) -> Episode:
    """An episode of two turns; the second prompt extends the tokens of the first."""
    first = turn(0.0, prompt=(1, 2), sampled=(7, 8), thought=thought, executed=1)
    second = turn(reward, prompt=(1, 2, 7, 8, 3), sampled=(9,), penalty=-0.1, state="s")
    turns = (
        replace(first, observation="P_", drawing=("P_", "_G")),
        replace(second, observation="_P"),
    )
    ending: dict[str, Any] = {"terminated": reward > 0, "truncated": reward == 0}
    return Episode(
        env="frozen-lake",
        level_seed=level,
        noise_seed=2**60 + 1,
        group=group,
        member=member,
        turns=turns,
        stop_reason="solved" if reward > 0 else "max_turns",
        success=reward > 0,
        final_observation="_*",
        **ending,
    )


def groups(step: int, levels: tuple[int, int]) -> list[Group]:
    """Two groups of two episodes: one success in the first group, none in the second."""
    return [
        Group(
            tuple(
                episode(number, member, float(number == member == 0), level, thought)
                for member, thought in enumerate(THOUGHTS[2 * number : 2 * number + 2])
            )
        )
        for number, level in enumerate(levels)
    ]


def log_step(recorder: Recorder, step: int, success: float) -> None:
    """Log a step's metrics and episodes."""
    metrics = {
        "success/mean": success,
        "progress/updates": 2.0 * step,
        "progress/episodes": 4.0 * step,
        "progress/tokens": 10.0 * step,
        "time/step_s": 4.0,
        "time/update_s": 1.0,
        "mismatch/max_abs": step * 1e-6,
        "information/first/mi": 1.0,
        "information/first/regime": 1.0,
    }
    recorder.log(step, {name: last(value) for name, value in metrics.items()})
    levels = (10000 + 2 * step, 10001 + 2 * step)
    recorder.episodes(step, groups(step, levels), [True, False], scores=[0.5, None])


def evaluate(recorder: Recorder, step: int, success: float) -> None:
    """Record an evaluation of two levels, with two episodes each."""
    recorder.evaluation(step, evaluation(success).record() | {"env": "frozen-lake"})
    recorder.episodes(step, groups(step, (123, 124)), phase="eval")


def steps(recorder: Recorder) -> Iterator[int]:
    """Log the run, and yield each step after it is committed."""
    evaluate(recorder, 0, 0.5)
    for step in (1, 2, 3, 4):
        log_step(recorder, step, 0.5 + step / 10)
        recorder.commit()
        yield step
    evaluate(recorder, 4, 0.2)
    recorder.event(4, "alarm", "grad_spike: 30", {"detector": "grad_spike"})
    recorder.event(4, "guard", "rolled back to step 2, attempt 1")
    recorder.commit()
    recorder.attempt = 1
    for step in (3, 4, 5, 6):
        log_step(recorder, step, 0.9)
        recorder.commit()
        yield step
    arrays = {"token_ids": [1, 2, 7, 8], "loss_mask": [False, False, True, True]}
    arrays |= {"turn_index": [-1, -1, 0, 0], "sampled_logprobs": [0.0, 0.0, -0.5, -0.1]}
    arrays |= {"old_logprobs": [0.0, 0.0, -0.5, -0.1], "advantages": [9.0, 9.0, 1.0, float("nan")]}
    recorder.samples(6, [{"group": 0, "member": 0, **arrays}])
    recorder.cross_scores(6, "first", [[-1.0, -2.0], [-3.0, -1.5]], [0, 1], ["a", "b"], ["P", "Q"])
    evaluate(recorder, 6, 0.9)


def make_engine_run(folder: Path, steps: int = 30) -> Path:
    """Write a run on Ray that got a new engine after sampler 1 was lost, and lost sampler 0."""
    folder.mkdir(parents=True)
    settings = {"engine.name": "ray", "engine.learners": 2, "engine.samplers": 2}
    changes = settings | {"engine.max_staleness": 1, "steps": steps}
    lost = {5: "sampler 1", 20: "sampler 0"}
    with Recorder.create(folder, dump(merge("frozen-lake", changes))) as recorder:
        for step in range(1, steps + 1):
            alive = 1 if step in lost else 2
            metrics = {
                "time/tokens_per_s": 400.0 * alive + 10 * (step % 4),
                "time/publish_s": 0.1 + 0.05 * alive,
                "time/step_s": 4.0,
                "engine/queue": float(step % 2),
                "engine/staleness_mean": 0.5 + 0.1 * (step % 3),
                "engine/staleness_max": 1.0,
                "engine/learner_idle_fraction": 0.5 / alive,
                "engine/sampler_idle_fraction": 0.1 * alive,
                "engine/samplers": float(alive),
                "engine/stale_groups": float(step % 5 == 0),
            }
            recorder.log(step, {name: last(value) for name, value in metrics.items()})
            recorder.commit()
            if step in lost:
                data = {"process": lost[step], "what": "lost"}
                recorder.event(step, "engine", f"{lost[step]} is lost", data)
            if step == 5:
                recorder.event(step, "engine", "a new engine continues", {"what": "restored"})
    return folder


def make_run(folder: Path, finish: bool = True) -> Path:
    """Copy the run, without its last two steps if `finish` is false."""
    name = "viewer-run" if finish else "viewer-run-unfinished"
    return Path(shutil.copytree(once(name, partial(_write_run, finish=finish)), folder))


def _write_run(folder: Path, finish: bool) -> None:
    folder.mkdir()
    config = dump(merge("frozen-lake", {"steps": 6, "seed": 7}))
    with Recorder.create(folder, config, text_of=lambda token: f"<{token}>") as recorder:
        for step in steps(recorder):
            if not finish and (recorder.attempt, step) == (1, 4):
                break


def call(
    parent: int, link: str, prompt: tuple[int, ...], sampled: tuple[int, ...], role: CallRole
) -> Turn:
    """A call of an agent, as `ragen.gateway.session` makes it."""
    made = turn(0.0, prompt=prompt, sampled=sampled, state=str(prompt))
    said = f"reply {sampled}"
    return replace(
        made,
        observation=f"request {prompt}",
        completion=replace(made.completion, text=said),
        actions_asked=(said,),
        actions_executed=(said,),
        call=Call(parent, link, role),
    )


def agent_episode(member: int = 0) -> Episode:
    """An agent's calls: a fork, a sub-agent's conversation, and four that are not trained on."""
    turns = (
        call(-1, "first call", (1, 2), (7,), "agent"),
        call(0, "verbatim", (1, 2, 7, 3), (8,), "agent"),
        call(0, "JSON written anew", (1, 2, 7, 4), (9, 9), "agent"),
        call(-1, "message 1 (system) is new: <b>You help.</b>", (5,), (6,), "agent"),
        replace(call(1, "verbatim", (1, 2, 7, 3, 8, 3), (8, 9), "agent"), reward=1.0),
    )
    stop = replace(
        call(-1, "the budget is used up", (1,), (1,), "budget"),
        prompt=Prompt((), None, 0, 0, 0.0, 0),
        completion=Completion(None, None, "Give your final answer now.", "length", 0),
    )
    title = replace(call(-1, "another beginning", (11,), (12,), "auxiliary"), penalty=-0.5)
    others = (
        title,
        call(5, "other white space", (11, 12, 13), (14,), "auxiliary"),
        call(1, "verbatim", (1, 2, 7, 3, 8, 5), (15,), "discarded"),
        stop,
    )
    return Episode(
        env="agent:agent.py:main",
        level_seed=3,
        noise_seed=4,
        group=0,
        member=member,
        turns=turns,
        stop_reason="solved",
        terminated=True,
        truncated=False,
        success=True,
        others=others,
    )


def make_agent_run(folder: Path) -> Path:
    """Write a run with a group of two episodes of an agent; only the first one forks."""
    folder.mkdir(parents=True)
    config = dump(merge("bandit", {"steps": 1}))
    whole = agent_episode()
    straight = replace(agent_episode(1), turns=whole.turns[:2], others=())
    with Recorder.create(folder, config, text_of=lambda token: f"<{token}>") as recorder:
        recorder.episodes(1, [Group((whole, straight))], [True])
    return folder
