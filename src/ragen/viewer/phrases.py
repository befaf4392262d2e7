"""Phrases that thoughts repeat, by step. A template is a phrase that most thoughts contain."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from ragen.viewer.reading import Answer, Question, RunReader, Unanswered

MOST_STEPS, MOST_EPISODES = 40, 128
"""Maximum number of steps, evenly over the run, and of episodes of each. More would take longer and
change no share visibly."""

MOST_PHRASES = 30

LONGEST = 12
"""Maximum number of words in a phrase; longer phrases hardly occur twice."""

Item = TypeVar("Item")


def phrases(asked: Question) -> Answer:
    """``/api/phrases``: the most frequent phrases, and the share of thoughts with them by step."""
    words, phase = asked.whole_number("words", 5), asked.query.get("phase", "train")
    if not 2 <= words <= LONGEST:
        raise Unanswered(f"words = {words}: a phrase has 2 to {LONGEST} words")
    with asked.reading() as run:
        rows = run.rows("SELECT DISTINCT step, attempt FROM episodes WHERE phase = ?", phase)
        attempts = {step: attempt for step, attempt in rows if run.counts(attempt, step)}
        steps = spread(sorted(attempts), MOST_STEPS)
        thoughts = {step: list(_thoughts(run, phase, attempts[step], step)) for step in steps}
    return _table({step: found for step, found in thoughts.items() if found}, words)


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _thoughts(run: RunReader, phase: str, attempt: int, step: int) -> Iterator[list[str]]:
    query = "SELECT id FROM episodes WHERE attempt = ? AND step = ? AND phase = ? ORDER BY id"
    for row in spread(run.rows(query, attempt, step, phase), MOST_EPISODES):
        for (thought,) in run.turns("thought", row["id"]):
            if thought is not None:
                yield thought.split()


def _table(thoughts: dict[int, list[list[str]]], words: int) -> Answer:
    """The phrases with the largest share of the thoughts of any step."""
    shares: dict[str, dict[int, float]] = defaultdict(dict)
    for step, texts in thoughts.items():
        held = (dict.fromkeys(_in(thought, words)) for thought in texts)  # in order, unlike a set
        counts = Counter(chain.from_iterable(held))
        for phrase, count in counts.items():
            if count > 1:
                shares[phrase][step] = count / len(texts)
    ranked = sorted(
        shares, key=lambda phrase: (-max(shares[phrase].values()), -sum(shares[phrase].values()))
    )
    return {
        "steps": list(thoughts),
        "phrases": [
            {
                "phrase": phrase,
                "counts": [round(shares[phrase].get(step, 0.0), 4) for step in thoughts],
            }
            for phrase in _apart(ranked, words)
        ],
    }


def _in(thought: list[str], words: int) -> Iterator[str]:
    return (" ".join(thought[at : at + words]) for at in range(len(thought) - words + 1))


def _apart(ranked: Iterable[str], words: int) -> list[str]:
    """The first phrases that do not overlap.

    A sentence that all thoughts repeat contains many phrases, each shifted by a word. A phrase is
    left out if half of its words or more, at an end, are in a phrase that is already chosen.
    """
    chosen: list[str] = []
    ends: set[tuple[str, ...]] = set()
    half = (words + 1) // 2
    for phrase in ranked:
        own = phrase.split()
        pieces = {tuple(own[at : at + half]) for at in range(words - half + 1)}
        if ends.isdisjoint(pieces):
            chosen.append(phrase)
            ends |= pieces
        if len(chosen) == MOST_PHRASES:
            break
    return chosen
