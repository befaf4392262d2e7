"""A run goes on where its environment tries to end it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ragen
from ragen.envs.bandit import Bandit
from ragen.storage.reader import read_metrics
from tests.bandit_model import settings


class Exiting(Bandit):
    """It tries to end the run on every third level."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = super().reset(seed=seed, options=options)
        if seed is not None and seed % 3 == 1:
            raise KeyboardInterrupt
        return answer


def test_a_run_goes_on_where_episodes_try_to_end_it(tmp_path: Path) -> None:
    values = settings(steps=1, eval__episodes=0, rollout__num_groups=4, rollout__group_size=2)
    run = ragen.train("bandit", values, env=Exiting, out=tmp_path / "run").run
    failed = read_metrics(run)["episodes/failed"]
    assert failed.keys() == {1} and 0 < failed[1] < 8
