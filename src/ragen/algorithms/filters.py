"""Filters: which groups are worth learning from.

StarPO-S (arXiv:2504.20073) keeps the prompts whose outcome is most uncertain under the policy,

    U(π, M, s₀) = Std_{τ∼π(·|s₀)}[R(τ)],

estimated by the spread of the group's rewards. Whole groups are kept or left out, failures together
with successes. A score ranks the groups, and a rule decides how many of them stay.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ragen.config.extensions import SCORE
from ragen.core.errors import RagenError
from ragen.core.statistics import all_equal
from ragen.core.types import Episode, Group

SLACK = 1e-9
"""Rounding error that a sum of shares may have when it is compared with p."""

Score = Callable[[Group], float]
"""The signature of every score. It takes a group with at least one episode that did not fail, and
returns a finite number. Groups with higher numbers are kept first.

    def mean_length(group: Group) -> float: ...
"""

Rule = Callable[[Sequence[float], float, int], list[int]]
"""The signature of every rule. It takes the scores of the groups that may be kept (at least one),
the config's `filter.value` and the number of all groups of the step. It returns indices into the
scores."""


def reward_std(group: Group) -> float:
    """The std of `Episode.reward`, without penalties, over a group's n episodes that did not fail.

    It divides by n − 1, and is exactly 0 if all rewards are equal or n < 2.
    """
    return math.sqrt(variance(group))


def variance(group: Group) -> float:
    """The square of `reward_std`. Under ``top_p`` it gives groups of wide spread more weight."""
    rewards = [episode.reward for episode in _played(group)]
    if len(rewards) < 2 or all_equal(rewards):
        return 0.0
    return float(np.var(rewards, ddof=1))


SCORES: dict[str, Score] = {"reward_std": reward_std, "variance": variance}
"""RAGEN's own scores by their name in the config."""


def find_score(name: str) -> Score:
    """The score of a name in the config, RAGEN's own or from outside."""
    return SCORE.find(name, SCORES)


def _score(group: Group, name: str) -> float:
    score = find_score(name)(group)
    if not isinstance(score, numbers.Real) or not math.isfinite(score):
        raise RagenError(f"the filter score {name} gave {score}: it has to be a finite number")
    return float(score)


def scores_of(groups: Sequence[Group], score: str) -> list[float | None]:
    """The score of each group; ``None`` where all its episodes failed."""
    return [_score(group, score) if _played(group) else None for group in groups]


def keep_all(scores: Sequence[float], value: float, num_groups: int) -> list[int]:
    """All groups."""
    return list(range(len(scores)))


def keep_top_k(scores: Sequence[float], value: float, num_groups: int) -> list[int]:
    """The groups with the highest scores; of equal scores, the earlier group.

    A `value` above 1 is the number of groups to keep. Up to 1 it is their share of the step's
    groups; the number is rounded, and at least 1.
    """
    count = round(value) if value > 1 else max(1, round(value * num_groups))
    return _ranking(scores)[:count]


def keep_top_p(scores: Sequence[float], value: float, num_groups: int) -> list[int]:
    """The shortest prefix of the ranking with at least the share `value` of the summed scores.

    If all scores are 0, all groups hold the same share.

    Raises:
        ValueError: A score is negative, so its share of the sum is undefined.
    """
    if min(scores) < 0:
        raise ValueError('top_p needs scores of 0 or more: use filter.rule = "top_k"')
    total = math.fsum(scores)
    shares = [score / total for score in scores] if total > 0 else [1 / len(scores)] * len(scores)
    ranked = _ranking(shares)
    held: npt.NDArray[np.float64] = np.cumsum([shares[index] for index in ranked])
    return ranked[: 1 + int((held < value - SLACK).sum())]


FILTERS: dict[str, Rule] = {
    "all": keep_all,
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "reweight": keep_all,
}
"""Rules by their name in the config. ``reweight`` keeps all groups and weighs them
(`group_weights`)."""


def select(
    groups: Sequence[Group],
    *,
    score: str = "reward_std",
    rule: str = "all",
    value: float = 0.25,
    include_zero: bool = True,
    min_played: int = 1,
) -> list[int]:
    """The ascending indices of the groups to learn from; none if no group qualifies.

    Groups of equal rewards are candidates only with `include_zero`. A candidate has at least
    `min_played` episodes that did not fail: 2 if the estimator compares a group's episodes, else 1.

    Raises:
        RagenError: The score cannot be loaded, or gives a number that is not finite.
        ValueError: A score is negative, and the rule is ``top_p``.
    """
    candidates = [
        index
        for index, group in enumerate(groups)
        if len(_played(group)) >= min_played and (include_zero or reward_std(group) > 0)
    ]
    if not candidates:
        return []
    scores = [_score(groups[index], score) for index in candidates]
    return sorted(candidates[index] for index in FILTERS[rule](scores, value, len(groups)))


def group_weights(groups: Sequence[Group], rule: str) -> list[float] | None:
    """The factor on each kept group's advantages, or ``None`` if the rule does not weigh groups.

    ``reweight`` is the soft form of the filter (arXiv:2604.06268): the factor is the group's reward
    std ÷ the largest reward std. If all stds are 0, all factors are 0. The entropy bonus, a KL term
    in the loss and the critic's loss are not weighted.
    """
    if rule != "reweight":
        return None
    stds = [reward_std(group) for group in groups]
    largest = max(stds, default=0.0) or 1.0
    return [std / largest for std in stds]


def _ranking(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def _played(group: Group) -> list[Episode]:
    return [episode for episode in group.episodes if not episode.failed]
