"""The plots of a report: success, the signals of collapse, and time by phase.

Each function makes one figure from plain numbers. matplotlib is imported when a figure is drawn,
since that takes a second. Figures are made without `pyplot`, so there is no window and no global
state. The colours are those of Okabe and Ito, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from ragen.core.metrics import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ragen.evaluation.results import RunEvaluation


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of a run: what counts, and the stretches that were rolled back."""

    standing: Series
    rolled_back: tuple[Series, ...] = ()


INK, PALE, BLUE, ORANGE, RED = "#333333", "#999999", "#0072B2", "#E69F00", "#D55E00"
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", RED, "#56B4E9", INK)
WIDTH = 7.2
"""Width of a figure in inches, as wide as a page's text."""

SMOOTH = 5
"""Window of the trailing mean that is drawn over a noisy signal, in steps."""

RULES: dict[Any, Any] = {  # matplotlib's own type lists every key
    "font.size": 9,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
}


def smoothed(series: Series, window: int = SMOOTH) -> dict[int, float]:
    """The mean of the last `window` values at each step."""
    steps, numbers = list(series), list(series.values())
    return {
        step: fmean(numbers[max(0, end - window) : end]) for end, step in enumerate(steps, start=1)
    }


def draw_success(
    success: Curve, reward: Curve, evaluations: Sequence[RunEvaluation], alarms: Sequence[int]
) -> Figure:
    """Success and mean reward of the training episodes by step, one above the other.

    The evaluations are drawn with their intervals, and the last one's baselines as lines. `alarms`
    are steps to mark.
    """
    with figure_of([2.465, 1.45], same_x=True) as (figure, ((above,), (below,))):
        _draw(above, success, "training episodes")
        for how in dict.fromkeys(each.evaluation.how for each in evaluations):
            _intervals(above, [each for each in evaluations if each.evaluation.how == how])
        above.yaxis.set_major_formatter("{x:.0%}")
        above.set_title("success")
        _draw(below, reward)
        below.set_title("mean reward of an episode")
        if evaluations:
            last = evaluations[-1].evaluation
            _reference(above, last.random, "random play")
            _reference(above, last.optimal, "optimal play")
            _reference(below, last.random_return, "random play")
            _reference(below, last.optimal_return, "optimal play")
        _finish(figure, (above, below), alarms)
    return figure


def draw_signals(panels: Mapping[str, Curve], alarms: Sequence[int]) -> Figure:
    """Signals by title, one above the other over the same steps; `alarms` are steps to mark."""
    with figure_of([1.45] * len(panels), same_x=True) as (figure, axes):
        for (place,), (title, curve) in zip(axes, panels.items(), strict=True):
            _draw(place, curve, "mean of five steps")
            place.set_title(title)
            if place.dataLim.y0 >= 0:
                place.set_ylim(bottom=0.0)
        _finish(figure, [place for (place,) in axes], alarms)
    return figure


def draw_time(phases: Mapping[str, float]) -> Figure:
    """Seconds by phase as bars with their shares, the longest first."""
    with figure_of([0.232 * len(phases) + 0.2175]) as (figure, ((place,),)):
        ordered, whole = sorted(phases, key=phases.__getitem__), sum(phases.values()) or 1.0
        bars = place.barh(ordered, [phases[name] for name in ordered], 0.62, color=BLUE)
        words = [f"{phases[name]:.1f} s, {phases[name] / whole:.0%}" for name in ordered]
        place.bar_label(bars, words, padding=4, fontsize=8)
        place.set_title("seconds by phase")
        place.margins(x=0.16)
        place.tick_params(axis="y", length=0)
        place.xaxis.set_visible(False)
        place.grid(False)
        place.spines[:].set_visible(False)
    return figure


@contextmanager
def figure_of(
    heights: Sequence[float], columns: int = 1, same_x: bool = False
) -> Iterator[tuple[Figure, Sequence[Sequence[Axes]]]]:
    """A figure of ``axes[row][column]``, drawn by `RULES`; rows have `heights` in inches."""
    _import_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(RULES):
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained", dpi=150)
        shape, ratios = (len(heights), columns), {"height_ratios": heights}
        axes = figure.subplots(*shape, sharex=same_x, squeeze=False, gridspec_kw=ratios)
        yield figure, axes.tolist()


def _import_matplotlib() -> None:
    """Import matplotlib whatever ``MPLBACKEND`` names: the figures need no backend.

    A command that a notebook runs inherits the kernel's, which may not exist here.
    """
    if "matplotlib" in sys.modules or (backend := os.environ.pop("MPLBACKEND", None)) is None:
        return
    try:
        import matplotlib
    finally:
        os.environ["MPLBACKEND"] = backend
    with suppress(ValueError):  # as matplotlib does at its import, for others in this process
        matplotlib.rcParams["backend"] = backend


Corner = Literal["outside upper right", "outside lower center"]


def add_legend(figure: Figure, axes: Iterable[Axes], where: Corner, columns: int) -> None:
    """One legend for several axes, with one entry for each label."""
    drawn = [place.get_legend_handles_labels() for place in axes]
    legend = {label: handle for each in drawn for handle, label in zip(*each, strict=True)}
    figure.legend(legend.values(), legend.keys(), loc=where, ncols=columns, fontsize=8)


def _draw(place: Axes, curve: Curve, label: str | None = None) -> None:
    """A pale line with its trailing mean over it; rolled-back stretches are dashed."""
    for series in curve.rolled_back:
        place.plot(list(series), list(series.values()), "--", color=PALE, lw=1, label="rolled back")
    steps, numbers = list(curve.standing), list(curve.standing.values())
    place.plot(steps, numbers, color=BLUE, lw=0.8, alpha=0.4, marker="" if steps[1:] else ".")
    place.plot(steps, list(smoothed(curve.standing).values()), color=BLUE, lw=1.6, label=label)


def _intervals(place: Axes, evaluations: Sequence[RunEvaluation]) -> None:
    series = [each.evaluation for each in evaluations]
    greedy = series[0].temperature == 0
    below = [e.success - e.success_low for e in series]
    above = [e.success_high - e.success for e in series]
    place.errorbar(
        [each.step for each in evaluations],
        [e.success for e in series],
        yerr=[below, above],
        fmt="D" if greedy else "o",
        color=ORANGE if greedy else INK,
        markerfacecolor="white" if greedy else INK,
        markersize=6 if greedy else 4,
        linewidth=1,
        capsize=2,
        label=f"evaluated, {series[0].how}",
        zorder=3 if greedy else 4,  # where both coincide, both are visible
    )


def _reference(place: Axes, level: float | None, label: str) -> None:
    if level is None:
        return
    place.axhline(level, color=PALE, lw=1, ls=":")
    place.annotate(
        label,
        (1.0, level),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=PALE,
    )


def _finish(figure: Figure, axes: Sequence[Axes], alarms: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    for place in axes:
        for step in dict.fromkeys(alarms):
            place.axvline(step, color=RED, lw=1, zorder=1, label="alarm")
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    add_legend(figure, axes[:1], "outside upper right", 5)
