"""What a run shows while it goes on: a live bar in a terminal, one plain line a step in a log.

Progress goes to standard error, so that results on standard output stay clean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import override

from ragen.config import Config
from ragen.types import Episode

if TYPE_CHECKING:
    from ragen.evaluation import Evaluation

SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = MappingProxyType(
    {
        "success/mean": ("success", "{:.0%}".format),
        "reward/std_in_group": ("reward std", "{:.2f}".format),
        "entropy/mean": ("entropy", "{:.2f}".format),
    }
)
"""The metrics that are shown, each with its label and form."""

TOKENS, SECONDS = "tokens/sampled", "time/step_s"
"""What tokens a second are made of."""


class Watcher:
    """Who looks on while a run goes. This one keeps silent; the others show what they see."""

    run: Path | None = None
    """The run's folder, once it has one."""

    def begin(self, run: Path, config: Config, step: int) -> None:
        """A run begins, or goes on after `step` steps."""
        self.run = run

    def episode(self, episode: Episode) -> None:
        """An episode ended."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are finished; `metrics` are the last one's."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation ended."""

    def end(self) -> None:
        """The run is over, finished or not."""


class Lines(Watcher):
    """One plain line a step and an evaluation, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        super().begin(run, config, step)
        self._steps = config.steps
        self._say(f"{run}: {config.recipe}, {config.algorithm}, {config.steps} steps")
        if step:
            self._say(f"going on after step {step}")

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._say(f"step {step}/{self._steps}  {summary(metrics)}")

    @override
    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._say(f"step {step}/{self._steps}  {evaluation_line(evaluation)}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bar(Watcher):
    """A bar with the time that is left, redrawn in place; evaluations stay above it."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            TextColumn("{task.fields[summary]}"),
            console=console,
        )
        self._task = self._bar.add_task("", total=None, summary="", visible=False)
        self._episodes = 0
        self._of_step = 1
        self._redrawn = 0.0

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        super().begin(run, config, step)
        self._of_step = config.rollout.prompts * config.rollout.members
        self._bar.update(
            self._task,
            description=config.recipe,
            total=config.steps,
            completed=step,
            visible=True,
            summary="evaluating the model as it is",
        )
        self._bar.start()

    @override
    def episode(self, episode: Episode) -> None:
        self._episodes += 1
        # A step may take minutes with a real model: the bar moves within it, a few times a second.
        if time.monotonic() - self._redrawn > 0.2:
            self._redrawn = time.monotonic()
            done = self._bar.tasks[0].completed // 1
            share = min(self._episodes / self._of_step, 1.0)
            self._bar.update(self._task, completed=done + 0.9 * share)

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._episodes = 0
        self._bar.update(self._task, completed=step, summary=summary(metrics))

    @override
    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._episodes = 0
        line = f"step {step}  {evaluation_line(evaluation)}"
        self._bar.console.print(line, markup=False, highlight=False)

    @override
    def end(self) -> None:
        self._bar.stop()


def watcher_for(console: Console, quiet: bool = False) -> Watcher:
    """What suits the place: a bar in a terminal, lines elsewhere, nothing where quiet is asked."""
    if quiet:
        return Watcher()
    return Bar(console) if console.is_terminal else Lines(console)


def summary(metrics: Mapping[str, float]) -> str:
    """A step in a few words; what was not measured in it is left out.

    Example:
        >>> summary({"success/mean": 0.5, "tokens/sampled": 24690.0, "time/step_s": 2.0})
        'success 50%  12.3k tokens/s'
    """
    parts = [
        f"{label} {form(metrics[name])}"
        for name, (label, form) in SHOWN.items()
        if not math.isnan(metrics.get(name, math.nan))
    ]
    if metrics.get(SECONDS):
        speed = metrics.get(TOKENS, 0.0) / metrics[SECONDS]
        parts.append(f"{speed / 1000:.1f}k tokens/s" if speed >= 1000 else f"{speed:.0f} tokens/s")
    return "  ".join(parts)


def evaluation_line(evaluation: Evaluation) -> str:
    """An evaluation in a few words, floor and ceiling beside it."""
    best = "" if evaluation.best is None else f", best play {evaluation.best:.1%}"
    return (
        f"{temperature_words(evaluation.temperature)}: success {evaluation.success:.1%} "
        f"[{evaluation.success_low:.1%}, {evaluation.success_high:.1%}] "
        f"(random play {evaluation.random:.1%}{best})"
    )


def temperature_words(temperature: float) -> str:
    """How a temperature is called.

    Example:
        >>> temperature_words(0.0), temperature_words(1.0)
        ('greedy', 'T=1')
    """
    return "greedy" if temperature == 0 else f"T={temperature:g}"
