"""Collecting the groups of a step."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ragen.config.reading import resolve
from ragen.core.types import Completion, Prompt
from ragen.engines.engine import Engine
from ragen.envs.registry import env_factory
from ragen.rollout.setup import Setup
from ragen.training.ahead import Ahead, Start
from ragen.training.collection import collect_groups


class Counting:
    """A policy that counts how many completions it is asked for at the same time."""

    open = most = 0

    async def complete(self, prompt: Prompt) -> Completion:
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        return Completion(None, None, "</think><answer>Dragon</answer>", "stop", 0)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("engine", "at_once"),
    [
        ({}, 3),
        ({"name": "ray", "samplers": 2}, 6),
        ({"name": "ray", "samplers": 2, "most_samplers": 3, "address": "auto"}, 9),
    ],
)
def test_every_sampler_gets_as_many_episodes_as_it_has_slots(
    staleness: int, engine: dict[str, Any], at_once: int
) -> None:
    given = {f"engine.{key}": value for key, value in engine.items()}
    shape = {"rollout.slots": 3, "rollout.num_groups": 4, "rollout.group_size": 4}
    if engine:
        given["engine.max_staleness"] = staleness
    config = resolve("bandit", given | shape)
    policy = Counting()
    fake = cast("Engine", SimpleNamespace(policy=policy, forget=lambda: None))
    setup = Setup("bandit", env_factory("bandit"), 1, 1, 1)
    starts = [Start(setup, level) for level in range(4)]

    async def collect() -> None:
        overlap = Ahead().overlap(config, 1) if staleness else None
        groups = await collect_groups(fake, starts, config, 0, overlap=overlap)
        assert [len(group.episodes) for group in groups] == [4] * 4

    asyncio.run(collect())
    assert policy.most == at_once
