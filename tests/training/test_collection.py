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
from ragen.config.reading import resolve
from ragen.core.types import Completion, Episode, Prompt, Sample
from ragen.engines.engine import Engine
from ragen.envs.registry import env_factory
from ragen.rollout.groups import Gate
from ragen.rollout.setup import Setup
from ragen.training.ahead import Ahead, Start
from ragen.training.collection import collect_groups, sample_record


class Counting:
    """A policy that counts how many completions it is asked for at the same time."""

    open = most = 0
    num_samplers = 1

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
    policy.num_samplers = max(config.engine.samplers, config.engine.most_samplers)
    collect(policy, config)
    assert policy.most == at_once


def collect(policy: Counting, config: Config) -> None:
    """Play groups of single turns, of which none is lost."""
    fake = cast("Engine", SimpleNamespace(policy=policy, forget=lambda: None))
    setup = Setup("bandit", env_factory("bandit"), 1, 1, 1)
    starts = [Start(setup, level) for level in range(config.rollout.num_groups)]

    async def play() -> None:
        overlap = Ahead().overlap(config, 1, policy) if config.engine.max_staleness else None
        groups = await collect_groups(fake, starts, config, 0, overlap=overlap)
        assert [len(group.episodes) for group in groups] == [4] * len(starts)

    asyncio.run(play())


@pytest.mark.parametrize("staleness", [0, 1])
def test_episodes_at_once_are_those_of_the_samplers_that_there_are(staleness: int) -> None:
    """Else the first samplers read prompts anew, because they have no slots for so many."""

    class Coming(Counting):
        """Two of four samplers; the others join later, and in the end only one is left."""

        def __init__(self) -> None:
            self.num_samplers = 2
            self.asked = list[int]()

        async def complete(self, prompt: Prompt) -> Completion:
            self.num_samplers = {20: 4, 80: 1, 100: 0}.get(len(self.asked), self.num_samplers)
            self.asked.append(self.open + 1)
            return await super().complete(prompt)

    policy = Coming()
    engine = {"name": "ray", "samplers": 2, "most_samplers": 4, "address": "auto"}
    given = {f"engine.{key}": value for key, value in engine.items()}
    shape = {"rollout.slots": 3, "rollout.num_groups": 32, "rollout.group_size": 4}
    collect(policy, resolve("bandit", given | shape | {"engine.max_staleness": staleness}))
    assert len(policy.asked) == 128
    assert max(policy.asked[:20]) == 6 and max(policy.asked[20:80]) == 12
    assert max(policy.asked[92:]) == 3, "those that were open at the loss have gone on"


def test_a_gate_lets_episodes_in_in_their_order_also_if_some_are_cancelled() -> None:
    entered, policy = list[int](), Counting()

    async def play() -> None:
        gate, leave = Gate(policy, 2), asyncio.Event()

        async def enter(number: int) -> None:
            async with gate:
                entered.append(number)
                await leave.wait()

        async def settle() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(enter(number)) for number in range(8)]
        await settle()
        assert entered == [0, 1]
        tasks[2].cancel()  # it waits
        tasks[1].cancel()  # it is in
        await settle()
        assert entered == [0, 1, 3]
        policy.num_samplers = 2
        tasks[0].cancel()
        await settle()
        assert entered == [0, 1, 3, 4, 5, 6]
        policy.num_samplers = 1
        tasks[3].cancel()
        tasks[4].cancel()
        await settle()
        assert entered == [0, 1, 3, 4, 5, 6]
        tasks.append(asyncio.create_task(enter(8)))
        await settle()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert entered == [0, 1, 3, 4, 5, 6, 7, 8]
        policy.num_samplers = 2
        async with gate, gate, gate, gate:
            assert gate.locked()
        policy.num_samplers = 1
        async with gate, gate:
            assert gate.locked()

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
