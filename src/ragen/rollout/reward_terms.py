"""Reward terms of turns: penalties that a run may add to each turn, mostly for its thought.

Terms of whole episodes and groups are in `ragen.rollout.episode_terms`.

The papers train on the reward alone and leave open how reasoning itself could be rewarded
(arXiv:2504.20073, arXiv:2604.06268). Here thoughts are always measured where the environment can
read them (`Env.read_thought`), and rewarded only where a run asks for it (``reward.terms``).

The results are written into `Turn.info` when the turn is played:

- ``thought_read``: true if the thought could be read; absent where the environment reads none.
- ``facts_stated``, ``facts_true``: the facts of the thought, and those that hold in the
  environment's state before the turn.
- ``plan_kept``: true if the answer has the actions that the thought planned, in their order.
- ``observation_f1``, ``prediction_f1``: how well these parts of the thought (`thought_parts`)
  describe the states before and after the actions; absent where the reply was not valid.
- ``reward_terms``: the amount that each reward term added to the turn, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import isawaitable
from statistics import fmean
from typing import Any

from ragen.config.extensions import JUDGE, TERM, Judged, judged_by, short_name
from ragen.core.metrics import Metrics, mean
from ragen.core.types import Episode, Turn
from ragen.core.user_code import UserCodeError, awaited, boundary
from ragen.envs.contract import Reading

Term = Callable[[Any], Any]
"""The signatures of reward terms: a number for each record that is judged, times the weight.

    def brevity(turn: Turn) -> float: ...
    def politeness(episode: Episode) -> float: ...
    def shortest(episodes: Sequence[Episode]) -> Sequence[float]: ...

The annotation of the parameter says what is judged: a turn, an episode, or the episodes of a group
that did not fail. A turn can only be charged: −1 to 0 of `Turn.penalty`, which filters do not read,
because a term that pays in each turn would reward more turns. Episodes get −1 to 1 of the last
turn's reward, which filters read. Any term may be ``async``.
"""

TERM_S = 30.0
"""Seconds that one call of a reward term from outside may take."""

NEED_READING = frozenset({"grounding", "consistency", "observation", "prediction"})
"""Terms that need an environment that reads thoughts."""

_PART = re.compile(r"<(observation|prediction)>([^<]*)</\1>")

NGRAM = 4
"""Length, in words, of the n-grams that `repeated_ngrams` compares."""

BAND = (1 / 20, 3 / 4)
"""Shortest and longest thought without a fault, as shares of the tokens that a reply may have. A
shorter one has hardly a word, and a longer one leaves hardly any room for the answer."""


# Faults, each from 0 (none) to 1. An unknown fault is 0.


def grounding(turn: Turn) -> float:
    """Share of the thought's facts that are false."""
    stated = turn.info.get("facts_stated", 0)
    return 1 - turn.info["facts_true"] / stated if stated else 0.0


def consistency(turn: Turn) -> float:
    """1 if the answer does something other than the thought planned."""
    return float(turn.info.get("plan_kept") is False)


def observation(turn: Turn) -> float:
    """1 − F1 of the thought's ``<observation>``: 1 if there is none or the reply is not valid."""
    return 1 - float(turn.info.get("observation_f1", 0.0))


def prediction(turn: Turn) -> float:
    """1 − F1 of the thought's ``<prediction>``, likewise."""
    return 1 - float(turn.info.get("prediction_f1", 0.0))


def length(turn: Turn) -> float:
    """How far the thought's n tokens are outside of the `BAND` from low to high.

    (low − n) / low below it, (n − high) / (longest − high) above it, where longest is the greatest
    number of tokens of a reply. So it is 1 for an empty thought, and where no room is left for the
    answer.
    """
    if turn.thought_span is None:
        return 0.0
    start, stop = turn.thought_span
    longest = turn.prompt.max_tokens
    low, high = (share * longest for share in BAND)
    number = stop - start
    return min(1.0, max((low - number) / low, (number - high) / (longest - high), 0.0))


def repetition(turn: Turn) -> float:
    """Share of the thought's n-grams that repeat an earlier one."""
    return repeated_ngrams(turn.thought or "") or 0.0


def repeated_ngrams(thought: str) -> float | None:
    """Share of a thought's n-grams of `NGRAM` words that repeat an earlier one; ``None`` if none.

    Example:
        >>> repeated_ngrams("a b c d e a b c d")  # of six, the last repeats the first
        ... # doctest: +ELLIPSIS
        0.1666...
    """
    words = thought.split()
    ngrams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else None


def _charge(fault: Callable[[Turn], float]) -> Callable[[Turn], float]:
    def term(turn: Turn) -> float:
        return 0.0 - fault(turn)  # not −x, which turns 0.0 into −0.0

    return term


_FAULTS = (grounding, consistency, observation, prediction, length, repetition)
TERMS = {each.__name__: _charge(each) for each in _FAULTS}
"""RAGEN's own reward terms by their name in the config: each costs its fault. The form of a reply
has a key of its own, ``reward.format_penalty``."""


def find_term(name: str) -> Term:
    """The reward term of a name in the config, RAGEN's own or from outside."""
    return TERM.find(name, TERMS)


def weights_for(judged: Judged, weights: Mapping[str, float]) -> dict[str, float]:
    """The weights of the terms that judge such records, without the judge."""
    return {
        name: weight
        for name, weight in weights.items()
        if name != JUDGE and judged_by(find_term(name)) == judged
    }


async def apply_reward_terms(turn: Turn, weights: Mapping[str, float]) -> Turn:
    """The turn with its terms' values in its penalty and its info; `Turn.reward` stays as it is.

    `weights` has terms of turns only.
    """
    if not weights:
        return turn
    terms = {}
    for name, weight in weights.items():
        own = TERMS.get(name)
        value = own(turn) if own else (await call_term(name, turn))[0]
        terms[short_name(name)] = weight * value
    info = {**turn.info, "reward_terms": terms}
    return replace(turn, penalty=turn.penalty + sum(terms.values()), info=info)


async def call_term(name: str, judged: Turn | Episode | Sequence[Episode]) -> list[float]:
    """The values of a term from outside, one for each record that it judges."""
    call = f"the reward term {name}"
    try:
        return await term_values(call, find_term(name), judged)
    except UserCodeError as failure:
        text = f"{failure}\n{call} failed: {failure.reason}"
        raise UserCodeError(text, failure.timed_out) from failure


async def term_values(
    call: str, term: Term, judged: Turn | Episode | Sequence[Episode]
) -> list[float]:
    """The value of a term for each record that it judges; `call` is the term's name in messages."""
    with boundary(call, TERM_S):
        answer = term(judged)
    if isawaitable(answer):
        answer = await awaited(call, answer, TERM_S)
    with boundary(call, TERM_S):
        answers = answer if isinstance(judged, Sequence) else [answer]
        values = [float(value) for value in answers]
    if isinstance(judged, Sequence) and len(values) != len(judged):
        raise UserCodeError(f"it returned {len(values)} numbers for {len(judged)} episodes")
    most = 0 if isinstance(judged, Turn) else 1
    for value in values:
        if not -1 <= value <= most:
            what = "of a turn, a number from -1 to 0" if most == 0 else "a number from -1 to 1"
            raise UserCodeError(f"it returned {value:g}: {what} is expected")
    return values


def reward_term_metrics(episodes: Sequence[Episode]) -> Metrics:
    """``reward_terms/<name>``: the mean of what each term added to an episode's reward."""
    terms = [
        turn.info["reward_terms"]
        for episode in episodes
        for turn in episode.turns
        if "reward_terms" in turn.info
    ]
    count = len(episodes)
    return {
        f"reward_terms/{name}": mean(sum(each[name] for each in terms) / count, count)
        for name in dict.fromkeys(name for each in terms for name in each)
    }


def thought_parts(thought: str) -> dict[str, str]:
    """The contents of ``<observation>`` and ``<prediction>``, none if one appears twice.

    Example:
        >>> thought_parts("<observation>P a0</observation>go<prediction>P a1</prediction>")
        {'observation': 'P a0', 'prediction': 'P a1'}
    """
    found = _PART.findall(thought)
    parts = dict(found)
    return parts if len(parts) == len(found) else {}


def part_info(part: str, reading: Reading | None) -> dict[str, float]:
    """The entry of `Turn.info` about a part of a thought, from the environment's reading of it.

    Without `Reading.f1`, it is the share of stated facts that are true.
    """
    if reading is None or reading.stated == 0:
        return {f"{part}_f1": 0.0}
    f1 = reading.true / reading.stated if reading.f1 is None else reading.f1
    return {f"{part}_f1": f1}


def thought_info(reading: Reading | None, actions_asked: Sequence[str]) -> dict[str, Any]:
    """The entries of `Turn.info` about a thought, from the environment's reading of it."""
    if reading is None:
        return {"thought_read": False}
    info = {"thought_read": True, "facts_stated": reading.stated, "facts_true": reading.true}
    if reading.plan is None:
        return info
    return info | {"plan_kept": reading.plan == tuple(actions_asked)}


def thought_metrics(turns: Sequence[Turn]) -> Metrics:
    """The truth of thoughts and how often their plans are kept; unknown metrics are left out.

    - ``thought/read_fraction``: thoughts that could be read, of all that were given to the
      environment.
    - ``thought/hallucinated_fraction``: false facts, of those stated.
    - ``thought/consistent_fraction``: plans that the answer carries out, of those stated.
    - ``thought/observation_f1``, ``thought/prediction_f1``: the means of the entries in the info.
    """
    read = [turn.info["thought_read"] for turn in turns if "thought_read" in turn.info]
    infos = [turn.info for turn in turns if "facts_stated" in turn.info]
    kept = [info["plan_kept"] for info in infos if "plan_kept" in info]
    metrics: Metrics = {}
    if read:
        metrics["thought/read_fraction"] = mean(fmean(read), len(read))
    if stated := sum(info["facts_stated"] for info in infos):
        true = sum(info["facts_true"] for info in infos)
        metrics["thought/hallucinated_fraction"] = mean(1 - true / stated, stated)
    if kept:
        metrics["thought/consistent_fraction"] = mean(fmean(kept), len(kept))
    for name in ("observation_f1", "prediction_f1"):
        if scores := [turn.info[name] for turn in turns if name in turn.info]:
            metrics[f"thought/{name}"] = mean(fmean(scores), len(scores))
    return metrics
