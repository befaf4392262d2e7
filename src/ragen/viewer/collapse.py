"""The collapse page: information metrics over steps, cross-scores and gradient norms."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ragen.diagnostics.collapse import HIGH_ENTROPY, HIGH_MI, MIN_PROMPTS, REGIMES
from ragen.reports.facts import GRADIENTS
from ragen.storage.attempts import attempts_of, still_counts
from ragen.viewer.reading import (
    Answer,
    NotFound,
    Query,
    array_of,
    folder_of,
    loaded,
    reading,
    text_of,
    whole_number,
)
from ragen.viewer.run_metrics import Series, current, histories

INFORMATION = "information/"
"""Prefix of the information metrics; the path of the sampling follows."""

AXES: Mapping[str, str] = {
    "mi": "mi",
    "conditional_entropy": "conditional_entropy",
    "prompt_entropy": "prompt_entropy",
    "zscore": "mi_zscore",
    "retrieval": "retrieval_1",
    "chance": "chance_1",
    "num_prompts": "prompts",
}
"""The values of a step, and the names of their metrics below the path."""

DIGITS = 4
"""Decimals of a score, in nats: more than the drawing of the matrix needs."""


def collapse(root: Path, query: Query) -> Answer:
    """``/api/collapse``: information metrics over steps, the recorded matrices, gradient norms.

    Raises:
        Unanswered: There is no such run, or it cannot be read.
    """
    with reading(folder_of(root, query)) as connection:
        attempts = attempts_of(connection)
        names = [
            name
            for (name,) in connection.execute("SELECT DISTINCT name FROM metrics")
            if name.startswith((INFORMATION, GRADIENTS))
        ]
        course = current(attempts, histories(connection, attempts, names))
        matrices = _matrices(connection)
    paths = sorted({name.split("/")[1] for name in names if name.startswith(INFORMATION)})
    return {
        "paths": {path: _path(course, path) for path in sorted(paths, key="first".__ne__)},
        "thresholds": {
            "mi_share": HIGH_MI,
            "conditional_entropy": HIGH_ENTROPY,
            "min_prompts": MIN_PROMPTS,
        },
        "matrix_steps": [{"step": step, "path": path} for step, path in sorted(matrices)],
        "gradients": _gradients(course),
    }


def _path(course: Mapping[str, Series], path: str) -> dict[str, list[Any]]:
    """The metrics of one path; steps without a thought to measure are left out."""
    own = {name: course.get(f"{INFORMATION}{path}/{metric}", {}) for name, metric in AXES.items()}
    regimes = course.get(f"{INFORMATION}{path}/regime", {})
    steps = sorted(regimes)
    return {
        "steps": steps,
        "regime": [REGIMES[int(regimes[step])] for step in steps],
        **{name: [series.get(step) for step in steps] for name, series in own.items()},
    }


def _gradients(course: Mapping[str, Series]) -> Answer:
    """Gradient norms by bucket of reward std, lowest first, with one value a step."""
    buckets: dict[str, dict[str, Series]] = {}
    for name, series in course.items():
        if name.startswith(GRADIENTS):
            _, bucket, measure = name.split("/")
            buckets.setdefault(bucket, {})[measure] = series
    steps = _steps(series for measures in buckets.values() for series in measures.values())
    return {
        "steps": steps,
        "buckets": [
            {"bucket": bucket}
            | {measure: [series.get(step) for step in steps] for measure, series in own.items()}
            for bucket, own in sorted(buckets.items())
        ],
    }


def _steps(found: Iterable[Series]) -> list[int]:
    return sorted({step for series in found for step in series})


def matrix(root: Path, query: Query) -> Answer:
    """``/api/matrix``: the cross-scores of a step, with its thoughts and prompts.

    A score of −∞ is null.

    Raises:
        Unanswered: There is no such run or step, or the run cannot be read.
    """
    step, path = whole_number(query, "step"), text_of(query, "path")
    with reading(folder_of(root, query)) as connection:
        attempt = _matrices(connection).get((step, path))
        row = connection.execute(
            "SELECT scores, own, num_prompts, thoughts, prompts FROM cross_scores"
            " WHERE attempt = ? AND step = ? AND path = ?",
            (attempt, step, path),
        ).fetchone()
    if row is None:
        raise NotFound(f"no cross-scores of step {step}, path {path!r}, are recorded")
    scores = array_of("scores", row["scores"]).reshape(-1, row["num_prompts"])
    return {
        "scores": [
            [round(score, DIGITS) if math.isfinite(score) else None for score in line]
            for line in scores.tolist()
        ],
        "own": array_of("own", row["own"]).tolist(),
        "thoughts": loaded(row["thoughts"]),
        "prompts": loaded(row["prompts"]),
    }


def _matrices(connection: sqlite3.Connection) -> dict[tuple[int, str], int]:
    """The attempt whose matrix still counts, by step and path."""
    counts = still_counts(connection)
    rows = connection.execute("SELECT attempt, step, path FROM cross_scores ORDER BY attempt")
    return {(step, path): number for number, step, path in rows if counts(number, step)}
