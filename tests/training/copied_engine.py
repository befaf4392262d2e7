"""An engine whose sampler has weights of its own, in one process: a play goes on in an update."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import torch

from ragen.algorithms.batch import Batch
from ragen.config.config import Config
from ragen.core.metrics import Metrics
from ragen.engines.factory import make_sampler
from ragen.engines.local import LocalEngine
from ragen.models.names import resolve_model


class CopiedEngine(LocalEngine):
    """A `LocalEngine` that samples with a copy of the model."""

    ROUNDS = 400
    """Rounds of the event loop that an update takes."""

    def __init__(self, config: Config, path: str) -> None:
        super().__init__(config, path)
        self.copied = copy.deepcopy(self.model)
        self.policy = make_sampler(self.copied, self.chat, path, config.model, config.rollout)

    @torch.no_grad()
    def _copy(self) -> None:
        pairs = zip(self.copied.parameters(), self.model.parameters(), strict=True)
        for copied, weights in pairs:
            copied.copy_(weights)

    async def _push(self) -> None:
        self._copy()
        await self.policy.publish(self.copied, self.version)
        self.learner.synced = True

    async def update(self, batch: Batch, step: int) -> Metrics:
        metrics = await super().update(batch, step)
        for _ in range(self.ROUNDS):
            await asyncio.sleep(0)
        return metrics


def copied_engine(config: Config, path: str | None = None, after: Any = None) -> CopiedEngine:
    """In the place of `make_engine`."""
    return CopiedEngine(config, path or resolve_model(config.model.path, config.env.name))


def use_copied(monkeypatch: Any) -> None:
    """Let runs use this engine."""
    for module in ("trainer", "recovery"):
        monkeypatch.setattr(f"ragen.training.{module}.make_engine", copied_engine)
