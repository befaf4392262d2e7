"""The groups that steps train on, played when a step asks for them or ahead of it.

With ``engine.max_staleness = k`` the groups of the next k steps are played while one step trains.
The play of step n + k begins when step n begins to train and earlier plays leave room, so at the
earliest with the weights that step n begins with. Its samples are therefore at most k publications
behind when step n + k trains on them. Levels and seeds are those of step n + k itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ragen.core.metrics import Metrics, largest, last, mean, total
from ragen.core.types import Episode, Group
from ragen.evaluation.outcomes import outcome_of, refuse_unplayable
from ragen.training.ahead import Played, Start
from ragen.training.collection import collect_groups
from ragen.training.mixture import first_starts
from ragen.training.running import Run


async def next_groups(run: Run) -> Played:
    """The groups that the next step trains on; the plays of the steps after it begin.

    In a mixture or a curriculum, the starts of a step that is played ahead follow from the counts
    and the stage at the time when its play begins.
    """
    if not run.config.engine.max_staleness:
        run.env_time.seconds = 0.0
        if run.judge is not None:
            run.judge.metrics()  # drops those of an abandoned step
    _begin(run)
    run.ahead.plans.popleft()
    return await run.ahead.plays.popleft()


def _begin(run: Run) -> None:
    """Begin the plays of the next step and of those that `engine.max_staleness` allows."""
    config, state, ahead = run.config, run.state, run.ahead
    while len(ahead.plays) <= config.engine.max_staleness:
        step = state.step + len(ahead.plays)
        if ahead.plays and config.budget == "steps" and step >= config.steps:
            break
        planned = Counter(start.setup.env for starts in ahead.plans for start in starts)
        counts = {name: state.groups.get(name, 0) + planned[name] for name in run.playing}
        starts = first_starts(run.playing, config, replace(state, step=step, groups=counts))
        ahead.plans.append(starts)
        ahead.plays.append(asyncio.create_task(_play(run, starts, step, state.stage)))


async def _play(run: Run, starts: Sequence[Start], step: int, stage: int) -> Played:
    began = time.perf_counter()
    on_episode = partial(_episode_ended, run)
    config, ahead = run.config, run.ahead
    gate = ahead.gate = ahead.gate or asyncio.Semaphore(config.episodes_at_once)
    groups = await collect_groups(run.engine, starts, config, step, on_episode, run.judge, gate)
    refuse_unplayable([outcome_of(episode) for group in groups for episode in group.episodes])
    return Played(starts, stage, groups, time.perf_counter() - began)


def _episode_ended(run: Run, episode: Episode) -> None:
    run.beat()
    run.watcher.episode(episode)


def staleness(group: Group, version: int) -> int:
    """Publications by which the oldest completion of a group is behind this policy version."""
    versions = [
        turn.completion.policy_version for episode in group.episodes for turn in episode.turns
    ]
    return version - min(versions, default=version)


def fresh(run: Run, groups: Sequence[Group]) -> list[int]:
    """The indices of the groups that are not too stale to train on; an event lists the others."""
    version, most = run.engine.version, run.config.engine.max_staleness
    found = [index for index, group in enumerate(groups) if staleness(group, version) <= most]
    if len(found) < len(groups):
        dropped = sorted({*range(len(groups))} - {*found})
        text = f"{len(dropped)} of {len(groups)} groups are staler than {most}: not trained on"
        data = {"what": "stale", "groups": dropped}
        run.recorder.event(run.state.step + 1, "engine", text, data)
    return found


def parts_of(run: Run) -> dict[str, float]:
    """The seconds of the rollout that environments and a judge took; empty if steps overlap."""
    if run.config.engine.max_staleness:
        return {}
    judge = {} if run.judge is None else {"judge": run.judge.seconds}
    return {"env": run.env_time.seconds, **judge}


def overlap_metrics(run: Run, played: Played, kept: Sequence[int], version: int) -> Metrics:
    """Metrics of a step that was played ahead; empty if no step is.

    `version` is that of the weights with which the step began to train, and `kept` are the indices
    of the groups it trained on. ``engine/queue`` is the number of steps that have been played and
    wait for training.
    """
    if not run.config.engine.max_staleness:
        return {}
    old = [staleness(played.groups[index], version) for index in kept]
    every = [staleness(group, version) for group in played.groups]
    metrics = {
        "engine/stale_groups": total(sum(each > run.config.engine.max_staleness for each in every)),
        "engine/queue": last(sum(task.done() for task in run.ahead.plays)),
        "engine/play_s": total(played.seconds),
    }
    if old:
        metrics["engine/staleness_mean"] = mean(sum(old) / len(old))
        metrics["engine/staleness_max"] = largest(max(old))
    return metrics
