"""The runs of a study: one for each recipe, arm and training seed. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ragen.config.config import Config
from ragen.config.reading import differences
from ragen.core.errors import RagenError
from ragen.studies.study import FineTuning, Scale, Study


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


def grid(study: Study, scale: Scale, seeds: int, out: Path) -> list[Cell]:
    """All runs of a study, seed by seed, so that the first results show every arm.

    Raises:
        RagenError: The settings of one of them exclude each other, or there are too few seeds.
    """
    if seeds < 2:
        raise RagenError(f"--seeds {seeds}: an interval over seeds takes 2 or more")
    cells = []
    for seed, recipe, arm in product(range(seeds), study.grid(scale).recipes, study.arms):
        folder = out.resolve() / _slug(recipe) / _slug(arm) / f"seed-{seed}"
        config, fine_tuning = study.config(scale, recipe, arm, seed), study.sft.get(arm)
        base = config.model.path
        if fine_tuning is not None:
            model = config.model.model_copy(update={"path": str(tuned_model(folder))})
            config = config.model_copy(update={"model": model})
        cells.append(Cell(recipe, arm, seed, config, folder, base, fine_tuning))
    return cells


def tuned_model(folder: Path) -> Path:
    """The folder of a run's fine-tuned model, next to that of the run."""
    return folder.with_name(f"{folder.name}-sft")


def plan(study: Study, cells: Sequence[Cell]) -> str:
    """A study's claim, predictions and runs, as text."""
    lines = [f"{study.title} ({study.number})", f"claim: {study.claim}"]
    lines += [f"predicts {prediction.words}" for prediction in study.predictions]
    lines += [f"{cell.folder}: {_settings(cell.config)}" for cell in cells if cell.seed == 0]
    return "\n".join([*lines, f"{len(cells)} runs"])


def _settings(config: Config) -> str:
    """A run's algorithm, and what differs from its preset."""
    changes = ", ".join(f"{each.key} = {each.value!r}" for each in differences(config))
    return f"{config.algorithm}; {changes}"


def _slug(name: str) -> str:
    """A name as part of a path."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in name).strip("-")
