"""Experiment trackers: TensorBoard and Weights & Biases.

Each is written through its own library, which is imported only if `record.trackers` names it. The
metrics have the names of the run's database. A resumed run continues the same tracker run. After a
kill or a rollback, steps are logged again. TensorBoard hides the replaced ones. Weights & Biases
can only append: its own step counter continues, and curves are drawn against the metric
``progress/step``.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ragen.config.config import Config
from ragen.config.reading import flatten
from ragen.core.errors import RagenError
from ragen.core.files import whole_file
from ragen.training.progress import Watcher, Watchers

if TYPE_CHECKING:
    from ragen.evaluation.results import Evaluation

PROJECT = "ragen"
"""The project of all runs, unless ``WANDB_PROJECT`` names another."""

STEP = "progress/step"

ID = "tracker_id"
"""The file in a run's folder that holds its id in trackers."""

EVALUATED = ("success", "success_low", "success_high", "mean_return")
"""The numbers of an evaluation that are logged, under ``eval/`` or ``eval_greedy/``."""


class Tracker(Watcher):
    """Appends the numbers of steps and evaluations to the `_run` of its library.

    The library's prints go to standard error: standard output is for results.
    """

    _run: Any = None

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        with redirect_stdout(sys.stderr):
            self._run.log({**metrics, STEP: step})

    @override
    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        section = "eval" if evaluation.temperature else "eval_greedy"
        self.step(step, {f"{section}/{name}": getattr(evaluation, name) for name in EVALUATED})

    @override
    def end(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with redirect_stdout(sys.stderr):
                run.finish()


class TensorBoard(Tracker):
    """Event files in the run's folder, which ``tensorboard --logdir runs`` finds."""

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        self._folder = str(run / "tensorboard")
        self._last, self._named = step, set[str]()
        # Also a run that starts again from step 0 may have logged steps before it was killed.
        self._open(step + 1 if Path(self._folder).exists() else None)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run = SummaryWriter(self._folder, purge_step=purge_step)

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        again = step == self._last and not self._named.isdisjoint(metrics)
        if step < self._last or again:  # rolled back
            self._run.close()
            self._open(step)
        if step != self._last or again:
            self._named.clear()
        self._last = step
        self._named |= metrics.keys()
        for name, number in metrics.items():
            self._run.add_scalar(name, number, step)
        self._run.flush()

    @override
    def end(self) -> None:
        if self._run is not None:
            self._run.close()


class Wandb(Tracker):
    """A run of Weights & Biases; ``WANDB_MODE=offline`` keeps it in the run's folder."""

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                id=_id(run),
                resume="allow",
                dir=str(run),
                config=flatten(config),
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise RagenError(
                f"record.trackers: wandb does not start ({error}); try `wandb login`, or set "
                f"WANDB_MODE=offline, and then: ragen resume {shlex.quote(str(run))}"
            ) from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)


TRACKERS: Mapping[str, Callable[[], Watcher]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}
"""Trackers by the name of their library."""


def with_trackers(watcher: Watcher | None, trackers: str) -> Watcher:
    """The watcher, joined by the trackers that ``record.trackers`` names."""
    names = [name.strip() for name in trackers.split(",") if name.strip()]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RagenError(
                f"record.trackers: {name} is not installed: pip install 'ragen-rl[{name}]'"
            )
    watcher = watcher or Watcher()
    return Watchers(watcher, *(TRACKERS[name]() for name in names)) if names else watcher


def _id(run: Path) -> str:
    """A random id, the same after a resume: two people may train one recipe with one seed."""
    path = run / ID
    if not path.exists():
        with whole_file(path) as temporary:
            temporary.write_text(secrets.token_hex(4))
    return path.read_text().strip()
