"""A run trains the same whether its environment changes all that it can reach or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ragen
from ragen.envs.bandit import Bandit
from ragen.models.names import resolve_model
from ragen.storage.reader import read_metrics
from tests.hostile_envs import UNDONE

SETTINGS = {
    "steps": 2,
    "eval.episodes": 4,
    "rollout.num_groups": 4,
    "rollout.group_size": 4,
    "threads": 1,
}


class Meddling(Bandit):
    """Every call does the next deed of `UNDONE`."""

    calls = 0

    def step(self, action: str) -> Any:
        deeds = [deed for name, deed in UNDONE.items() if name not in ("fork", "prints", "thread")]
        deeds[type(self).calls % len(deeds)]()
        type(self).calls += 1
        return super().step(action)


class Exiting(Bandit):
    """It tries to end the run on every third level."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = super().reset(seed=seed, options=options)
        if seed is not None and seed % 3 == 1:
            raise KeyboardInterrupt
        return answer


def train(env: type[Bandit], out: Path, **changes: Any) -> dict[str, dict[int, float]]:
    values = SETTINGS | changes | {"model.path": str(resolve_model("base", "bandit"))}
    run = ragen.train("bandit", values, env=env, out=out).run
    metrics = read_metrics(run)
    return {name: series for name, series in metrics.items() if not name.startswith("time/")}


def test_a_run_learns_the_same_whatever_its_environment_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = train(Bandit, Path("plain"))
    meddled = train(Meddling, Path("meddled"))
    assert Meddling.calls > len(UNDONE)
    assert meddled == plain


def test_a_run_goes_on_where_episodes_try_to_end_it(tmp_path: Path) -> None:
    metrics = train(Exiting, tmp_path / "run", **{"eval.episodes": 0})
    failed = metrics["episodes/failed"]
    assert len(failed) == 2 and all(0 < count < 16 for count in failed.values())
