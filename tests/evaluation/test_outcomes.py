"""Outcomes of episodes and their storage."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from ragen.core.errors import RagenError
from ragen.core.types import Episode, Usage
from ragen.evaluation.outcomes import Outcome, OutcomeStore, outcome_of
from ragen.storage.database import DATABASE, new_run_folder
from ragen.storage.reader import read_evaluations
from ragen.storage.recorder import Recorder
from tests import records

LOST = Outcome("bandit", 124, 1, False, -0.5, 2, 3, 2, 1, 7, 90, 12, "failed")
A, B = {"settings": "a"}, {"settings": "b"}


def test_outcome_of_an_episode_golden() -> None:
    """Two turns: 2 prompt and 2 sampled tokens, then the counts of a server, 50 and 9."""
    first = records.turn(1.0, thought="go up  now", executed=2, info={"effective": 1})
    second = records.turn(-0.5, thought=None, penalty=-0.1, executed=1, info={"effective": 1})
    completion = replace(second.completion, token_ids=None, logprobs=None, usage=Usage(50, 9))
    turns = (first, replace(second, completion=completion))
    ends = {"terminated": True, "truncated": False, "success": True}
    outcome = outcome_of(Episode("w", 123, 17, 0, 4, turns, "solved", **ends))
    assert outcome == Outcome("w", 123, 4, True, 0.5, 2, 3, 2, 1, 3, 52, 11, "solved")
    assert not outcome.failed and outcome.reason == ""
    failed = replace(outcome, error="Traceback …\nKeyError: 1\n")
    assert failed.failed and failed.reason == "KeyError: 1"


def test_outcomes_are_read_in_order_and_replaced_by_level_and_sample(tmp_path: Path) -> None:
    with OutcomeStore(tmp_path, A) as store, OutcomeStore(tmp_path, B) as other:
        for outcome in (LOST, replace(LOST, sample=0, success=True), replace(LOST, level_seed=123)):
            store.add(outcome)
        other.add(replace(LOST, error="half a pair: \ud83d"))
        store.add(replace(LOST, success=True))
        stored = store.outcomes()
        assert [(o.level_seed, o.sample, o.success) for o in stored] == [
            (123, 1, False),
            (124, 0, True),
            (124, 1, True),
        ]
        assert [each.error for each in other.outcomes()] == ["half a pair: ?"]
    with OutcomeStore(tmp_path, A) as store:
        assert store.outcomes() == stored


def test_evaluations_of_training_and_of_the_command_are_kept_apart(tmp_path: Path) -> None:
    """Also while the run is written; and a resume drops no evaluation of the command."""
    folder = new_run_folder(tmp_path, "bandit")
    record = {"env": "bandit", "temperature": 1.0, "episodes": 4, "success": 0.5}
    with Recorder.create(folder, "seed = 0") as recorder:
        recorder.evaluation(3, record)
        recorder.commit()
        with OutcomeStore(folder, {"seed": 1}) as store:
            store.add(LOST)
            store.finish({**record, "success": 1.0})
            key = store.key
        recorder.evaluation(5, record)
        recorder.forget_after(0, 3)
    assert read_evaluations(folder) == [{**record, "attempt": 0, "step": 3}]
    with sqlite3.connect(folder / DATABASE) as connection:
        rows = connection.execute("SELECT step, key, settings, success FROM evaluations").fetchall()
    assert rows == [(3, None, None, 0.5), (None, key, '{"seed": 1}', 1.0)]


def test_an_unwritable_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RagenError, match=r"cannot write .* with --out$") as caught:
        OutcomeStore(tmp_path / "file" / "evals", A)
    assert "\n" not in str(caught.value)
