"""A film to search: scenes that persist, forms that pass through them, and one moment to find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np

from ragen.envs.contract import generators, pick, shuffled

BACKDROPS = ("white", "grey", "brown", "green", "pink", "orange")
FORMS = ("disc", "square", "diamond", "ring", "box", "star")
COLOURS = ("red", "blue", "yellow", "purple")
"""The options of each question."""
SHORTEST, LONGEST = 20, 60
"""Frames of a scene; the last scene has those that are left over, too."""
MOMENT = 3
"""Frames in which the target is seen."""
NEAR = 5
"""Frames before and after the moment with the cue, and how far off a named frame may be: 5 s at one
frame per second, as in arXiv:2504.02259."""
ELSEWHERE = 2
"""Times that the cue is seen without the target."""
PASSING, BRIEFEST = 50, 5
"""One other form passes for so many frames of the film; it is seen in 5 to 20 frames."""


@dataclass(frozen=True)
class Film:
    """A level. In the frames of `moment`, the `target` is seen before `backdrop`, near the `cue`.

    A frame is a code: 64 times the index of its backdrop, plus a bit for each of `FORMS` in it.
    `shown` has the frames as they are, and `glimpsed` as a look at many shows them. `colour` is the
    answer, that of the target.
    """

    shown: tuple[int, ...]
    glimpsed: tuple[int, ...]
    backdrop: str
    target: str
    cue: str
    moment: range
    colour: str

    @cached_property
    def question(self) -> str:
        """The question of the level, with its options."""
        return (
            f"Frames 0 to {len(self.shown) - 1}. Which colour has the {self.target} in a "
            f"{self.backdrop} scene near a {self.cue}?\n{', '.join(COLOURS)}"
        )

    def seen(self, frame: int, closely: bool) -> tuple[str, ...]:
        """The backdrop of a frame and the forms that a look shows."""
        return contents((self.shown if closely else self.glimpsed)[frame])

    def describe(self, frame: int, closely: bool) -> str:
        """A frame in words. Only a close look shows the colour of the target."""
        text = f"{frame} {' '.join(self.seen(frame, closely))}"
        if not closely:
            return text
        return text.replace(self.target, f"{self.colour} {self.target}")


@cache
def contents(code: int) -> tuple[str, ...]:
    """The backdrop and the forms of a frame.

    Example:
        >>> contents(3 * 64 + 0b1001)
        ('green', 'disc', 'ring')
    """
    return BACKDROPS[code // 64], *(form for bit, form in enumerate(FORMS) if code >> bit & 1)


@lru_cache(maxsize=1024)
def generate(seed: int, frames: int, noise: float) -> Film:
    """The film of a seed; a glimpse misses forms with probability `noise`, and invents a tenth."""
    level, _ = generators(seed, None)
    starts, backdrops = [0], [pick(level, range(len(BACKDROPS)))]
    while (start := starts[-1] + _between(level, SHORTEST, LONGEST)) <= frames - SHORTEST:
        starts.append(start)
        backdrops.append((backdrops[-1] + _between(level, 1, len(BACKDROPS) - 1)) % len(BACKDROPS))
    ends = [*starts[1:], frames]
    target, cue, *others = shuffled(level, range(len(FORMS)))
    scene = pick(level, range(len(starts)))
    first = _between(level, starts[scene], ends[scene] - MOMENT)
    shown = np.zeros((frames, len(FORMS)), bool)
    shown[first : first + MOMENT, target] = True
    for place in (first, *(_between(level, 0, frames - 1) for _ in range(ELSEWHERE))):
        shown[max(place - NEAR, 0) : place + MOMENT + NEAR, cue] = True
    for _ in range(frames // PASSING):
        place, length = _between(level, 0, frames - 1), _between(level, BRIEFEST, SHORTEST)
        shown[place : place + length, pick(level, others)] = True
    draws = level.random(shown.shape)
    glimpsed = np.where(shown, draws >= noise, draws < noise / 10)
    behind = 64 * np.repeat(backdrops, np.subtract(ends, starts))
    bits = 1 << np.arange(len(FORMS))
    return Film(
        shown=tuple((behind + shown @ bits).tolist()),
        glimpsed=tuple((behind + glimpsed @ bits).tolist()),
        backdrop=BACKDROPS[backdrops[scene]],
        target=FORMS[target],
        cue=FORMS[cue],
        moment=range(first, first + MOMENT),
        colour=pick(level, COLOURS),
    )


def _between(level: np.random.Generator, low: int, high: int) -> int:
    return pick(level, range(low, high + 1))


def evenly(start: int, end: int, count: int) -> list[int]:
    """At most `count` frames from `start` to `end`, evenly spaced and with both ends.

    Example:
        >>> evenly(0, 10, 3), evenly(4, 5, 3), evenly(4, 9, 1)
        ([0, 5, 10], [4, 5], [4])
    """
    count = min(count, end - start + 1)
    return [start + step * (end - start) // max(count - 1, 1) for step in range(count)]


def agreement(named: Sequence[int], moment: Sequence[int]) -> tuple[float, float, float]:
    """Temporal precision P, recall R and F1 of named frames (arXiv:2504.02259, section 3).

    P is the share of the named frames within `NEAR` frames of the moment, R the share of the
    moment's frames within `NEAR` frames of a named one, and F1 = 2PR ÷ (P + R), or 0.

    Example:
        >>> agreement([15, 90], [20, 21])
        (0.5, 0.5, 0.5)
    """
    near = [[abs(frame - other) <= NEAR for other in moment] for frame in named]
    precision = sum(map(any, near)) / len(named)
    recall = sum(map(any, zip(*near, strict=True))) / len(moment)
    return precision, recall, 2 * precision * recall / (precision + recall) if precision else 0.0
