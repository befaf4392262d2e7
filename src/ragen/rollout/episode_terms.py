"""Reward terms of whole episodes and of groups, and the judge: added when a group has ended.

Their values are added to `Turn.reward` of the last turn. So filters and diagnostics compare the
rewards that the run learns from, even if the environment itself gives none. The terms are computed
only in training; an evaluation reads the environment's own rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ragen.config.extensions import JUDGE, short_name
from ragen.core.seeding import derive
from ragen.core.types import Episode, Group
from ragen.core.user_code import UserCodeError
from ragen.rollout.groups import together
from ragen.rollout.judge import Failure, Judge
from ragen.rollout.reward_terms import call_term, weights_for


async def apply_episode_terms(
    group: Group, weights: Mapping[str, float], judge: Judge | None, seed: int, step: int
) -> Group:
    """The group with its terms added to the last turns' rewards, and listed in their info.

    `weights` may have reward terms of turns, which are left out. Episodes that failed or have no
    turn are not judged. If a term fails, the episode that it judged fails, or all episodes of the
    group. `seed` is the run's, `step` counts finished steps.
    """
    for name, weight in weights_for("episode", weights).items():
        found = await together(_values(name, each) for each in judged(group))
        group = _with(group, name, weight, chain.from_iterable(found))
    for name, weight in weights_for("episodes", weights).items():
        group = _with(group, name, weight, await _values(name, judged(group)))
    if judge is not None:
        order = derive(seed, "judge", step, group.episodes[0].group)
        scores = await judge.scores(judged(group), step, order)
        group = _with(group, JUDGE, weights[JUDGE], scores)
    return group


def judged(group: Group) -> list[Episode]:
    """The episodes of a group that can be judged."""
    return [episode for episode in group.episodes if _is_judged(episode)]


def _is_judged(episode: Episode) -> bool:
    return bool(episode.turns) and not episode.failed


async def _values(name: str, judged: Episode | Sequence[Episode]) -> Sequence[float | Failure]:
    """The values of a term for one or several episodes, or for each the reason that it failed."""
    count = 1 if isinstance(judged, Episode) else len(judged)
    try:
        return await call_term(name, judged) if count else []
    except UserCodeError as failure:
        return [Failure(str(failure), "timeout" if failure.timed_out else "error")] * count


def _with(group: Group, name: str, weight: float, values: Iterable[float | Failure]) -> Group:
    """The group with a term's values for its judged episodes, in order."""
    left = iter(values)
    return Group(
        tuple(
            _rewarded(each, name, weight, next(left)) if _is_judged(each) else each
            for each in group.episodes
        )
    )


def _rewarded(episode: Episode, name: str, weight: float, value: float | Failure) -> Episode:
    if isinstance(value, Failure):
        return replace(
            episode,
            stop_reason=value.stop_reason,
            error=value.reason,
            success=False,
            terminated=False,
            truncated=True,
        )
    *before, last = episode.turns
    terms = {**last.info.get("reward_terms", {}), short_name(name): weight * value}
    info = {**last.info, "reward_terms": terms}
    rewarded = replace(last, reward=last.reward + weight * value, info=info)
    return replace(episode, turns=(*before, rewarded))
