"""The data of one run that its report, plots and model card are made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.extensions import short_names
from ragen.core.metrics import OF_ENV, Series
from ragen.core.statistics import Interval, gain
from ragen.evaluation.outcomes import phase_of
from ragen.evaluation.results import RunEvaluation, load_evaluations
from ragen.reports.plots import Curve
from ragen.settings.saved import run_config
from ragen.storage.database import check_run_folder
from ragen.storage.reader import (
    Attempt,
    Histories,
    current,
    read_attempts,
    read_events,
    read_successes,
)

ALARM = "alarm"
"""The kind of the events that the plots mark."""

SIGNALS = {
    "success/mean": "success",
    "reward/mean": "reward",
    "reward/std_in_group": "reward std",
    "reward/flat_group_fraction": "flat groups",
    "filter/kept_fraction": "kept groups",
    "entropy/mean": "entropy, nats",
    "gradient/policy_norm": "gradient norm",
    "gradient/critic_norm": "critic's gradient",
    "critic/explained_variance": "explained variance",
    "clip/fraction": "clip fraction",
    "kl/reference": "KL to reference",
    "format/valid_fraction": "valid replies",
    "actions/effective_fraction": "effective actions",
    "length/thought_tokens": "thought, tokens",
    "thought/unique_fraction": "unique thoughts",
    "thought/repeated_ngram_fraction": "repeated n-grams",
    "thought/hallucinated_fraction": "hallucinated facts",
    "thought/consistent_fraction": "plans kept",
    "information/first/mi": "MI, nats a thought",
    "information/first/mi_zscore": "MI z-score",
    "information/first/conditional_entropy": "H(Z|X), nats",
    "episodes/failed": "failed episodes",
}
"""The metrics of the table of signals, each with its label."""

TERMS = "reward_terms/"
"""Prefix of the metrics of reward terms: what each adds. They are shown among the signals."""

JUDGE = {
    "judge/calls": "questions",
    "judge/cached": "questions whose answer was known",
    "judge/failed": "questions without a score",
    "judge/prompt_tokens": "prompt tokens",
    "judge/completion_tokens": "completion tokens",
}
"""The metrics of a judge's cost, each with its label."""

AGENT = {
    "agent/calls": "calls",
    "agent/roots": "conversations that were begun",
    "agent/forks": "calls that continue a reply which another call continues, too",
    "agent/retries": "retries, which got the reply of the first request",
    "agent/agent_tokens": "sampled tokens",
    "agent/compaction_tokens": "sampled tokens of summaries with which a conversation begins",
    "agent/auxiliary_tokens": "sampled tokens of auxiliary calls, not trained on",
    "agent/discarded_tokens": "sampled tokens of replies that were not used, not trained on",
}
"""The metrics of an existing agent's calls, each with its label."""

GRADIENTS = "gradient_by_std/"
"""Prefix of the gradient norms by bucket of reward std, in runs that measured them."""

EXACT = ("exactness/", "mismatch/")
"""Prefixes of the exactness metrics: how much was checked, and how far two computations differ."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The data of a run's folder.

    Attributes:
        config: The settings, with those that a resume changed, without those that rollbacks did.
        metrics, evaluations: Without what was rolled back.
        attempts: The metrics of each attempt, with what was rolled back.
        successes: Success on each level of the recorded evaluations (`read_successes`).
    """

    run: Path
    config: Config
    metrics: Mapping[str, Series]
    evaluations: tuple[RunEvaluation, ...]
    events: tuple[Mapping[str, Any], ...]
    attempts: Histories
    successes: Mapping[tuple[str, int], Mapping[tuple[str, int], float]] = field(
        default_factory=dict
    )

    def gain(self, one: RunEvaluation, other: RunEvaluation) -> tuple[Interval, bool]:
        """`ragen.core.statistics.gain` from one evaluation to another that is sampled alike."""
        phase = phase_of(one.evaluation.temperature)
        before, after = (self.successes.get((phase, each.step), {}) for each in (one, other))
        return gain(one.evaluation.interval, other.evaluation.interval, before, after)

    def by_env(self) -> dict[str, Facts]:
        """The environments of a mixture: what is known of each, as of a run in it alone."""
        found = {}
        for place, (env, short) in enumerate(short_names(self.config.env.mix).items()):
            prefix, metrics = f"env/{short}/", self.metrics
            own = {n.removeprefix(prefix): metrics[n] for n in metrics if n.startswith(prefix)}
            own |= {name: own[of_env] for name, of_env in OF_ENV.items() if of_env in own}
            evaluations = tuple(
                replace(each, evaluation=each.evaluation.parts[place]) for each in self.evaluations
            )
            successes = {
                which: {level: value for level, value in levels.items() if level[0] == env}
                for which, levels in self.successes.items()
            }
            found[env] = replace(self, metrics=own, evaluations=evaluations, successes=successes)
        return found

    @property
    def steps(self) -> int:
        """Finished steps."""
        return max((max(series) for series in self.metrics.values()), default=0)

    @property
    def alarms(self) -> list[int]:
        """The steps of the alarms."""
        return [event["step"] for event in self.events if event["kind"] == ALARM]

    def curve(self, name: str) -> Curve:
        """One metric as a curve, with the stretches that were rolled back."""
        left = rolled_back(self.attempts, name)
        return Curve(self.metrics.get(name, {}), tuple(left.values()))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase over all attempts, and of the evaluations."""
        evaluating = math.fsum(each.evaluation.seconds for each in self.evaluations)
        return seconds_by_phase(self.attempts, evaluating)


def read_facts(run: Path) -> Facts:
    """Read a run, finished or not."""
    check_run_folder(run)
    config, attempts = run_config(run), read_attempts(run)
    evaluations, events = tuple(load_evaluations(run)), tuple(read_events(run))
    return Facts(run, config, current(attempts), evaluations, events, attempts, read_successes(run))


def rolled_back(histories: Histories, name: str) -> dict[Attempt, Series]:
    """The rolled-back parts of a metric, each from the last point that still counts on."""
    found: dict[Attempt, Series] = {}
    for attempt, history in histories.items():
        series = history.get(name, {})
        stretch = {step: value for step, value in series.items() if step >= attempt.end - 1}
        if len(stretch) > 1:
            found[attempt] = stretch
    return found


def seconds_by_phase(attempts: Histories, evaluating: float) -> dict[str, float]:
    """Seconds of each phase over all attempts, the longest parts split up.

    Sums of other phases (a step; a rollout whose parts are known) and rates are left out.
    `evaluating` is the seconds of the evaluations.
    """
    seconds: dict[str, float] = {}
    for history in attempts.values():
        sums = {"time/step_s", "time/tokens_per_s"}
        sums |= {"time/rollout_s"} if "time/generate_s" in history else set()
        for name, series in history.items():
            if name.startswith("time/") and name not in sums:
                phase = name.removeprefix("time/").removesuffix("_s")
                seconds[phase] = seconds.get(phase, 0.0) + math.fsum(series.values())
    return seconds | ({"evaluations": evaluating} if evaluating else {})
