"""Progress of a run: a live table in a terminal, one plain line per step in a log.

Progress goes to standard error, so that results on standard output stay clean.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from ragen.config.config import Config
from ragen.core.errors import GuardStop
from ragen.core.stopping import cancel_running
from ragen.core.tables import format_rate, sparkline
from ragen.core.types import Episode

if TYPE_CHECKING:
    from ragen.evaluation.results import Evaluation


TREND = 20
"""Width of a sparkline in characters; the live table then fits into 80 columns."""


SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "success/mean": ("success", "{:.0%}".format),
    "reward/std_in_group": ("reward std", "{:.2f}".format),
    "entropy/mean": ("entropy", "{:.2f}".format),
    "gradient/policy_norm": ("gradient norm", "{:.2f}".format),
    "time/tokens_per_s": ("tokens/s", format_rate),
}
"""The metrics that are shown, each with its label and format."""
FAILED = "episodes/failed"
"""Shown if it is not 0: the environment or its server is in trouble."""


class Watcher:
    """Receives the progress of a run. This one shows nothing; its subclasses do."""

    run: Path | None = None
    """The run's folder, once there is one."""

    def note(self, text: str) -> None:
        """Show a remark."""

    def begin(self, run: Path, config: Config, step: int) -> None:
        """A run begins, or is resumed after `step` steps."""
        self.run = run

    def episode(self, episode: Episode) -> None:
        """An episode ended."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` ended, with these metrics."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation ended."""

    def alarm(self, step: int, text: str) -> None:
        """Show an alarm."""

    def end(self) -> None:
        """The run ended, finished or not."""

    def hangs(self) -> None:
        """The run hangs, and the guard asks to stop; called by a thread of its own."""
        cancel_running()


class Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        def tell_all(method: str, *arguments: Any) -> None:
            for watcher in watchers:
                getattr(watcher, method)(*arguments)

        for method in ("note", "begin", "episode", "step", "evaluated", "alarm", "end", "hangs"):
            setattr(self, method, partial(tell_all, method))


class OfCommand(Watcher):
    """Shows nothing; the watcher of a command, whose process ends if the run hangs."""

    @override
    def hangs(self) -> None:
        os._exit(GuardStop.exit_code)  # code that never waits cannot be cancelled


class Lines(OfCommand):
    """One plain line for each step, evaluation and alarm, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = ""

    @override
    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        super().begin(run, config, step)
        self._total = f"/{config.steps}" if config.budget == "steps" else ""
        self.note(f"{run}: {config.recipe}, {config.algorithm}, {config.steps} {config.budget}")
        if step:
            self.note(f"resumed after step {step}")

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.note(f"step {step}{self._total}  {summary(metrics)}")

    @override
    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.note(f"step {step}{self._total}  {evaluation}")

    @override
    def alarm(self, step: int, text: str) -> None:
        self.note(f"! {text}")


class LiveTable(OfCommand):
    """A table redrawn in place: each signal and its trend; evaluations and alarms stay above it."""

    def __init__(self, console: Console) -> None:
        self._config, self._episodes = Config(), 0
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(None),
            TextColumn("{task.fields[position]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            speed_estimate_period=3600,
        )
        self._history: dict[str, list[float]] = {name: [] for name in SHOWN}
        self._evaluations: list[tuple[int, Evaluation]] = []
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4)

    @override
    def note(self, text: str, style: str = "") -> None:
        self._live.console.print(Text(text, style), soft_wrap=True)

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        super().begin(run, config, step)
        self._config = config
        # With another budget, the used part of a resumed run is known after its first step.
        used = step if config.budget == "steps" else 0
        position = f"step {step} of {config.steps}" if config.budget == "steps" else f"step {step}"
        self._bar.add_task(config.recipe, total=config.steps, completed=used, position=position)
        self._live.start(refresh=True)

    @override
    def episode(self, episode: Episode) -> None:
        """With a real model a step may take minutes. How many updates it will make is unknown."""
        self._episodes += 1
        rollout = self._config.rollout
        whole = rollout.num_groups * rollout.group_size
        if self._config.budget == "steps" and self._episodes <= whole:
            self._bar.advance(_BAR, 0.9 / whole)

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._episodes = 0
        used, total = float(step), self._config.steps
        position = f"step {step} of {total}"
        if self._config.budget == "updates":
            used = metrics["progress/updates"]
            position = f"step {step}, {used:.0f} of {total} updates"
        if self._config.budget == "tokens":
            used = metrics["progress/tokens"] / 1000
            position = f"step {step}, {used:.0f} of {total} thousand tokens"
        self._bar.update(_BAR, completed=used, position=position)
        for name, value in shown(metrics).items():
            self._history[name].append(value)
        if metrics.get(FAILED):
            self.note(f"step {step}  {metrics[FAILED]:.0f} episodes failed", "bold red")

    @override
    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        if evaluation.temperature == self._config.eval.temperature:
            self._evaluations.append((step, evaluation))
        self.note(f"step {step}  {evaluation}")

    @override
    def alarm(self, step: int, text: str) -> None:
        self.note(f"! {text}", "bold red")

    @override
    def end(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        signals = Table.grid(
            Column(min_width=13),
            Column(min_width=6, justify="right"),
            Column(min_width=TREND),
            Column(),  # the only column that a narrow terminal folds
            padding=(0, 2),
        )
        baselines = ""
        if self._evaluations:
            step, last = self._evaluations[-1]
            optimal = "" if last.optimal is None else f", optimal {last.optimal:.1%}"
            signals.add_row(
                "evaluated",
                f"{last.success:.1%}",
                sparkline([each.success for _, each in self._evaluations], TREND),
                f"[{last.success_low:.1%}, {last.success_high:.1%}] {last.how}, step {step}",
                style="bold",
            )
            baselines = f"random play {last.random:.1%}{optimal}"
        for name, history in self._history.items():
            if history:
                label, form = SHOWN[name]
                note = baselines if name == "success/mean" else ""
                signals.add_row(label, form(history[-1]), sparkline(history, TREND), note)
        return Group(self._bar, signals)


_BAR = TaskID(0)
"""The only task of the bar."""


def watcher_for(console: Console, quiet: bool = False) -> Watcher:
    """A table in a terminal, lines elsewhere, nothing if `quiet`."""
    if quiet:
        return OfCommand()
    return LiveTable(console) if console.is_terminal else Lines(console)


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of `SHOWN` that were measured in a step."""
    return {name: metrics[name] for name in SHOWN if not math.isnan(metrics.get(name, math.nan))}


def summary(metrics: Mapping[str, float]) -> str:
    """A step in one line."""
    parts = [f"{SHOWN[name][0]} {SHOWN[name][1](x)}" for name, x in shown(metrics).items()]
    if metrics.get(FAILED):
        parts.append(f"failed episodes {metrics[FAILED]:.0f}")
    return "  ".join(parts)
