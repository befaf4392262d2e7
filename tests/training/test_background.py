"""Evaluations in the background have the numbers of those that a run waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragen.storage.checkpoint import SETTINGS_HASH
from ragen.training.background import Background, Evaluated, evaluate_checkpoint
from ragen.training.trainer import train
from tests.training.runs import make_config, recorded_results


def results(run: Path) -> dict[str, Any]:
    """All that a run came to, but for the hash of its settings."""
    found = recorded_results(run)
    del found["state"][SETTINGS_HASH]
    return found


def test_saved_policies_play_as_those_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bandit_run: Path
) -> None:
    """The other process takes seconds to start; its work is done here, when the run asks for it."""
    asked: list[tuple[Path, int]] = []

    async def answer(background: Background) -> Evaluated:
        return await evaluate_checkpoint(*asked[-1], lambda _: None)

    monkeypatch.setattr(
        Background, "ask", lambda _, folder, step, beat: asked.append((folder, step))
    )
    monkeypatch.setattr(Background, "answer", answer)
    config = make_config(eval__every=1, checkpoint__keep=9, eval__background=True)
    train(config, tmp_path / "run")
    assert [step for _, step in asked] == [1, 2]
    assert results(tmp_path / "run") == results(bandit_run)
