"""A run's folder as Python data: its config, metrics, episodes, evaluations and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ragen.config.config import Config
from ragen.evaluation.results import RunEvaluation, load_evaluations
from ragen.settings.saved import run_config
from ragen.storage.database import check_run_folder
from ragen.storage.reader import read_events, read_metrics
from ragen.storage.stored_episodes import Recorded, read_episodes


@dataclass(frozen=True)
class RunData:
    """A run as its folder holds it, finished or not; everything is read when it is first used.

    What the guard rolled back is left out of `metrics` and `evaluations`. Reading raises a
    `RagenError` where a file is missing, damaged, or was written by another version.
    """

    path: Path

    @cached_property
    def config(self) -> Config:
        """The settings, with those that a resume changed, without those that rollbacks did."""
        return run_config(self.path)

    @cached_property
    def metrics(self) -> Mapping[str, npt.NDArray[np.float64]]:
        """One column a metric, ``(N,)`` for N steps; ``"step"`` is the first, NaN is a gap."""
        series = read_metrics(self.path)
        steps = sorted({step for values in series.values() for step in values})
        columns = {
            name: np.array([values.get(step, np.nan) for step in steps])
            for name, values in sorted(series.items())
        }
        return {"step": np.array(steps, dtype=np.float64), **columns}

    @cached_property
    def evaluations(self) -> tuple[RunEvaluation, ...]:
        """The run's own evaluations in order, each with its step."""
        return tuple(load_evaluations(self.path))

    @cached_property
    def events(self) -> tuple[Mapping[str, Any], ...]:
        """Alarms, the guard's actions, resumes and errors, in order."""
        return tuple(read_events(self.path))

    def episodes(self) -> Iterator[Recorded]:
        """The recorded episodes in order, one at a time."""
        return read_episodes(self.path)


def load_run(path: str | Path) -> RunData:
    """A run's folder as Python data.

    Raises:
        RagenError: The folder holds no run.
    """
    folder = Path(path)
    check_run_folder(folder)
    return RunData(folder)
