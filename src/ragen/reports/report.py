"""`ragen report`: one page about one run, for the terminal and as Markdown with plots.

It reads only the run's folder, also while the run is in progress. A page is a list of `Section`s,
each made by one function of the `Facts`; `markdown` and `show` write them in two forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ragen.config.reading import differences
from ragen.core.files import OTHER_OUT, file_errors, whole_file
from ragen.core.metrics import IGNORED, Series
from ragen.core.tables import Section, format_duration, format_rate, markdown, sparkline
from ragen.evaluation.results import RunEvaluation
from ragen.reports.facts import AGENT, EXACT, GRADIENTS, JUDGE, SIGNALS, TERMS, Facts
from ragen.reports.plots import draw_signals, draw_success, draw_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPARKLINE = 10

BUCKET = ("groups", "reward_std", "task_per_token", "entropy_per_token", "kl_per_token")
"""The columns of a bucket; the database also has the norms per sample."""

COLLAPSE = ("reward/std_in_group", "entropy/mean", "gradient/policy_norm")
"""The signals that are drawn: their order shows an Echo Trap (arXiv:2504.20073)."""


def page(facts: Facts) -> list[Section]:
    """The sections of the report in their order."""
    found = [headline(facts), *in_each_env(facts, success), *in_each_env(facts, signals)]
    if any(name.startswith(GRADIENTS) for name in facts.metrics):
        found.append(gradients(facts))
    if "judge/calls" in facts.metrics:
        found.append(judge(facts))
    if "agent/calls" in facts.metrics:
        found.append(agent(facts))
    return [*found, events(facts), exactness(facts), times(facts), settings(facts)]


def headline(facts: Facts) -> Section:
    """The run's environment, model and recipe, and how far it got."""
    config = facts.config
    attempts = "" if len(facts.attempts) < 2 else f" in {len(facts.attempts)} attempts"
    lines = (
        f"Environment {config.env.name}, model {config.model.path}, recipe {config.recipe}, "
        f"algorithm {config.algorithm}, seed {config.seed}.",
        f"Finished steps: {facts.steps}{attempts}; budget: {config.steps} {config.budget}.",
    )
    return Section(f"Run {facts.run.resolve().name}", lines)


def in_each_env(facts: Facts, make: Callable[[Facts], Section]) -> list[Section]:
    """A section, and in a mixture the same for each environment, without the plot."""
    whole = make(facts)
    return [whole] + [
        replace(make(alone), title=f"{whole.title} in {env}", plot=None)
        for env, alone in facts.by_env().items()
    ]


def success(facts: Facts) -> Section:
    """Success before and after training with its change, and the baselines."""
    title = "Success"
    if not facts.evaluations:
        return Section(title, ("The run was not evaluated.",), plot="success")
    some = facts.evaluations[-1].evaluation
    rows = []
    lines = [
        f"{some.episodes} levels that training does not use, 95 % intervals; baselines: random and "
        "optimal play."
    ]
    for how in dict.fromkeys(each.evaluation.how for each in facts.evaluations):
        series = [each for each in facts.evaluations if each.evaluation.how == how]
        best = max(series, key=lambda each: each.evaluation.success)
        shown = {each.step: each for each in (series[0], best, series[-1])}
        rows += [shown[step].evaluation.row(f"step {step}, {how}") for step in sorted(shown)]
        if len(series) > 1:
            lines.append(f"{how}: {_gain(facts, series[0], series[-1])}")
    columns = ("player", "success", "95 % interval", "mean return")
    return Section(title, tuple(lines), columns, some.with_baselines(rows), "success")


def _gain(facts: Facts, one: RunEvaluation, other: RunEvaluation) -> str:
    change, is_paired = facts.gain(one, other)
    before, after = one.evaluation.success, other.evaluation.success
    points = f"{100 * change.value:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    said = f"{before:.1%} → {after:.1%}, {points}{', level by level' if is_paired else ''}"
    if change.low <= 0 <= change.high:
        said += "; the interval contains 0: no change is shown"
    return f"{said}."


def signals(facts: Facts) -> Section:
    """First, lowest, highest and last value of each signal, and its sparkline."""
    metrics = facts.metrics
    labels = {name: label for name, label in SIGNALS.items() if name in metrics}
    labels |= {name: name for name in sorted(metrics) if name.startswith(TERMS)}
    rows = []
    for name, label in labels.items():
        series = metrics[name]
        low, high = (end(series, key=series.__getitem__) for end in (min, max))
        numbers = list(series.values())
        rows.append(
            (
                label,
                f"{numbers[0]:.3g}",
                f"{series[low]:.3g} ({low})",
                f"{series[high]:.3g} ({high})",
                f"{numbers[-1]:.3g}",
                sparkline(numbers, SPARKLINE),
            )
        )
    if not rows:
        return Section("Signals", ("No step is finished.",))
    columns = ("signal", "first", "lowest", "highest", "last", "trend")
    return Section("Signals", ("The step is in brackets.",), columns, tuple(rows), "signals")


def gradients(facts: Facts) -> Section:
    """The gradient norms by reward std, of the last step at which they were measured."""
    norms = {name: s for name, s in facts.metrics.items() if name.startswith(GRADIENTS)}
    step = max(max(series) for series in norms.values())
    buckets: dict[str, dict[str, float]] = {}
    for name, series in norms.items():
        if step in series:
            _, bucket, measure = name.split("/")
            buckets.setdefault(bucket, {})[measure] = series[step]
    shown = [measure for measure in BUCKET if any(measure in bucket for bucket in buckets.values())]
    rows = tuple(
        (name, *(f"{bucket[measure]:.3g}" if measure in bucket else "" for measure in shown))
        for name, bucket in sorted(buckets.items())
    )
    line = (
        f"Norms of each term's gradient in step {step}, entropy and KL at weight 1, by the reward "
        "std of the groups; bucket 0 has the lowest."
    )
    return Section("Gradients by reward std", (line,), ("bucket", *shown), rows)


def judge(facts: Facts) -> Section:
    """The judge's requests and their cost, over all attempts."""
    asked = facts.config.judge
    line = f"{asked.model} at {asked.url}. Rubric: {asked.rubric}"
    return Section("Judge", (line,), ("measure", "sum"), _sums(JUDGE, facts.attempts.values()))


def agent(facts: Facts) -> Section:
    """How the calls of an existing agent became samples."""
    ignored = [name for name in sorted(facts.metrics) if name.startswith(IGNORED)]
    labels = {name: f"calls that set {name.removeprefix(IGNORED)}" for name in ignored}
    lines = ("The parameters named here have no effect: the run decides.",) if ignored else ()
    rows = _sums(AGENT | labels, [facts.metrics])
    return Section("Calls of the agent", lines, ("measure", "sum"), rows)


def _sums(
    labels: Mapping[str, str], histories: Iterable[Mapping[str, Series]]
) -> tuple[tuple[str, str], ...]:
    """The sums of some metrics over all steps, each with its label."""
    known = [*histories]
    return tuple(
        (label, f"{math.fsum(math.fsum(each[name].values()) for each in found):,.0f}")
        for name, label in labels.items()
        if (found := [each for each in known if name in each])
    )


def events(facts: Facts) -> Section:
    """Alarms, the guard's actions, resumes and errors."""
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
    return Section("Alarms and actions", (), ("kind", "step", "attempt", "time", "text"), rows)


def exactness(facts: Facts) -> Section:
    """How much was checked, and the largest difference that was found."""
    rows = []
    for name, series in sorted(facts.metrics.items()):
        if name.startswith(EXACT):
            counted = name.endswith("_checked")
            value = math.fsum(series.values()) if counted else max(series.values())
            rows.append((name, f"{value:,.0f}" if counted else f"{value:.3g}"))
    if not rows:
        return Section("Exactness", ("Nothing was checked.",))
    line = "Checks are summed over the run; differences are the largest of any step."
    return Section("Exactness", (line,), ("measure", "value"), tuple(rows))


def times(facts: Facts) -> Section:
    """Seconds by phase, over all attempts."""
    seconds = facts.phases
    whole = math.fsum(seconds.values())
    if not whole:
        return Section("Time", ("No step is finished.",))
    sampled = math.fsum(
        math.fsum(history.get(name, {}).values())
        for history in facts.attempts.values()
        for name in ("tokens/sampled", "tokens/continuations")
    )
    rows = [
        (name, f"{s:.1f}", f"{s / whole:.0%}", _median(facts, name))
        for name, s in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    speed = f"{sampled:,.0f} tokens sampled in steps, {format_rate(sampled / whole)} tokens/s"
    lines = (f"{format_duration(whole)} in total, {speed}.",)
    columns = ("phase", "seconds", "share", "median per step")
    return Section("Time", lines, columns, tuple(rows), "time")


def _median(facts: Facts, phase: str) -> str:
    series = facts.metrics.get(f"time/{phase}_s")
    return f"{median(series.values()):.3f}" if series else ""


def settings(facts: Facts) -> Section:
    """The settings that differ from the preset."""
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
    """The figures by name; figures without data are left out."""
    alarms, figures = facts.alarms, dict[str, "Figure"]()
    if "success/mean" in facts.metrics or facts.evaluations:
        figures["success"] = draw_success(
            facts.curve("success/mean"), facts.curve("reward/mean"), facts.evaluations, alarms
        )
    panels = {SIGNALS[name]: facts.curve(name) for name in COLLAPSE if name in facts.metrics}
    if panels:
        figures["signals"] = draw_signals(panels, alarms)
    if facts.phases:
        figures["time"] = draw_time(facts.phases)
    return figures


def write_report(facts: Facts, out: Path) -> Path:
    """Write ``report.md`` and its plots into a folder; an earlier report is overwritten."""
    path, figures = out / "report.md", plots(facts)
    with file_errors("write", path, OTHER_OUT):
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            with whole_file(out / f"report-{name}.png") as temporary:
                figure.savefig(temporary)
        with whole_file(path) as temporary:
            temporary.write_text(markdown(page(facts), figures), encoding="utf-8")
    return path
