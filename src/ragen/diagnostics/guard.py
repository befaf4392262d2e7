"""The guard raises an alarm where a detector's condition newly holds.

The detector's response follows (`GuardConfig.response`): ``log``, ``stop``, or ``rollback`` to the
last checkpoint from before the onset, with one setting changed (`remedy`). `training.recovery`
carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.extensions import short_name
from ragen.config.sections import FilterConfig, LossConfig, RolloutConfig, UpdateConfig
from ragen.core.errors import RagenError
from ragen.core.seeding import derive
from ragen.diagnostics.collapse import WINDOW
from ragen.diagnostics.detectors import (
    DETECTORS,
    EVALUATED,
    LEVELS,
    Detection,
    Detector,
    History,
)
from ragen.storage.reader import read_evaluations, read_events, read_metrics, standing

REARM_STEPS = WINDOW
"""Steps in a row without its condition after which a detector may fire again."""

MESSAGES: dict[str, str] = {
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
    "non_finite": "loss, gradient or logits not finite ({value:.0f} updates were skipped)",
    "empty_filter": "no group had any spread of reward for {value:.0f} steps, so there is nothing "
    "to learn: use easier or harder levels, or filter.include_zero = true",
    "mismatch": "with the same weights, sampler and learner differ by {value:.3g} nats in a "
    "token's logprob, of which {baseline:.3g} may be rounding",
    "failed_episodes": "{value:.0%} of the episodes failed",
    "stalled": "no phase made progress for {value:.0f} s",
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """A detector fired: the problem began at step `onset` and was detected at `step`."""

    detector: str
    step: int
    onset: int
    value: float
    baseline: float

    def __str__(self) -> str:
        text = MESSAGES.get(self.detector, "{value:.3g}, with a baseline of {baseline:.3g}")
        message = text.format(value=self.value, baseline=self.baseline)
        return f"step {self.step}, {short_name(self.detector)}: {message}"


@dataclass(slots=True)
class GuardState:
    """The guard's memory, saved with every checkpoint.

    No detector fires up to the step `grace`. `last_held` has, for each detector that has fired, the
    last step at which its condition held. `changes` are the settings that rollbacks changed, by
    key: the run's config is its `config.toml` with these applied.
    """

    checked_step: int = 0
    grace: int = 0
    rollbacks: int = 0
    last_held: dict[str, int] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    def leave(self, keys: Iterable[str]) -> None:
        """Leave settings to the user, who has changed them on purpose."""
        for key in keys:
            self.changes.pop(key, None)


def raise_alarms(
    history: History,
    step: int,
    state: GuardState,
    detectors: Mapping[str, Detector] = DETECTORS,
) -> list[Alarm]:
    """The alarms of a step, one for each period of trouble (`REARM_STEPS`); updates `state`."""
    state.checked_step = step
    alarms = []
    for name, detector in detectors.items():
        detection = detector(history)
        if not isinstance(detection, Detection | None):
            raise RagenError(
                f"the detector {name} returned {type(detection).__name__}: a Detection or None is "
                "expected"
            )
        if detection is None or step <= state.grace:
            continue
        if name not in state.last_held or step - state.last_held[name] > REARM_STEPS:
            alarms.append(Alarm(name, step, detection.onset, detection.value, detection.baseline))
        state.last_held[name] = step
    return alarms


def read_history(folder: Path, temperature: float) -> dict[str, dict[int, float]]:
    """The metrics of a run, with its evaluations at `temperature`."""
    stands, every = standing(folder), read_evaluations(folder)
    counting = (each for each in every if stands(each["attempt"], each["step"]))
    evaluations = [each for each in counting if each["temperature"] == temperature]
    return read_metrics(folder) | {
        EVALUATED: {each["step"]: each["success"] for each in evaluations},
        LEVELS: {each["step"]: each["episodes"] for each in evaluations},
    }


def read_alarms(folder: Path) -> list[Alarm]:
    """A run's alarms in order. An alarm that a resumed run raised again counts once."""
    events = {
        (event["attempt"], event["step"], event["data"]["detector"]): event["data"]
        for event in read_events(folder, "alarm")
    }
    return [Alarm(**data) for data in events.values()]


def changed_on_purpose(folder: Path) -> set[str]:
    """The keys that the user has changed since the last rollback."""
    keys: set[str] = set()
    for event in read_events(folder):
        if event["kind"] == "settings":
            keys.update(event["data"]["changes"])
        elif event["kind"] == "guard" and event["data"]["action"] == "rollback":
            keys.clear()
    return keys


def remedy(config: Config, attempt: int) -> dict[str, Any]:
    """The settings, by key, that a rollback changes (``guard.remedy``) to begin an attempt."""
    match config.guard.remedy:
        case "lr":
            return lower_learning_rate(config.update)
        case "filter":
            return tighten_filter(config.filter, config.rollout)
        case "kl":
            return raise_kl(config.loss)
        case "seeds":
            return change_seed(config.seed, attempt)


def lower_learning_rate(update: UpdateConfig) -> dict[str, Any]:
    """A third of every learning rate: two rollbacks lower it by about an order of magnitude."""
    rates = {"update.lr": update.lr, "update.critic_lr": update.critic_lr}
    return {key: rate * (1 / 3) for key, rate in rates.items() if rate}


def tighten_filter(settings: FilterConfig, rollout: RolloutConfig) -> dict[str, Any]:
    """The filter of StarPO-S, or half of what the present filter keeps."""
    value = settings.value
    if settings.rule in ("all", "reweight"):
        return {"filter.rule": "top_k", "filter.value": 0.25}
    if value >= 4:
        return {"filter.value": value // 2}
    if value > 1:  # One group, which cannot be given as a number: 1.0 is the share of all.
        return {"filter.value": 1 / (rollout.num_groups * (1 + rollout.refill))}
    return {"filter.value": value / 2}


def raise_kl(loss: LossConfig) -> dict[str, Any]:
    """Ten times the weight of the KL divergence, and at least 0.01."""
    return {"loss.kl": max(0.01, 10 * loss.kl)}


def change_seed(seed: int, attempt: int) -> dict[str, Any]:
    """Other random numbers on the same levels. Evaluations keep theirs."""
    return {"seed": derive(seed, "attempt", attempt)}
