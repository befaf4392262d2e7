"""The guard: detects that a run is in trouble, says what is done about it, and keeps the record.

A detector is a pure function of the run's metric history up to a step; it says whether its
condition holds there, since when, and by which numbers. Where it holds anew, that is an alarm, and
the detector's response (`config.GuardConfig`) follows: ``log``, ``stop``, or ``rollback`` to the
last checkpoint from before the onset, with one setting changed. The loop carries that out
(`recovery.guarded`).

| detector | reads | holds where | onset |
|---|---|---|---|
| ``reward_std_cliff`` | reward std in the group | trailing mean below ½ of the baseline, failures do not explain it | window's first step |
| ``entropy_cliff`` | entropy | trailing mean below ¼ of the baseline, failures do not explain it | window's first step |
| ``entropy_blowup`` | entropy | trailing mean above 4 × the baseline and above 1 nat | window's first step |
| ``grad_spike`` | gradient norm | one step above 5 × the median of all before, and an outlier among their logarithms | that step |
| ``reward_drop`` | evaluations | the last two both below the median of the three best before them, the intervals of both differences below 0 | after the last evaluation that was not |
| ``mi_drop`` | z-score of MI, EMA, of 4 distinct prompts or more | below ½ of its highest value, and that above 1 | after the last value that was not |
| ``format_loss`` | valid replies | trailing mean 0.2 below its highest | window's first step |
| ``degenerate_text`` | completions of one repeated token | more than half of the last five steps' | window's first step |
| ``non_finite`` | skipped updates | one in the step | that step |
| ``empty_filter`` | kept groups | none for `filter.max_empty` steps | the first of them |

Baselines and trailing means are `diagnostics`': the first and the last five steps. *Failures
explain* a fall of spread or entropy where an agent that fails a fraction f as often as at first has
kept at least that fraction of it: an environment that is being solved leaves less to be unsure of. The
eleventh, ``stalled``, is the `Watchdog`'s.

Sources: order and kind of the signs, arXiv:2504.20073; MI, arXiv:2604.06268. The published hard
stops come later: reward std below a tenth of its start for ten steps, five empty filters.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

from ragen.config.config import Config
from ragen.config.sections import DetectorName
from ragen.core.seeding import derive
from ragen.core.statistics import difference, wilson
from ragen.diagnostics.regimes import MIN_PROMPTS, WINDOW
from ragen.diagnostics.signals import Series, baseline_of, spike, trailing_means
from ragen.storage.reader import read_evaluations, read_events, read_metrics, standing

History = Mapping[str, Series]
"""Metrics by name, then by step, up to the step that is looked at."""

REWARD_STD, SUCCESS = "reward/std_in_group", "success/mean"
ENTROPY, GRADIENT, VALID = "entropy/mean", "gradient/policy_norm", "format/valid_fraction"
DEGENERATE, KEPT = "text/degenerate_fraction", "filter/kept_fraction"
SKIPPED = ("update/skipped_policy", "update/skipped_critic")
MI = "ema/information/first/mi_zscore"
"""The thought–prompt information that ``mi_drop`` watches: of first turns, smoothed."""
PROMPTS = "information/first/prompts"
METRICS = (REWARD_STD, SUCCESS, ENTROPY, GRADIENT, VALID, DEGENERATE, KEPT, *SKIPPED, MI, PROMPTS)
EVALUATED, LEVELS = "evaluation/success", "evaluation/episodes"
"""Evaluations as series: success, and of how many episodes."""

STD_CLIFF, ENTROPY_CLIFF, ENTROPY_BLOWUP = 1 / 2, 1 / 4, 4.0
"""Shares of the baseline. Reward std is steady in a healthy run, so half is much; entropy falls to
a third where nothing is wrong, and rises for a few steps while an agent changes its mind."""
LEAST_NATS = 1.0
"""Entropy below it is no blow-up: nearly three equally likely tokens at every position."""
MI_SHARE, MI_MEANS = 1 / 2, 1.0
"""Half of the highest z-score, where that had been at least one standard deviation."""
FORMAT_LOSS = 0.2
"""Five standard errors of a share of 128 replies, and more of larger steps."""
DEGENERATE_SHARE = 0.5
"""Of the replies of a window: a policy that looks for something new may babble for a step or two,
and be rewarded back."""
CALM = WINDOW
"""Steps in a row without its condition after which a detector may fire again."""
REACH = 2 * WINDOW
"""Steps that checkpoints reach back at least where something is answered by a rollback: an onset
lies a window before its alarm."""
GRACE = 2 * WINDOW
"""Steps after a rollback in which nothing fires: until then trailing means mix in what was."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A detector's condition holds: the step since when, the number there, what it was before."""

    onset: int
    value: float
    baseline: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """A detector fired: `onset` is where the trouble began, `step` where it was seen.

    Example:
        >>> print(Alarm("grad_spike", 33, 33, 30.0, 1.0))
        step 33, grad_spike: the gradient norm jumped to 30, usual is 1
    """

    detector: DetectorName
    step: int
    onset: int
    value: float
    baseline: float

    def __str__(self) -> str:
        """The sentence that is printed and stored."""
        words = WORDS[self.detector].format(value=self.value, baseline=self.baseline)
        return f"step {self.step}, {self.detector}: {words}"


WORDS: Mapping[DetectorName, str] = MappingProxyType(
    {
        "reward_std_cliff": "reward std in the group fell to {value:.3g} from {baseline:.3g}, more "
        "than failures did",
        "entropy_cliff": "entropy fell to {value:.3g} nats a token from {baseline:.3g}, more than "
        "failures did",
        "entropy_blowup": "entropy rose to {value:.3g} nats a token from {baseline:.3g}",
        "grad_spike": "the gradient norm jumped to {value:.3g}, usual is {baseline:.3g}",
        "reward_drop": "success is {value:.1%} in evaluation, it had been {baseline:.1%}",
        "mi_drop": "thoughts tell less of their prompts: z-score of MI {value:.3g}, it had been "
        "{baseline:.3g}",
        "format_loss": "{value:.1%} of the replies are valid, it had been {baseline:.1%}",
        "degenerate_text": "{value:.1%} of the replies repeat one token",
        "non_finite": "{value:.0f} updates were skipped: loss or gradient not finite",
        "empty_filter": "no group had any spread of reward for {value:.0f} steps, so nothing can "
        "be learnt: easier or harder levels, or filter.include_zero = true",
        "stalled": "no progress of any phase for {value:.0f} s",
    }
)
"""What each alarm says, by its numbers."""


def reward_std_cliff(history: History, **_: Any) -> Trouble | None:
    """Published as the first sign: the members of a group begin to end alike."""
    return _cliff(history, REWARD_STD, STD_CLIFF)


def entropy_cliff(history: History, **_: Any) -> Trouble | None:
    """The policy stops choosing, although it does not succeed."""
    return _cliff(history, ENTROPY, ENTROPY_CLIFF)


def _cliff(history: History, name: str, share: float) -> Trouble | None:
    trouble = _windowed(history.get(name, {}))
    if trouble is None or trouble.value >= share * trouble.baseline * _failures_left(history):
        return None
    return trouble


def _failures_left(history: History) -> float:
    """Failures now as a share of those at the start, at most 1.

    Example:
        >>> _failures_left({SUCCESS: {s: 0.2 if s <= 5 else 0.8 for s in range(1, 11)}})
        0.25
    """
    success = _windowed(history.get(SUCCESS, {}))
    if success is None or success.baseline >= 1:
        return 1.0
    return round(min(1.0, (1 - success.value) / (1 - success.baseline)), 9)


def entropy_blowup(history: History, **_: Any) -> Trouble | None:
    """The policy falls apart: the sign of a learning rate that is too high."""
    trouble = _windowed(history.get(ENTROPY, {}))
    if trouble is None or trouble.value <= max(LEAST_NATS, ENTROPY_BLOWUP * trouble.baseline):
        return None
    return trouble


def grad_spike(history: History, **_: Any) -> Trouble | None:
    """Published as the mark of no return."""
    norms = history.get(GRADIENT, {})
    usual = spike(list(norms.values()))
    return None if usual is None else Trouble(*list(norms.items())[-1], usual)


def reward_drop(history: History, **_: Any) -> Trouble | None:
    """Twice in a row significantly worse than it has been able to be.

    The mark is the median of the three best evaluations before the last two (their maximum would be
    their luckiest). Each of the two must lie below it with the whole 95 % interval of the
    difference.
    """
    success, levels = history.get(EVALUATED, {}), history.get(LEVELS, {})
    steps = list(success)
    best = sorted(steps[:-2], key=lambda step: success[step])[-3:]
    if len(best) < 3:
        return None
    mark = median(success[step] for step in best)

    def below(step: int) -> bool:
        episodes = int(levels[step])
        now, then = (wilson(round(share * episodes), episodes) for share in (success[step], mark))
        return difference(now, then).high < 0

    if not (below(steps[-1]) and below(steps[-2])):
        return None
    return Trouble(_since(steps, below), success[steps[-1]], mark)


def mi_drop(history: History, **_: Any) -> Trouble | None:
    """Template collapse: thoughts that no longer depend on what was asked.

    Where nearly all prompts are one, as in Bandit, thoughts may become one for good reasons.
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
    if highest < MI_MEANS or now >= MI_SHARE * highest:
        return None
    return Trouble(_since(list(scores), lambda at: scores[at] < MI_SHARE * highest), now, highest)


def _since(steps: list[int], holds: Callable[[int], bool]) -> int:
    """The first step at which a condition that holds at the last one may have begun.

    Example:
        >>> _since([0, 5, 10, 15], lambda step: step > 5)
        6
    """
    return 1 + max((step for step in steps if not holds(step)), default=-1)


def format_loss(history: History, **_: Any) -> Trouble | None:
    """Replies that were valid no longer are."""
    means = trailing_means(history.get(VALID, {}))
    if not means:
        return None
    highest = max(baseline_of(history[VALID]), *(value for _, value in means))
    trouble = _windowed(history[VALID])
    assert trouble is not None
    if trouble.value >= highest - FORMAT_LOSS:
        return None
    return Trouble(trouble.onset, trouble.value, highest)


def degenerate_text(history: History, **_: Any) -> Trouble | None:
    """Replies such as "!!!!!!!!", known from broken weights and kernels."""
    last = list(history.get(DEGENERATE, {}).items())[-WINDOW:]
    if len(last) < WINDOW or (value := fmean(share for _, share in last)) <= DEGENERATE_SHARE:
        return None
    return Trouble(last[0][0], value, 0.0)


def non_finite(history: History, **_: Any) -> Trouble | None:
    """An update whose loss or gradient was not finite; the learner skips it."""
    last = [list(history[name].items())[-1] for name in SKIPPED if history.get(name)]
    skipped = sum(value for _, value in last)
    return Trouble(max(step for step, _ in last), skipped, 0.0) if skipped else None


def empty_filter(history: History, *, max_empty: int, **_: Any) -> Trouble | None:
    """The filter keeps nothing: no group's rewards differ."""
    kept = list(history.get(KEPT, {}).items())[-max_empty:]
    if len(kept) < max_empty or any(share for _, share in kept):
        return None
    return Trouble(kept[0][0], max_empty, 0.0)


def _windowed(series: Series) -> Trouble | None:
    """The trailing mean at the last step beside the baseline; none before two windows are full."""
    if len(series) < 2 * WINDOW:
        return None
    return Trouble(list(series)[-WINDOW], trailing_means(series)[-1][1], baseline_of(series))


DETECTORS: Mapping[DetectorName, Callable[..., Trouble | None]] = MappingProxyType(
    {
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
    }
)
"""All detectors that read the history, by their name in the config."""


@dataclass(slots=True)
class GuardState:
    """What the guard remembers, saved with every checkpoint.

    `looked` is the last step it looked at; `troubled` holds for each detector that has fired the
    last step at which its condition held; up to `grace` nothing fires. `changes` are the settings
    that rollbacks changed, by key: the run's config is its `config.toml` with these laid over.
    """

    looked: int = 0
    grace: int = 0
    rollbacks: int = 0
    troubled: dict[str, int] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)


def look(
    history: History,
    step: int,
    state: GuardState,
    *,
    off: Collection[str] = (),
    max_empty: int = 5,
) -> list[Alarm]:
    """The alarms of a step; `state` is brought up to it.

    A detector fires once for an episode of trouble: again only after its condition has not held for
    `CALM` steps.

    Args:
        history: Metrics up to `step`.
        step: The step that is finished.
        state: What is remembered of the steps before.
        off: Detectors that are not asked.
        max_empty: Steps that make an ``empty_filter``.

    Example:
        >>> norms = {GRADIENT: dict.fromkeys(range(1, 20), 1.0) | {20: 9.0}}
        >>> state = GuardState()
        >>> [str(alarm) for alarm in look(norms, 20, state)]
        ['step 20, grad_spike: the gradient norm jumped to 9, usual is 1']
        >>> look({GRADIENT: norms[GRADIENT] | {21: 8.0}}, 21, state)
        []
    """
    state.looked = step
    alarms = []
    for name, detector in DETECTORS.items():
        trouble = None if name in off else detector(history, max_empty=max_empty)
        if trouble is None or step <= state.grace:
            continue
        if name not in state.troubled or step - state.troubled[name] > CALM:
            alarms.append(Alarm(name, step, trouble.onset, trouble.value, trouble.baseline))
        state.troubled[name] = step
    return alarms


def replay(history: History, max_empty: int = 5) -> list[Alarm]:
    """The alarms that a finished run's history would have raised, step by step."""
    state, alarms = GuardState(), []
    last = max((step for series in history.values() for step in series), default=0)
    for now in range(1, last + 1):
        seen = {
            name: {step: value for step, value in series.items() if step <= now}
            for name, series in history.items()
        }
        alarms += look(seen, now, state, max_empty=max_empty)
    return alarms


def read_history(
    folder: Path, temperature: float, after: tuple[int, int] | None = None
) -> dict[str, dict[int, float]]:
    """What the detectors read, from a run's database.

    Args:
        folder: The run.
        temperature: That of the evaluations to read.
        after: Attempt and step of what was read before, where only the rest is wanted.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    stands = standing(folder, after)
    evaluations = [
        each
        for each in read_evaluations(folder)
        if each["temperature"] == temperature and stands(each["attempt"], each["step"])
    ]
    return read_metrics(folder, METRICS, after) | {
        EVALUATED: {each["step"]: each["success"] for each in evaluations},
        LEVELS: {each["step"]: each["episodes"] for each in evaluations},
    }


def read_alarms(folder: Path) -> list[Alarm]:
    """A run's alarms in order; one that a resumed run raised again counts once.

    Raises:
        RagenError: There is no run, or its database cannot be read.
    """
    events = {
        (event["attempt"], event["step"], event["data"]["detector"]): event["data"]
        for event in read_events(folder, "alarm")
    }
    return [Alarm(**data) for data in events.values()]


# Remedies: what a rollback changes, by config key.

LR_FACTOR = 1 / 3
"""Two rollbacks make about an order of magnitude."""


def slower(config: Config, attempt: int) -> dict[str, Any]:
    """A third of every learning rate."""
    update = config.update
    rates = {"lr": update.lr, "critic_lr": update.critic_lr, "muon_lr": update.muon_lr}
    return {f"update.{name}": rate * LR_FACTOR for name, rate in rates.items() if rate}


def tighter(config: Config, attempt: int) -> dict[str, Any]:
    """StarPO-S's filter, or half of what the present one keeps."""
    rule, value = config.filter.rule, config.filter.value
    if rule == "all":
        return {"filter.rule": "top_k", "filter.value": 0.25, "filter.reweight": False}
    if rule == "min_p":  # of the largest score: more is tighter
        return {"filter.value": min(1.0, 2 * value)}
    if value >= 4:
        return {"filter.value": value // 2}
    if value > 1:  # One group, which as a number cannot be said: 1.0 is the share of all.
        rollout = config.rollout
        return {"filter.value": 1 / (rollout.num_groups * (1 + rollout.refill))}
    return {"filter.value": value / 2}


def anchored(config: Config, attempt: int) -> dict[str, Any]:
    """Ten times the weight of the KL divergence, from 0.01 on."""
    return {"loss.kl": max(0.01, 10 * config.loss.kl)}


def reseeded(config: Config, attempt: int) -> dict[str, Any]:
    """Other random numbers on the same levels; those of evaluations stay."""
    return {"seed": derive(config.seed, "attempt", attempt)}


REMEDIES: Mapping[str, Callable[[Config, int], dict[str, Any]]] = MappingProxyType(
    {"lr": slower, "filter": tighter, "kl": anchored, "seeds": reseeded}
)
"""Changes by their name in the config."""
