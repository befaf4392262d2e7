"""Which groups are worth learning from.

StarPO-S (arXiv:2504.20073) keeps the prompts whose outcome is most uncertain to the policy itself,

    U(π, M, s₀) = Std_{τ∼π(·|s₀)}[R(τ)],

measured by the spread of the group's rewards. Whole groups are kept or left, lost episodes with the
won.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ragen.types import Group

Score = Literal["reward_std"]
Rule = Literal["all", "top_k"]


def reward_std(group: Group) -> float:
    """Spread of the world's rewards in a group, format penalties left out.

    The standard deviation with G − 1 of `Episode.total_reward` over the episodes that did not fail.
    Exactly 0 where all are equal, or where fewer than two remain.
    """
    rewards = [episode.total_reward for episode in group.episodes if not episode.failed]
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return 0.0
    return float(np.std(rewards, ddof=1))


SCORES: dict[str, Callable[[Group], float]] = {"reward_std": reward_std}
"""What a group is ranked by; every score is 0 or more, and 0 says that there is nothing to
learn."""


def keep_all(scores: Sequence[float], share: float) -> list[int]:
    """Every group."""
    return list(range(len(scores)))


def keep_top(scores: Sequence[float], share: float) -> list[int]:
    """The round(share · groups) groups of highest score, at least one; the earlier of equals.

    Example:
        >>> keep_top([0.1, 0.5, 0.0, 0.5], 0.25), keep_top([0.1, 0.5, 0.0, 0.5], 0.75)
        ([1], [1, 3, 0])
    """
    ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
    return ranked[: max(1, round(share * len(scores)))]


FILTERS: dict[str, Callable[[Sequence[float], float], list[int]]] = {
    "all": keep_all,
    "top_k": keep_top,
}
"""Rules that choose from the scores, by their name in the config."""


def select(
    groups: Sequence[Group],
    *,
    score: Score = "reward_std",
    rule: Rule = "all",
    value: float = 0.25,
    keep: Literal["largest", "smallest"] = "largest",
    include_zero: bool = True,
    min_played: int = 1,
) -> list[int]:
    """The groups to learn from.

    Args:
        groups: The step's groups, with their failed episodes.
        score: What groups are ranked by.
        rule: How many are kept.
        value: The rule's number: the share of all groups that ``"top_k"`` keeps.
        keep: Which end of the ranking.
        include_zero: Whether groups of score 0 may be among them.
        min_played: Episodes that must not have failed for a group to be kept at all: 2 for
            estimators that compare members (`advantages.COMPARES_MEMBERS`), else 1.

    Returns:
        Indices into `groups`, ascending; empty where no group qualifies.
    """
    scores = [SCORES[score](group) for group in groups]
    ranked = FILTERS[rule](scores if keep == "largest" else [-s for s in scores], value)
    return [
        index
        for index in sorted(ranked)
        if (include_zero or scores[index] > 0)
        and sum(not episode.failed for episode in groups[index].episodes) >= min_played
    ]
