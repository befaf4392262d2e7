"""The policies for failures: each decides by its numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragen.config.sections import GuardConfig, Response
from ragen.core.errors import UnplayableError
from ragen.core.types import Episode
from ragen.training.failures import FailedEpisodes, LostEngine, Rollback, SmallGroup, Stall
from tests.records import episode, turn

PLAYED = episode(turn(1.0))


def failed(error: str) -> Episode:
    return replace(PLAYED, stop_reason="error", error=f"Traceback\n{error}")


def test_many_failed_episodes_are_complained_of_with_the_commonest_reason() -> None:
    policy = FailedEpisodes(alarm_fraction=0.5)
    few = [failed("OSError: gone"), PLAYED, PLAYED]
    assert policy.complaint(few) == policy.complaint([]) == policy.complaint([PLAYED]) == ""
    many = [failed("OSError: gone"), failed("OSError: gone"), failed("TimeoutError"), PLAYED]
    assert policy.complaint(many) == (
        "3 of 4 episodes (75%) failed and are not trained on, 2 of them with: OSError: gone"
    )
    with pytest.raises(UnplayableError, match="failed in every episode: OSError: gone"):
        policy.complaint([failed("OSError: gone")] * 2)


def test_a_group_needs_two_episodes_where_they_are_compared() -> None:
    assert [SmallGroup().min_played(name) for name in ("grpo", "gae")] == [2, 1]


@pytest.mark.parametrize(
    ("responses", "eval_every", "kept"),
    [
        ({}, 3, 0),
        ({"reward_drop": "log", "grad_spike": "rollback"}, 20, 3),
        ({"reward_drop": "rollback"}, 20, 9),  # an alarm at 100, an onset at 61: 60, 65 … 100
        ({"reward_drop": "rollback"}, 3, 3),
    ],
)
def test_enough_checkpoints_are_kept_to_precede_an_onset(
    responses: dict[str, Response], eval_every: int, kept: int
) -> None:
    guard = GuardConfig(responses=responses)
    assert Rollback(reach_steps=10).kept_checkpoints(guard, eval_every, spacing=5) == kept


def test_the_fourth_loss_ends_a_run_and_nobody_looks_where_stalls_are_off() -> None:
    assert [LostEngine(most=3).ends_run(losses) for losses in (3, 4)] == [False, True]
    assert [Stall(5.0).limit(response) for response in ("off", "log", "stop")] == [0.0, 5.0, 5.0]
