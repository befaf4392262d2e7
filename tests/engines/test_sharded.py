"""Processes that train together: their gradients, weights and checkpoints are those of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ragen.engines.sharded import Rank
from tests.bandit_model import bandit_model
from tests.engines.recorded import batch_for, collection, config_of, in_processes


def test_two_processes_train_as_one() -> None:
    collection()
    config = config_of("ppo")

    def trained(size: int, rank: int = 0, address: str = "") -> dict[str, Tensor]:
        one = Rank(config, str(bandit_model()), rank, size, address)
        batch = batch_for(one, config)
        for step in range(3):
            one.update(batch, step)
        weights = dict(one.weights())
        one.close()
        return weights

    expected = trained(1)
    (actual, none) = in_processes(2, lambda rank, address: trained(2, rank, address))
    assert none == {}
    close: Any = torch.testing.assert_close
    close(actual, expected, atol=1e-5, rtol=0)
