"""Mixtures: which environment each group of a step is played in, and on which level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ragen.config.sections import MixedEnv, RolloutConfig
from ragen.core.seeding import train_level
from ragen.rollout.setup import Setup


class Start(NamedTuple):
    """Where a group starts: its environment's set-up and its level."""

    setup: Setup
    level: int


def first_starts(
    playing: Mapping[str, Setup],
    rollout: RolloutConfig,
    mix: Mapping[str, MixedEnv],
    step: int,
    counts: Mapping[str, int],
) -> list[Start]:
    """Where the groups of a step start, before any is refilled.

    In a mixture, the n-th group of an environment has its n-th training level, whatever the other
    environments and the shares are. `step` is the number of finished steps, and `counts` are the
    groups so far by environment.
    """
    num_groups, num_levels = rollout.num_groups, rollout.levels
    if len(playing) == 1:
        (setup,) = playing.values()
        first = step * num_groups
        return [Start(setup, train_level(first + g, num_levels)) for g in range(num_groups)]
    shares = {name: each.share for name, each in mix.items()}
    played, starts = Counter(counts), []
    for name in share_out(shares, counts, num_groups):
        starts.append(Start(playing[name], train_level(played[name], num_levels)))
        played[name] += 1
    return starts


def share_out(shares: Mapping[str, float], counts: Mapping[str, int], num_groups: int) -> list[str]:
    """The environments of a step's groups, in the order of the shares.

    Each group goes to the environment that is furthest below its share of all groups so far, this
    one included; among equals, to the first. So the shares hold over many steps, even if one step
    has too few groups for them. `shares` are weights above 0, and `counts` the groups so far.
    """
    whole, played = sum(shares.values()), Counter(counts)
    chosen: Counter[str] = Counter()
    for number in range(played.total() + 1, played.total() + num_groups + 1):
        behind = {name: number * share / whole - played[name] for name, share in shares.items()}
        name = max(behind, key=behind.__getitem__)
        played[name] += 1
        chosen[name] += 1
    return [name for name in shares for _ in range(chosen[name])]
