"""The results of a study: its verdict, its page, its figure, and a table of all runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ragen.core.files import OTHER_OUT, file_errors, whole_file
from ragen.core.statistics import Interval
from ragen.evaluation.evaluation import evaluate_target
from ragen.reports.plots import COLOURS, add_legend, figure_of
from ragen.studies.measures import SHARES, measure_of, read_run
from ragen.studies.rule import ERROR, MOST_SEEDS, Verdict, sentence, verdict_of
from ragen.studies.study import (
    Cell,
    Decision,
    Numbers,
    Result,
    Scale,
    Study,
    claimed,
    decide,
    env_of,
    finite,
    is_judged,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERDICT_WORDS: Mapping[Verdict, str] = {
    "supports": "The data support the claim",
    "smaller": "The data support the claim, with less than half of its size",
    "contradicts": "The data contradict the claim, or at least half of its size",
    "by environment": "It depends on the environment, or is undecided",
    "not judged": "The claim was not tested",
}

ALWAYS = ("before", "peak", "final", "collapsed", "seconds")

RUNS = "runs.csv"
"""The table of all runs, from which everything else of a study follows."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The numbers of a study and the decisions that follow from them."""

    study: Study
    scale: Scale
    seeds: int
    numbers: Mapping[str, Numbers]
    decisions: Sequence[Decision]

    @property
    def verdict(self) -> Verdict:
        """The verdict over all environments that are judged, or will be once they are run."""
        found: list[Result] = [each.outcome for each in self.decisions]
        outcomes: list[Result] = ["undecided" if each == "not run" else each for each in found]
        return verdict_of([outcome for outcome in outcomes if is_judged(outcome)])

    @property
    def environments(self) -> list[str]:
        """The environments that were run."""
        return [each.environment for each in self.decisions if each.outcome != "not run"]

    @property
    def sentence(self) -> str:
        """The outcomes by environment."""
        return sentence({each.environment: each.outcome for each in self.decisions})


def conclude(study: Study, scale: Scale, seeds: int, out: Path, cells: Sequence[Cell]) -> Findings:
    """Measure all runs of some environments, decide, and write the table, figure and page."""
    names = dict.fromkeys((*study.measures, *ALWAYS))
    numbers: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in names}
    curves, rows = {}, []
    for cell in cells:
        temperature, env = cell.config.eval.temperature, env_of(cell.environment)
        facts = read_run(cell.folder, temperature, transfer_of(cell), env)
        curves[cell.environment, cell.arm, cell.seed] = facts.success
        measured = {name: measure_of(name)(facts) for name in names}
        values = (f"{value:.6g}" for value in measured.values())
        rows.append([cell.environment, cell.arm, cell.seed, *values])
        for name, value in measured.items():
            numbers[name].setdefault((cell.environment, cell.arm), []).append(value)
    findings = Findings(study, scale, seeds, numbers, decide(study, numbers))
    with written(out / RUNS) as path, path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["environment", "arm", "seed", *names])
        writer.writerows(rows)
    with written(out / "study.svg") as path:
        draw(findings, curves).savefig(path)
    with written(out / "study.md") as path:
        path.write_text("\n".join(page(findings)) + "\n", encoding="utf-8")
    return findings


def read_findings(study: Study, scale: Scale, folder: Path) -> Findings:
    """The findings of a study whose table of runs is in `folder`."""
    with (folder / RUNS).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers: dict[str, dict[tuple[str, str], list[float]]] = {}
    for name in (name for name in rows[0] if name not in ("environment", "arm", "seed")):
        for row in rows:
            values = numbers.setdefault(name, {}).setdefault((row["environment"], row["arm"]), [])
            values.append(float(row[name]))
    seeds = len({row["seed"] for row in rows})
    return Findings(study, scale, seeds, numbers, decide(study, numbers))


def transfer_of(cell: Cell) -> dict[str, float]:
    """Success of a finished run in the study's other evaluations; missing ones are made."""
    found, settings = {}, cell.config.eval
    for name, changes in cell.transfer.items():
        evaluation, _ = evaluate_target(
            str(cell.folder),
            changes,
            episodes=settings.episodes,
            seed=cell.seed,
            temperature=settings.temperature,
            out=cell.folder,
        )
        found[name] = evaluation.success
    return found


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A file of results that appears when it is whole."""
    with file_errors("write", path, OTHER_OUT), whole_file(path) as temporary:
        yield temporary


def page(findings: Findings) -> Iterator[str]:
    """A study's page in Markdown: claim, verdict, outcomes, numbers of the arms, limits."""
    study, seeds = findings.study, findings.seeds
    yield f"# {study.title}\n"
    yield f"**Claim** ({study.number}). {study.claim}\n"
    yield f"**{VERDICT_WORDS[findings.verdict]}.** {findings.sentence}\n"
    planned = "" if seeds == study.seeds else f", where {study.seeds} were planned"
    counts = [len(values) for values in findings.numbers[study.contrast.measure].values()]
    fewest, most = min(counts, default=seeds), max(counts, default=seeds)
    made = f"{most}" if fewest == most else f"{fewest} to {most}"
    yield f"{made} training seeds an arm{planned}. The rule, the settings and the predictions were"
    yield "committed before the runs.\n"
    command = f"ragen study {study.name} --scale {findings.scale}"
    yield f"```sh\n{command if seeds == study.seeds else f'{command} --seeds {seeds}'}\n```\n"
    confidence = f"here [{1 - study.error:.1%}]"
    yield f"| {study.contrast.words} | pairs | claim | {confidence} | outcome | predicted |"
    yield "|---|---|---|---|---|---|"
    for each in findings.decisions:
        place, here = each.place, bounds(each.interval)
        cells = [each.environment, f"{each.pairs}", claimed(place.effect), here]
        yield f"| {' | '.join([*cells, outcome_words(each), place.predicted])} |"
    if not planned:
        yield f"\nAll intervals of a study hold in at least {1 - ERROR:.0%} of studies."
    yield "\nThe claims:\n"
    for each in findings.decisions:
        yield f"- {each.environment}: {each.place.source}"
    names = list(findings.numbers)
    yield "\nDescribed, not judged: medians over the seeds, with the lowest and the highest.\n"
    yield f"| environment | arm | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}"
    for place_name, arm in product(findings.environments, study.arms):
        cells = [described(name, findings.numbers[name][place_name, arm]) for name in names]
        yield f"| {place_name} | {arm} | {' | '.join(cells)} |"
    yield "\n![success by step, and at the end](study.svg)\n"
    if study.seen:
        yield f"**Seen after the runs.** {study.seen}\n"
    yield f"**What this scale cannot show.** {study.limits}"


def bounds(interval: Interval) -> str:
    """An interval in words, which may have no bounds."""
    if math.isnan(interval.value):
        return "–"
    if math.isinf(interval.high):
        return f"{interval.value:.3g}, too few seeds for an interval"
    return f"{interval.value:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def outcome_words(decision: Decision) -> str:
    """The outcome, and how many seeds would decide it."""
    if decision.outcome != "undecided":
        return f"**{decision.outcome}**"
    if decision.pairs == 0:
        return "undecided; no run has this measure"
    seeds = f"about {decision.enough}" if decision.enough else f"more than {MOST_SEEDS}"
    return f"undecided; {seeds} seeds would decide"


def described(name: str, values: Sequence[float]) -> str:
    """The runs of an arm in words."""
    known = finite(values)
    if not known:
        return "–"
    if name in SHARES:
        return f"{sum(known):.0f} of {len(known)}"
    return f"{median(known):.3g} ({min(known):.3g}–{max(known):.3g})"


def draw(findings: Findings, curves: Mapping[tuple[str, str, int], Mapping[int, float]]) -> Figure:
    """Success by step, each seed and the median, and the primary measure, seed by seed."""
    study = findings.study
    primary = findings.numbers[study.contrast.measure]
    with figure_of([2.3] * len(findings.environments), 2) as (figure, axes):
        for (by_step, end), place in zip(axes, findings.environments, strict=True):
            for row, arm in enumerate(study.arms):
                colour = COLOURS[row % len(COLOURS)]
                own = [c for (e, a, _), c in curves.items() if (e, a) == (place, arm)]
                for curve in own:
                    by_step.plot(list(curve), list(curve.values()), color=colour, alpha=0.2, lw=0.7)
                steps = sorted(set.intersection(*(set(curve) for curve in own)))
                middle = [median(curve[step] for curve in own) for step in steps]
                by_step.plot(steps, middle, color=colour, label=arm, marker=".")
                values = finite(primary[place, arm])
                end.plot(values, [row] * len(values), "o", color=colour, alpha=0.5, markersize=4)
                if values:
                    end.plot([median(values)], [row], "|", color=colour, markersize=12, mew=2)
            by_step.set_title(f"{place}: success on held-out levels, by step")
            by_step.set_ylim(-0.02, 1.02)
            end.set_title(study.contrast.measure)
            end.set_yticks(range(len(study.arms)), list(study.arms))
            end.set_ylim(len(study.arms) - 0.5, -0.5)
        add_legend(figure, chain(*axes), "outside lower center", 4)
    return figure
