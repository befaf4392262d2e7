"""Searches of a film at equal frames: evenly spaced ones, an oracle, and T* (arXiv:2504.02259).

The steps of T* are those of the authors' code (github.com/mll-lab-nu/TStar), as functions of arrays
over the N frames. A frame that T* looks at again counts as seen again, and it stops in time to see
the frames that it names; there, these cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy  # loads `interpolate` on first use

from ragen.envs.worlds.haystack.film import Film, evenly

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

TARGET, CUE = 1.0, 0.5
"""Weights of an object in the score of a frame."""
QUARTILE = 75
WINDOW = 5
"""Frames to each side that take part of a high score."""
SMOOTHING = 0.5
THRESHOLD = 0.5
"""Score above which a close look confirms the target."""
CONFIDENCE, CLOSE_CONFIDENCE = (0.3, 0.9), (0.6, 1.0)
"""Range of the detector's confidence, in a frame among many and in a frame seen closely."""


@dataclass(frozen=True, slots=True)
class Search:
    """The frames that a search names, those that it saw closely, and how many it saw in all."""

    named: list[int]
    closely: list[int]
    num_seen: int


Player = Callable[[Film, int, int, np.random.Generator], Search]
"""Searches a film with at most so many frames in all, and names at most so many."""


def uniform(film: Film, budget: int, keep: int, generator: np.random.Generator) -> Search:
    """See evenly spaced frames closely."""
    return _see(evenly(0, len(film.shown) - 1, budget), keep)


def random(film: Film, budget: int, keep: int, generator: np.random.Generator) -> Search:
    """See random frames closely."""
    return _see(draw(np.ones(len(film.shown)), budget, generator), keep)


def _see(frames: list[int], keep: int) -> Search:
    named = [frames[place] for place in evenly(0, len(frames) - 1, keep)]
    return Search(named, frames, len(frames))


def oracle(film: Film, budget: int, keep: int, generator: np.random.Generator) -> Search:
    """See the middle of the moment."""
    middle = film.moment[len(film.moment) // 2]
    return Search([middle], [middle], 1)


def with_target(film: Film, found: Search) -> Search:
    """Name the frames in which the target was seen closely instead, if there are any."""
    seen = [frame for frame in found.closely if film.target in film.seen(frame, True)]
    return replace(found, named=list(dict.fromkeys(seen)) or found.named)


def tstar(
    film: Film, budget: int, keep: int, generator: np.random.Generator, grid: int = 4
) -> Search:
    """T*, which looks at grid² frames at once and names frames drawn by their scores."""
    frames, count = len(film.shown), grid**2
    scores, unvisited = np.zeros(frames), np.ones(frames, dtype=bool)
    sampled, closely = first_frames(frames, count), list[int]()
    left, is_found = budget - keep, False
    while not is_found and left >= count:
        left -= count
        found = [detect(film, frame, False, generator) for frame in sampled]
        confidences = np.array([max(each.values(), default=0.0) for each in found])
        scores[sampled], unvisited[sampled] = confidences, False
        spread(scores, sampled, confidences)
        chances = distribution(scores, unvisited)
        for frame, objects in zip(sampled, found, strict=True):
            if film.target in objects and left and not is_found:
                left -= 1
                closely.append(frame)
                again = detect(film, frame, True, generator)
                scores[frame] = max(again.values(), default=0.0)
                is_found = film.target in again and bool(scores[frame] > THRESHOLD)
        sampled = draw(sampling_weights(chances, unvisited, count), count, generator)
    named = draw(scores if scores.any() else np.ones(frames), keep, generator)
    return Search(named, [*closely, *named], budget - keep - left + len(named))


def detect(
    film: Film, frame: int, closely: bool, generator: np.random.Generator
) -> dict[str, float]:
    """The target and the cues that are seen in a frame, with confidence × weight of each.

    The cues are the backdrop and the form that the question names. The confidence is random.
    """
    low, high = CLOSE_CONFIDENCE if closely else CONFIDENCE
    weights = {film.target: TARGET, film.backdrop: CUE, film.cue: CUE}
    seen = [each for each in film.seen(frame, closely) if each in weights]
    return {each: weights[each] * (low + (high - low) * generator.random()) for each in seen}


def first_frames(frames: int, count: int) -> list[int]:
    """The frames of the first round: ``first_frames(11, 4)`` are 0, 2, 4 and 6."""
    return list(range(0, frames, frames // count))[:count]


def spread(scores: Floats, sampled: Sequence[int], confidences: Floats) -> None:
    """Raise the scores around the top quarter of the sampled frames, in place and in their order.

    s(f + d) = max(s(f + d), s(f) ÷ (|d| + 1)) for |d| up to `WINDOW`.
    """
    threshold = np.percentile(confidences, QUARTILE)
    for frame, confidence in zip(sampled, confidences, strict=True):
        if confidence >= threshold:
            around = np.arange(max(frame - WINDOW, 0), min(frame + WINDOW + 1, len(scores)))
            scores[around] = np.maximum(scores[around], scores[frame] / (abs(around - frame) + 1))


def distribution(scores: Floats, unvisited: Bools) -> Floats:
    """P = σ(max(1 ÷ N, f)) ÷ Σ, with a smoothing spline f through the scores of visited frames.

    The squared errors of the spline add up to at most `SMOOTHING`.
    """
    visited, frames = np.flatnonzero(~unvisited), np.arange(len(scores))
    spline = scipy.interpolate.UnivariateSpline(visited, scores[visited], s=SMOOTHING)(frames)
    raised = 1 / (1 + np.exp(-np.maximum(1 / len(frames), spline)))
    chances: Floats = raised / raised.sum()
    return chances


def sampling_weights(chances: Floats, unvisited: Bools, count: int) -> Floats:
    """Weights of the frames in the next round: the top quarter of (P + count ÷ N) · unvisited.

    If it has fewer than `count` frames, all frames have the weight P + count ÷ N.
    """
    raised = chances + count / len(chances)
    weights: Floats = raised * unvisited
    weights = weights * (weights >= np.percentile(weights, QUARTILE))
    return weights if np.count_nonzero(weights) >= count else raised


def draw(weights: Floats, count: int, generator: np.random.Generator) -> list[int]:
    """At most `count` frames, drawn one by one in proportion to their weights.

    Those of the smallest −ln(u) ÷ weight have the probabilities of successive draws without
    replacement (Efraimidis and Spirakis 2006).
    """
    possible = np.flatnonzero(weights)
    keys = -np.log1p(-generator.random(len(weights))[possible]) / weights[possible]
    drawn: list[int] = possible[np.argsort(keys, kind="stable")[:count]].tolist()
    return drawn
