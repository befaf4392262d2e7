"""Evaluations and comparisons as tables, with random and optimal play as baselines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ragen.core.errors import printable
from ragen.core.statistics import binomial_variance, interquartile_mean
from ragen.core.tables import Section
from ragen.evaluation.compare import Arm, Comparison
from ragen.evaluation.outcomes import Outcome, describe_failures
from ragen.evaluation.results import Evaluation

PLAYER_COLUMNS = ("player", "success", "95 %", "mean return")


def evaluation_table(evaluation: Evaluation, outcomes: Sequence[Outcome]) -> Section:
    """One target in one environment."""
    e = evaluation
    title = f"{e.env}, {e.episodes} held-out levels"
    columns: tuple[str, ...] = PLAYER_COLUMNS
    rows = e.with_baselines([e.row(f"{e.target}, {e.how}")])
    if e.samples > 1:
        title, columns = f"{title} × {e.samples}", (*columns, f"pass@{e.samples}", "95 %")
        value, low, high = e.pass_at[str(e.samples)]
        chance = f"{value:.1%}", f"{low:.1%} – {high:.1%}"
        rows = tuple(row + (chance if row[2] else ("", "")) for row in rows)
    return Section(title, tuple(_lines(e, outcomes)), columns, rows)


def _lines(e: Evaluation, outcomes: Sequence[Outcome]) -> list[str]:
    # One level says nothing about the spread over levels.
    spread = f" [{e.mean_return_low:.3f}, {e.mean_return_high:.3f}]" if e.episodes > 1 else ""
    lines = [
        f"Per episode: return {e.mean_return:.3f}{spread}, {e.mean_turns:.2f} turns, "
        f"{e.mean_actions:.2f} actions, {e.effective_fraction:.1%} of them effective.",
        f"Per turn: {e.valid_fraction:.1%} valid replies, {e.thought_words:.1f} words of thought, "
        f"{e.completion_tokens:.1f} tokens.",
    ]
    if e.invalid_reason:
        lines.append(f"An invalid reply: {e.invalid_reply!r}. {printable(e.invalid_reason)}")
    if e.pass_at:
        chances = (
            f"pass@{k} {value:.1%} [{low:.1%}, {high:.1%}]"
            for k, (value, low, high) in e.pass_at.items()
        )
        lines.append(f"At least one of k episodes of a level: {', '.join(chances)}.")
    if e.total_prompt_tokens:
        lines.append(
            f"Tokens: {e.total_prompt_tokens:,} read, {e.total_completion_tokens:,} written."
        )
    if e.folder:
        lines.append(f"Every episode, with its replies: ragen view {shlex.quote(e.folder)}")
    return lines + describe_failures(outcomes)


def evaluation_record(evaluation: Evaluation, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The object that ``ragen eval --json`` prints for one environment."""
    return evaluation.record() | {
        "failed_requests": sum(outcome.stop_reason == "request" for outcome in outcomes),
        "failures": describe_failures(outcomes),
    }


def comparison_table(comparison: Comparison) -> Section:
    """Both arms with the baselines, below the verdict."""
    a, b = comparison.a, comparison.b
    first = a.evaluations[0]
    rows = []
    for arm in (a, b):
        mean = ", interquartile mean" if arm.num_seeds > 1 else ""
        interval = f"{arm.success.low:.1%} – {arm.success.high:.1%}"
        rows.append((f"{arm.name}, {first.how}{mean}", f"{arm.success.value:.1%}", interval))
    p_value = "" if comparison.p_value is None else f"; McNemar's p = {comparison.p_value:.2g}"
    samples = f", {first.samples} episodes each" if first.samples > 1 else ""
    lines = [
        comparison.verdict,
        f"Of {first.episodes} levels{samples}: {a.name} did better on {comparison.won}, {b.name} "
        f"on {comparison.lost}{p_value}.",
        f"Smallest detectable effect: {100 * comparison.detectable:.1f} points (80 % power, 5 % "
        "two-sided).",
    ]
    for arm in (a, b):
        if arm.num_seeds > 1:
            rates = ", ".join(f"{evaluation.success:.1%}" for evaluation in arm.evaluations)
            lines.append(f"{arm.name}: {rates}.")
    shown = tuple(row[:3] for row in first.with_baselines(rows))
    return Section(comparison.env, (*lines, *comparison.failures), PLAYER_COLUMNS[:3], shown)


def closing_sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """Mean scores over environments, and limits of the verdicts, for all comparisons."""
    lines = list(dict.fromkeys(line for each in comparisons for line in each.cautions))
    rows = []
    if len(comparisons) > 1:
        missed = 1 - 0.95 ** len(comparisons)
        lines.append(
            f"Each interval holds separately: in {missed:.0%} of such suites of "
            f"{len(comparisons)}, at least one misses the truth."
        )
        for arms in zip(*((each.a, each.b) for each in comparisons), strict=True):
            strata, noises = _normalized_scores(arms)
            if strata and arms[0].num_seeds > 1:
                mean = interquartile_mean(strata, fmean(noises))
                interval = f"{mean.low:.2f} – {mean.high:.2f}"
                rows.append(
                    (f"{arms[0].name}, {len(strata)} environments", f"{mean.value:.2f}", interval)
                )
    if rows:
        lines.append(
            "Score: the interquartile mean of success over seeds and environments, with random "
            "play as 0 and optimal play as 1."
        )
    columns = ("player", "score", "95 %")
    return [Section("Limits", tuple(lines), columns, tuple(rows))] if lines else []


def _normalized_scores(arms: Sequence[Arm]) -> tuple[list[list[float]], list[float]]:
    """Success per seed with random play as 0 and optimal play as 1, and each score's own variance.

    There is a list of scores for each arm, one arm per environment. Environments without a solver,
    or in which optimal play is no better than random play, are left out.
    """
    strata, noises = [], []
    for arm in arms:
        scores = []
        for each in arm.evaluations:
            if each.optimal is not None and each.optimal > each.random:
                span = each.optimal - each.random
                scores.append((each.success - each.random) / span)
                noises.append(binomial_variance(each.success, each.episodes) / span**2)
        if scores:
            strata.append(scores)
    return strata, noises
