"""The processes of a run's engine, as its events report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragen.viewer.reading import Answer

ENGINE = "engine"
"""The kind of the events; their data name the process and say what happened to it."""

MOST = 4096
"""Maximum number of processes of a kind that a config allows. Another program may have written a
larger number into it."""

KINDS = {
    "learner": ("engine.learners", 1),
    "sampler": ("engine.samplers", 1),
}
"""The kinds of processes of an engine on Ray, each with the setting of the number that it starts
with, and the default of this setting."""


def engine_of(
    config: Mapping[str, Any], names: Sequence[str], events: Sequence[Answer]
) -> list[Answer] | None:
    """The engine's processes, each with its state and its last event.

    `names` are those of the run's metrics, and `config` its settings by dotted key. ``None`` if
    nothing is recorded of the engine, as in a run with one process.
    """
    about_engine = [each for each in events if each["kind"] == ENGINE]
    if not about_engine and not any(name.startswith(f"{ENGINE}/") for name in names):
        return None
    found: dict[str, Answer] = {}
    if config.get("engine.name") == "ray":
        for kind, (key, default) in KINDS.items():
            count = config.get(key)
            for number in range(min(count, MOST) if isinstance(count, int) else default):
                _row(found, f"{kind} {number}")
    for event in about_engine:
        data = event["data"] if isinstance(event["data"], dict) else {}
        process, what = data.get("process"), data.get("what")
        if isinstance(process, str):
            row = _row(found, process)
            row["losses"] += what == "lost"
            row["state"] = "lost" if what == "lost" else row["state"]
            row |= {"step": event["step"], "text": event["text"]}
        elif what == "restored":  # a new engine with new processes
            for row in found.values():
                row["state"] = "running"
    return sorted(found.values(), key=_order)


def _row(found: dict[str, Answer], process: str) -> Answer:
    new = {"process": process, "state": "running", "losses": 0, "step": None, "text": ""}
    return found.setdefault(process, new)


def _order(row: Answer) -> tuple[str, int, str]:
    kind, _, number = row["process"].rpartition(" ")
    return kind, int(number) if number.isdecimal() and len(number) < 10 else -1, row["process"]
