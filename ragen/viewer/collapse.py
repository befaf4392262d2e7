"""Signs of collapse: what thoughts tell, where gradients come from, which phrases come again."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

from ragen.regimes import INFORMED, MIN_PROMPTS, REGIMES, SAMPLINGS, UNDECIDED
from ragen.report import GRADIENTS
from ragen.schema import TURNS_AN_EPISODE, decompress
from ragen.viewer.course import attempts_of, histories, standing
from ragen.viewer.reading import (
    Answer,
    NotFound,
    Query,
    folder_of,
    reading,
    text_of,
    whole_number,
)
from ragen.viewer.run_page import matrix_steps, steps_of

MEASURED = {
    "mi": "mi",
    "conditional_entropy": "conditional_entropy",
    "zscore": "mi_zscore",
    "retrieval": "retrieval_1",
    "chance": "chance_1",
    "prompt_entropy": "prompt_entropy",
    "num_prompts": "prompts",
    "thoughts": "thoughts",
    "left_out": "left_out",
}
"""What is shown of a step's information, and the metric that holds it."""

OF_BUCKET = ("reward_std", "task_per_token", "entropy_per_token", "kl_per_token")

BUCKETS = 4
"""Quartiles of the reward std (`ragen.diagnostics.std_buckets`)."""

LOOKED_AT = 40
"""Steps that the table of phrases has columns for."""

THOUGHTS = 256
"""Thoughts of a step in which phrases are counted: enough for shares to a few points."""

PHRASES = 30


def collapse(root: Path, query: Query) -> Answer:
    """``/api/collapse``: the two axes of collapse over the steps, and gradients by reward std.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    folder = folder_of(root, query)
    measures = [*MEASURED.values(), "regime"]
    names = [f"information/{path}/{measure}" for path in SAMPLINGS for measure in measures]
    buckets = [f"{GRADIENTS}{bucket}/{m}" for bucket in range(BUCKETS) for m in OF_BUCKET]
    with reading(folder) as connection:
        attempts = attempts_of(connection)
        course = standing(attempts, histories(connection, attempts, [*names, *buckets]))
        matrices = matrix_steps(connection)
    return {
        "paths": {path: _path(path, course) for path in SAMPLINGS},
        "thresholds": {
            "mi_share": INFORMED,
            "conditional_entropy": UNDECIDED,
            "min_prompts": MIN_PROMPTS,
        },
        "matrix_steps": matrices,
        "gradients": _gradients(course),
    }


def _path(path: str, course: dict[str, dict[int, float]]) -> Answer:
    prefix = f"information/{path}"
    steps = sorted(course.get(f"{prefix}/mi", {}))
    shown: Answer = {
        name: [course.get(f"{prefix}/{measure}", {}).get(step) for step in steps]
        for name, measure in MEASURED.items()
    }
    regimes = course.get(f"{prefix}/regime", {})
    return shown | {"steps": steps, "regime": [REGIMES[int(regimes[step])] for step in steps]}


def _gradients(course: dict[str, dict[int, float]]) -> Answer:
    found = {name: series for name, series in course.items() if name.startswith(GRADIENTS)}
    steps = sorted({step for series in found.values() for step in series})
    return {
        "steps": steps,
        "buckets": [
            {
                "bucket": bucket,
                **{
                    m: [found.get(f"{GRADIENTS}{bucket}/{m}", {}).get(step) for step in steps]
                    for m in OF_BUCKET
                },
            }
            for bucket in range(BUCKETS)
            if any(name.startswith(f"{GRADIENTS}{bucket}/") for name in found)
        ],
    }


def matrix(root: Path, query: Query) -> Answer:
    """``/api/matrix``: log p of each thought after each prompt, and both in words.

    Raises:
        Unanswered: There is no such run or matrix, or the run cannot be read.
    """
    folder, step = folder_of(root, query), whole_number(query, "step")
    with reading(folder) as connection:
        row = connection.execute(
            "SELECT * FROM cross_scores WHERE step = ? AND path = ? ORDER BY attempt DESC LIMIT 1",
            (step, text_of(query, "path")),
        ).fetchone()
    if row is None:
        raise NotFound(f"there is no matrix of step {step} in this run")
    scores = decompress("scores", row["scores"])
    return {
        "scores": scores.reshape(row["num_thoughts"], row["num_prompts"]).tolist(),
        "own": decompress("own", row["own"]).tolist(),
        "thoughts": json.loads(row["thoughts"]),
        "prompts": json.loads(row["prompts"]),
    }


def phrases(root: Path, query: Query) -> Answer:
    """``/api/phrases``: the phrases that most thoughts hold, and their share by step.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    folder, phase = folder_of(root, query), query.get("phase", "train")
    length = min(20, max(1, whole_number(query, "words"))) if "words" in query else 5
    with reading(folder) as connection:
        steps = _spread(steps_of(connection, "episodes", phase), LOOKED_AT)
        shares = [_shares(_thoughts(connection, phase, step), length) for step in steps]
    totals: Counter[str] = Counter()
    for share in shares:
        totals.update(share)
    return {
        "steps": steps,
        "phrases": [
            {
                "phrase": phrase,
                "first": next(s for s, share in zip(steps, shares, strict=True) if share[phrase]),
                "last": [s for s, share in zip(steps, shares, strict=True) if share[phrase]][-1],
                "counts": [share[phrase] for share in shares],
            }
            for phrase, _ in totals.most_common(PHRASES)
        ],
    }


def _spread(steps: list[int], most: int) -> list[int]:
    """At most so many steps, evenly, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _thoughts(connection: sqlite3.Connection, phase: str, step: int) -> list[str]:
    """Thoughts of a step, of its latest attempt."""
    rows = connection.execute(
        "SELECT t.thought FROM episodes AS e JOIN turns AS t"
        f" ON t.id BETWEEN e.id * {TURNS_AN_EPISODE} AND (e.id + 1) * {TURNS_AN_EPISODE} - 1"
        " WHERE e.phase = ? AND e.step = ? AND t.thought IS NOT NULL AND e.attempt ="
        " (SELECT max(attempt) FROM episodes WHERE phase = ? AND step = ?) LIMIT ?",
        (phase, step, phase, step, THOUGHTS),
    )
    return [thought for (thought,) in rows]


def _shares(thoughts: list[str], length: int) -> Counter[str]:
    """Of each phrase, the share of the thoughts that hold it.

    Example:
        >>> _shares(["go up now", "go up"], 2)["go up"]
        1.0
    """
    held: Counter[Any] = Counter()
    for thought in thoughts:
        words = re.findall(r"\S+", thought[:20_000])
        last = max(1, len(words) - length + 1)
        held.update({" ".join(words[at : at + length]) for at in range(last)} - {""})
    return Counter({phrase: count / len(thoughts) for phrase, count in held.items()})
