"""The outcome of an episode."""

from __future__ import annotations

from dataclasses import replace

from ragen.core.types import Episode, Usage
from ragen.evaluation.outcomes import Outcome, outcome_of
from tests import records


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
