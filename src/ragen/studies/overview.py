"""All studies together: one table and one figure of what they found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ragen.reports.plots import BLUE, ORANGE, PALE, add_legend, figure_of
from ragen.studies.results import Findings, bounds, outcome_words, written
from ragen.studies.study import Decision, Study, claimed, env_of, is_judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def overview(studies: Sequence[Study], found: Mapping[str, Findings]) -> Iterator[str]:
    """A table of all claims by environment, in Markdown; a study not in `found` was not run yet."""
    head = ("study", "claim", "environment", "contrast", "claimed", "predicted", "here", "outcome")
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for study in studies:
        findings = found.get(study.name)
        decided = {each.environment: each for each in findings.decisions} if findings else {}
        name = f"[{study.name}]({study.name}/study.md)" if findings else study.name
        claim, contrast = study.claim, study.contrast.words
        for environment, place in study.environments.items():
            effect = claimed(place.effect).removeprefix("claimed ")
            decision = decided.get(environment)
            cells = [name, claim, environment, contrast, effect, place.predicted]
            cells += [bounds(decision.interval), outcome_words(decision)] if decision else ["", ""]
            yield f"| {' | '.join(cells)} |"
            name = claim = contrast = ""  # once for all environments of a study


FIGURE = "![each effect with its interval, and the published one](studies.svg)"


def undecided(found: Sequence[Findings]) -> Iterator[str]:
    """How many claims are decided, and the rest with the seeds that it would take."""
    rows = [(each.study, decision) for each in found for decision in each.decisions]
    judged = [(study, d) for study, d in rows if is_judged(d.outcome)]
    left = [(study, d) for study, d in judged if d.outcome == "undecided"]
    yield f"{len(judged) - len(left)} of {len(judged)} judged claims by environment are decided."
    if left:
        yield "Undecided:\n"
    for study, decision in left:
        where = f"{study.name}, {decision.environment}"
        yield f"- {where}, after {decision.pairs} seeds: {outcome_words(decision)}"


def write_overview(found: Sequence[Findings], out: Path) -> None:
    """Write ``index.md`` and ``studies.svg``."""
    with written(out / "studies.svg") as path:
        draw_overview(found).savefig(path)
    table = overview([each.study for each in found], {each.study.name: each for each in found})
    with written(out / "index.md") as path:
        sentences = [f"- **{each.study.name}.** {each.sentence}" for each in found]
        lines = [*table, "", FIGURE, "", *sentences, "", *undecided(found), ""]
        path.write_text("\n".join(lines), encoding="utf-8")


def draw_overview(found: Sequence[Findings]) -> Figure:
    """A row for each claim and a column for each environment, the one with most results first."""
    made = [[d for d in each.decisions if d.outcome != "not run"] for each in found]
    counts = Counter(env_of(d.environment) for decisions in made for d in decisions)
    columns = [env for env, _ in counts.most_common()] or [""]
    with figure_of([0.75] * len(found), len(columns)) as (figure, axes):
        for each, decisions, row in zip(found, made, axes, strict=True):
            for column, place in zip(columns, row, strict=True):
                _draw_row(place, [d for d in decisions if env_of(d.environment) == column])
            row[0].set_title(each.study.name)
        for column, place in zip(columns, axes[0], strict=True):
            place.set_title(column, loc="right", color=BLUE, fontsize=8)
        add_legend(figure, chain(*axes), "outside lower center", 4)
    return figure


def _draw_row(place: Axes, decisions: Sequence[Decision]) -> None:
    """The effects of one claim in one environment, each with its interval and the claimed one."""
    if not decisions:
        place.set_axis_off()
        return
    place.axvline(0, color=PALE, lw=0.8)
    width = 0.1
    for height, each in enumerate(decisions):
        reach = max(1.0, abs(each.interval.value))  # an interval of few seeds is infinite
        low, high = max(each.interval.low, -reach), min(each.interval.high, reach)
        place.plot([each.place.effect], [height], "D", color=ORANGE, markersize=4, label="claimed")
        place.plot([low, high], [height, height], color=BLUE, lw=1.5)
        place.plot([each.interval.value], [height], "o", color=BLUE, markersize=4, label="here")
        width = max(width, each.place.effect, abs(each.interval.value), -low, high)
    names = [each.environment.partition(", ")[2] for each in decisions]
    place.set_yticks(range(len(decisions)), names, fontsize=7)
    place.set_ylim(len(decisions) - 0.5, -0.5)
    place.set_xlim(-1.1 * width, 1.1 * width)
    place.locator_params(axis="x", nbins=4)
    place.tick_params(labelsize=7)
