"""The list of runs: the state of each, its progress and its success.

A summary is cached until the run's files change. Only whether a process writes the run is checked
each time. A run that could not be read is tried again, because a lock or a lost network share
changes no time stamp.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ragen.config.config import Config
from ragen.config.keys import Flat, raw_values
from ragen.core.errors import RagenError
from ragen.core.statistics import Interval, gain
from ragen.evaluation.outcomes import how_sampled, phase_of
from ragen.reports.facts import ALARM
from ragen.storage.database import CONFIG, is_claimed
from ragen.storage.reader import current
from ragen.viewer.reading import (
    Answer,
    Question,
    RunReader,
    Runs,
    Unreadable,
    loaded,
    reading,
    signature,
)

SPARK = 40

SETTINGS = {
    **{"env": "env.name", "model": "model.path"},
    **{name: name for name in ("algorithm", "recipe", "seed", "budget", "steps")},
}
"""The settings that a row shows, and their keys."""

UNKNOWN: Answer = {
    **dict.fromkeys((*SETTINGS, "step", "attempts", "num_episodes", "success", "before", "gain")),
    **dict.fromkeys(("random", "optimal", "last_event", "problem")),
    **{"spark": [], "alarms": 0, "parts": []},
}


def runs(asked: Question) -> Answer:
    """``/api/runs``: the runs of the folder, latest start first."""
    found = [run_summary(asked.runs, run) for run in asked.runs.ids()]
    found.sort(key=lambda run: (run["started"], run["run"]), reverse=True)
    return {"folder": asked.runs.root.resolve().name, "runs": found}


def run_summary(runs: Runs, run: str) -> Answer:
    """One run's row in the list; if it cannot be read, ``problem`` says why."""
    folder = (runs.root / run).resolve()
    now = signature(folder)
    written, config = [stamp[2] / 1e9 for stamp in now[:2] if stamp], now[2]
    times = {
        "updated": max(written, default=None),
        "started": config[2] / 1e9 if config else 0.0,
    }
    about = {"run": run, "name": folder.name} | UNKNOWN | times
    before, summary = runs.summaries.get(folder, (None, {}))
    if before != now:
        try:
            summary = _summary(folder)
        except RagenError as error:
            return about | {"state": "unreadable", "problem": str(error)}
        runs.summaries[folder] = now, summary
    return about | summary | ({"state": "running"} if is_claimed(folder) else {})


def _summary(folder: Path) -> Answer:
    """The part of a row that is cached."""
    config = read_settings(folder)
    try:
        with reading(folder) as run:
            shown = {name: config.get(key) for name, key in SETTINGS.items()}
            return shown | _progress(run, config)
    except RagenError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # SQLite checks no types
        raise Unreadable(f"the run holds a value that RAGEN does not write: {error}") from None


def read_settings(folder: Path) -> Flat:
    """A config by dotted key, as in its file: not validated, so an outdated value hides no run."""
    try:
        return settings_of((folder / CONFIG).read_bytes())
    except OSError as error:
        raise Unreadable(f"config.toml cannot be read: {error.strerror}") from None


def settings_of(text: bytes) -> Flat:
    """The values of a `config.toml` by dotted key, as in its text."""
    try:
        return raw_values(tomllib.loads(text.decode()))
    except (ValueError, RecursionError) as error:  # a recursion by thousands of brackets
        raise Unreadable(f"config.toml is damaged: {error}") from None


def _progress(run: RunReader, config: Flat) -> Answer:
    histories = run.histories(("success/mean", "progress/updates"))
    attempts, course = list(histories), current(histories)
    evaluated = evaluations(run)
    temperature = config.get("eval.temperature")
    trained = [each for each in evaluated if each.get("temperature") == temperature]
    step = attempts[-1].last if attempts else 0
    last = run.rows(
        "SELECT step, kind, text, json_extract(data, '$.action') AS action FROM events"
        " ORDER BY id DESC LIMIT 1"
    )
    last_event = dict(last[0]) if last else None
    shown = trained[-1] if trained else evaluated[-1] if evaluated else {}
    return {
        "state": _end(config, step, course.get("progress/updates", {}), trained, last_event),
        "step": step,
        "attempts": len(attempts),
        "num_episodes": run.value("SELECT count(*) FROM episodes"),
        "success": _success(trained[-1]) if trained else None,
        "before": _success(trained[0]) if trained else None,
        "gain": _gain(run, trained),
        "random": shown.get("random"),
        "optimal": shown.get("optimal"),
        "parts": [
            {name: part.get(name) for name in ("env", "success", "random", "optimal")}
            for part in map(_evaluation, shown.get("parts", ()))
        ],
        "spark": _thinned(list(course.get("success/mean", {}).values()), SPARK),
        "alarms": run.value("SELECT count(*) FROM events WHERE kind = ?", ALARM),
        "last_event": last_event,
    }


def _end(
    config: Flat,
    step: int,
    updates: Mapping[int, float],
    evaluated: list[Answer],
    last: Answer | None,
) -> str:
    """The state of a run without a process: finished (and evaluated), stopped or interrupted."""
    spent = updates.get(step, 0.0) if config.get("budget") == "updates" else step
    evaluates = config.get("eval.episodes") != 0
    complete = not evaluates or any(each["step"] == step for each in evaluated)
    if spent >= config.get("steps", Config.model_fields["steps"].default) and complete:
        return "finished"
    stopped = last is not None and last["kind"] == "guard" and last["action"] == "stop"
    return "stopped" if stopped else "interrupted"


def evaluations(run: RunReader) -> list[Answer]:
    """The evaluations of a run that still count, in order.

    Each is its record, with time, step and way of sampling, and success as an interval.
    """
    found = []
    for row in run.rows("SELECT attempt, step, time, record FROM evaluations ORDER BY id"):
        if run.counts(row["attempt"], row["step"]):
            when = {name: row[name] for name in ("attempt", "step", "time")}
            found.append(_evaluation(loaded(row["record"])) | when)
    return found


def with_parts(evaluated: list[Answer]) -> list[Answer]:
    """Evaluations, each followed by its parts: the single environments of a mixture."""
    return [
        each | _evaluation(part) | {"is_part": True} if part else each
        for each in evaluated
        for part in (None, *each.get("parts", ()))
    ]


def _evaluation(said: Answer) -> Answer:
    low, high = said.get("success_low"), said.get("success_high")
    success = {"value": said.get("success"), "low": low, "high": high}
    return said | {"how": how_sampled(said.get("temperature", 1.0)), "success": success}


def _success(evaluation: Answer) -> Answer:
    return {**evaluation["success"], **{name: evaluation[name] for name in ("step", "how")}}


def _gain(run: RunReader, evaluated: list[Answer]) -> Answer | None:
    """The latest success less the first, as `ragen report` gives it."""
    if not evaluated or evaluated[0]["step"] == evaluated[-1]["step"]:
        return None
    ends = [evaluated[place] for place in (0, -1)]
    first, latest = (each["success"] for each in ends)
    if None in (*first.values(), *latest.values()):
        return None
    solved: list[dict[tuple[str, int], float]] = [
        {
            (env, level): float(success)
            for env, level, success in run.rows(
                "SELECT env, level_seed, success FROM episodes"
                " WHERE (attempt, step, phase) = (?, ?, ?) ORDER BY id",
                each["attempt"],
                each["step"],
                phase_of(each["temperature"]),
            )
        }
        for each in ends
    ]
    found, is_paired = gain(Interval(**first), Interval(**latest), *solved)
    return asdict(found) | {"paired": is_paired}


def _thinned(numbers: list[float], most: int) -> list[float]:
    """At most `most` numbers, each the mean of a range."""
    ranges = np.array_split(numbers, min(most, len(numbers))) if numbers else []
    return [float(each.mean()) for each in ranges]
