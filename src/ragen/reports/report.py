"""`ragen report`: one page about one run, for the terminal and as Markdown with plots.

It reads the run's folder and nothing else, also while the run goes on. A page is a list of
`Section`s, each made by one function of the `Facts`; `markdown` and `show` write the same sections
in their two forms.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ragen.config.config import Config
from ragen.config.reading import differences, read_config
from ragen.core.errors import RagenError
from ragen.core.metrics import Series
from ragen.core.statistics import Interval, difference
from ragen.core.tables import Section, markdown
from ragen.evaluation.results import Evaluation, RunEvaluation, load_evaluations
from ragen.reports.plots import Curve, draw_signals, draw_success, draw_time
from ragen.storage.database import CONFIG
from ragen.storage.reader import read_attempts, read_events, read_metrics
from ragen.training.progress import clock, sparkline, thousands

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = Mapping[str, Series]
"""Metric name to its series."""

COURSE = 10
"""Characters of a signal's course."""

ALARM = "alarm"
"""The kind of an event that the plots mark."""

SIGNALS: Mapping[str, str] = {
    "success/mean": "success",
    "reward/mean": "reward",
    "reward/std_in_group": "reward std",
    "reward/flat_group_fraction": "flat groups",
    "entropy/mean": "entropy, nats",
    "gradient/policy_norm": "gradient norm",
    "gradient/critic_norm": "critic's gradient",
    "critic/explained_variance": "explained variance",
    "clip/fraction": "clip fraction",
    "kl/reference": "KL to reference",
    "format/valid_fraction": "valid replies",
    "actions/effective_fraction": "effective actions",
    "length/thought_tokens": "thought, tokens",
    "thought/unique_fraction": "unique thoughts",
    "thought/repeated_ngram_fraction": "repeated n-grams",
    "thought/hallucinated_fraction": "hallucinated facts",
    "thought/consistent_fraction": "plans kept",
    "information/first/mi": "MI, nats a thought",
    "information/first/mi_zscore": "MI z-score",
    "information/first/conditional_entropy": "H(Z|X), nats",
    "episodes/failed": "failed episodes",
}
"""The metrics of the table of signals, each with its label."""

TERMS = "reward_terms/"
"""What the run's reward terms cost: signals, too, under the names that they have."""

GRADIENTS = "gradient_by_std/"
"""Gradient norms by bucket of reward std, where the run took them."""

BUCKET = ("groups", "reward_std", "task_per_token", "entropy_per_token", "kl_per_token")
"""What the page shows of a bucket; the database also has the norms a sample."""

COLLAPSE = ("reward/std_in_group", "entropy/mean", "gradient/policy_norm")
"""The three whose order tells an Echo Trap (arXiv:2504.20073): they are drawn."""

EXACT = ("exactness/", "mismatch/")
"""Metrics of the report of exactness: what was checked, and how far two computations differ."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run's folder says of it.

    `course` and `evaluations` are those of the run as it stands; `attempts` holds the metrics of
    each attempt, what was rolled back among them.
    """

    run: Path
    config: Config
    course: History
    evaluations: tuple[RunEvaluation, ...]
    events: tuple[Mapping[str, Any], ...]
    attempts: Mapping[int, History]

    @property
    def steps(self) -> int:
        """Finished steps."""
        return max((max(series) for series in self.course.values()), default=0)

    @property
    def alarms(self) -> list[int]:
        """The steps of the alarms."""
        return [event["step"] for event in self.events if event["kind"] == ALARM]

    def curve(self, name: str) -> Curve:
        """One metric, and what was rolled back of it, from where that left the course."""
        begins = {
            attempt: min(min(series) for series in history.values())
            for attempt, history in self.attempts.items()
        }
        left = []
        for attempt, history in self.attempts.items():
            end = min((begins[other] for other in begins if other > attempt), default=math.inf)
            stretch = {step: x for step, x in history.get(name, {}).items() if step >= end - 1}
            if len(stretch) > 1:
                left.append(stretch)
        return Curve(self.course.get(name, {}), tuple(left))


def read_facts(run: Path) -> Facts:
    """Read a run, finished or not.

    Raises:
        RagenError: It is no run folder, or its files are damaged.
    """
    if not (run / CONFIG).is_file():
        raise RagenError(f"{run} is no run folder ({CONFIG} is missing)")
    return Facts(
        run,
        read_config(run / CONFIG),
        read_metrics(run),
        tuple(load_evaluations(run)),
        tuple(read_events(run)),
        read_attempts(run),
    )


def page(facts: Facts) -> list[Section]:
    """The sections in their order."""
    measured = any(name.startswith(GRADIENTS) for name in facts.course)
    closer = (gradients,) if measured else ()
    parts = (headline, learnt, signals, *closer, happened, exactness, times, settings)
    return [part(facts) for part in parts]


def headline(facts: Facts) -> Section:
    """Which run this is, and how far it got."""
    config = facts.config
    attempts = "" if len(facts.attempts) < 2 else f" in {len(facts.attempts)} attempts"
    lines = (
        f"Environment {config.env.name}, model {config.model.path}, recipe {config.recipe}, "
        f"algorithm "
        f"{config.algorithm}, seed {config.seed}.",
        f"{facts.steps} steps are finished{attempts}; the run's length is {config.steps} "
        f"{config.budget}.",
    )
    return Section(f"Run {facts.run.resolve().name}", lines)


def learnt(facts: Facts) -> Section:
    """Success before and after, with the baselines, and how much it grew."""
    title = "What was learnt"
    if not facts.evaluations:
        return Section(title, ("It was not evaluated.",), plot="success")
    some = facts.evaluations[-1].evaluation
    rows: list[tuple[str, ...]] = [
        ("random play", f"{some.random:.1%}", "", f"{some.random_return:.3f}")
    ]
    lines = [f"{some.episodes} levels that training does not use, 95 % intervals."]
    for how in dict.fromkeys(each.evaluation.how for each in facts.evaluations):
        alike = [each for each in facts.evaluations if each.evaluation.how == how]
        best = max(alike, key=lambda each: each.evaluation.success)
        shown = {each.step: each for each in (alike[0], best, alike[-1])}
        rows += [_evaluation_row(shown[step]) for step in sorted(shown)]
        if len(alike) > 1:
            lines.append(f"{how}: {_gain(alike[0].evaluation, alike[-1].evaluation)}")
    if some.optimal is not None:
        optimal_return = "" if some.optimal_return is None else f"{some.optimal_return:.3f}"
        rows.append(("optimal play", f"{some.optimal:.1%}", "", optimal_return))
    columns = ("player", "success", "95 % interval", "mean return")
    return Section(title, tuple(lines), columns, tuple(rows), "success")


def _evaluation_row(evaluated: RunEvaluation) -> tuple[str, ...]:
    e = evaluated.evaluation
    interval = f"{e.success_low:.1%} – {e.success_high:.1%}"
    player = f"step {evaluated.step}, {e.how}"
    return (player, f"{e.success:.1%}", interval, f"{e.mean_return:.3f}")


def _gain(before: Evaluation, after: Evaluation) -> str:
    """How success changed, in points, and whether that is more than chance."""
    grown = difference(_success(after), _success(before))
    unsure = "; the interval holds 0: no change is shown" if grown.low <= 0 <= grown.high else ""
    points = f"{100 * grown.value:+.1f} points [{100 * grown.low:+.1f}, {100 * grown.high:+.1f}]"
    return f"{before.success:.1%} → {after.success:.1%}, {points}{unsure}."


def _success(evaluation: Evaluation) -> Interval:
    return Interval(evaluation.success, evaluation.success_low, evaluation.success_high)


def signals(facts: Facts) -> Section:
    """First, lowest, highest and last value of each signal, and its course."""
    course = facts.course
    named = {name: label for name, label in SIGNALS.items() if name in course}
    named |= {name: name for name in sorted(course) if name.startswith(TERMS)}
    rows = []
    for name, label in named.items():
        series = course[name]
        low, high = (end(series, key=series.__getitem__) for end in (min, max))
        numbers = list(series.values())
        rows.append(
            (
                label,
                f"{numbers[0]:.3g}",
                f"{series[low]:.3g} ({low})",
                f"{series[high]:.3g} ({high})",
                f"{numbers[-1]:.3g}",
                sparkline(numbers, COURSE),
            )
        )
    if not rows:
        return Section("Signals", ("No step is finished.",))
    columns = ("signal", "first", "lowest", "highest", "last", "course")
    return Section("Signals", ("In brackets the step.",), columns, tuple(rows), "signals")


def gradients(facts: Facts) -> Section:
    """The gradients by reward std, as they were measured last."""
    found = {name: s for name, s in facts.course.items() if name.startswith(GRADIENTS)}
    step = max(max(series) for series in found.values())
    buckets: dict[str, dict[str, float]] = {}
    for name, series in found.items():
        if step in series:
            _, bucket, measure = name.split("/")
            buckets.setdefault(bucket, {})[measure] = series[step]
    shown = [measure for measure in BUCKET if any(measure in found for found in buckets.values())]
    rows = tuple(
        (name, *(f"{bucket[measure]:.3g}" if measure in bucket else "" for measure in shown))
        for name, bucket in sorted(buckets.items())
    )
    line = (
        f"Norms of each term's gradient in step {step}, entropy and KL at weight 1, by the reward "
        "std of the groups; bucket 0 has the lowest."
    )
    return Section("Gradients by reward std", (line,), ("bucket", *shown), rows)


def happened(facts: Facts) -> Section:
    """Alarms, what the guard did, resumes and errors."""
    if not facts.events:
        return Section("Alarms and actions", ("None.",))
    rows = tuple(
        (
            event["kind"],
            f"{event['step']}",
            f"{event['attempt']}",
            f"{datetime.fromtimestamp(event['time']):%Y-%m-%d %H:%M:%S}",
            event["text"],
        )
        for event in facts.events
    )
    return Section("Alarms and actions", (), ("kind", "step", "attempt", "time", "what"), rows)


def exactness(facts: Facts) -> Section:
    """What was checked, and the largest difference that was found."""
    rows = []
    for name, series in sorted(facts.course.items()):
        if name.startswith(EXACT):
            counted = name.endswith("_checked")
            value = math.fsum(series.values()) if counted else max(series.values())
            rows.append((name, f"{value:,.0f}" if counted else f"{value:.3g}"))
    if not rows:
        return Section("Exactness", ("Nothing was measured.",))
    line = "Checks counted over the run; of differences the largest in a step."
    return Section("Exactness", (line,), ("measure", "value"), tuple(rows))


def times(facts: Facts) -> Section:
    """Seconds by phase, over all attempts."""
    seconds = phases(facts)
    whole = math.fsum(seconds.values())
    if not whole:
        return Section("Time", ("No step is finished.",))
    sampled = math.fsum(
        math.fsum(history.get("tokens/sampled", {}).values()) for history in facts.attempts.values()
    )
    rate = thousands(sampled / whole)
    rows = [
        (name, f"{s:.1f}", f"{s / whole:.0%}", _usual(facts, name))
        for name, s in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    lines = (f"{clock(whole)} in all, {sampled:,.0f} tokens sampled in steps, {rate} tokens/s.",)
    columns = ("phase", "seconds", "share", "median of a step")
    return Section("Time", lines, columns, tuple(rows), "time")


def phases(facts: Facts) -> dict[str, float]:
    """Seconds of each phase over all attempts, and of the evaluations that stand."""
    evaluating = math.fsum(each.evaluation.seconds for each in facts.evaluations)
    return seconds_by_phase(facts.attempts, evaluating)


def seconds_by_phase(
    attempts: Mapping[int, Mapping[str, Series]], evaluating: float
) -> dict[str, float]:
    """Seconds of each phase over all attempts, those of evaluations beside them.

    A sum of others (a step; a rollout, where its parts are told) is left out, and so is a rate.
    """
    found: dict[str, float] = {}
    for history in attempts.values():
        sums = {"time/step_s", "time/tokens_per_s"}
        sums |= {"time/rollout_s"} if "time/generate_s" in history else set()
        for name, series in history.items():
            if name.startswith("time/") and name not in sums:
                phase = name.removeprefix("time/").removesuffix("_s")
                found[phase] = found.get(phase, 0.0) + math.fsum(series.values())
    return found | ({"evaluations": evaluating} if evaluating else {})


def _usual(facts: Facts, phase: str) -> str:
    series = facts.course.get(f"time/{phase}_s")
    return f"{median(series.values()):.3f}" if series else ""


def settings(facts: Facts) -> Section:
    """What the config changes of its preset."""
    changes = differences(facts.config)
    title = f"Settings that differ from {facts.config.algorithm}"
    if not changes:
        return Section(title, ("None.",))
    rows = tuple(
        (change.key, "unset" if change.preset is None else f"{change.preset}", f"{change.value}")
        for change in changes
    )
    return Section(title, (), ("key", "preset", "this run"), rows)


def plots(facts: Facts) -> dict[str, Figure]:
    """The figures by name; those for which nothing was recorded are left out."""
    alarms, found = facts.alarms, dict[str, "Figure"]()
    if "success/mean" in facts.course or facts.evaluations:
        found["success"] = draw_success(
            facts.curve("success/mean"), facts.curve("reward/mean"), facts.evaluations, alarms
        )
    panels = {SIGNALS[name]: facts.curve(name) for name in COLLAPSE if name in facts.course}
    if panels:
        found["signals"] = draw_signals(panels, alarms)
    if seconds := phases(facts):
        found["time"] = draw_time(seconds)
    return found


def write_report(facts: Facts, out: Path) -> Path:
    """Write ``report.md`` and its plots into a folder, over those of an earlier report.

    Returns:
        The page's path.

    Raises:
        RagenError: The folder cannot be written.
    """
    path = out / "report.md"
    try:
        out.mkdir(parents=True, exist_ok=True)
        figures = plots(facts)
        for name, figure in figures.items():
            figure.savefig(out / f"report-{name}.png")
        path.write_text(markdown(page(facts), figures), encoding="utf-8")
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise RagenError(
            f"cannot write the report into {out}: {reason}; choose a writable place with --out"
        ) from None
    return path
