"""What a run shows while it goes on: a live table in a terminal, one plain line a step in a log.

Progress goes to standard error, so that results on standard output stay clean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from ragen.config.config import Config
from ragen.config.reading import recipes
from ragen.core.types import Episode
from ragen.storage.database import CONFIG

if TYPE_CHECKING:
    from ragen.evaluation.results import Evaluation

BLOCKS = "▁▂▃▄▅▆▇█"
"""The levels of a sparkline."""

TREND = 20
"""Characters of a sparkline; a live table with it fits into 80 columns."""

MIN_DONE = 0.2
"""Steps before the time that is left is told: what a smaller part of one says is off by much."""


def thousands(number: float) -> str:
    """A rate in three digits or so.

    Example:
        >>> thousands(512.3), thousands(24690.0)
        ('512', '24.7k')
    """
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = MappingProxyType(
    {
        "success/mean": ("success", "{:.0%}".format),
        "reward/std_in_group": ("reward std", "{:.2f}".format),
        "entropy/mean": ("entropy", "{:.2f}".format),
        "gradient/policy_norm": ("gradient norm", "{:.2f}".format),
        "time/tokens_per_s": ("tokens/s", thousands),
    }
)
"""What is shown of a step, each with its label and form."""


class Watcher:
    """Who looks on while a run goes. This one keeps silent; the others show what they see."""

    run: Path | None = None
    """The run's folder, once it has one."""

    def note(self, text: str) -> None:
        """Something to know of a run before it begins."""

    def begin(self, run: Path, config: Config, step: int) -> None:
        """A run begins, or goes on after `step` steps."""
        self.run = run

    def episode(self, episode: Episode) -> None:
        """An episode ended."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are finished; `metrics` are the last one's."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation ended."""

    def alarm(self, step: int, text: str) -> None:
        """Something that a researcher should know at once."""

    def end(self) -> None:
        """The run is over, finished or not."""


class Lines(Watcher):
    """One plain line a step, an evaluation and an alarm, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = ""

    @override
    def note(self, text: str) -> None:
        self._say(text)

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        super().begin(run, config, step)
        self._total = f"/{config.steps}" if config.budget == "steps" else ""
        self._say(f"{run}: {config.recipe}, {config.algorithm}, {config.steps} {config.budget}")
        if step:
            self._say(f"going on after step {step}")
        elif advice := hint(config):
            self._say(advice)

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._say(f"step {step}{self._total}  {summary(metrics)}")

    @override
    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._say(f"step {step}{self._total}  {evaluation}")

    @override
    def alarm(self, step: int, text: str) -> None:
        self._say(f"! {text}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveTable(Watcher):
    """A table redrawn in place: each signal now and so far; evaluations and alarms stay above it.

    What is redrawn while a step goes on is the bar and the time that is left.
    """

    def __init__(self, console: Console) -> None:
        self._config = Config()
        self._step = self._episodes = 0
        # Of the run's budget: now, and when it began. A run that goes on learns in its first step
        # how many updates it had made.
        self._spent = 0.0
        self._first: float | None = 0.0
        self._began = time.monotonic()
        self._history: dict[str, list[float]] = {name: [] for name in SHOWN}
        self._evaluations: list[tuple[int, Evaluation]] = []
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4)

    @override
    def note(self, text: str) -> None:
        self._above(text)

    @override
    def begin(self, run: Path, config: Config, step: int) -> None:
        super().begin(run, config, step)
        self._config = config
        self._step = step
        self._spent = float(step) if config.budget == "steps" else 0.0
        self._first = self._spent if config.budget == "steps" or not step else None
        self._began = time.monotonic()
        self._live.start(refresh=True)
        if (advice := hint(config)) and not step:
            self._above(advice)

    @override
    def episode(self, episode: Episode) -> None:
        self._episodes += 1

    @override
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._episodes = step, 0
        self._spent = metrics["progress/updates"] if self._config.budget == "updates" else step
        if self._first is None:
            self._first, self._began = self._spent, time.monotonic()
        for name, value in told(metrics).items():
            self._history[name].append(value)

    @override
    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        if self._spent == self._first:  # The time that is left is that of steps.
            self._began = time.monotonic()
        if evaluation.temperature == self._config.eval.temperature:
            self._evaluations.append((step, evaluation))
        self._above(f"step {step}  {evaluation}")

    @override
    def alarm(self, step: int, text: str) -> None:
        self._above(f"! {text}", "bold red")

    @override
    def end(self) -> None:
        self._live.stop()

    def _above(self, line: str, style: str = "") -> None:
        self._live.console.print(Text(line, style), soft_wrap=True)

    def _draw(self) -> RenderableType:
        signals = Table.grid(
            Column(min_width=13),
            Column(min_width=6, justify="right"),
            Column(min_width=TREND),
            Column(),  # all that a narrow terminal folds
            padding=(0, 2),
        )
        beside = ""
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
            beside = f"random play {last.random:.1%}{optimal}"
        for name, history in self._history.items():
            if history:
                label, form = SHOWN[name]
                of_success = beside if name == "success/mean" else ""
                signals.add_row(label, form(history[-1]), sparkline(history, TREND), of_success)
        return Group(self._headline(), signals)

    def _headline(self) -> Table:
        total, budget = self._config.steps, self._config.budget
        line = Table.grid(
            *(Column(ratio=ratio, no_wrap=True) for ratio in (None, 1, None, None)),
            padding=(0, 2),
            expand=True,
        )
        far = f"step {self._step} of {total}"
        if budget == "updates":
            far = f"step {self._step}, {self._spent:.0f} of {total} updates"
        line.add_row(
            Text(self._config.recipe, "bold"),
            ProgressBar(total=total, completed=self._finished()),
            far,
            self._left(),
        )
        return line

    def _finished(self) -> float:
        """What is spent of the budget, and of the present step a share.

        With a real model a step may take minutes; how many updates it will make is not known.
        """
        if self._config.budget == "updates":
            return self._spent
        rollout = self._config.rollout
        return self._spent + 0.9 * min(
            self._episodes / (rollout.num_groups * rollout.group_size), 1.0
        )

    def _left(self) -> str:
        """How long the rest takes if it goes as what was before, evaluations included."""
        total = self._config.steps
        if self._spent >= total or (self._step == 0 and not self._episodes):
            return "evaluating"
        done = self._finished() - (self._finished() if self._first is None else self._first)
        if done < MIN_DONE:
            return ""
        pace = (time.monotonic() - self._began) / done
        return f"{clock(pace * (total - self._finished()))} left"


def watcher_for(console: Console, quiet: bool = False) -> Watcher:
    """What suits the place: a table in a terminal, lines elsewhere, nothing if quiet is asked."""
    if quiet:
        return Watcher()
    return LiveTable(console) if console.is_terminal else Lines(console)


def hint(config: Config) -> str | None:
    """Where a recipe of the embedded model is given another one: the recipe for that.

    A run is no other model: it began with the embedded one, or this was said when it began.

    Example:
        >>> from ragen.config.reading import resolve
        >>> hint(resolve("sokoban-large", {"model": "Qwen/Qwen2.5-0.5B-Instruct"}))
        'recipe sokoban-large is made for the embedded model; for others: paper/sokoban --env ...'
        >>> hint(resolve("sokoban")), hint(resolve("paper/sokoban"))
        (None, None)
    """
    env, model = config.env.name, config.model.path
    if config.prompt.style == "paper" or model == "base" or (Path(model) / CONFIG).is_file():
        return None
    for name in recipes() if config.recipe in recipes() else ():
        family = name.removeprefix("paper/")
        if name != family and env.startswith(family):
            other = f"{name} --env {env}" if env != family else name
            return f"recipe {config.recipe} is made for the embedded model; for others: {other}"
    return None


def told(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of `SHOWN` that a step has; what was not measured in it is left out.

    Example:
        >>> told({"success/mean": 0.5, "entropy/mean": math.nan, "reward/mean": 1.0})
        {'success/mean': 0.5}
    """
    return {name: metrics[name] for name in SHOWN if not math.isnan(metrics.get(name, math.nan))}


def summary(metrics: Mapping[str, float]) -> str:
    """A step in a few words.

    Example:
        >>> summary({"success/mean": 0.5, "time/tokens_per_s": 12345.0})
        'success 50%  tokens/s 12.3k'
    """
    return "  ".join(f"{SHOWN[name][0]} {SHOWN[name][1](x)}" for name, x in told(metrics).items())


def sparkline(numbers: Sequence[float], width: int) -> str:
    """A curve in one line of text, from its lowest number to its highest.

    More numbers than `width` are drawn as means of stretches of equal length; what is not finite is
    left out.

    Example:
        >>> sparkline([0, 1, 2, 3], 4), sparkline([0, 0, 1, 1, 7, 7], 3), sparkline([5, 5], 4)
        ('▁▃▆█', '▁▂█', '▁▁')
    """
    finite = [number for number in numbers if math.isfinite(number)]
    cells = min(width, len(finite))
    edges = [round(i * len(finite) / cells) for i in range(cells + 1)] if cells else []
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(BLOCKS) - 1
    # Half a level is added, so that the levels are of equal height and the highest is reached.
    return "".join(
        BLOCKS[int((mean - low) / (high - low) * top + 0.5) if high > low else 0] for mean in means
    )


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any.

    Example:
        >>> clock(9.4), clock(3723)
        ('0:09', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
