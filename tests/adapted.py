"""Random play of another library's environment through RAGEN, to compare with the bare library."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from ragen.core.types import Episode
from ragen.envs.registry import make
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, random_player
from ragen.rollout.setup import Setup

LEVELS = (123, 124, 10_000)


def noise_of(noise_seed: int) -> np.random.Generator:
    """The generator of the random events."""
    return np.random.Generator(np.random.PCG64([1, noise_seed]))


def random_episodes(name: str, **params: Any) -> list[Episode]:
    """Two episodes of random play on each of `LEVELS`, within the environment's own budgets."""
    env = make(name, **params)
    setup = Setup(
        name,
        lambda: make(name, **params),
        turns=env.max_turns,
        actions_per_turn=env.actions_per_turn,
        actions=env.max_actions,
        style="paper",
    )
    policy = PlayerPolicy(random_player, setup.think, setup.prefill)
    groups = asyncio.run(run_groups(policy, setup, LEVELS, 2, (0, "eval")))
    episodes = [episode for group in groups for episode in group.episodes]
    assert all(episode.error is None for episode in episodes)
    return episodes
