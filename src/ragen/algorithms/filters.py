"""Which groups are worth learning from, and how much.

StarPO-S (arXiv:2504.20073) keeps the prompts whose outcome is most uncertain to the policy itself,

    U(π, M, s₀) = Std_{τ∼π(·|s₀)}[R(τ)],

measured by the spread of the group's rewards. Whole groups are kept or left, lost episodes with the
won. A score ranks the groups, a rule says how many of them stay.

Scores read the environment's own rewards (format penalties and normalisation come later), count by
episode, and leave failed episodes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

import numpy as np
import numpy.typing as npt

from ragen.config.kinds import SCORE
from ragen.core.errors import RagenError
from ragen.core.inputs import check_positional
from ragen.core.statistics import all_equal
from ragen.core.types import Episode, Group

Score = Callable[[Group], float]
"""The signature of every score: a finite number for a group, failed episodes among it."""

Rule = Literal["all", "top_k", "top_p", "top_p_softmax", "min_p"]
Scale = Literal["none", "linear", "sqrt"]

SLACK = 1e-9
"""Share by which a sum of floats may fall short of the p that it stands for."""


def reward_std(group: Group) -> float:
    """Spread of the environment's rewards in a group, format penalties left out.

    The standard deviation with G − 1 of `Episode.total_reward` over the episodes that did not fail.
    Exactly 0 where all are equal, or where fewer than two remain.
    """
    return math.sqrt(variance(group))


def variance(group: Group) -> float:
    """The square of `reward_std`; a sum of it (``top_p``) gives the widest groups more weight."""
    return _variance(_rewards(group))


def mean_reward(group: Group) -> float:
    """Mean reward of an episode: how easy the prompt is."""
    return fmean(_rewards(group) or [0.0])


def sum_reward(group: Group) -> float:
    """Sum of the rewards. Ranks as the mean does, except where episodes failed."""
    return math.fsum(_rewards(group))


def entropy(group: Group) -> float:
    """How undecided the policy was, in nats a token: the mean over episodes of `surprise`."""
    return fmean(_surprises(group) or [0.0])


def entropy_variance(group: Group) -> float:
    """How differently undecided its episodes are: their variance (with G − 1) of `surprise`."""
    return _variance(_surprises(group))


def length(group: Group) -> float:
    """Mean number of sampled tokens of an episode."""
    return fmean([len(_logprobs(episode)) for episode in _played(group)] or [0.0])


def surprise(episode: Episode) -> float:
    """Mean of −logprob over an episode's sampled tokens, in nats: an estimate of its entropy.

        When groups are chosen, the sampled tokens' own logprobs are all that is known of the
        distributions they were drawn from. That is enough: given what came before a token, −logprob
        has the entropy as its mean, so its sum over an episode is an unbiased estimate of the
        entropies' sum.

    Example:
            >>> from ragen.core.inputs import check_positional
    from ragen.config.kinds import SCORE
    from ragen.core.errors import RagenError
    from ragen.core.types import Completion, Prompt, Turn
            >>> said = Completion((5, 6), (-0.5, -1.5), "", "stop", 0)
            >>> prompt = Prompt((), (1,), 0, 8, 1.0, 0)
            >>> turn = Turn("", prompt, said, None, None, (), (), 0.0, 0.0, True, "")
            >>> surprise(Episode("x", 0, 0, 0, 0, (turn,), "failed", True, False, False, False))
            1.0
    """
    return -fmean(_logprobs(episode) or [0.0])


SCORES: dict[str, Score] = {
    "reward_std": reward_std,
    "variance": variance,
    "mean": mean_reward,
    "sum": sum_reward,
    "entropy": entropy,
    "entropy_variance": entropy_variance,
    "length": length,
}
"""RAGEN's own scores by their name in the config. Only `mean` and `sum` may be negative."""


def find_score(name: str) -> Score:
    """The score of a name in the config, RAGEN's own or from outside.

    Raises:
        RagenError: It cannot be loaded, or it cannot be called with a group.
    """
    return SCORE.find(name, SCORES, lambda function: check_positional(function, "group"))


def _score(group: Group, name: str) -> float:
    score = float(find_score(name)(group))
    if not math.isfinite(score):
        raise RagenError(f"the filter score {name} gave {score}: it has to be a finite number")
    return score


def scores_of(groups: Sequence[Group], score: str) -> list[float | None]:
    """What each group is ranked by; ``None`` where all its episodes failed."""
    return [_score(group, score) if _played(group) else None for group in groups]


def keep_all(merits: Sequence[float], value: float, num_groups: int) -> list[int]:
    """All of them."""
    return list(range(len(merits)))


def keep_top_k(merits: Sequence[float], value: float, num_groups: int) -> list[int]:
    """The groups of highest merit; the earlier of equals.

    Up to 1, `value` is the share of the step's groups that is kept, rounded, one at least. Above 1
    it is their number.

    Example:
        >>> keep_top_k([0.1, 0.5, 0.0, 0.5], 0.25, 4), keep_top_k([0.1, 0.5, 0.0, 0.5], 3, 4)
        ([1], [1, 3, 0])
    """
    count = round(value) if value > 1 else max(1, round(value * num_groups))
    return _ranking(merits)[:count]


def keep_top_p(merits: Sequence[float], value: float, num_groups: int) -> list[int]:
    """The shortest start of the ranking that holds the share `value` of the summed merit.

    Where all merits are 0, all hold the same share.

    Raises:
        ValueError: A merit is negative, so that shares of the sum mean nothing.

    Example:
        >>> keep_top_p([0.1, 0.5, 0.0, 0.4], 0.6, 4)  # .5 falls short of .6, .5 + .4 does not
        [1, 3]
    """
    _refuse_negative(merits)
    total = math.fsum(merits)
    shares = [merit / total for merit in merits] if total > 0 else [1 / len(merits)] * len(merits)
    return _nucleus(shares, value)


def keep_top_p_softmax(merits: Sequence[float], value: float, num_groups: int) -> list[int]:
    """The shortest start of the ranking that holds the share `value` of softmax(merits).

    Example:
        >>> keep_top_p_softmax([0.0, math.log(3)], 0.75, 2)  # ¼ and ¾
        [1]
    """
    weights = [math.exp(merit - max(merits)) for merit in merits]
    return _nucleus([weight / math.fsum(weights) for weight in weights], value)


def keep_min_p(merits: Sequence[float], value: float, num_groups: int) -> list[int]:
    """The groups whose merit is at least `value` times the largest.

    Raises:
        ValueError: A merit is negative, so that multiples of the largest mean nothing.

    Example:
        >>> keep_min_p([0.1, 0.5, 0.25], 0.5, 3)
        [1, 2]
    """
    _refuse_negative(merits)
    floor = value * max(merits) * (1 - SLACK)
    return [index for index in _ranking(merits) if merits[index] >= floor]


FILTERS: dict[str, Callable[[Sequence[float], float, int], list[int]]] = {
    "all": keep_all,
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "top_p_softmax": keep_top_p_softmax,
    "min_p": keep_min_p,
}
"""Rules that choose from at least one merit, by their name in the config: from the merits of the
groups that may be kept, the rule's number and the number of all the step's groups to indices into
the merits."""


def select(
    groups: Sequence[Group],
    *,
    score: str = "reward_std",
    rule: Rule = "all",
    value: float = 0.25,
    keep: Literal["largest", "smallest"] = "largest",
    include_zero: bool = True,
    min_played: int = 1,
) -> list[int]:
    """The groups to learn from.

    Only groups that may be kept are ranked. With ``keep="smallest"`` the rules see each score
    mirrored between the extremes, largest + smallest − score: an order turned round, on the same
    scale.

    Args:
        groups: The step's groups, with their failed episodes.
        score: What groups are ranked by.
        rule: How many are kept.
        value: The rule's number (see `FILTERS`).
        keep: Which end of the ranking.
        include_zero: Whether groups without any spread of reward may be among them.
        min_played: Episodes that must not have failed for a group to be kept at all: 2 for
            estimators that compare the episodes of a group (`estimator.compares_group`), else 1.

    Returns:
        Indices into `groups`, ascending; empty where no group qualifies.
    """
    candidates = [
        index
        for index, group in enumerate(groups)
        if len(_played(group)) >= min_played and (include_zero or reward_std(group) > 0)
    ]
    if not candidates:
        return []
    scores = [_score(groups[index], score) for index in candidates]
    ends = max(scores) + min(scores)
    merits = scores if keep == "largest" else [ends - each for each in scores]
    return sorted(candidates[place] for place in FILTERS[rule](merits, value, len(groups)))


SCALES: dict[str, Callable[[float], float]] = {
    "none": lambda share: 1.0,
    "linear": lambda share: share,
    "sqrt": math.sqrt,
}
"""From the share of the groups that was kept to a factor on the policy's loss."""


def group_weights(
    groups: Sequence[Group], kept: Sequence[int], *, scale: Scale = "none", reweight: bool = False
) -> list[float]:
    """How much each kept group counts: a factor on its advantages.

    A loss averages over what it is given, so the fewer groups are kept, the more each of them
    moves the policy. `scale` takes this back: with ``"linear"`` the policy's term is what it would
    be if the groups left out were there with advantages of 0. `reweight` is the soft form of the
    filter (arXiv:2604.06268): every group stays, with its reward std ÷ the largest one; where all
    are flat, nothing counts.

    Every policy loss is proportional to the advantage, so a factor on it is one on the loss; the
    entropy bonus, a KL term in the loss and the critic keep their weight.

    Args:
        groups: The step's groups.
        kept: Indices of those that `select` kept.
        scale: See `SCALES`.
        reweight: Whether groups count by their spread.

    Returns:
        One factor for each of `kept`.
    """
    factor = SCALES[scale](len(kept) / max(1, len(groups)))
    if not reweight:
        return [factor] * len(kept)
    stds = [reward_std(groups[index]) for index in kept]
    widest = max(stds, default=0.0) or 1.0
    return [factor * std / widest for std in stds]


def _ranking(merits: Sequence[float]) -> list[int]:
    return sorted(range(len(merits)), key=lambda index: -merits[index])


def _nucleus(shares: Sequence[float], p: float) -> list[int]:
    """The shortest start of the ranking whose shares, which sum to 1, come to p; one at least."""
    ranked = _ranking(shares)
    held: npt.NDArray[np.float64] = np.cumsum([shares[index] for index in ranked])
    return ranked[: 1 + int((held < p - SLACK).sum())]


def _refuse_negative(merits: Sequence[float]) -> None:
    if min(merits) < 0:
        raise ValueError(
            "top_p and min_p take scores of 0 or more; scores that may be negative go with top_k "
            "or top_p_softmax"
        )


def _played(group: Group) -> list[Episode]:
    return [episode for episode in group.episodes if not episode.failed]


def _rewards(group: Group) -> list[float]:
    return [episode.total_reward for episode in _played(group)]


def _surprises(group: Group) -> list[float]:
    return [surprise(episode) for episode in _played(group)]


def _logprobs(episode: Episode) -> list[float]:
    return [each for turn in episode.turns for each in turn.completion.logprobs or ()]


def _variance(numbers: Sequence[float]) -> float:
    """With n − 1; exactly 0 where all are equal but for rounding, or fewer than two."""
    if len(numbers) < 2 or all_equal(numbers):
        return 0.0
    return float(np.var(numbers, ddof=1))
