"""The responses to failures: each decides by its numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragen.config.sections import GuardConfig, Response
from ragen.core.types import Episode
from ragen.training.recovery import describe_failed
from ragen.training.running import kept_for_rollback
from ragen.training.watchdog import STALL_S, stall_limit
from tests.records import episode, turn

PLAYED = episode(turn(1.0))


def failed(error: str) -> Episode:
    return replace(PLAYED, stop_reason="error", error=f"Traceback\n{error}")


def test_many_failed_episodes_are_complained_of_with_the_commonest_reason() -> None:
    many = [failed("OSError: gone"), failed("OSError: gone"), failed("TimeoutError"), PLAYED]
    assert describe_failed(many) == (
        "3 of 4 episodes (75%) failed and are not trained on, 2 of them with: OSError: gone"
    )


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
    assert kept_for_rollback(GuardConfig(responses=responses), eval_every, spacing=5) == kept


def test_nobody_looks_where_stalls_are_off() -> None:
    assert [stall_limit(response) for response in ("off", "log")] == [0.0, STALL_S]
