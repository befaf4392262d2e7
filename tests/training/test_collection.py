"""Collecting the groups of a step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ragen.algorithms.batch import Batch, collate
from ragen.config.config import Config
from ragen.config.reading import merge
from ragen.core.types import Completion, Episode, Prompt, Sample
from ragen.engines.engine import Engine
from ragen.envs.registry import env_factory
from ragen.rollout.setup import Setup
from ragen.training.collection import collect_groups, sample_record
from ragen.training.mixture import Start


class Counting:
    """A policy that counts how many completions it is asked for at the same time."""

    open = most = 0

    async def complete(self, prompt: Prompt) -> Completion:
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        return Completion(None, None, "</think><answer>Dragon</answer>", "stop", 0)


@pytest.mark.parametrize(
    ("engine", "at_once"), [({}, 3), ({"engine.name": "ray", "engine.samplers": 2}, 6)]
)
def test_every_sampler_gets_as_many_episodes_as_it_has_slots(
    engine: dict[str, Any], at_once: int
) -> None:
    shape = {"rollout.slots": 3, "rollout.num_groups": 4, "rollout.group_size": 4}
    policy = Counting()
    collect(policy, merge("bandit", engine | shape))
    assert policy.most == at_once


def collect(policy: Counting, config: Config) -> None:
    """Play groups of single turns, of which none is lost."""
    fake = cast("Engine", SimpleNamespace(policy=policy, forget=lambda: None))
    setup = Setup("bandit", env_factory("bandit"), 1, 1, 1)
    starts = [Start(setup, level) for level in range(config.rollout.num_groups)]

    async def play() -> None:
        groups = await collect_groups(fake, starts, config.rollout, 0, 0, config.episodes_at_once)
        assert [len(group.episodes) for group in groups] == [4] * len(starts)

    asyncio.run(play())


class Computed(TorchDispatchMode):
    """The most numbers that an operation computes, but for views."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.most = max(self.most, result.numel())
        return result


def test_a_recorded_row_costs_no_more_in_a_larger_batch() -> None:
    def scored(length: int, shift: float) -> Batch:
        on = (False,) + (True,) * (length - 1)
        turns, ends = (-1,) + (0,) * (length - 1), (False,) * (length - 1) + (True,)
        logprobs = tuple(-0.1 * number for number in range(length))
        rows = [
            Sample((7,) * n, on[:n], logprobs[:n], turns[:n], ends[-n:], 0, 0)
            for n in range(2, length + 1)
        ]
        batch = collate(rows)
        return replace(batch, old_logprobs_BT=batch.sampled_logprobs_BT + shift * batch.mask_BT)

    batch, updated = scored(20, 0.0), scored(20, 0.25)
    episode = Episode("bandit", 1, 0, 3, 2, (), "failed", True, False, False, None)
    with Computed() as computed:
        record = sample_record(batch, updated, 4, [episode])
    assert record["group"] == 3 and record["member"] == 2
    assert record["ratios"] == pytest.approx([1.0, *[2.718281828**0.25] * 5])
    assert computed.most <= 20
