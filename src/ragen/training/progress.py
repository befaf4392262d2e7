"""Progress of a run: a live table in a terminal, one plain line per step in a log.

Progress goes to standard error, so that results on standard output stay clean.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from ragen.config.config import Config
from ragen.core.errors import GuardStop
from ragen.core.stopping import cancel_running
from ragen.core.tables import format_duration, format_rate, sparkline
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
    """A table redrawn in place: each signal and its trend; evaluations and alarms stay above it.

    Between steps only the bar and the remaining time change.
    """

    def __init__(self, console: Console) -> None:
        self._config = Config()
        self._step = self._episodes = 0
        # `_used` is the used part of the budget, and `_timed` the time and the used part when the
        # timing of steps began. A resumed run with a budget of updates knows its used part only
        # after its first step.
        self._used = 0.0
        self._timed: tuple[float, float] | None = None
        self._history: dict[str, list[float]] = {name: [] for name in SHOWN}
        self._evaluations: list[tuple[int, Evaluation]] = []
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4)

    @override
    def note(self, text: str, style: str = "") -> None:
        self._live.console.print(Text(text, style), soft_wrap=True)

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        super().begin(run, config, step)
        self._config, self._step = config, step
        if config.budget == "steps":
            self._used = step
        self._timed = None if self._used < step else (time.monotonic(), self._used)
        self._live.start(refresh=True)

    @override
    def episode(self, episode: Episode) -> None:
        self._episodes += 1

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._episodes = step, 0
        self._used = metrics["progress/updates"] if self._config.budget == "updates" else step
        if self._timed is None:
            self._timed = time.monotonic(), self._used
        for name, value in shown(metrics).items():
            self._history[name].append(value)
        if metrics.get(FAILED):
            self.note(f"step {step}  {metrics[FAILED]:.0f} episodes failed", "bold red")

    @override
    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        if self._timed is not None and self._timed[1] == self._used:  # before the first step
            self._timed = time.monotonic(), self._used
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
        return Group(self._headline(), signals)

    def _headline(self) -> Table:
        total = self._config.steps
        columns = (Column(ratio=ratio, no_wrap=True) for ratio in (None, 1, None, None))
        line = Table.grid(*columns, padding=(0, 2), expand=True)
        position = f"step {self._step} of {total}"
        if self._config.budget == "updates":
            position = f"step {self._step}, {self._used:.0f} of {total} updates"
        bar = ProgressBar(total=total, completed=self._finished())
        line.add_row(Text(self._config.recipe, "bold"), bar, position, self._left())
        return line

    def _finished(self) -> float:
        """The share of the budget that is used, with a part of the present step.

        With a real model a step may take minutes. How many updates it will make is unknown.
        """
        if self._config.budget == "updates":
            return self._used
        rollout = self._config.rollout
        share = self._episodes / (rollout.num_groups * rollout.group_size)
        return self._used + 0.9 * min(share, 1.0)

    def _left(self) -> str:
        """The remaining time at the pace so far, evaluations included."""
        total, finished = self._config.steps, self._finished()
        if self._used >= total or (self._step == 0 and not self._episodes):
            return "evaluating"
        began, used = self._timed or (0.0, finished)
        if finished - used < 0.2:  # an estimate from so little of a step is far off
            return ""
        pace = (time.monotonic() - began) / (finished - used)
        return f"{format_duration(pace * (total - finished))} left"


def watcher_for(console: Console, quiet: bool = False) -> Watcher:
    """A table in a terminal, lines elsewhere, nothing if `quiet`."""
    if quiet:
        return OfCommand()
    return LiveTable(console) if console.is_terminal else Lines(console)


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of `SHOWN` that were measured in a step."""
    return {name: metrics[name] for name in SHOWN if not math.isnan(metrics.get(name, math.nan))}


def summary(metrics: Mapping[str, float]) -> str:
    """A step in one line.

    Example:
        >>> summary({"success/mean": 0.5, "time/tokens_per_s": 12345.0})
        'success 50%  tokens/s 12.3k'
        >>> summary({"success/mean": 0.5, "episodes/failed": 3.0})
        'success 50%  failed episodes 3'
    """
    parts = [f"{SHOWN[name][0]} {SHOWN[name][1](x)}" for name, x in shown(metrics).items()]
    if metrics.get(FAILED):
        parts.append(f"failed episodes {metrics[FAILED]:.0f}")
    return "  ".join(parts)
