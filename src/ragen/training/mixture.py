"""Mixtures: which environment each group of a step is played in, and on which level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ragen.config.config import Config
from ragen.core.seeding import train_level
from ragen.rollout.setup import Setup
from ragen.training.ahead import Start
from ragen.training.running import LoopState


def first_starts(playing: Mapping[str, Setup], config: Config, state: LoopState) -> list[Start]:
    """Where the groups of the next step start.

    In a mixture, the n-th group of an environment has its n-th training level, whatever the other
    environments and the shares are. `state` counts the groups so far.
    """
    num_groups, num_levels = config.rollout.num_groups, config.rollout.levels
    if len(playing) == 1:
        (setup,) = playing.values()
        first = state.step * num_groups
        return [Start(setup, train_level(first + g, num_levels)) for g in range(num_groups)]
    shares = {name: each.share for name, each in config.env.mix.items()}
    counts, starts = Counter(state.groups), []
    for name in share_out(shares, state.groups, num_groups):
        starts.append(Start(playing[name], train_level(counts[name], num_levels)))
        counts[name] += 1
    return starts


def share_out(shares: Mapping[str, float], counts: Mapping[str, int], num_groups: int) -> list[str]:
    """The environments of a step's groups.

    Each group goes to the environment that is furthest below its share of all groups so far, this
    one included; among equals, to the first. So the shares hold over many steps, even if one step
    has too few groups for them. The environments of a step come in the order of the shares.

    Args:
        shares: Weights above 0 by environment.
        counts: Groups so far by environment.
        num_groups: Groups of the step.
    """
    whole, played = sum(shares.values()), Counter(counts)
    chosen: Counter[str] = Counter()
    for number in range(played.total() + 1, played.total() + num_groups + 1):
        behind = {name: number * share / whole - played[name] for name, share in shares.items()}
        name = max(behind, key=behind.__getitem__)
        played[name] += 1
        chosen[name] += 1
    return [name for name in shares for _ in range(chosen[name])]
