"""Running a study: its grid of runs, each once, and what they come to.

Runs go to ``OUT/<recipe>/<arm>/seed-<n>``, each on one thread, several at a time in processes of
their own. What is finished is skipped, what was stopped or killed is resumed, so the same command
goes on where it was. At the end stand ``runs.csv`` (all measures of all runs), ``study.svg`` and
``study.md`` with the verdict.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING

from ragen.config.config import Config
from ragen.config.reading import differences, read_config
from ragen.core.errors import GuardStop, RagenError
from ragen.core.statistics import mean_interval
from ragen.core.stopping import StopRequested
from ragen.engines.threads import usable_cpus
from ragen.evaluation.results import load_evaluations
from ragen.finetuning.sft import sft
from ragen.reports.plots import COLOURS, figure_of
from ragen.storage.database import CONFIG
from ragen.storage.reader import read_events
from ragen.studies.measures import measure_of, read_run
from ragen.studies.study import Decision, Lesson, Numbers, Scale, Study, Verdict, decide, verdict
from ragen.training.trainer import resolve_paths, resume, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Say = Callable[[str], None]

SAID: Mapping[Verdict, str] = {
    "supports": "support the claim",
    "contradicts": "contradict the claim",
    "cannot decide": "cannot decide",
}
"""A verdict in words."""

ALWAYS = ("before", "peak", "final", "seconds")
"""Measures that every study reports, whether or not its predictions are about them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a study's grid; `lesson` makes of `base` the model that it begins with."""

    recipe: str
    arm: str
    seed: int
    config: Config
    folder: Path
    base: str = "base"
    lesson: Lesson | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """What a study came to."""

    study: Study
    scale: Scale
    seeds: int
    numbers: Mapping[str, Numbers]
    decisions: Sequence[Decision]
    verdict: Verdict


def grid(study: Study, scale: Scale, seeds: int, out: Path) -> list[Cell]:
    """All runs of a study, seed by seed, so that an early look sees every arm.

    Raises:
        RagenError: The settings of one of them exclude each other, or there are too few seeds.
    """
    if seeds < 2:
        raise RagenError(f"--seeds {seeds}: an interval over seeds takes 2 or more")
    cells = []
    for seed, recipe, arm in product(range(seeds), study.grid(scale).recipes, study.arms):
        folder = out.resolve() / _slug(recipe) / _slug(arm) / f"seed-{seed}"
        config, lesson = study.config(scale, recipe, arm, seed), study.sft.get(arm)
        base = config.model.path
        if lesson is not None:
            taught = config.model.model_copy(update={"path": str(taught_model(folder))})
            config = config.model_copy(update={"model": taught})
        cells.append(Cell(recipe, arm, seed, config, folder, base, lesson))
    return cells


def taught_model(folder: Path) -> Path:
    """Where the fine-tuned model of a run lies: beside it."""
    return folder.with_name(f"{folder.name}-sft")


def plan(study: Study, cells: Sequence[Cell]) -> str:
    """What would be run, and how it would be judged."""
    lines = [f"{study.title} ({study.number})", f"claim: {study.claim}"]
    lines += [f"predicts {prediction.words}" for prediction in study.predictions]
    lines += [f"{cell.folder}: {_changes(cell.config)}" for cell in cells if cell.seed == 0]
    return "\n".join([*lines, f"{len(cells)} runs"])


def _changes(config: Config) -> str:
    """A run's algorithm, and what differs from its preset."""
    changes = ", ".join(f"{each.key} = {each.value!r}" for each in differences(config))
    return f"{config.algorithm}; {changes}"


def run_study(
    study: Study,
    scale: Scale = "laptop",
    *,
    seeds: int = 5,
    out: Path,
    jobs: int = 0,
    say: Say = lambda _: None,
) -> Findings:
    """Make the runs that are missing, then judge.

    Args:
        study: What is run.
        scale: Which of its grids.
        seeds: Training seeds of each arm.
        out: Where runs and results go; may hold some already.
        jobs: Processes at once; 0 takes one for each core.
        say: Told a line about each run that ends.

    Raises:
        RagenError: A number out of its range, settings that exclude each other, a run of other
            settings in `out`, one that failed, or `out` cannot be written; those that are done
            stay.
    """
    if jobs < 0:
        raise RagenError(f"--jobs {jobs}: expected a whole number ≥ 0")
    cells = grid(study, scale, seeds, out)
    for cell in cells:
        refuse_other_settings(cell)
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not is_finished(cell)]
    say(f"{study.name}: {len(cells)} runs, {len(cells) - len(missing)} of them done")
    for number, cell in enumerate(carried_out(missing, jobs or usable_cpus()), 1):
        say(f"{number}/{len(missing)}  {cell.recipe}, {cell.arm}, seed {cell.seed}")
    return conclude(study, scale, seeds, out, cells)


def carried_out(cells: Sequence[Cell], jobs: int) -> Iterator[Cell]:
    """Make the runs, `jobs` of them at once; each when it ends."""
    if jobs == 1:
        for cell in cells:
            carry_out(cell)
            yield cell
        return
    # Spawned: a fork of a process with torch's threads in it may hang.
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        started = {pool.submit(carry_out, cell): cell for cell in cells}
        try:
            for future in as_completed(started):
                future.result()
                yield started[future]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()  # each saves its run as of its last step
            raise


def end_with_parent() -> None:
    """In a process of the pool: be gone as soon as the study's own is, also where that is killed.

    Left alone, it would go on with its run, beside the same command that is given again.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def carry_out(cell: Cell) -> None:
    """Make one run, or go on with it. A stop by the guard is a result like any other.

    Raises:
        RagenError: It failed.
        KeyboardInterrupt: It was stopped, and is saved.
    """
    try:
        teach(cell)
        if (cell.folder / CONFIG).exists() and any(cell.folder.glob("checkpoints/step-*")):
            resume(cell.folder)
            return
        shutil.rmtree(cell.folder, ignore_errors=True)  # killed before its first checkpoint
        with _writing(cell.folder.parent):
            cell.folder.parent.mkdir(parents=True, exist_ok=True)
        train(cell.config, cell.folder)
    except GuardStop:
        return
    except StopRequested:
        raise KeyboardInterrupt("stopped; the same command goes on from here") from None


def teach(cell: Cell) -> None:
    """Make the model that a run begins with, where it has a lesson and it is not there."""
    lesson, model = cell.lesson, taught_model(cell.folder)
    if lesson is None or model.exists():
        return
    untaught = cell.config.model.model_copy(update={"path": cell.base})
    config = cell.config.model_copy(update={"model": untaught})
    sft(config, model, episodes=lesson.episodes, epochs=lesson.epochs, lr=lesson.lr)


def is_finished(cell: Cell) -> bool:
    """Whether a run has its last evaluation, or was stopped by the guard."""
    if not (cell.folder / CONFIG).exists():
        return False
    if any(event["text"].startswith("stopped") for event in read_events(cell.folder, "guard")):
        return True
    # The greedy evaluation is the last thing that a run does.
    greedy = [e.step for e in load_evaluations(cell.folder) if e.evaluation.temperature == 0]
    return bool(greedy) and (max(greedy) > 0 or cell.config.steps == 0)


def refuse_other_settings(cell: Cell) -> None:
    """A run in the folder must be of this study's settings.

    Raises:
        RagenError: It is not.
    """
    if not (cell.folder / CONFIG).exists():
        return
    if read_config(cell.folder / CONFIG) != resolve_paths(cell.config):
        raise RagenError(
            f"{cell.folder} was made with other settings than the study has now; name another --out"
        )


def conclude(study: Study, scale: Scale, seeds: int, out: Path, cells: Sequence[Cell]) -> Findings:
    """Measure the runs, judge, and write ``runs.csv``, ``study.svg`` and ``study.md``.

    Raises:
        RagenError: A run cannot be read, or `out` cannot be written.
    """
    names = dict.fromkeys((*ALWAYS, *(p.measure for p in study.predictions)))
    numbers: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in names}
    curves, rows = {}, []
    for cell in cells:
        facts = read_run(cell.folder, cell.config.eval.temperature)
        curves[cell.recipe, cell.arm, cell.seed] = facts.success
        measured = {name: measure_of(name)(facts) for name in names}
        rows.append([cell.recipe, cell.arm, cell.seed, *(f"{x:.6g}" for x in measured.values())])
        for name, value in measured.items():
            numbers[name].setdefault((cell.recipe, cell.arm), []).append(value)
    decisions = decide(study, scale, numbers)
    found = Findings(study, scale, seeds, numbers, decisions, verdict(decisions))
    with _writing(out):
        with (out / "runs.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["recipe", "arm", "seed", *names])
            writer.writerows(rows)
        draw(found, curves).savefig(out / "study.svg")
        (out / "study.md").write_text("\n".join(page(found)) + "\n", encoding="utf-8")
    return found


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A place that takes no files is the user's to mend; what is done stays done."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise RagenError(
            f"cannot write {error.filename or folder}: {reason}; free space there or choose "
            "another place with --out"
        ) from None


def page(found: Findings) -> Iterator[str]:
    """A study's page in Markdown: claim, published, rule, numbers, verdict, limits."""
    study = found.study
    yield f"# {study.title}\n"
    yield f"**Claim** ({study.number}). {study.claim}\n"
    yield f"**Published.** {study.published}\n"
    yield f"**Here the data {SAID[found.verdict]}** ({found.seeds} training seeds an arm).\n"
    yield f"```sh\nragen study {study.name} --seeds {found.seeds} --scale {found.scale}\n```\n"
    yield "| prediction | recipe | excess [95 %] | |\n|---|---|---|---|"
    for decision in found.decisions:
        bounds = f"{decision.excess:.3g} [{decision.low:.3g}, {decision.high:.3g}]"
        yield f"| {decision.prediction.words} | {decision.recipe} | {bounds} | {decision.outcome} |"
    names = list(found.numbers)
    yield "\nMeans over the seeds with their 95 % interval:\n"
    yield f"| recipe | arm | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}"
    for recipe in study.grid(found.scale).recipes:
        for arm in study.arms:
            cells = [_mean(found.numbers[name][recipe, arm]) for name in names]
            yield f"| {recipe} | {arm} | {' | '.join(cells)} |"
    yield "\n![success by step, and at the end](study.svg)\n"
    yield f"**What this scale cannot show.** {study.limits}"


def draw(found: Findings, curves: Mapping[tuple[str, str, int], Mapping[int, float]]) -> Figure:
    """Success by step (mean over the seeds with its interval), and at the end, seed by seed."""
    recipes, arms = found.study.grid(found.scale).recipes, list(found.study.arms)
    with figure_of(len(recipes), 2) as (figure, axes):
        for (over, end), recipe in zip(axes, recipes, strict=True):
            for place, arm in enumerate(arms):
                colour = COLOURS[place % len(COLOURS)]
                own = [c for (r, a, _), c in curves.items() if (r, a) == (recipe, arm)]
                steps = sorted(set.intersection(*(set(curve) for curve in own)))
                means = [mean_interval([curve[step] for curve in own]) for step in steps]
                over.plot(steps, [m.value for m in means], color=colour, label=arm, marker=".")
                low, high = [m.low for m in means], [m.high for m in means]
                over.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
                last = found.numbers["final"][recipe, arm]
                end.plot(last, [place] * len(last), "o", color=colour, alpha=0.5, markersize=4)
                m = mean_interval(last)
                end.plot([m.low, m.high], [place, place], color=colour, lw=1.5)
                end.plot([m.value], [place], "|", color=colour, markersize=12, mew=2)
            over.set_title(f"{recipe}: success on held-out levels, by step")
            over.set_ylim(-0.02, 1.02)
            end.set_title("at the end, by arm")
            end.set_yticks(range(len(arms)), arms)
            end.set_xlim(-0.02, 1.02)
            end.set_ylim(len(arms) - 0.5, -0.5)
    return figure


def _mean(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "–"
    mean = mean_interval(finite)
    return f"{mean.value:.3g} [{mean.low:.3g}, {mean.high:.3g}]"


def _slug(name: str) -> str:
    """A name as part of a path."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in name).strip("-")
