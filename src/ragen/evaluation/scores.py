"""Evaluations as tables: what an agent reached, always between floor and ceiling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragen.core.errors import RagenError
from ragen.core.tables import Section
from ragen.evaluation.evaluation import Evaluation
from ragen.evaluation.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Prices:
    """What an endpoint charges for a million tokens that it reads and that it writes.

    Raises:
        RagenError: A price below 0.

    Example:
        >>> Prices(0.5, 2.0).cost(1_000_000, 250_000)
        1.0
    """

    read: float = 0.0
    written: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.read < math.inf and 0 <= self.written < math.inf):
            raise RagenError("--price-in and --price-out: expected numbers ≥ 0")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens cost."""
        return (prompt_tokens * self.read + completion_tokens * self.written) / 1e6


def scores(evaluation: Evaluation, outcomes: Sequence[Outcome], prices: Prices) -> Section:
    """One target in one environment."""
    e = evaluation
    optimal_return = "" if e.optimal_return is None else f"{e.optimal_return:.3f}"
    rows = [
        ("random play", f"{e.random:.1%}", "", f"{e.random_return:.3f}", "", ""),
        (
            f"{e.target}, {e.how}",
            f"{e.success:.1%}",
            f"{e.success_low:.1%} – {e.success_high:.1%}",
            f"{e.mean_return:.3f}",
            f"{e.pass_at_k:.1%}",
            f"{e.pass_at_k_low:.1%} – {e.pass_at_k_high:.1%}",
        ),
    ]
    if e.optimal is not None:
        rows.append(("optimal play", f"{e.optimal:.1%}", "", optimal_return, "", ""))
    columns = ("player", "success", "95 %", "mean return", f"pass@{e.samples}", "95 %")
    several = e.samples > 1
    width = len(columns) if several else len(columns) - 2
    return Section(
        f"{e.env}, {e.episodes} held-out levels" + (f" × {e.samples}" if several else ""),
        tuple(_lines(e, outcomes, prices)),
        columns[:width],
        tuple(row[:width] for row in rows),
    )


def _lines(e: Evaluation, outcomes: Sequence[Outcome], prices: Prices) -> list[str]:
    # One level says nothing of how far others lie from it.
    spread = f" [{e.mean_return_low:.3f}, {e.mean_return_high:.3f}]" if e.episodes > 1 else ""
    lines = [
        f"An episode: return {e.mean_return:.3f}{spread}, {e.mean_turns:.2f} turns, "
        f"{e.mean_actions:.2f} actions, {e.effective_fraction:.1%} of them effective.",
        f"A turn: {e.valid_fraction:.1%} valid replies, {e.thought_words:.1f} words of thought, "
        f"{e.completion_tokens:.1f} tokens.",
    ]
    if e.pass_at:
        chances = (
            f"pass@{k} {value:.1%} [{low:.1%}, {high:.1%}]"
            for k, (value, low, high) in e.pass_at.items()
        )
        lines.append(f"One of k episodes of a level: {', '.join(chances)}.")
    if e.total_prompt_tokens:
        cost = prices.cost(e.total_prompt_tokens, e.total_completion_tokens)
        lines.append(
            f"Tokens: {e.total_prompt_tokens:,} read, {e.total_completion_tokens:,} written"
            + (f"; at the prices given they cost {cost:.4g}." if cost else ".")
        )
    return lines + failures(outcomes)


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """What failed, by whom and why; such episodes count as no success.

    Example:
        >>> lost = Outcome("w", 123, 0, False, 0.0, *(0,) * 7, "request", "it said HTTP 500")
        >>> failures([lost])[0].partition(":")[0]
        '1 of 1 episodes failed at the server and counts as no success'
    """
    lines = []
    for where, failed, advice in (
        (
            "at the server",
            [o for o in outcomes if o.failed and o.stop_reason == "request"],
            "; the same command plays them again",
        ),
        (
            "in the environment",
            [o for o in outcomes if o.failed and o.stop_reason != "request"],
            "",
        ),
    ):
        if failed:
            ((reason, _),) = Counter(outcome.reason for outcome in failed).most_common(1)
            verb = "counts" if len(failed) == 1 else "count"
            lines.append(
                f"{len(failed)} of {len(outcomes)} episodes failed {where} and {verb} as no "
                f"success: {reason}{advice}"
            )
    return lines


def as_record(
    evaluation: Evaluation, outcomes: Sequence[Outcome], prices: Prices
) -> dict[str, Any]:
    """What ``ragen eval --json`` prints of one environment."""
    e = evaluation
    return e.record() | {
        "cost": prices.cost(e.total_prompt_tokens, e.total_completion_tokens),
        "failed_requests": sum(outcome.stop_reason == "request" for outcome in outcomes),
        "failures": failures(outcomes),
    }
