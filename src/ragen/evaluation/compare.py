"""Which of two arms is better: the same levels, the same events, and what they could have shown.

An arm is one agent, or the training seeds of one method. Who has the same level, sample and seed
meets the same environment and draws from the same random numbers, so that most of what is luck is
alike for both, and what is left is compared level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ragen.config.config import Config
from ragen.config.reading import flatten, read_config
from ragen.core.errors import RagenError
from ragen.core.statistics import (
    Floats,
    Interval,
    interquartile_mean,
    mcnemar,
    paired_difference,
    smallest_detectable,
)
from ragen.core.tables import Section
from ragen.envs.registry import make
from ragen.evaluation.evaluation import Evaluation
from ragen.evaluation.outcomes import Outcome
from ragen.evaluation.scores import failures
from ragen.evaluation.targets import config_for, is_local, run_of
from ragen.models.names import base_folder
from ragen.rollout.players import PLAYERS
from ragen.storage.database import CONFIG

Overrides = Mapping[str, Any]

Measure = Callable[[str, Overrides], tuple[Evaluation, list[Outcome]]]
"""Plays a target under settings, as `evaluation.outcomes_of` does."""

SUITES: Mapping[str, Mapping[str, Overrides]] = MappingProxyType(
    {
        "bandit": {
            "bandit": {"env": "bandit"},
            "bandit-rev": {"env": "bandit-rev"},
            "bandit, held-out professions": {
                "env": "bandit",
                "env.params.name_set": "professions",
                "env.params.split": "test",
            },
            "bandit, held-out pairs": {
                "env": "bandit",
                "env.params.name_set": "pairs",
                "env.params.split": "test",
            },
        },
        "sokoban": {
            name: {"env": name}
            for name in ("sokoban", "sokoban-large", "sokoban-new-symbols", "frozen-lake")
        },
    }
)
"""What an agent that was trained on the first entry is asked beyond it (arXiv:2504.20073)."""

FEW_SEEDS = 5
"""Training seeds below which the interval of their interquartile mean misses the truth much more
often than it says (`statistics.interquartile_mean`)."""

AS_SHOWN = ("env.params.observation", "env.timeout_s", "env.isolate")
"""Keys of an environment that do not change the game: how it is shown, and how it is run."""

ASKED = ("prompt.", "rollout.max_tokens", "model.max_length", "env.params.observation")
"""How an agent is asked. A model's folder does not know that of itself."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side: an agent, or several training seeds of one method.

    `success` is the agent's with its interval, or the seeds' interquartile mean with its own.
    """

    name: str
    evaluations: tuple[Evaluation, ...]
    success: Interval

    @property
    def seeds(self) -> int:
        """How many training seeds, or 1."""
        return len(self.evaluations)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two arms in one place.

    `difference` is that of their mean success, `one` less `other`, and `detectable` the smallest
    that the sample would have shown in four of five cases. On `won` levels the one did better, on
    `lost` the other. `p_value` is McNemar's, of one agent an arm; seeds are no repetitions of it.
    `cautions` say how far the verdict goes, `failures` what broke.
    """

    place: str
    one: Arm
    other: Arm
    difference: Interval
    detectable: float
    won: int
    lost: int
    p_value: float | None
    cautions: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """What may be said, in a sentence."""
        found = self.difference
        points = f"{_points(found.value)} points [{_points(found.low)}, {_points(found.high)}]"
        if found.low > 0:
            return f"{self.one.name} is better than {self.other.name}: {points}."
        if found.high < 0:
            return f"{self.one.name} is worse than {self.other.name}: {points}."
        return (
            f"No difference is shown: {points}. One of less than {100 * self.detectable:.1f} "
            "points could not have been expected to show in this sample."
        )

    def record(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""
        return asdict(self) | {"verdict": self.verdict}


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def contests(
    ones: Sequence[str],
    others: Sequence[str],
    places: Mapping[str, Overrides],
    overrides: Overrides,
    measure: Measure,
    served: bool = False,
) -> Iterator[Comparison]:
    """Compare two arms in one place after the other.

    ``base`` is the same embedded model in all of them, that of the environment where the first run
    was
    trained, or else of the first place: an agent that was trained on Sokoban and walks a lake meets
    the model that it started from, not one that has seen lakes.

    Args:
        ones: The first arm: a target, or the runs of its training seeds.
        others: The second.
        places: Settings by the name of the place, such as one of `SUITES`.
        overrides: Values by config key that hold everywhere.
        measure: Plays a target.
        served: Whether names that are not here are those of a server's models.

    Raises:
        RagenError: As `compare`; an arm names a target twice; there is no embedded model for that
            environment.
    """
    for arm in (ones, others):
        for target in arm:
            if [Path(each) for each in arm].count(Path(target)) > 1:
                raise RagenError(f"{target} is named twice: a training seed counts once")
    for settings in places.values():  # nothing is played before all of it is known to be possible
        same_game([*ones, *others], {**overrides, **settings}, served)
    base = "base"
    if base in (*ones, *others):
        base = str(
            base_folder(_home([*ones, *others], {**overrides, **next(iter(places.values()))}))
        )

    def at_home(target: str, settings: Overrides) -> tuple[Evaluation, list[Outcome]]:
        return measure(base if target == "base" else target, settings)

    for place, settings in places.items():
        yield compare(place, ones, others, {**overrides, **settings}, at_home, served)


def compare(
    place: str,
    ones: Sequence[str],
    others: Sequence[str],
    overrides: Overrides,
    measure: Measure,
    served: bool = False,
) -> Comparison:
    """Let two arms play the same levels.

    Args:
        place: What the environment is called in the result; by default what it calls itself.
        ones: The first arm: a target, or the runs of its training seeds.
        others: The second.
        overrides: Values by config key; the environment among them, or all play the first run's.
        measure: Plays one of them.
        served: As in `contests`.

    Raises:
        RagenError: There is no such environment, or runs were trained in different games.
    """
    settled = same_game([*ones, *others], overrides, served)
    played = [[measure(target, settled[target]) for target in arm] for arm in (ones, others)]
    shares = [np.array([_on_levels(outcomes) for _, outcomes in arm]) for arm in played]
    one, other = (
        _arm(names, [evaluation for evaluation, _ in arm])
        for names, arm in zip((ones, others), played, strict=True)
    )
    samples = one.evaluations[0].samples
    difference = paired_difference(shares[0].tolist(), shares[1].tolist(), samples)
    gains = np.round(shares[0].mean(0) - shares[1].mean(0), 9)  # thirds do not add up exactly
    alone = one.seeds == other.seeds == 1
    return Comparison(
        place or one.evaluations[0].env,
        one,
        other,
        difference,
        smallest_detectable(difference),
        int((gains > 0).sum()),
        int((gains < 0).sum()),
        mcnemar([round(gain * samples) for gain in gains]) if alone else None,
        tuple(_cautions(ones, others)),
        tuple(
            f"{target}: {line}"
            for target, (_, outcomes) in zip(
                (*ones, *others), (*played[0], *played[1]), strict=True
            )
            for line in failures(outcomes)
        ),
    )


def _on_levels(outcomes: Sequence[Outcome]) -> Floats:
    """Share of successes on each level, in the levels' order."""
    levels = sorted({outcome.level_seed for outcome in outcomes})
    place = {level: number for number, level in enumerate(levels)}
    solved = np.zeros(len(levels))
    for outcome in outcomes:
        solved[place[outcome.level_seed]] += outcome.success
    return solved * len(levels) / len(outcomes)


def _arm(names: Sequence[str], evaluations: Sequence[Evaluation]) -> Arm:
    first = evaluations[0]
    if len(names) == 1:
        success = Interval(first.success, first.success_low, first.success_high)
        return Arm(names[0], tuple(evaluations), success)
    success = interquartile_mean([[evaluation.success for evaluation in evaluations]])
    return Arm(f"{names[0]} ({len(names)} seeds)", tuple(evaluations), success)


def _cautions(ones: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """What a reader must know who would take the verdict further than it goes."""
    fewest = min((len(arm) for arm in (ones, others) if len(arm) > 1), default=FEW_SEEDS)
    if fewest < FEW_SEEDS:
        yield (
            f"{fewest} training seeds are few: the interval of their interquartile mean misses the "
            "truth far more often than in 5 of 100 cases; that of the difference, too, where some "
            f"seeds of a method collapse. Train {FEW_SEEDS} or more."
        )
    runs = {run_of(target) for target in (*ones, *others)}
    if len(ones) == len(others) == 1 and len(runs) == 2 and None not in runs:
        yield (
            "One training seed an arm tells which run is better, not which method: name the runs "
            "of several seeds, separated by commas."
        )


def same_game(
    targets: Sequence[str], overrides: Overrides, served: bool = False
) -> dict[str, dict[str, Any]]:
    """The settings of each target under which all play the same game.

    Those of the first run hold for whoever has none of its own. How the environment is shown to it
    and
    how it is prompted stays each run's own; where no environment is named, a model beside a run is
    asked as the first run is, but for the embedded one and, where `served`, those of a server.

    Raises:
        RagenError: There is no such environment; or two runs were trained in different games, and
            `overrides` do not settle it.
    """
    runs = [target for target in targets if run_of(target)]
    first = (runs or targets)[0]
    config = config_for(first, overrides)
    make(config.env.name, **config.env.params).close()
    game = _game(config)
    for run in runs:
        own = _game(config_for(run, overrides))
        for key in sorted(game | own, key=lambda key: (key != "env.name", key)):
            if game.get(key) != own.get(key):
                raise RagenError(
                    f"{first} and {run} were trained in different games: {key} is "
                    f"{game.get(key)!r} and {own.get(key)!r}; settle it with --{key}"
                )
    asked = {key: value for key, value in flatten(config).items() if key.startswith(ASKED)}
    if not runs or not overrides.keys().isdisjoint(("env", "env.name")):
        asked = {}  # what is named there says how a model is asked

    def settled(target: str) -> dict[str, Any]:
        if target in runs:
            return dict(overrides)
        other = target == "base" or target in PLAYERS or (served and not is_local(target))
        return {**game, **({} if other else asked), **overrides}

    return {target: settled(target) for target in targets}


def _game(config: Config) -> dict[str, Any]:
    """The keys that decide what is played: levels, events, budgets."""
    return {
        key: value
        for key, value in flatten(config).items()
        if key.startswith("env.") and key not in AS_SHOWN
    }


def _home(targets: Sequence[str], overrides: Overrides) -> str:
    """The environment where the first run was trained; without a run, the one that is played."""
    for target in targets:
        if (run := run_of(target)) is not None:
            return read_config(run / CONFIG).env.name
    return config_for(targets[0], overrides).env.name


def table(comparison: Comparison) -> Section:
    """Both arms between floor and ceiling, under what may be said of them."""
    one, other = comparison.one, comparison.other
    some = one.evaluations[0]
    rows = [("random play", f"{some.random:.1%}", "")]
    for arm in (one, other):
        mean = ", interquartile mean" if arm.seeds > 1 else ""
        interval = f"{arm.success.low:.1%} – {arm.success.high:.1%}"
        rows.append((f"{arm.name}, {some.how}{mean}", f"{arm.success.value:.1%}", interval))
    if some.optimal is not None:
        rows.append(("optimal play", f"{some.optimal:.1%}", ""))
    p_value = "" if comparison.p_value is None else f"; McNemar's p = {comparison.p_value:.2g}"
    each = f", {some.samples} episodes each" if some.samples > 1 else ""
    lines = [
        comparison.verdict,
        f"Of {some.episodes} levels{each}: {one.name} did better on {comparison.won}, {other.name} "
        f"on {comparison.lost}{p_value}.",
        f"Smallest detectable effect: {100 * comparison.detectable:.1f} points (80 % power, 5 % "
        "two-sided).",
    ]
    for arm in (one, other):
        if arm.seeds > 1:
            rates = ", ".join(f"{evaluation.success:.1%}" for evaluation in arm.evaluations)
            lines.append(f"{arm.name}: {rates}.")
    columns = ("player", "success", "95 %")
    return Section(comparison.place, (*lines, *comparison.failures), columns, tuple(rows))


def in_all(comparisons: Sequence[Comparison]) -> list[Section]:
    """What holds for all comparisons: the mean over environments, and the verdicts' limits."""
    lines = list(dict.fromkeys(line for each in comparisons for line in each.cautions))
    rows = []
    if len(comparisons) > 1:
        missed = 1 - 0.95 ** len(comparisons)
        lines.append(
            f"Each interval holds by itself: in {missed:.0%} of such suites of {len(comparisons)} "
            "one or more misses the truth."
        )
        for arms in zip(*((each.one, each.other) for each in comparisons), strict=True):
            strata = [stratum for stratum in map(_normalised, arms) if stratum]
            if strata and arms[0].seeds > 1:
                found = interquartile_mean(strata)
                interval = f"{found.low:.2f} – {found.high:.2f}"
                rows.append(
                    (f"{arms[0].name}, {len(strata)} environments", f"{found.value:.2f}", interval)
                )
    if rows:
        lines.append(
            "Score: the interquartile mean over seeds and environments of success, with random "
            "play as 0 "
            "and optimal play as 1."
        )
    columns = ("player", "score", "95 %")
    return [Section("To keep in mind", tuple(lines), columns, tuple(rows))] if lines else []


def _normalised(arm: Arm) -> list[float]:
    """Success of the seeds between floor and ceiling; none where there is no ceiling."""
    return [
        (each.success - each.random) / (each.optimal - each.random)
        for each in arm.evaluations
        if each.optimal is not None and each.optimal > each.random
    ]
