"""All studies together: what they cost, and one table and one figure of what they found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragen.config.config import Config
from ragen.config.rules import CRITIC
from ragen.engines.memory import plan, size
from ragen.models.names import is_available_offline
from ragen.reports.plots import BLUE, ORANGE, PALE, figure_of
from ragen.studies.results import Findings, bounds, outcome_words, written
from ragen.studies.study import (
    Cell,
    Decision,
    Place,
    Scale,
    Study,
    cells_of,
    claimed,
    env_of,
    is_judged,
    with_model,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPISODE_S = {"bandit": 0.003, "frozen-lake": 0.011, "sokoban": 0.021}
"""Seconds of one core (an AMD EPYC) that an episode and its update take, by the environment's name
up to its variant, with the embedded models. Of them `UPDATE_SHARE` are the update's."""

UPDATE_SHARE = 0.35
CRITIC_FACTOR = 1.5
"""The factor of an update's time with a critic."""


def seconds_of(cell: Cell) -> float:
    """The seconds that a run takes on one core, estimated; NaN for a model that is not embedded."""
    config = cell.config
    names = [name for name in EPISODE_S if config.env.name.startswith(name)]
    if not names or cell.base != "base":
        return math.nan
    each = EPISODE_S[names[0]]
    critic = CRITIC_FACTOR if config.advantage.name in CRITIC else 1.0
    collections, trained = collections_of(config)
    collected = collections * config.rollout.num_groups * config.rollout.group_size
    evaluations = 3 + (collections // config.eval.every if config.eval.every else 0)
    evaluated = evaluations * config.eval.episodes * max(1, len(config.env.mix))
    played = (collected + evaluated) * (1 - UPDATE_SHARE)
    tuned = cell.fine_tuning.episodes * cell.fine_tuning.epochs if cell.fine_tuning else 0
    return each * (played + (trained * critic + tuned) * UPDATE_SHARE)


def collections_of(config: Config) -> tuple[int, float]:
    """The collections of a run, and the episodes that its updates see, an epoch counted each."""
    rule = config.filter
    kept = rule.value if rule.rule == "top_k" and rule.value <= 1 else 1.0
    trained = kept * config.rollout.num_groups * config.rollout.group_size * config.update.epochs
    if config.budget == "steps":
        return config.steps, config.steps * trained
    updates = max(1, round(trained / config.update.minibatch_episodes))
    collections = math.ceil(config.steps / updates)
    return collections, collections * trained


def plans(
    studies: Sequence[Study], scale: Scale, seeds: int | None, only: str | None = None
) -> Iterator[str]:
    """A line for each study: its runs, their seconds on one core and their largest memory."""
    total = 0.0
    for study in studies:
        count = study.seeds if seeds is None else seeds
        some = cells_of(study, scale, min(count, 2), Path("runs"), only)
        cells = [cell for cell in some if cell.seed == study.first_seed]
        seconds = count * sum(map(seconds_of, cells))
        total += seconds
        yield f"{study.name:<17} {count * len(cells):>4} runs, {_time(seconds)}, {_memory(cells)}"
    yield f"together {_time(total)}, divided by the number of runs at once (--jobs)"


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "an unknown time"
    return f"about {seconds:,.0f} s of one core"


def _memory(cells: Sequence[Cell]) -> str:
    """The memory of the largest run, as far as it is known without a download."""
    known = [
        plan(with_model(cell.config, cell.base)).total
        for cell in cells
        if cell.base == "base" or is_available_offline(cell.base)
    ]
    return f"up to {size(max(known))} a run" if known else "an unknown memory (the model is absent)"


def overview(studies: Sequence[Study], found: Mapping[str, Findings]) -> Iterator[str]:
    """A table with a row for each claim and environment, in Markdown.

    `found` are findings by a study's name; a study without them was not run yet.
    """
    head = ("study", "claim", "environment", "contrast", "claimed", "predicted", "here", "outcome")
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for study in studies:
        findings = found.get(study.name)
        name = f"[{study.name}]({study.name}/study.md)" if findings else study.name
        about = name, study.claim, study.contrast.words
        for place, decision in rows_of(study, findings):
            environment, expected = place
            effect = claimed(expected.effect).removeprefix("claimed ")
            cells = (about[0], about[1], environment, about[2], effect, expected.predicted)
            here = (bounds(decision.interval), outcome_words(decision)) if decision else ("", "")
            yield f"| {' | '.join((*cells, *here))} |"
            about = "", "", ""


def rows_of(
    study: Study, findings: Findings | None
) -> Iterator[tuple[tuple[str, Place], Decision | None]]:
    """Each environment of a study by name, and what was decided in it."""
    known = {each.environment: each for each in findings.decisions} if findings else {}
    for name, place in study.environments.items():
        yield (name, place), known.get(name)


FIGURE = "![each effect with its interval, and the published one](studies.svg)"


def sentences(found: Sequence[Findings]) -> Iterator[str]:
    """A sentence on each claim, and what remains undecided with the seeds that it would take."""
    for each in found:
        yield f"- **{each.study.name}.** {each.sentence}"
    rows = [(each.study, decision) for each in found for decision in each.decisions]
    judged = [(study, d) for study, d in rows if is_judged(d.outcome)]
    left = [(study, d) for study, d in judged if d.outcome == "undecided"]
    yield f"\n{len(judged) - len(left)} of {len(judged)} judged claims by environment are decided."
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
        lines = [*table, "", FIGURE, "", *sentences(found), ""]
        path.write_text("\n".join(lines), encoding="utf-8")


def draw_overview(found: Sequence[Findings]) -> Figure:
    """A row for each claim and a column for each environment, that of most results first."""
    made = [[d for d in each.decisions if d.outcome != "not run"] for each in found]
    counts = Counter(env_of(d.environment) for decisions in made for d in decisions)
    columns = [env for env, _ in counts.most_common()] or [""]
    with figure_of(len(found), len(columns), height=0.75) as (figure, axes):
        for each, decisions, row in zip(found, made, axes, strict=True):
            for column, place in zip(columns, row, strict=True):
                _draw_row(place, [d for d in decisions if env_of(d.environment) == column])
            row[0].set_title(each.study.name)
        for column, place in zip(columns, axes[0], strict=True):
            place.set_title(column, loc="right", color=BLUE, fontsize=8)
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
