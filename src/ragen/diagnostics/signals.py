"""What a run looks like from outside: its signals, and the published signs of collapse.

Names of metrics are paths; a metric that cannot be told (no thought, no token ids) is left out,
never invented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, inf, isfinite, log
from statistics import fmean, median, stdev
from typing import Literal

import numpy as np
from torch import Tensor

from ragen.algorithms.filters import reward_std
from ragen.algorithms.losses import k3
from ragen.core.metrics import Metrics, largest, last, mean, total
from ragen.core.types import Episode, Group, Turn
from ragen.diagnostics.regimes import WINDOW
from ragen.rollout.reasoning import measures, repeated_ngrams, term_metrics

EMA_WEIGHT = 0.1
"""Weight of the newest value in a moving average: the last ten make up two thirds of it."""
NUM_BUCKETS = 4
"""Quartiles of the in-group reward std, as arXiv:2604.06268 compares them."""
REPEATS = 8
"""Times in a row that one token comes in a degenerate completion, half of which it is at least."""


def summarize(groups: Sequence[Group], kept: Sequence[int]) -> Metrics:
    """Every signal of a step that needs no learner.

    Args:
        groups: All of the step's groups, failed episodes among them: those are counted, and play no
            part in any other number.
        kept: Indices of the groups that the filter kept.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    played = [episode for episode in episodes if not episode.failed]
    turns = [turn for episode in played for turn in episode.turns]
    return {
        "episodes/failed": total(len(episodes) - len(played)),
        "episodes/played": total(len(played)),
        **_mean("filter/kept_fraction", [index in set(kept) for index in range(len(groups))]),
        **_outcomes(played),
        **term_metrics(played),
        **_spread(groups),
        **_turns(turns),
        **_thoughts(turns),
        **measures(turns),
    }


def _outcomes(played: Sequence[Episode]) -> Metrics:
    return {
        **_mean("reward/mean", [episode.total_reward for episode in played]),
        **_mean("success/mean", [episode.success for episode in played]),
        **_mean("episodes/truncated_fraction", [episode.truncated for episode in played]),
        **_mean("turns/mean", [len(episode.turns) for episode in played]),
    }


def _spread(groups: Sequence[Group]) -> Metrics:
    """In-group reward std, of the groups in which at least two episodes were played."""
    comparable = [g for g in groups if sum(not episode.failed for episode in g.episodes) > 1]
    stds = [reward_std(group) for group in comparable]
    if not stds:
        return {}
    return {
        "reward/std_in_group": mean(fmean(stds), len(stds)),
        "reward/std_in_group_max": largest(max(stds)),
        **_mean("reward/flat_group_fraction", [std == 0 for std in stds]),
    }


def _turns(turns: Sequence[Turn]) -> Metrics:
    told = [turn for turn in turns if "effective" in turn.info]
    executed = sum(len(turn.actions_executed) for turn in told)
    lengths = [len(ids) for ids in _token_ids(turns)]
    metrics = {
        **_mean("actions/per_turn", [len(turn.actions_executed) for turn in turns]),
        **_mean("format/valid_fraction", [turn.well_formed for turn in turns]),
        **_mean("length/completion_tokens", lengths),
        **_mean("text/degenerate_fraction", [is_degenerate(ids) for ids in _token_ids(turns)]),
        **_mean("length/cut_fraction", [t.completion.finish_reason == "length" for t in turns]),
        **_mean("prompt/turns_dropped", [turn.prompt.turns_dropped for turn in turns]),
        "tokens/sampled": total(sum(lengths)),
    }
    if executed:
        changed = sum(turn.info["effective"] for turn in told)
        metrics["actions/effective_fraction"] = mean(changed / executed, executed)
    return metrics


def _token_ids(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    return [t.completion.token_ids for t in turns if t.completion.token_ids is not None]


def is_degenerate(token_ids: Sequence[int]) -> bool:
    """Whether one token, repeated, is most of a completion, such as "!!!!!!!!".

    Example:
        >>> is_degenerate([5, 6, *[9] * 8, 2]), is_degenerate([9] * 7)
        (True, False)
    """
    longest = max((len(list(run)) for _, run in groupby(token_ids)), default=0)
    return longest >= REPEATS and 2 * longest >= len(token_ids)


def _thoughts(turns: Sequence[Turn]) -> Metrics:
    spans = [turn.thought_span for turn in turns if turn.thought_span is not None]
    thoughts = [turn.thought for turn in turns if turn.thought is not None]
    repeated = [repeated_ngrams(thought) for thought in thoughts]
    metrics = {
        **_mean("length/thought_tokens", [stop - start for start, stop in spans]),
        **_mean("thought/repeated_ngram_fraction", [x for x in repeated if x is not None]),
    }
    if thoughts:
        unique = len(set(thoughts)) / len(thoughts)
        metrics["thought/unique_fraction"] = mean(unique, len(thoughts))
    return metrics


def _mean(name: str, items: Sequence[float]) -> Metrics:
    return {name: mean(fmean(items), len(items))} if items else {}


def explained_variance(values_N: Tensor, returns_N: Tensor) -> Metrics:
    """How much of the returns' spread the critic foresaw: 1 − Var(R − V) ÷ Var(R).

    1 is a perfect critic, 0 one that says the mean, below 0 one that is worse than that. Empty
    where all returns are equal, since there was nothing to foresee.

    Example:
        >>> from torch import tensor
        >>> metrics = explained_variance(tensor([0.0, 1.0]), tensor([0.0, 2.0]))
        >>> metrics["critic/explained_variance"].value
        0.75
    """
    if len(returns_N) < 2 or bool(returns_N.max() == returns_N.min()):
        return {}
    unexplained = float((returns_N - values_N).var() / returns_N.var())
    return {"critic/explained_variance": mean(1 - unexplained, len(returns_N))}


def reference_kl(old_logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Metrics:
    """KL(policy ‖ reference) in nats by k3, wherever the run charges for it: reward or loss."""
    if not len(old_logprobs_N):
        return {}
    kl = k3(old_logprobs_N, reference_logprobs_N).mean().item()
    return {"kl/reference": mean(kl, len(old_logprobs_N))}


def smooth(averages: Mapping[str, float], metrics: Metrics) -> dict[str, float]:
    """Exponential moving averages after one more step: a ← a + w (x − a), from the first x on.

    Metrics that are means have one; sums, maxima and states have none. What was not measured in
    this step, or is not finite, leaves its average as it was.

    Example:
        >>> smooth({"reward/mean": 1.0}, {"reward/mean": mean(0.0), "tokens/sampled": total(9)})
        {'reward/mean': 0.9}
    """
    new = {name: m.value for name, m in metrics.items() if m.kind == "mean" and isfinite(m.value)}
    return dict(averages) | {
        name: x + (1 - EMA_WEIGHT) * (averages.get(name, x) - x) for name, x in new.items()
    }


def averaged(averages: Mapping[str, float], metrics: Metrics) -> Metrics:
    """The averages of a step's metrics, as ``ema/<name>``."""
    return {f"ema/{name}": last(averages[name]) for name in metrics if name in averages}


def std_buckets(stds: Sequence[float]) -> list[int]:
    """Which quartile each group's reward std lies in, from 0; equal stds share the lowest.

    Example:
        >>> std_buckets([0.0, 0.0, 0.5, 0.2]), std_buckets([0.5, 0.5])
        ([0, 0, 3, 2], [0, 0])
    """
    edges = np.quantile(stds, np.arange(1, NUM_BUCKETS) / NUM_BUCKETS)
    buckets: list[int] = np.searchsorted(edges, stds, side="left").tolist()
    return buckets


# The Echo Trap (arXiv:2504.20073): early gain, then one rewarded template instead of many thoughts.

Series = Mapping[int, float]
"""One metric over a run: step to value, in the order of the steps."""

SignName = Literal["early_gain", "thoughts_repeat", "std_before_reward", "gradient_spike"]

SIGNS: dict[SignName, str] = {
    "early_gain": "an early gain that is lost again",
    "thoughts_repeat": "thoughts repeat each other",
    "std_before_reward": "reward std falls before the reward does",
    "gradient_spike": "a spike of the gradient norm",
}
"""What each sign says."""


SPIKE = 5
"""How many times the usual gradient norm makes a spike, at least."""

OUTLIER = 3.5
"""Modified z-score of an outlier (Iglewicz and Hoaglin 1993), whose σ is 1.4826 times the median
absolute deviation."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One published sign of collapse: the step where it showed, the number there, and its baseline.

    Example:
        >>> print(Sign("thoughts_repeat", 21, 0.11, 0.64))
        thoughts repeat each other, step 21: 0.11 (was 0.64)
    """

    name: SignName
    step: int
    value: float
    baseline: float

    def __str__(self) -> str:
        """In words."""
        return f"{SIGNS[self.name]}, step {self.step}: {self.value:.3g} (was {self.baseline:.3g})"


def echo_trap_signs(history: Mapping[str, Series]) -> list[Sign]:
    """Which of the Echo Trap's published signs a run shows, in the order in which they appeared.

    A baseline is the mean of the first `WINDOW` steps, and what is compared with it the mean of the
    last `WINDOW` ones. The rules, with the metric that each reads:

    - ``early_gain`` (``reward/mean``): the trailing mean exceeds the baseline by 10 % of it and by
      two standard errors of it, and falls below that mark again before the end. Step and value: its
      peak.
    - ``thoughts_repeat`` (``thought/unique_fraction``): below half the baseline.
    - ``std_before_reward`` (``reward/std_in_group``): below half the baseline, at an earlier step
      than that at which ``reward/mean`` fell 10 % of its highest trailing mean below it.
    - ``gradient_spike`` (``gradient/policy_norm``): one step's norm is a `spike` beside all before.

    A metric that is missing or shorter than two windows shows no sign.
    """
    reward = history.get("reward/mean", {})
    found = (
        _early_gain(reward),
        _halved("thoughts_repeat", history.get("thought/unique_fraction", {})),
        _std_before_reward(history.get("reward/std_in_group", {}), reward),
        _gradient_spike(history.get("gradient/policy_norm", {})),
    )
    return sorted((sign for sign in found if sign is not None), key=lambda sign: sign.step)


def baseline_of(series: Series) -> float:
    """Mean of the first `WINDOW` steps."""
    return fmean(list(series.values())[:WINDOW])


def trailing_means(series: Series) -> list[tuple[int, float]]:
    """Step and trailing mean wherever the window no longer overlaps the baseline's."""
    steps, numbers = list(series), list(series.values())
    ends = range(2 * WINDOW, len(numbers) + 1)
    return [(steps[end - 1], fmean(numbers[end - WINDOW : end])) for end in ends]


def _early_gain(reward: Series) -> Sign | None:
    trailing = trailing_means(reward)
    if not trailing:
        return None
    baseline = baseline_of(reward)
    error = stdev(list(reward.values())[:WINDOW]) / WINDOW**0.5
    mark = baseline + max(0.1 * abs(baseline), 2 * error)
    step, peak = max(trailing, key=lambda point: point[1])
    lost = any(value < mark for at, value in trailing if at > step)
    return Sign("early_gain", step, peak, baseline) if peak > mark and lost else None


def _halved(name: SignName, series: Series) -> Sign | None:
    for step, value in trailing_means(series):
        if value < (baseline := baseline_of(series)) / 2:
            return Sign(name, step, value, baseline)
    return None


def _std_before_reward(std: Series, reward: Series) -> Sign | None:
    sign = _halved("std_before_reward", std)
    fall = _reward_fall(reward)
    return sign if sign is not None and fall is not None and sign.step < fall else None


def _reward_fall(reward: Series) -> int | None:
    if len(reward) < 2 * WINDOW:
        return None
    highest = baseline_of(reward)
    for step, value in trailing_means(reward):
        highest = max(highest, value)
        if value < highest - 0.1 * abs(highest):
            return step
    return None


def _gradient_spike(norm: Series) -> Sign | None:
    steps, numbers = list(norm), list(norm.values())
    for i in range(WINDOW, len(numbers)):
        if (usual := spike(numbers[: i + 1])) is not None:
            return Sign("gradient_spike", steps[i], numbers[i], usual)
    return None


def spike(norms: Sequence[float]) -> float | None:
    """The median of all norms before the last, where that one is a spike beside them.

    The last is one if it is above `SPIKE` times the median, and its logarithm an `OUTLIER` among
    theirs: where few episodes make a gradient, norms spread over orders of magnitude by themselves.
    None before two windows of norms say how far, and none of a norm that is not finite, whose
    update is never applied.

    Example:
        >>> usual = [1.0, 1.2, 0.9, 1.1, 1.0] * 2
        >>> spike([*usual, 5.2]), spike([*usual, 4.8]), spike([0.1, 0.3, 1.0, 3.0, 4.0] * 2 + [5.2])
        (1.0, None, None)
    """
    before = [norm for norm in norms[:-1] if 0 < norm < inf]
    if len(before) < 2 * WINDOW or not isfinite(norms[-1]):
        return None
    usual = median(before)
    spread = 1.4826 * median(abs(log(norm / usual)) for norm in before)
    return usual if norms[-1] > usual * max(SPIKE, exp(OUTLIER * spread)) else None
