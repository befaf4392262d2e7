"""A study: a published claim, the runs that test it, and the rule that decides.

A study is a TOML file in ``ragen/studies/findings``. It holds the claim and the published result, a
few *arms* (settings that differ in one thing), the recipes that the arms change at each *scale*,
and *predictions*: which measure of which arm should be above what. All of it is written before a
run is made, so the verdict is a function of the data.

**The rule.** A prediction says that a measure of an arm exceeds another arm's, or a number, by more
than its margin. On each recipe it is *supported* if the whole 95 % interval (Student's t over
training seeds; Welch's for two arms) with at least the noise of the runs' own measurement
(`measures.noise_of`) lies above the margin, *contradicted* if the whole interval
lies below it, and *undecided* otherwise. The study *supports* the claim if most predictions, over
all recipes, are supported and none is contradicted. It *contradicts* the claim if one or more are
contradicted and none is supported. Otherwise it *cannot decide*.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, model_validator

from ragen.config.config import Config
from ragen.config.reading import differences, resolve
from ragen.config.sections import Section
from ragen.core.errors import RagenError, nearest
from ragen.core.statistics import Interval, mean_difference, mean_interval
from ragen.studies.measures import measure_of

Scale = Literal["laptop", "paper"]
Outcome = Literal["supported", "contradicted", "undecided"]
Verdict = Literal["supports", "contradicts", "cannot decide"]
Numbers = Mapping[tuple[str, str], Sequence[float]]
"""The values of a measure, one for each training seed, by recipe and arm."""


class Prediction(Section):
    """A measure of `arm` is above `above`, by more than `by`.

    Example:
        >>> Prediction(measure="final", arm="a quarter", above="all").words
        'final: a quarter > all'
    """

    measure: str
    """A measure (`ragen.studies.measures`)."""
    arm: str
    above: str | float
    """Another arm, or a number."""
    by: float = 0.0

    @model_validator(mode="after")
    def _measurable(self) -> Prediction:
        measure_of(self.measure)
        return self

    @property
    def words(self) -> str:
        """The prediction as one line."""
        margin = f" + {self.by:g}" if self.by else ""
        above = self.above if isinstance(self.above, str) else f"{self.above:g}"
        return f"{self.measure}: {self.arm} > {above}{margin}"


class FineTuning(Section):
    """Supervised fine-tuning that an arm begins with, on episodes of optimal play."""

    episodes: int = Field(1024, ge=2)
    epochs: int = Field(3, ge=1)
    lr: float | None = None
    """By default ten times the recipe's ``update.lr``."""


class Grid(Section):
    """The recipes of one scale, and the settings that all their runs change."""

    recipes: list[str] = Field(min_length=1)
    settings: dict[str, Any] = Field(default_factory=dict)


class Study(Section):
    """One file of ``ragen/studies/findings``."""

    name: str
    number: str
    """The number of the claim in the list of the papers' findings."""
    title: str
    claim: str
    published: str
    limits: str
    """What runs at the scale of a laptop cannot show."""
    predictions: list[Prediction] = Field(min_length=1)
    arms: dict[str, dict[str, Any]]
    """Settings by the arm's name; they win over those of the recipe and the scale."""
    sft: dict[str, FineTuning] = Field(default_factory=dict)
    """The fine-tuning that an arm begins with, by the arm's name."""
    laptop: Grid
    paper: Grid

    @model_validator(mode="after")
    def _named(self) -> Study:
        named = [arm for each in self.predictions for arm in (each.arm, each.above)]
        for arm in (*named, *self.sft):
            if isinstance(arm, str) and arm not in self.arms:
                raise ValueError(f"there is no arm {arm!r} (only {', '.join(self.arms)})")
        return self

    def grid(self, scale: Scale) -> Grid:
        """The recipes at a scale."""
        return self.laptop if scale == "laptop" else self.paper

    def config(self, scale: Scale, recipe: str, arm: str, seed: int) -> Config:
        """The settings of one run.

        Raises:
            RagenError: They exclude each other, or a key does not exist.
        """
        # One thread a run: several run at once, and a run's numbers depend on the count.
        settings = {"threads": 1, **self.grid(scale).settings, **self.arms[arm], "seed": seed}
        return resolve(recipe, settings)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a study's grid.

    `seed` is the training seed. `fine_tuning` makes of the model `base` the one that the run begins
    with.
    """

    recipe: str
    arm: str
    seed: int
    config: Config
    folder: Path
    base: str = "base"
    fine_tuning: FineTuning | None = None

    @property
    def tuned_model(self) -> Path:
        """The folder of the fine-tuned model, next to that of the run."""
        return self.folder.with_name(f"{self.folder.name}-sft")


def cells_of(study: Study, scale: Scale, seeds: int, out: Path) -> list[Cell]:
    """All runs of a study, seed by seed, so that the first results show every arm.

    Raises:
        RagenError: The settings of one of them exclude each other, or there are too few seeds.
    """
    if seeds < 2:
        raise RagenError(f"--seeds {seeds}: an interval over seeds takes 2 or more")
    cells = []
    for seed, recipe, arm in product(range(seeds), study.grid(scale).recipes, study.arms):
        config = study.config(scale, recipe, arm, seed)
        folder = out.resolve() / _slug(recipe) / _slug(arm) / f"seed-{seed}"
        cell = Cell(recipe, arm, seed, config, folder, config.model.path, study.sft.get(arm))
        if cell.fine_tuning is not None:
            cell = replace(cell, config=with_model(config, str(cell.tuned_model)))
        cells.append(cell)
    return cells


def with_model(config: Config, path: str) -> Config:
    """The config with another model to begin with."""
    model = config.model.model_copy(update={"path": path})
    return config.model_copy(update={"model": model})


def _slug(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"[^\w.-]", "-", name).strip("-")


def plan(study: Study, cells: Sequence[Cell]) -> str:
    """A study's claim, predictions and runs, as text."""
    lines = [f"{study.title} ({study.number})", f"claim: {study.claim}"]
    lines += [f"predicts {prediction.words}" for prediction in study.predictions]
    for cell in cells:
        if cell.seed == 0:
            changes = [f"{each.key} = {each.value!r}" for each in differences(cell.config)]
            lines.append(f"{cell.folder}: {cell.config.algorithm}; {', '.join(changes)}")
    return "\n".join([*lines, f"{len(cells)} runs"])


@dataclass(frozen=True, slots=True)
class Decision:
    """One prediction on one recipe: by how much the measure is above, with its interval."""

    recipe: str
    prediction: Prediction
    excess: float
    low: float
    high: float

    @property
    def outcome(self) -> Outcome:
        """The outcome by the rule of this module."""
        if self.low > self.prediction.by:
            return "supported"
        return "contradicted" if self.high < self.prediction.by else "undecided"


@cache
def study_names() -> tuple[str, ...]:
    """The names of the studies that come with the package."""
    folder = resources.files("ragen.studies") / "findings"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir()))


def load_study(name: str) -> Study:
    """A study by its name.

    Raises:
        RagenError: No study has this name.
    """
    known = study_names()
    if name not in known:
        hint = nearest(name, known, f"studies are {', '.join(known)}")
        raise RagenError(f"unknown study {name!r}{hint}")
    file = resources.files("ragen.studies") / "findings" / f"{name}.toml"
    return Study(name=name, **tomllib.loads(file.read_text(encoding="utf-8")))


def decide(
    study: Study,
    scale: Scale,
    numbers: Mapping[str, Numbers],
    noises: Mapping[str, Numbers] | None = None,
) -> list[Decision]:
    """The decision about each prediction on each recipe.

    `numbers` are each measure's values by recipe and arm, `noises` their own variances
    (`measures.noise_of`). Values that are not finite are left out.
    A mean of fewer than two values has no interval, so it decides nothing.
    """
    decisions = []
    for recipe in study.grid(scale).recipes:
        for prediction in study.predictions:
            values = numbers[prediction.measure]
            known = noises[prediction.measure] if noises else {}
            ours = finite(values[recipe, prediction.arm])
            noise = mean_noise(known.get((recipe, prediction.arm), ()))
            if isinstance(prediction.above, str):
                theirs = finite(values[recipe, prediction.above])
                other_noise = mean_noise(known.get((recipe, prediction.above), ()))
                excess = mean_difference(ours, theirs, (noise, other_noise))
            else:
                mean, level = mean_interval(ours, noise), prediction.above
                excess = Interval(mean.value - level, mean.low - level, mean.high - level)
            decisions.append(Decision(recipe, prediction, excess.value, excess.low, excess.high))
    return decisions


def verdict(decisions: Sequence[Decision]) -> Verdict:
    """The verdict that follows from all decisions, by the rule of this module.

    Example:
        >>> above = Prediction(measure="final", arm="a", above=0.5)
        >>> won, lost = (Decision("bandit", above, x, x - 0.1, x + 0.1) for x in (0.2, -0.2))
        >>> verdict([won]), verdict([won, lost])
        ('supports', 'cannot decide')
    """
    outcomes = [decision.outcome for decision in decisions]
    supported, contradicted = outcomes.count("supported"), outcomes.count("contradicted")
    if not contradicted and 2 * supported > len(outcomes):
        return "supports"
    return "contradicts" if contradicted and not supported else "cannot decide"


def mean_noise(noises: Sequence[float]) -> float:
    """The mean of the variances of several runs' measures; 0 where none is known."""
    known = finite(noises)
    return fmean(known) if known else 0.0


def finite(values: Sequence[float]) -> list[float]:
    """The values that are finite."""
    return [value for value in values if math.isfinite(value)]
