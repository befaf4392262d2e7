"""What a study found: its verdict, its page, its figure, and a table of all runs."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragen.core.files import OTHER_OUT, file_errors, whole_file
from ragen.core.statistics import mean_interval
from ragen.reports.plots import COLOURS, figure_of
from ragen.studies.measures import measure_of, noise_of, read_run
from ragen.studies.study import (
    Cell,
    Decision,
    Numbers,
    Scale,
    Study,
    Verdict,
    decide,
    finite,
    mean_noise,
    verdict,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERDICT_WORDS: Mapping[Verdict, str] = {
    "supports": "support the claim",
    "contradicts": "contradict the claim",
    "cannot decide": "cannot decide",
}
"""A verdict as the end of a sentence that begins with "the data"."""

ALWAYS = ("before", "peak", "final", "seconds")
"""Measures that every study reports, beside those of its predictions."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The numbers of a study and the decisions that follow from them."""

    study: Study
    scale: Scale
    seeds: int
    numbers: Mapping[str, Numbers]
    noises: Mapping[str, Numbers]
    decisions: Sequence[Decision]
    verdict: Verdict


def conclude(study: Study, scale: Scale, seeds: int, out: Path, cells: Sequence[Cell]) -> Findings:
    """Measure the runs, decide, and write ``runs.csv``, ``study.svg`` and ``study.md``.

    Raises:
        RagenError: A run cannot be read, or `out` cannot be written.
    """
    names = dict.fromkeys((*ALWAYS, *(p.measure for p in study.predictions)))
    numbers: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in names}
    noises: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in names}
    curves, rows = {}, []
    for cell in cells:
        facts = read_run(cell.folder, cell.config.eval.temperature)
        curves[cell.recipe, cell.arm, cell.seed] = facts.success
        measured = {name: measure_of(name)(facts) for name in names}
        rows.append([cell.recipe, cell.arm, cell.seed, *(f"{x:.6g}" for x in measured.values())])
        for name, value in measured.items():
            place = cell.recipe, cell.arm
            numbers[name].setdefault(place, []).append(value)
            noises[name].setdefault(place, []).append(noise_of(name, facts))
    decisions = decide(study, scale, numbers, noises)
    findings = Findings(study, scale, seeds, numbers, noises, decisions, verdict(decisions))
    with _result(out / "runs.csv") as path, path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["recipe", "arm", "seed", *names])
        writer.writerows(rows)
    with _result(out / "study.svg") as path:
        draw(findings, curves).savefig(path)
    with _result(out / "study.md") as path:
        path.write_text("\n".join(page(findings)) + "\n", encoding="utf-8")
    return findings


@contextmanager
def _result(path: Path) -> Iterator[Path]:
    with file_errors("write", path, OTHER_OUT), whole_file(path) as temporary:
        yield temporary


def page(findings: Findings) -> Iterator[str]:
    """A study's page in Markdown: claim, published result, verdict, numbers, limits."""
    study = findings.study
    yield f"# {study.title}\n"
    yield f"**Claim** ({study.number}). {study.claim}\n"
    yield f"**Published.** {study.published}\n"
    words = VERDICT_WORDS[findings.verdict]
    yield f"**Here the data {words}** ({findings.seeds} training seeds an arm).\n"
    command = f"ragen study {study.name} --seeds {findings.seeds} --scale {findings.scale}"
    yield f"```sh\n{command}\n```\n"
    yield "| prediction | recipe | excess [95 %] | |\n|---|---|---|---|"
    for decision in findings.decisions:
        bounds = f"{decision.excess:.3g} [{decision.low:.3g}, {decision.high:.3g}]"
        yield f"| {decision.prediction.words} | {decision.recipe} | {bounds} | {decision.outcome} |"
    names = list(findings.numbers)
    yield "\nMeans over the seeds with their 95 % interval:\n"
    yield f"| recipe | arm | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}"
    for recipe in study.grid(findings.scale).recipes:
        for arm in study.arms:
            cells = [
                _mean(findings.numbers[name][recipe, arm], findings.noises[name][recipe, arm])
                for name in names
            ]
            yield f"| {recipe} | {arm} | {' | '.join(cells)} |"
    yield "\n![success by step, and at the end](study.svg)\n"
    yield f"**What this scale cannot show.** {study.limits}"


def draw(findings: Findings, curves: Mapping[tuple[str, str, int], Mapping[int, float]]) -> Figure:
    """Success by step (mean over the seeds with its interval), and at the end, seed by seed."""
    recipes, arms = findings.study.grid(findings.scale).recipes, list(findings.study.arms)
    with figure_of(len(recipes), 2) as (figure, axes):
        for (by_step, end), recipe in zip(axes, recipes, strict=True):
            for place, arm in enumerate(arms):
                colour = COLOURS[place % len(COLOURS)]
                own = [c for (r, a, _), c in curves.items() if (r, a) == (recipe, arm)]
                steps = sorted(set.intersection(*(set(curve) for curve in own)))
                noise = mean_noise(findings.noises["final"][recipe, arm])
                means = [mean_interval([curve[step] for curve in own], noise) for step in steps]
                by_step.plot(steps, [m.value for m in means], color=colour, label=arm, marker=".")
                low, high = [m.low for m in means], [m.high for m in means]
                by_step.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
                last = findings.numbers["final"][recipe, arm]
                end.plot(last, [place] * len(last), "o", color=colour, alpha=0.5, markersize=4)
                m = mean_interval(last, noise)
                end.plot([m.low, m.high], [place, place], color=colour, lw=1.5)
                end.plot([m.value], [place], "|", color=colour, markersize=12, mew=2)
            by_step.set_title(f"{recipe}: success on held-out levels, by step")
            by_step.set_ylim(-0.02, 1.02)
            end.set_title("at the end, by arm")
            end.set_yticks(range(len(arms)), arms)
            end.set_xlim(-0.02, 1.02)
            end.set_ylim(len(arms) - 0.5, -0.5)
    return figure


def _mean(values: Sequence[float], noises: Sequence[float]) -> str:
    known = finite(values)
    if not known:
        return "–"
    mean = mean_interval(known, mean_noise(noises))
    return f"{mean.value:.3g} [{mean.low:.3g}, {mean.high:.3g}]"
