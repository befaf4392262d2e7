"""A study: a published claim, the runs that test it, and what is expected of them.

A study is a TOML file in ``ragen/studies/findings``. It holds the claim, a few *arms* (settings
that differ in one thing), the primary contrast of two of them, and the *environments* with the
effect that was published for each and the outcome that is predicted. All of it is committed before
a run is made, so the verdict is a function of the data (`ragen.studies.rule`).

Runs have the seeds 1000, 1001, …: the first series of studies used those from 0 on, and trial runs
that choose a setting may use any below 1000.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeGuard, get_args

from pydantic import Field, model_validator

from ragen.config.config import Config
from ragen.config.reading import changed, differences, merge
from ragen.config.sections import Section
from ragen.core.errors import RagenError, nearest
from ragen.core.statistics import Interval
from ragen.studies.measures import SHARES, TRANSFER, measure_of
from ragen.studies.rule import (
    ERROR,
    MARGIN,
    Outcome,
    median_after,
    median_interval,
    outcome_of,
    seeds_to_decide,
    share_interval,
)

Scale = Literal["laptop", "paper"]
Result = Outcome | Literal["not exercised", "untestable", "withdrawn", "not run"]
"""The outcome of a claim in one environment; the last four are not judged."""
Numbers = Mapping[tuple[str, str], Sequence[float]]
"""The values of a measure, one for each training seed, by environment and arm."""

FIRST_SEED = 1000


class Contrast(Section):
    """A measure of `arm` minus the same measure of `above`, or minus the number `above`."""

    measure: str
    """A measure (`ragen.studies.measures`)."""
    arm: str
    above: str | float
    """Another arm, or a number."""

    @model_validator(mode="after")
    def _measurable(self) -> Contrast:
        measure_of(self.measure)
        return self

    @property
    def words(self) -> str:
        """The contrast as one line."""
        above = self.above if isinstance(self.above, str) else f"{self.above:g}"
        return f"{self.measure}: {self.arm} − {above}"


class Need(Section):
    """A condition of the runs for the claim to be tested: `measure` of `arm` within bounds.

    The median over the seeds is compared with `least` and `most`, both included. Outside of them
    the outcome is "not exercised".
    """

    measure: str
    arm: str
    least: float = -math.inf
    most: float = math.inf


class FineTuning(Section):
    """Supervised fine-tuning that an arm begins with, on episodes of a player (`ragen sft`).

    With the player ``base``, the model plays itself, and learns from the episodes that it solves.
    """

    player: str = "solver"
    episodes: int = Field(1024, ge=2)
    epochs: int = Field(3, ge=1)
    lr: float | None = None
    """By default ten times the recipe's ``update.lr``."""


class Place(Section):
    """An environment of a study: its recipes, and what was published and is predicted there."""

    laptop: str
    """The recipe at this scale."""
    paper: str
    effect: float = Field(ge=0)
    """D: the published value of the contrast; 0 if the claim is that the arms are equal."""
    source: str
    """Where D comes from. It says so if no number was published and D was chosen."""
    predicted: Result
    """The outcome that the authors of the study expect."""
    seeds: int | None = Field(None, ge=2)
    """Fewer seeds than the study's, where they decide; `source` says why."""
    untestable: bool = False
    """D is too small for any number of seeds. Then runs are described, not judged."""
    needs: list[Need] = Field(default_factory=list)
    """Conditions here, beside the `needs` of the whole study."""
    settings: dict[str, Any] = Field(default_factory=dict)


class Study(Section):
    """One file of ``ragen/studies/findings``."""

    name: str
    number: str
    """The number of the claim in the list of the papers' findings."""
    title: str
    claim: str
    limits: str
    """The limits of runs at the scale of a laptop."""
    seen: str = ""
    """Remarks on the study itself, written after the runs, and no part of the rule."""
    withdrawn: bool = False
    """The authors found after the runs that the contrast does not test the claim."""
    seeds: int = Field(ge=2)
    first_seed: int = Field(FIRST_SEED, ge=FIRST_SEED)
    contrast: Contrast
    """The primary one, in each environment."""
    describe: list[str] = Field(default_factory=list)
    """Further measures, which are shown and not judged."""
    needs: list[Need] = Field(default_factory=list)
    arms: dict[str, dict[str, Any]]
    """Settings by the arm's name; they win over those of the environment and the scale. Here and
    there, ``laptop.KEY`` and ``paper.KEY`` hold at one scale only."""
    transfer: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Other evaluations of each trained policy, on as many levels: by name, what differs from the
    training's settings, such as the environment."""
    sft: dict[str, FineTuning] = Field(default_factory=dict)
    """The fine-tuning that an arm begins with, by the arm's name."""
    environments: dict[str, Place] = Field(min_length=1)
    """By a name such as ``sokoban`` or, for a second row in the same, ``sokoban, PPO``."""
    laptop: dict[str, Any] = Field(default_factory=dict)
    """Settings of all runs at this scale."""
    paper: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _named(self) -> Study:
        needs = self._all_needs()
        named = [self.contrast.arm, self.contrast.above, *(need.arm for need in needs)]
        for arm in (*named, *self.sft):
            if isinstance(arm, str) and arm not in self.arms:
                raise ValueError(f"there is no arm {arm!r} (only {', '.join(self.arms)})")
        for measure in self.measures:
            measure_of(measure)
            for part in measure.split(" - "):
                kind, _, name = part.partition(":")
                if kind == TRANSFER and name not in self.transfer:
                    known = ", ".join(self.transfer) or "none"
                    raise ValueError(f"there is no evaluation {name!r} (only {known})")
        return self

    @property
    def measures(self) -> list[str]:
        """The names of all measures, the primary one first."""
        needed = (need.measure for need in self._all_needs())
        return list(dict.fromkeys((self.contrast.measure, *self.describe, *needed)))

    def _all_needs(self) -> list[Need]:
        here = (place.needs for place in self.environments.values())
        return [*self.needs, *chain.from_iterable(here)]

    @property
    def error(self) -> float:
        """The error of one environment, so that a study's is `ERROR` (Bonferroni)."""
        judged = sum(not place.untestable for place in self.environments.values())
        return ERROR / max(1, judged)

    def config(self, scale: Scale, environment: str, arm: str, seed: int) -> Config:
        """The settings of one run."""
        place, common = self.environments[environment], getattr(self, scale)
        own = common | _at(scale, place.settings) | _at(scale, self.arms[arm])
        if "model.path" in own:  # each seed may have a base of its own
            own["model.path"] = own["model.path"].format(seed=seed)
        # One thread a run: several run at once, and a run's numbers depend on the count.
        return merge(getattr(place, scale), {"threads": 1, **own, "seed": seed})


def _at(scale: Scale, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one scale: those without a prefix, and those with its own."""
    other = "paper." if scale == "laptop" else "laptop."
    return {
        key.removeprefix(f"{scale}."): value
        for key, value in settings.items()
        if not key.startswith(other)
    }


@dataclass(frozen=True, slots=True)
class Cell:
    """A run of a study: `fine_tuning` makes its model of `base`, `transfer` tests the result."""

    environment: str
    arm: str
    seed: int
    config: Config
    folder: Path
    base: str = "base"
    fine_tuning: FineTuning | None = None
    transfer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def tuned_model(self) -> Path:
        """The folder of the fine-tuned model, next to the run's folder."""
        return self.folder.with_name(f"{self.folder.name}-sft")


def cells_of(
    study: Study, scale: Scale, seeds: int, out: Path, only: str | None = None
) -> list[Cell]:
    """All runs of a study, or of one environment, seed by seed, so that all arms show early."""
    if seeds < 2:
        raise RagenError(f"--seeds {seeds}: an interval over seeds takes 2 or more")
    if only is not None and only not in study.environments:
        hint = nearest(only, study.environments, f"it has {', '.join(study.environments)}")
        raise RagenError(f"study {study.name} has no environment {only!r}{hint}")
    cells = []
    numbers = range(study.first_seed, study.first_seed + seeds)
    environments = study.environments if only is None else [only]
    for seed, environment, arm in product(numbers, environments, study.arms):
        planned = study.environments[environment].seeds or seeds
        if seed - study.first_seed >= planned:
            continue
        config = study.config(scale, environment, arm, seed)
        folder = out.resolve() / _slug(environment) / _slug(arm) / f"seed-{seed}"
        place, base, tuning = (environment, arm, seed), config.model.path, study.sft.get(arm)
        cell = Cell(*place, config, folder, base, tuning, study.transfer)
        if tuning is not None:
            cell = replace(cell, config=changed(config, {"model.path": str(cell.tuned_model)}))
        cells.append(cell)
    return cells


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-")


def env_of(row: str) -> str:
    """The environment of a row of a study."""
    return row.partition(",")[0]


def preview(study: Study, cells: Sequence[Cell]) -> str:
    """A study's claim, contrast, predictions and runs, as text."""
    lines = [f"{study.title} ({study.number})", f"claim: {study.claim}", study.contrast.words]
    for name, place in study.environments.items():
        lines.append(f"predicts {place.predicted} on {name}: {claimed(place.effect)}")
    for cell in cells:
        if cell.seed == study.first_seed:
            changes = [f"{each.key} = {each.value!r}" for each in differences(cell.config)]
            lines.append(f"{cell.folder}: {cell.config.algorithm}; {', '.join(changes)}")
    return "\n".join([*lines, f"{len(cells)} runs"])


def claimed(effect: float) -> str:
    """The claimed effect in words."""
    return f"claimed {effect:+.3g}" if effect else f"claimed equal (±{MARGIN:g})"


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome in one environment, with the contrast's interval over `pairs` seeds."""

    environment: str
    place: Place
    interval: Interval
    pairs: int
    outcome: Result
    enough: int | None = None
    """If it is undecided, the number of seeds that would decide it, as far as these show."""


@cache
def study_names() -> tuple[str, ...]:
    """The names of the studies that come with the package."""
    folder = resources.files("ragen.studies") / "findings"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir()))


def load_study(name: str) -> Study:
    """A study by its name."""
    known = study_names()
    if name not in known:
        hint = nearest(name, known, f"studies are {', '.join(known)}")
        raise RagenError(f"unknown study {name!r}{hint}")
    file = resources.files("ragen.studies") / "findings" / f"{name}.toml"
    return Study(name=name, **tomllib.loads(file.read_text(encoding="utf-8")))


def is_judged(result: Result) -> TypeGuard[Outcome]:
    """True if a result is a verdict."""
    return result in get_args(Outcome)


def decide(study: Study, numbers: Mapping[str, Numbers]) -> list[Decision]:
    """The outcome in each environment, from each measure's values by environment and arm.

    An environment without values was not run. A pair of runs of one seed counts if both have the
    measure.
    """
    decisions, values = [], numbers[study.contrast.measure]
    for name, place in study.environments.items():
        was_run = (name, study.contrast.arm) in values
        ones, others = _pairs(study.contrast, values, name) if was_run else ([], [])
        after, pairs = partial(_interval, study, ones, others), len(ones)
        interval = after(pairs) if pairs else Interval(math.nan, -math.inf, math.inf)
        needs = *study.needs, *place.needs
        result: Result = outcome_of(interval, place.effect)
        if not was_run:
            result = "not run"
        elif study.withdrawn:
            result = "withdrawn"
        elif place.untestable:
            result = "untestable"
        elif not all(_is_met(need, numbers[need.measure][name, need.arm]) for need in needs):
            result = "not exercised"
        enough = None
        if result == "undecided" and pairs:
            enough = seeds_to_decide(pairs, place.effect, after)
        decisions.append(Decision(name, place, interval, pairs, result, enough))
    return decisions


def _pairs(contrast: Contrast, values: Numbers, environment: str) -> tuple[list[float], ...]:
    """The values of both arms, seed by seed, where both are finite."""
    ones = values[environment, contrast.arm]
    above = contrast.above
    others = values[environment, above] if isinstance(above, str) else [above] * len(ones)
    both = [each for each in zip(ones, others, strict=True) if all(map(math.isfinite, each))]
    return [one for one, _ in both], [other for _, other in both]


def _interval(study: Study, ones: Sequence[float], others: Sequence[float], runs: int) -> Interval:
    """The contrast's interval, or the interval after more runs like these."""
    count = len(ones)
    if study.contrast.measure in SHARES:
        if isinstance(study.contrast.above, str):
            return share_interval(sum(ones) / count, sum(others) / count, runs, study.error)
        found = share_interval(sum(ones) / count, None, runs, study.error)
        level = study.contrast.above
        return Interval(found.value - level, found.low - level, found.high - level)
    differences = [one - other for one, other in zip(ones, others, strict=True)]
    if runs == count:
        return median_interval(differences, study.error)
    return median_after(differences, runs, study.error)


def _is_met(need: Need, values: Sequence[float]) -> bool:
    known = finite(values)
    return bool(known) and need.least <= median(known) <= need.most


def finite(values: Sequence[float]) -> list[float]:
    """The values that are finite."""
    return [value for value in values if math.isfinite(value)]
