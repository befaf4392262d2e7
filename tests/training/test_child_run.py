"""Runs that begin with the policy of another run, which goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ragen.core.errors import RagenError
from ragen.core.stopping import StopRequested
from ragen.reports.card import origin
from ragen.settings.saved import run_config
from ragen.storage import checkpoint
from ragen.training.trainer import resume, train
from tests.training.runs import (
    SMALL,
    SendSignal,
    assert_same_results,
    make_config,
    recorded_results,
)

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({"loss__kl": 0.0}, ""),
    "lora": ({"loss__kl": 0.0, "lora__rank": 2}, "belongs to the model {}, which is gone"),
    "kl": ({"loss__kl": 0.5, "loss__kl_kind": "k3"}, "{}, which is gone: restore it"),
}
"""Settings of a run, and why it cannot go on without the checkpoint that it began with."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "neither")) for kind in KINDS]
)
def test_a_child_goes_on_bit_for_bit_after_its_parent_went_on(
    own_bandit_run: Path, kind: str
) -> None:
    """A child that needs its parent's checkpoint is refused without it."""
    parent = own_bandit_run
    whole, child = parent.with_name("whole"), parent.with_name("child")
    settings, refusal = KINDS[kind]
    config = make_config(**SMALL, **settings, model__path=str(parent))
    train(config, whole)
    with pytest.raises(StopRequested):
        train(config, child, watcher=SendSignal("step", 1, signal.SIGINT))
    began = checkpoint.newest(parent)
    assert run_config(child).model.path == str(began)
    away = began.rename(parent.with_name("away"))
    if refusal:
        with pytest.raises(RagenError, match=refusal.format(re.escape(str(began)))):
            resume(child)
        away.rename(began)
    resume(child)
    assert_same_results(child, recorded_results(whole))
    if kind == "lora":
        assert origin(str(child)) == run_config(parent).model.path
