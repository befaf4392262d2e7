"""Compare two agents or two methods on the same levels, events and random numbers.

An arm is one agent, or the training seeds of one method. Both arms meet the same environment and
draw from the same random numbers at the same level, sample and seed. Most of the luck is therefore
common to both, and the rest is compared level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Unpack

import numpy as np

from ragen.core.errors import RagenError
from ragen.core.statistics import (
    Floats,
    Interval,
    binomial_variance,
    interquartile_mean,
    mcnemar,
    paired_difference,
    smallest_detectable,
)
from ragen.evaluation.evaluation import Options, evaluate_target
from ragen.evaluation.outcomes import Outcome, describe_failures
from ragen.evaluation.results import Evaluation
from ragen.evaluation.targets import refuse_absent
from ragen.models.names import base_folder
from ragen.rollout.endpoint import Server
from ragen.settings.saved import run_config
from ragen.settings.target import Overrides, config_for, is_local, shared_settings
from ragen.storage.checkpoint import run_of

Measure = Callable[[str, Overrides], tuple[Evaluation, list[Outcome]]]

HELD_OUT = {"env": "bandit", "env.params.split": "test"}

SUITES: Mapping[str, Mapping[str, Overrides]] = {
    "bandit": {
        "bandit": {"env": "bandit"},
        "bandit-rev": {"env": "bandit-rev"},
        "bandit, held-out professions": {**HELD_OUT, "env.params.name_set": "professions"},
        "bandit, held-out pairs": {**HELD_OUT, "env.params.name_set": "pairs"},
    },
    "sokoban": {
        name: {"env": name}
        for name in ("sokoban", "sokoban-large", "sokoban-new-symbols", "frozen-lake")
    },
}
"""Environments for agents that were trained on the first entry of a suite (arXiv:2504.20073)."""

FEW_SEEDS = 5
"""Number of training seeds below which the interval of their interquartile mean misses the truth
much more often than in 5 % of cases (`statistics.interquartile_mean`)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison: an agent, or the training seeds of one method.

    `name` is the target, or the first of several with their number. There is one evaluation per
    training seed. `success` is the agent's rate or the seeds' interquartile mean.
    """

    name: str
    evaluations: tuple[Evaluation, ...]
    success: Interval

    @property
    def num_seeds(self) -> int:
        """Number of training seeds; 1 for a single agent."""
        return len(self.evaluations)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two arms in one environment.

    Attributes:
        env: The environment, or the name of a suite's entry.
        difference: Success of `a` minus success of `b`, from −1 to 1, with a 95 % interval.
        detectable: The smallest true difference that this sample shows in four of five cases.
        won, lost: Number of levels on which `a` or `b` did better.
        p_value: McNemar's exact p for two single agents; ``None`` for arms of several seeds.
        cautions, failures: Sentences that limit the verdict, and about failed episodes.
    """

    env: str
    a: Arm
    b: Arm
    difference: Interval
    detectable: float
    won: int
    lost: int
    p_value: float | None
    cautions: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One sentence: `a` is better, `a` is worse, or no difference is shown."""
        change, low, high = (100 * share for share in astuple(self.difference))
        points = f"{change:+.1f} points [{low:+.1f}, {high:+.1f}]"
        if self.difference.low > 0:
            return f"{self.a.name} is better than {self.b.name}: {points}."
        if self.difference.high < 0:
            return f"{self.a.name} is worse than {self.b.name}: {points}."
        return (
            f"No difference is shown: {points}. This sample is too small to show a difference of "
            f"less than {100 * self.detectable:.1f} points reliably."
        )

    def record(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""
        return asdict(self) | {"verdict": self.verdict}


def compare(
    a: str | Sequence[str],
    b: str | Sequence[str],
    overrides: Overrides | None = None,
    *,
    server: Server | None = None,
    **options: Unpack[Options],
) -> Comparison:
    """Compare two agents, or two methods of several training seeds each, in one environment.

    An arm is a target of `evaluate_target`, or the runs of one method's training seeds. Without an
    environment in `overrides`, both play in the environment of the first run. Targets that are not
    found on this machine are models of the server.

    Raises:
        RagenError: A target is missing or named twice, runs were trained in different
            environments, or an evaluation fails (`evaluate_target`).
    """
    arm_a, arm_b = ([each] if isinstance(each, str) else list(each) for each in (a, b))

    def measure(target: str, settings: Overrides) -> tuple[Evaluation, list[Outcome]]:
        at = None if is_local(target) else server
        return evaluate_target(target, settings, server=at, **options)

    refuse_absent_targets(arm_a, arm_b, server)
    only_env = {"": overrides or {}}
    return next(compare_in_envs(arm_a, arm_b, only_env, {}, measure, server is not None))


def refuse_absent_targets(a: Sequence[str], b: Sequence[str], server: Server | None) -> None:
    """Refuse missing targets before anything is played."""

    def seed_of(target: str) -> Path:
        return (run_of(target) or Path(target)).resolve()

    for arm in (a, b):
        if not all(arm or [""]):
            raise RagenError("an arm is one target, or several separated by commas: A1,A2,A3")
        for target in arm:
            same = [each for each in arm if seed_of(each) == seed_of(target)]
            if len(same) > 1:
                raise RagenError(
                    f"{run_of(target) or target} is named twice ({', '.join(same)}), but a seed "
                    "counts once: leave one out"
                )
            refuse_absent(target, server)


def compare_in_envs(
    a: Sequence[str],
    b: Sequence[str],
    envs: Mapping[str, Overrides],
    overrides: Overrides,
    measure: Measure,
    is_served: bool = False,
) -> Iterator[Comparison]:
    """Compare two arms in one environment after the other.

    ``base`` is the same embedded model in all environments: the model of the environment in which
    the first run was trained, or else of the first environment. So an agent that was trained on
    Sokoban meets the model that it started from on the lake, too, not one that has seen lakes.

    `envs` are settings by the environment's name in the result, such as an entry of `SUITES`; an
    empty name takes the environment's own. `overrides` hold for all environments.
    """
    targets, given = [*a, *b], [{**overrides, **values} for values in envs.values()]
    # All environments are checked before anything is played.
    settings = [shared_settings(targets, values, is_served) for values in given]
    base = "base"
    if "base" in targets:
        runs = [run for target in targets if (run := run_of(target))]
        home = run_config(runs[0]) if runs else config_for(targets[0], given[0])
        base = str(base_folder(home.env.name))
    for name, values in zip(envs, settings, strict=True):
        arms = [[measure(base if t == "base" else t, values[t]) for t in arm] for arm in (a, b)]
        yield _compared(name, (a, b), arms)


def _compared(
    name: str,
    targets: tuple[Sequence[str], Sequence[str]],
    measured: Sequence[Sequence[tuple[Evaluation, list[Outcome]]]],
) -> Comparison:
    rates = [np.array([_level_rates(outcomes) for _, outcomes in arm]) for arm in measured]
    arm_a, arm_b = (
        _arm(names, [evaluation for evaluation, _ in arm])
        for names, arm in zip(targets, measured, strict=True)
    )
    samples = arm_a.evaluations[0].samples
    difference = paired_difference(rates[0].tolist(), rates[1].tolist(), samples)
    gains = np.round(rates[0].mean(0) - rates[1].mean(0), 9)  # thirds do not add up exactly
    is_single = arm_a.num_seeds == arm_b.num_seeds == 1
    return Comparison(
        env=name or arm_a.evaluations[0].env,
        a=arm_a,
        b=arm_b,
        difference=difference,
        detectable=smallest_detectable(difference),
        won=int((gains > 0).sum()),
        lost=int((gains < 0).sum()),
        p_value=mcnemar([round(gain * samples) for gain in gains]) if is_single else None,
        cautions=tuple(_cautions(*targets)),
        failures=tuple(
            f"{target}: {line}"
            for target, (_, outcomes) in zip(chain(*targets), chain(*measured), strict=True)
            for line in describe_failures(outcomes)
        ),
    )


def _level_rates(outcomes: Sequence[Outcome]) -> Floats:
    """Share of successes on each level, in the order of the levels."""
    levels, index = np.unique([outcome.level_seed for outcome in outcomes], return_inverse=True)
    solved = np.bincount(index, [outcome.success for outcome in outcomes])
    return solved * len(levels) / len(outcomes)


def _arm(targets: Sequence[str], evaluations: Sequence[Evaluation]) -> Arm:
    first = evaluations[0]
    if len(targets) == 1:
        return Arm(targets[0], tuple(evaluations), first.interval)
    scores = [evaluation.success for evaluation in evaluations]
    noise = fmean(binomial_variance(score, first.episodes) for score in scores)
    mean = interquartile_mean([scores], noise)
    success = Interval(mean.value, max(0.0, mean.low), min(1.0, mean.high))
    return Arm(f"{targets[0]} ({len(targets)} seeds)", tuple(evaluations), success)


def _cautions(a: Sequence[str], b: Sequence[str]) -> Iterator[str]:
    fewest = min((len(arm) for arm in (a, b) if len(arm) > 1), default=FEW_SEEDS)
    if fewest < FEW_SEEDS:
        yield (
            f"{fewest} training seeds are few: the interval of their interquartile mean misses the "
            "truth far more often than in 5 of 100 cases. So does that of the difference if some "
            f"seeds of a method collapse. Train {FEW_SEEDS} or more."
        )
    runs = {run.resolve() if (run := run_of(target)) else None for target in (*a, *b)}
    if len(a) == len(b) == 1 and len(runs) == 2 and None not in runs:
        yield (
            "One training seed per arm shows which run is better, not which method: name the runs "
            "of several seeds, separated by commas."
        )
