"""Reward terms of whole episodes and of groups, and the judge: added after the last turn.

Their values are added to `Turn.reward` of the last turn. So filters and diagnostics compare the
rewards that the run learns from, even if the environment itself gives none. The terms are computed
only in training; an evaluation reads the environment's own rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ragen.config.extensions import JUDGE, short_name
from ragen.core.seeding import derive
from ragen.core.types import Episode, Group, StopReason
from ragen.core.user_code import UserCodeError
from ragen.rollout.groups import together
from ragen.rollout.judge import Failure, Judge
from ragen.rollout.reward_terms import call_term, weights_for


async def apply_episode_terms(
    groups: Sequence[Group],
    weights: Mapping[str, float],
    judge: Judge | None,
    seed: int,
    step: int,
) -> list[Group]:
    """The groups with their terms added to the last turns' rewards, and listed in their info.

    `weights` are those of all reward terms; terms of turns are left out. Episodes that failed or
    have no turn are not judged. If a term fails, the episode that it judged fails, or all episodes
    of the group. `seed` is the run's, `step` counts finished steps.
    """
    for name, weight in weights_for("episode", weights).items():
        groups = await together(_each(name, weight, group) for group in groups)
    for name, weight in weights_for("episodes", weights).items():
        groups = await together(_all(name, weight, group) for group in groups)
    if judge is not None:
        seeds = [derive(seed, "judge", step, group.episodes[0].group) for group in groups]
        found = await judge.scores([judged(group) for group in groups], step, seeds)
        groups = [
            _with(group, JUDGE, weights[JUDGE], values)
            for group, values in zip(groups, found, strict=True)
        ]
    return list(groups)


def judged(group: Group) -> list[Episode]:
    """The episodes of a group that can be judged."""
    return [episode for episode in group.episodes if episode.turns and not episode.failed]


Value = float | Failure | UserCodeError
"""The value of a term for an episode, or the reason why there is none."""


async def _each(name: str, weight: float, group: Group) -> Group:
    async def value(episode: Episode) -> Value:
        try:
            return (await call_term(name, episode))[0]
        except UserCodeError as failure:
            return failure

    return _with(group, name, weight, await together(value(each) for each in judged(group)))


async def _all(name: str, weight: float, group: Group) -> Group:
    episodes = judged(group)
    try:
        values: Sequence[Value] = await call_term(name, episodes) if episodes else []
    except UserCodeError as failure:
        values = [failure] * len(episodes)
    return _with(group, name, weight, values)


def _with(group: Group, name: str, weight: float, values: Sequence[Value]) -> Group:
    """The group with a term's values for its judged episodes."""
    left = iter(values)
    return Group(
        tuple(
            _rewarded(episode, name, weight, next(left))
            if episode.turns and not episode.failed
            else episode
            for episode in group.episodes
        )
    )


def _rewarded(episode: Episode, name: str, weight: float, value: Value) -> Episode:
    if isinstance(value, Failure):
        return _failed(episode, "request", value.reason)
    if isinstance(value, UserCodeError):
        return _failed(episode, "timeout" if value.timed_out else "error", str(value))
    *before, last = episode.turns
    terms = {**last.info.get("reward_terms", {}), short_name(name): weight * value}
    info = {**last.info, "reward_terms": terms}
    rewarded = replace(last, reward=last.reward + weight * value, info=info)
    return replace(episode, turns=(*before, rewarded))


def _failed(episode: Episode, reason: StopReason, error: str) -> Episode:
    return replace(
        episode,
        stop_reason=reason,
        error=error,
        success=False,
        terminated=False,
        truncated=True,
    )
