"""The collapse page: information metrics over steps, cross-scores and gradient norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragen.core.metrics import Series
from ragen.diagnostics.collapse import HIGH_ENTROPY, HIGH_MI, MIN_PROMPTS, REGIMES
from ragen.reports.facts import GRADIENTS
from ragen.storage.reader import current
from ragen.viewer.reading import Answer, NotFound, Question, RunReader, array_of, loaded

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


def collapse(asked: Question) -> Answer:
    """``/api/collapse``: information metrics over steps, the recorded matrices, gradient norms."""
    with asked.reading() as run:
        names = [name for name in run.metric_names if name.startswith((INFORMATION, GRADIENTS))]
        course = current(run.histories(names))
        matrices = _matrices(run)
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
    every = [series for measures in buckets.values() for series in measures.values()]
    steps = sorted(set().union(*every))
    return {
        "steps": steps,
        "buckets": [
            {"bucket": bucket}
            | {measure: [series.get(step) for step in steps] for measure, series in own.items()}
            for bucket, own in sorted(buckets.items())
        ],
    }


def matrix(asked: Question) -> Answer:
    """``/api/matrix``: the cross-scores of a step, with its thoughts and prompts; −∞ is null."""
    step, path = asked.whole_number("step"), asked.text("path")
    with asked.reading() as run:
        rows = run.rows(
            "SELECT scores, own, num_prompts, thoughts, prompts FROM cross_scores"
            " WHERE attempt = ? AND step = ? AND path = ?",
            _matrices(run).get((step, path)),
            step,
            path,
        )
    if not rows:
        raise NotFound(f"no cross-scores of step {step}, path {path!r}, are recorded")
    (row,) = rows
    scores = array_of("scores", row["scores"]).astype(float).reshape(-1, row["num_prompts"])
    return {
        "scores": scores.round(DIGITS).tolist(),
        "own": array_of("own", row["own"]).tolist(),
        "thoughts": loaded(row["thoughts"]),
        "prompts": loaded(row["prompts"]),
    }


def _matrices(run: RunReader) -> dict[tuple[int, str], int]:
    """The attempt whose matrix still counts, by step and path."""
    rows = run.rows("SELECT attempt, step, path FROM cross_scores ORDER BY attempt")
    return {(step, path): number for number, step, path in rows if run.counts(number, step)}
