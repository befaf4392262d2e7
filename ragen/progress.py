"""What a run shows while it goes on: a live bar in a terminal, one plain line a step in a log.

Progress goes to standard error, so that results on standard output stay clean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from typing_extensions import override

from ragen.metrics import Metric

SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = MappingProxyType(
    {
        "success/mean": ("success", "{:.0%}".format),
        "reward/std_in_group": ("reward std", "{:.2f}".format),
        "entropy/mean": ("entropy", "{:.2f}".format),
    }
)
"""The metrics that are shown, each with its label and form; tokens a second come from the clock."""

TOKENS = "tokens/sampled"


class Progress:
    """Told of a run's steps. This one shows nothing; the others are places to show them."""

    def begin(self, title: str, steps: int, done: int = 0) -> None:
        """A run of `steps` steps begins, `done` of them behind it."""

    def step(self, done: int, metrics: Mapping[str, Metric]) -> None:
        """So many steps are `done`; `metrics` are those of the last one."""

    def say(self, text: str) -> None:
        """One line that is no step: an evaluation, an alarm, a checkpoint."""

    def end(self) -> None:
        """The run is over, finished or not."""


class Lines(Progress):
    """One plain line a step, for logs and pipes.

    Example:
        >>> from ragen.metrics import mean
        >>> lines = Lines(Console(force_terminal=False))
        >>> lines.begin("bandit", 20)
        bandit: 20 steps
        >>> lines.step(1, {"success/mean": mean(0.5), "entropy/mean": mean(0.25)})
        step 1/20  success 50%  entropy 0.25
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._speed = _Speed()
        self._steps = 0

    @override
    def begin(self, title: str, steps: int, done: int = 0) -> None:
        self._steps = steps
        self._speed = _Speed()
        behind = f", {done} done" if done else ""
        self.say(f"{title}: {steps} steps{behind}")

    @override
    def step(self, done: int, metrics: Mapping[str, Metric]) -> None:
        self.say(f"step {done}/{self._steps}  {summary(metrics, self._speed(metrics))}")

    @override
    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bar(Progress):
    """A bar with the time that is left, redrawn in place, for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._speed = _Speed()
        self._bar: RichProgress | None = None

    @override
    def begin(self, title: str, steps: int, done: int = 0) -> None:
        self.end()
        self._speed = _Speed()
        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[summary]}"),
            console=self._console,
            transient=False,
        )
        self._bar.add_task(escape(title), total=steps, completed=done, summary="")
        self._bar.start()

    @override
    def step(self, done: int, metrics: Mapping[str, Metric]) -> None:
        if self._bar is not None:
            text = summary(metrics, self._speed(metrics))
            self._bar.update(self._bar.task_ids[0], completed=done, summary=text)

    @override
    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @override
    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def progress_for(console: Console, quiet: bool = False) -> Progress:
    """What suits the place: a bar in a terminal, lines elsewhere, nothing where quiet is asked."""
    if quiet:
        return Progress()
    return Bar(console) if console.is_terminal else Lines(console)


def summary(metrics: Mapping[str, Metric], tokens_per_s: float = math.nan) -> str:
    """A step in a few words; what was not measured in it is left out.

    Example:
        >>> from ragen.metrics import mean
        >>> summary({"success/mean": mean(0.5), "reward/std_in_group": mean(0.375)}, 12345.0)
        'success 50%  reward std 0.38  12.3k tokens/s'
    """
    parts = [
        f"{label} {form(metrics[name].value)}"
        for name, (label, form) in SHOWN.items()
        if name in metrics and not math.isnan(metrics[name].value)
    ]
    if not math.isnan(tokens_per_s):
        large = tokens_per_s >= 1000
        parts.append(
            f"{tokens_per_s / 1000:.1f}k tokens/s" if large else f"{tokens_per_s:.0f} tokens/s"
        )
    return "  ".join(parts)


class _Speed:
    """Sampled tokens a second of wall-clock time, from one step's end to the next."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, metrics: Mapping[str, Metric]) -> float:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        return metrics[TOKENS].value / elapsed if TOKENS in metrics and elapsed > 0 else math.nan
