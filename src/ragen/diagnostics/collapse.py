"""The published signs of collapse: RAGEN-2's regimes of reasoning and RAGEN's Echo Trap.

The regimes (arXiv:2604.06268) classify one step's thoughts by their entropy and by their mutual
information with the prompts, which `information` measures. The signs of the Echo Trap
(arXiv:2504.20073) are read from the metrics of a whole run. This module needs no torch, so that
readers of finished runs can use its names, limits and windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal, get_args

from ragen.core.metrics import Series

# Regimes.

Sampling = Literal["first", "any"]

SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)
"""Which turn's thought is measured: the first (then prompts are levels), or one drawn uniformly."""

Regime = Literal[
    "undecidable", "diverse", "template collapse", "compressed", "low-entropy collapse"
]
REGIMES: tuple[Regime, ...] = get_args(Regime)
"""The regimes by name. A metric holds the position of a name in this tuple."""

MIN_PROMPTS = 4
"""Distinct prompts below which no regime is assigned: with fewer, H(w) is at most log 3, which is
one lucky word."""
HIGH_MI = 0.5
"""Share of H(w) from which on I(X;Z) counts as high. Below it, a thought leaves more than √M of M
equally likely prompts possible."""
HIGH_ENTROPY = math.log(2)
"""H(Z|X) in nats per thought from which on it counts as high: two equally likely thoughts for each
prompt."""


def regime_of(
    mi: float, conditional_entropy: float, prompt_entropy: float, num_prompts: int
) -> Regime:
    """The regime of a step's thoughts: H(Z|X) high or low, I(X;Z) high or low.

    =====================  ===========  ==========
    regime                 H(Z|X) high  I(X;Z) high
    =====================  ===========  ==========
    diverse                yes          yes
    template collapse      yes          no
    compressed             no           yes
    low-entropy collapse   no           no
    =====================  ===========  ==========

    Both are in nats per thought; H(Z|X) is high from `HIGH_ENTROPY` on, I(X;Z) from `HIGH_MI` ·
    H(w) on. H(w), in nats, is the entropy of the shares of the `num_prompts` distinct prompts.
    """
    if num_prompts < MIN_PROMPTS:
        return "undecidable"
    high_mi = mi >= HIGH_MI * prompt_entropy
    if conditional_entropy >= HIGH_ENTROPY:
        return "diverse" if high_mi else "template collapse"
    return "compressed" if high_mi else "low-entropy collapse"


# Windows over a run's metrics.

STAGE = "curriculum/stage"
"""The metric of the curriculum's stage, counted from 1, in which a step was played."""

WINDOW = 5
"""Steps of the baseline at the start of a run, and of the trailing mean compared with it."""


def finite(series: Series) -> Series:
    """The steps whose value is finite: no other counts in a window."""
    return {step: value for step, value in series.items() if math.isfinite(value)}


def since_advance(history: Mapping[str, Series]) -> Mapping[str, Series]:
    """The metrics of the curriculum's present stage, for its levels are harder than those before.

    Evaluations have the full task in every stage, so all of them stay.
    """
    stages = list(history.get(STAGE, {}).items())
    begins = next((step for step, stage in stages if stage == stages[-1][1]), 0)
    if not stages or begins == stages[0][0]:
        return history
    return {
        name: series
        if name.startswith("evaluation/")
        else {step: value for step, value in series.items() if step >= begins}
        for name, series in history.items()
    }


def baseline_of(series: Series) -> float:
    """Mean of the first `WINDOW` steps with a finite value."""
    return fmean(list(finite(series).values())[:WINDOW])


def trailing_means(series: Series) -> list[tuple[int, float]]:
    """Step and trailing mean at each step whose window no longer overlaps the baseline's."""
    series = finite(series)
    steps, numbers = list(series), list(series.values())
    ends = range(2 * WINDOW, len(numbers) + 1)
    return [(steps[end - 1], fmean(numbers[end - WINDOW : end])) for end in ends]


def detect_spike(norms: Sequence[float]) -> float | None:
    """The median of all norms before the last one, if the last one is a spike, else ``None``.

    A spike is above 5 times the median, and its logarithm is an outlier among the logarithms: where
    few episodes contribute to a gradient, norms spread over orders of magnitude in a healthy run.
    An outlier has a modified z-score above 3.5 (Iglewicz and Hoaglin 1993), whose σ is 1.4826 times
    the median absolute deviation. Fewer than two windows of norms before it never give a spike, and
    neither does a norm that is not finite, because its update is skipped.
    """
    before = [norm for norm in norms[:-1] if 0 < norm < math.inf]
    if len(before) < 2 * WINDOW or not 0 < norms[-1] < math.inf:
        return None
    usual = median(before)
    middle = math.log(usual)
    spread = 1.4826 * median(abs(math.log(norm) - middle) for norm in before)
    excess = math.log(norms[-1]) - middle
    return usual if excess > max(math.log(5), 3.5 * spread) else None


# The Echo Trap: an early gain, then one rewarded template instead of varied thoughts.

SIGNS = {
    "early_gain": "an early gain that is lost again",
    "thoughts_repeat": "thoughts repeat each other",
    "std_before_reward": "reward std falls before the reward does",
    "gradient_spike": "a spike of the gradient norm",
}


@dataclass(frozen=True, slots=True)
class Sign:
    """One sign of the Echo Trap: the step where it appeared, the value there, and its baseline."""

    name: str
    step: int
    value: float
    baseline: float

    def __str__(self) -> str:
        return f"{SIGNS[self.name]}, step {self.step}: {self.value:.3g} (was {self.baseline:.3g})"


def echo_trap_signs(history: Mapping[str, Series]) -> list[Sign]:
    """The signs of the Echo Trap that a run shows, in the order in which they appeared.

    Trailing means are compared with the baseline. The rules, with the metric that each reads:

    - ``early_gain`` (``reward/mean``): the trailing mean exceeds the baseline by 10 % of it and by
      two of its standard errors, and falls below that mark again before the end. The sign has the
      step and the value of the peak.
    - ``thoughts_repeat`` (``thought/unique_fraction``): below half the baseline.
    - ``std_before_reward`` (``reward/std_in_group``): below half the baseline, at an earlier step
      than the one at which ``reward/mean`` fell 10 % below its highest trailing mean.
    - ``gradient_spike`` (``gradient/policy_norm``): one norm is a spike (`detect_spike`).

    A metric that is missing or shorter than two windows shows no sign. With a curriculum, only its
    last stage counts.
    """
    history = since_advance(history)
    reward = history.get("reward/mean", {})
    std_sign = _halved("std_before_reward", history.get("reward/std_in_group", {}))
    signs = (
        _early_gain(reward),
        _halved("thoughts_repeat", history.get("thought/unique_fraction", {})),
        std_sign if std_sign is not None and std_sign.step < _reward_fall(reward) else None,
        _gradient_spike(history.get("gradient/policy_norm", {})),
    )
    return sorted((sign for sign in signs if sign is not None), key=lambda sign: sign.step)


def _early_gain(reward: Series) -> Sign | None:
    trailing = trailing_means(reward)
    if not trailing:
        return None
    baseline = baseline_of(reward)
    error = stdev(list(finite(reward).values())[:WINDOW]) / WINDOW**0.5
    mark = baseline + max(0.1 * abs(baseline), 2 * error)
    step, peak = max(trailing, key=lambda point: point[1])
    lost = any(value < mark for at, value in trailing if at > step)
    return Sign("early_gain", step, peak, baseline) if peak > mark and lost else None


def _halved(name: str, series: Series) -> Sign | None:
    for step, value in trailing_means(series):
        if value < (baseline := baseline_of(series)) / 2:
            return Sign(name, step, value, baseline)
    return None


def _reward_fall(reward: Series) -> float:
    """The first step whose trailing mean is 10 % below the highest one; −∞ if none is."""
    highest = -math.inf
    for step, value in trailing_means(reward):
        highest = max(highest, value, baseline_of(reward))
        if value < highest - 0.1 * abs(highest):
            return step
    return -math.inf


def _gradient_spike(norms: Series) -> Sign | None:
    numbers = list(norms.values())
    for count, (step, norm) in enumerate(norms.items(), 1):
        if (usual := detect_spike(numbers[:count])) is not None:
            return Sign("gradient_spike", step, norm, usual)
    return None
