"""Runs whose estimator values states by continuations (`ragen.rollout.continuations`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ragen.algorithms.estimator import Credit
from ragen.core.errors import RagenError
from ragen.core.types import Episode
from ragen.storage.reader import read_metrics
from ragen.training import collection
from ragen.training.code_check import refuse_unfit
from ragen.training.trainer import resume
from tests.training.runs import (
    SMALL,
    assert_same_results,
    make_config,
    rows,
    train_and_kill,
    uninterrupted,
    uninterrupted_run,
)

VINE: dict[str, Any] = SMALL | {
    "algorithm": "vine",
    "env__name": "tests/pulls.py:Luck",
    "env__max_turns": 3,
    "model__max_length": 256,
    "advantage__continuations": 2,
    "rollout__group_size": 3,
}


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_continuations_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    config, run = make_config(**VINE), tmp_path / "run"
    train_and_kill(config, run, (collection, "value_turns"), 1)
    resume(run)
    assert_same_results(run, uninterrupted(config))


@pytest.mark.slow
def test_continuations_are_counted_and_neither_recorded_nor_trained() -> None:
    run = uninterrupted_run(make_config(**VINE))
    metrics = read_metrics(run)
    played, continued = metrics["tokens/sampled"], metrics["tokens/continuations"]
    assert min(continued.values()) > 0
    assert metrics["progress/tokens"][2] == sum(played.values()) + sum(continued.values())
    assert metrics["exactness/tokens_checked"][1] == 2 * played[1], "in each of two epochs"
    assert rows(run, "SELECT count(*) FROM episodes WHERE phase = 'train'") == [(2 * 2 * 3,)]
    assert any(any(each) for (each,) in rows(run, "SELECT advantages FROM samples"))


def of_episodes(episode: Episode) -> float:
    """A reward term of whole episodes."""
    return 0.0


def own(*, mask_ES: Tensor, state_values_ES: Tensor) -> Credit:
    """An estimator of the user's that needs continuations."""
    return Credit(state_values_ES * mask_ES)


@pytest.mark.parametrize(
    "more",
    [
        {"reward__terms": {f"{__file__}:of_episodes": 1.0}},
        {"reward__normalise": "mean", "reward__over": "batch"},
        {"loss__kl_kind": "k1"},
        {"engine__name": "ray", "engine__max_staleness": 1},
        {"diagnose__gradients_every": 1},
        {"diagnose__gradients_every": 1, "advantage__name": f"{__file__}:own"},
        {"env__name": "agent:true"},
    ],
)
def test_what_continuations_cannot_value_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(RagenError, match="compares rewards with those of continuations"):
        refuse_unfit(make_config(**{"algorithm": "vine"} | more))
