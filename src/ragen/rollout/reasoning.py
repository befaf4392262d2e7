"""Thoughts beside the reward: are they true, are they kept, and what their faults cost.

The papers train on the reward alone and leave open how reasoning itself could be rewarded
(arXiv:2504.20073, arXiv:2604.06268). Here it is measured always, wherever the environment can read
its
agent's thoughts (`Env.read_thought`), and rewarded only where a run asks for it (``reward.terms``).

What was read is written into `Turn.info` when the turn is played, by `notes`:

- ``thought_read``: whether the thought could be read; absent where the environment reads none.
- ``facts_stated``, ``facts_true``: of its facts, against the environment's state before the turn.
- ``plan_kept``: whether the answer asks for the actions that the thought planned, in their order.
- ``reward_terms``: what each reward term added to `Turn.penalty`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from ragen.core.metrics import Metrics, mean
from ragen.core.types import Episode, Turn
from ragen.envs.contract import Reading

NGRAM = 4
"""Words in a row that count as repeated when they come again in the same thought."""

BAND = (1 / 20, 3 / 4)
"""Lengths of a thought that are no fault, as shares of the tokens that a reply may have: below them
there is hardly a word, above them hardly room for the answer."""


def notes(reading: Reading | None, actions_asked: Sequence[str]) -> dict[str, Any]:
    """What `Turn.info` keeps of a thought that the environment was asked to read.

    Example:
        >>> notes(Reading(3, 2, ("Down",)), ("Down", "Left"))
        {'thought_read': True, 'facts_stated': 3, 'facts_true': 2, 'plan_kept': False}
        >>> notes(None, ("Down",))
        {'thought_read': False}
    """
    if reading is None:
        return {"thought_read": False}
    found = {
        "thought_read": True,
        "facts_stated": reading.stated,
        "facts_true": reading.true,
    }
    if reading.plan is None:
        return found
    return found | {"plan_kept": reading.plan == tuple(actions_asked)}


def measures(turns: Sequence[Turn]) -> Metrics:
    """How true thoughts are and whether they are kept; what nothing is known of is left out.

    - ``thought/read_fraction``: thoughts that could be read, of those the environment was asked to
    read.
    - ``thought/hallucinated_fraction``: facts that the environment's state contradicts, of those
    stated.
    - ``thought/consistent_fraction``: plans that the answer carries out, of those stated.
    """
    read = [turn.info["thought_read"] for turn in turns if "thought_read" in turn.info]
    told = [turn.info for turn in turns if "facts_stated" in turn.info]
    kept = [info["plan_kept"] for info in told if "plan_kept" in info]
    metrics: Metrics = {}
    if read:
        metrics["thought/read_fraction"] = mean(fmean(read), len(read))
    if stated := sum(info["facts_stated"] for info in told):
        true = sum(info["facts_true"] for info in told)
        metrics["thought/hallucinated_fraction"] = mean(1 - true / stated, stated)
    if kept:
        metrics["thought/consistent_fraction"] = mean(fmean(kept), len(kept))
    return metrics


def repeated_ngrams(thought: str) -> float | None:
    """Share of a thought's runs of `NGRAM` words that had come before in it, if there are any.

    Example:
        >>> repeated_ngrams("a b c d e a b c d")  # of six runs the last is the first again
        ... # doctest: +ELLIPSIS
        0.1666...
    """
    words = thought.split()
    ngrams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else None


# Faults, each from 0 (none) to 1 (as bad as can be). A reward term costs its weight times the
# fault, and none ever pays: what paid for each turn would pay for taking more of them. What cannot
# be told is not charged for.


def grounding(turn: Turn) -> float:
    """Share of the facts which the thought states that are false."""
    stated = turn.info.get("facts_stated", 0)
    return 1 - turn.info["facts_true"] / stated if stated else 0.0


def consistency(turn: Turn) -> float:
    """1 where the thought plans and the answer asks for something else."""
    return float(turn.info.get("plan_kept") is False)


def length(turn: Turn) -> float:
    """How far the thought's n tokens are out of the `BAND` from low to high.

    (low − n) / low below it and (n − high) / (most − high) above it, where `most` is what the whole
    reply may have: 1 at no token, and at no room for the answer.
    """
    if turn.thought_span is None:
        return 0.0
    start, stop = turn.thought_span
    most = turn.prompt.max_tokens
    low, high = (share * most for share in BAND)
    number = stop - start
    return min(1.0, max((low - number) / low, (number - high) / (most - high), 0.0))


def repetition(turn: Turn) -> float:
    """Share of the thought's runs of `NGRAM` words that had come before in it."""
    return repeated_ngrams(turn.thought or "") or 0.0


TERMS: Mapping[str, Callable[[Turn], float]] = MappingProxyType(
    {
        "grounding": grounding,
        "consistency": consistency,
        "length": length,
        "repetition": repetition,
    }
)
"""The faults by the name of their term. The form of a reply has its own key,
``reward.format_penalty``."""

NEED_READING = frozenset({"grounding", "consistency"})
"""Terms that an environment which reads no thoughts could never charge."""


def charged(turn: Turn, weights: Mapping[str, float]) -> Turn:
    """The turn with what its reward terms cost, as part of `Turn.penalty` and apart in its info.

    `Turn.reward` stays what the environment paid: filters, reports and evaluations read that.

    Args:
        turn: A finished turn.
        weights: What a fault of 1 costs, by the name of the term.
    """
    if not weights:
        return turn
    # 0 − x, since −x would make a −0.0 of no fault.
    terms = {name: 0.0 - weight * TERMS[name](turn) for name, weight in weights.items()}
    info = {**turn.info, "reward_terms": terms}
    return replace(turn, penalty=turn.penalty + sum(terms.values()), info=info)


def term_metrics(played: Sequence[Episode]) -> Metrics:
    """``reward_terms/<name>``: what each term added to an episode's reward, in the mean."""
    charges = [
        turn.info["reward_terms"] for e in played for turn in e.turns if "reward_terms" in turn.info
    ]
    names = dict.fromkeys(name for charge in charges for name in charge)
    return {
        f"reward_terms/{name}": mean(
            sum(charge[name] for charge in charges) / len(played), len(played)
        )
        for name in names
    }
