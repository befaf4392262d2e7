"""Detectors: functions of a run's metrics that say whether the run is in trouble.

A baseline is the mean of the first five finite values, a trailing mean the mean of the last five.
Where a trailing mean is read, trouble began at the first step of its window.

An agent whose failures shrank to a fraction f of those at the start has less left to be uncertain
about. So fewer failures explain a fall of spread or entropy, and the limit is multiplied by f.

Sources: the kind and order of the signs, arXiv:2504.20073; MI, arXiv:2604.06268. The published hard
stops come later: reward std below a tenth of its start for ten steps, five empty filters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from statistics import fmean, median

from ragen.config.extensions import DETECTOR
from ragen.config.sections import GuardConfig
from ragen.core.metrics import Series
from ragen.core.statistics import difference, wilson
from ragen.diagnostics.collapse import (
    MIN_PROMPTS,
    WINDOW,
    baseline_of,
    detect_spike,
    finite,
    trailing_means,
)

History = Mapping[str, Series]
"""Metrics by name, then by step, up to the step that is checked."""


@dataclass(frozen=True, slots=True)
class Detection:
    """A detector's condition holds: the step since when, the value there, and the baseline."""

    onset: int
    value: float
    baseline: float


Detector = Callable[[History], Detection | None]
"""The signature of every detector: from the metrics up to a step to a `Detection` if its condition
holds at the last step, else ``None``.

    def long_replies(history: History) -> Detection | None: ...

A detector is a pure function. It tolerates missing metrics and short histories.
"""

REWARD_STD, SUCCESS = "reward/std_in_group", "success/mean"
ENTROPY, GRADIENT, VALID = "entropy/mean", "gradient/policy_norm", "format/valid_fraction"
DEGENERATE, KEPT = "text/degenerate_fraction", "filter/kept_fraction"
SKIPPED = ("update/skipped_policy", "update/skipped_critic")
MI, PROMPTS = "ema/information/first/mi_zscore", "information/first/prompts"
EVALUATED, LEVELS = "evaluation/success", "evaluation/episodes"
"""Evaluations by step: success, and the number of episodes."""

MISMATCH, MISMATCH_BOUND = "mismatch/max_abs", "mismatch/bound"

EMPTY_STEPS = 5


def reward_std_cliff(history: History) -> Detection | None:
    """The episodes of a group begin to end alike: published as the first sign.

    The trailing mean is below half of the baseline, which fewer failures do not explain. Reward std
    is steady in a healthy run, so half is much.
    """
    return _cliff(history, REWARD_STD, 1 / 2)


def entropy_cliff(history: History) -> Detection | None:
    """The policy stops choosing, although it does not succeed.

    The trailing mean is below a quarter of the baseline, which fewer failures do not explain.
    Entropy falls to a third in healthy runs.
    """
    return _cliff(history, ENTROPY, 1 / 4)


def _cliff(history: History, name: str, share: float) -> Detection | None:
    detection = _windowed(history.get(name, {}))
    if detection is None:
        return None
    mark = share * detection.baseline * _failures_left(history)
    return None if detection.value >= mark else detection


def _failures_left(history: History) -> float:
    """Failures now as a share of those at the start, at most 1."""
    success = _windowed(history.get(SUCCESS, {}))
    if success is None or success.baseline >= 1:
        return 1.0
    return round(min(1.0, (1 - success.value) / (1 - success.baseline)), 9)


def entropy_blowup(history: History) -> Detection | None:
    """The policy falls apart: the sign of a learning rate that is too high.

    The trailing mean is above four times the baseline (entropy rises for a few steps while an agent
    changes its behaviour), and above 1 nat: nearly three equally likely tokens at every position.
    """
    detection = _windowed(history.get(ENTROPY, {}))
    if detection is None or detection.value <= max(1.0, 4 * detection.baseline):
        return None
    return detection


def grad_spike(history: History) -> Detection | None:
    """One gradient norm is a spike (`detect_spike`): published as the point of no return."""
    norms = history.get(GRADIENT, {})
    usual = detect_spike(list(norms.values()))
    return None if usual is None else Detection(*list(norms.items())[-1], usual)


def reward_drop(history: History) -> Detection | None:
    """Two evaluations in a row are significantly worse than before.

    The mark is the median of the three best evaluations before the last two (their maximum would be
    the luckiest one). For each of the two, the whole 95 % interval of the difference to the mark
    lies below 0.
    """
    success, levels = history.get(EVALUATED, {}), history.get(LEVELS, {})
    steps = list(success)
    if len(steps) < 5:
        return None
    mark = median(sorted(success[step] for step in steps[:-2])[-3:])

    def below(step: int) -> bool:
        episodes = int(levels[step])
        now, then = (wilson(round(share * episodes), episodes) for share in (success[step], mark))
        return difference(now, then).high < 0

    if not (below(steps[-1]) and below(steps[-2])):
        return None
    return Detection(_onset(steps, below), success[steps[-1]], mark)


def mi_drop(history: History) -> Detection | None:
    """Template collapse: thoughts no longer depend on the prompt.

    The z-score of MI (of first turns, smoothed) is below half of its highest value, and that was at
    least one standard deviation. Steps with fewer than `MIN_PROMPTS` prompts do not count: where
    nearly all prompts are equal, as in Bandit, equal thoughts are no sign of collapse.
    """
    prompts = history.get(PROMPTS, {})
    scores = {
        step: score
        for step, score in history.get(MI, {}).items()
        if prompts.get(step, 0) >= MIN_PROMPTS
    }
    if not scores:
        return None
    highest, now = max(scores.values()), list(scores.values())[-1]
    mark = highest / 2
    if highest < 1 or now >= mark:
        return None
    return Detection(_onset(list(scores), lambda step: scores[step] < mark), now, highest)


def _onset(steps: list[int], holds: Callable[[int], bool]) -> int:
    """The first step at which a condition that holds at the last step may have begun."""
    return 1 + max((step for step in steps if not holds(step)), default=-1)


def format_loss(history: History) -> Detection | None:
    """Replies that were valid no longer are: the trailing mean is 0.2 below its highest value.

    These are five standard errors of a share of 128 replies, and more in larger steps.
    """
    series = history.get(VALID, {})
    detection = _windowed(series)
    if detection is None:
        return None
    highest = max(baseline_of(series), *(value for _, value in trailing_means(series)))
    if detection.value >= highest - 0.2:
        return None
    return Detection(detection.onset, detection.value, highest)


def degenerate_text(history: History) -> Detection | None:
    """More than half of a window's replies are such as "!!!!!!!!", known from broken weights.

    A policy that explores may repeat tokens for a step or two and then recover.
    """
    last = list(finite(history.get(DEGENERATE, {})).items())[-WINDOW:]
    if len(last) < WINDOW or (value := fmean(share for _, share in last)) <= 0.5:
        return None
    return Detection(last[0][0], value, 0.0)


def non_finite(history: History) -> Detection | None:
    """The loss or gradient of an update was not finite, and the learner skipped it."""
    last = [list(history[name].items())[-1] for name in SKIPPED if history.get(name)]
    skipped = sum(value for _, value in last)
    return Detection(max(step for step, _ in last), skipped, 0.0) if skipped else None


def empty_filter(history: History) -> Detection | None:
    """The filter kept nothing for `EMPTY_STEPS` steps: the rewards of no group differ."""
    kept = list(history.get(KEPT, {}).items())[-EMPTY_STEPS:]
    if len(kept) < EMPTY_STEPS or any(share for _, share in kept):
        return None
    return Detection(kept[0][0], EMPTY_STEPS, 0.0)


def mismatch(history: History) -> Detection | None:
    """Sampler and learner disagree, at equal weights, by more than rounding."""
    bounds = list(history.get(MISMATCH_BOUND, {}).items())[-1:]
    for step, bound in bounds:
        value = history.get(MISMATCH, {}).get(step, nan)
        return None if value <= bound else Detection(step, value, bound)
    return None


def _windowed(series: Series) -> Detection | None:
    """The trailing mean at the last step and the baseline; ``None`` before two windows are full."""
    series = finite(series)
    if len(series) < 2 * WINDOW:
        return None
    return Detection(list(series)[-WINDOW], trailing_means(series)[-1][1], baseline_of(series))


DETECTORS: dict[str, Detector] = {
    "reward_std_cliff": reward_std_cliff,
    "entropy_cliff": entropy_cliff,
    "entropy_blowup": entropy_blowup,
    "grad_spike": grad_spike,
    "reward_drop": reward_drop,
    "mi_drop": mi_drop,
    "format_loss": format_loss,
    "degenerate_text": degenerate_text,
    "non_finite": non_finite,
    "empty_filter": empty_filter,
    "mismatch": mismatch,
}


def find_detector(name: str) -> Detector:
    """The detector of a name in the config, RAGEN's own or from outside."""
    return DETECTOR.find(name, DETECTORS)


def active_detectors(guard: GuardConfig) -> dict[str, Detector]:
    """The detectors whose response is not off; ``stalled`` is the watchdog's."""
    names = dict.fromkeys([*DETECTORS, *guard.responses])
    return {
        name: find_detector(name)
        for name in names
        if name != "stalled" and guard.response(name) != "off"
    }
