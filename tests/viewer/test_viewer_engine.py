"""What the viewer says of a run's engine: its processes, from events and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from viewer_run import make_engine_run, make_run

from ragen.viewer.processes import MOST, engine_of
from ragen.viewer.reading import Question, Runs
from ragen.viewer.server import ROUTES


def engine(root: Path, run: str) -> Any:
    return ROUTES["/api/run"](Question(Runs(root), {"run": run}))["engine"]


def test_processes_have_the_state_of_their_last_event(tmp_path: Path) -> None:
    make_engine_run(tmp_path / "ray")
    rows = [(r["process"], r["state"], r["losses"], r["step"]) for r in engine(tmp_path, "ray")]
    assert rows == [
        ("learner 0", "running", 0, None),
        ("learner 1", "running", 0, None),
        ("sampler 0", "lost", 1, 20),
        ("sampler 1", "running", 1, 5),
    ]


def test_a_run_in_one_process_has_no_processes(tmp_path: Path) -> None:
    make_run(tmp_path / "lake")
    assert engine(tmp_path, "lake") is None
    assert engine_of({"engine.name": "local"}, ["engine/queue"], []) == []  # It plays ahead.


def test_a_config_or_events_of_another_program_break_nothing() -> None:
    for count in (10**12, -1, "many", None, 2.5, [1]):
        config = {"engine.name": "ray", "engine.samplers": count, "engine.learners": 1}
        rows = engine_of(config, ["engine/queue"], [])
        assert rows is not None and len(rows) <= 1 + MOST
    strange: list[Any] = [None, [], 3, {"process": 7}, {"process": "sampler " + "9" * 5000}]
    events = [{"kind": "engine", "step": 1, "text": "?", "data": data} for data in strange]
    rows = engine_of({}, [], events)
    assert rows is not None and len(rows) == 1
