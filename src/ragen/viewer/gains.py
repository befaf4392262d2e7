"""What training changed, level by level: evaluations play the same levels, so that they pair."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragen.core.statistics import mcnemar, paired_difference, smallest_detectable, success_rate
from ragen.viewer.course import standing_in
from ragen.viewer.reading import Answer, Query, folder_of, reading

PHASES = ("eval", "eval greedy")
"""Whose levels come again; each training step has levels of its own."""

Course = dict[int, bool]
"""Step to success, of one level."""


def gains(root: Path, query: Query) -> Answer:
    """``/api/gains``: the first evaluation against the last, paired by level.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    with reading(folder_of(root, query)) as connection:
        played = _played(connection)
    found = (_gain(levels) for levels in played.values())
    return {
        "gains": [
            {"phase": phase, "env": env} | gain
            for (phase, env), gain in zip(played, found, strict=True)
            if gain is not None
        ]
    }


def _gain(levels: dict[int, Course]) -> dict[str, Any] | None:
    """What changed between the first step and the last that was played, on the levels of both."""
    steps = {step for course in levels.values() for step in course}
    first, last = min(steps), max(steps)
    both = sorted(level for level, course in levels.items() if {first, last} <= course.keys())
    if first == last or not both:
        return None
    before, after = ([levels[level][step] for level in both] for step in (first, last))
    difference = paired_difference([list(map(float, after))], [list(map(float, before))])
    changes = [int(now) - int(then) for then, now in zip(before, after, strict=True)]
    return {
        "from_step": first,
        "to_step": last,
        "before": asdict(success_rate(before, both)),
        "after": asdict(success_rate(after, both)),
        "difference": asdict(difference),
        "levels": len(both),
        "won": changes.count(1),
        "lost": changes.count(-1),
        "mcnemar_p": mcnemar(changes),
        "smallest_detectable": smallest_detectable(difference),
    }


def _played(connection: sqlite3.Connection) -> dict[tuple[str, str], dict[int, Course]]:
    """By phase and environment, and by level, how the level went at each step that counts."""
    stands = standing_in(connection)
    found: dict[tuple[str, str], dict[int, Course]] = {}
    rows = connection.execute(
        "SELECT phase, env, level_seed, step, attempt, success FROM episodes"
        f" WHERE phase IN ({','.join('?' * len(PHASES))}) ORDER BY phase, step, id",
        PHASES,
    )
    for phase, env, level, step, number, success in rows:
        if stands(number, step):
            found.setdefault((phase, env), defaultdict(dict))[level][step] = bool(success)
    return found
