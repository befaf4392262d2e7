"""Random play in other libraries' environments: through RAGEN, and by the bare library.

The two simulations share the levels, the budgets and what counts as success, and nothing else:
RAGEN plays whole episodes with prompts, replies and their parser, as `ragen eval random` does; the
bare library is stepped with actions and events from generators of its own. The table has success
and mean return of both with 95 % intervals, and the interval of the difference, in which 0 lies
where they agree.

    python benchmarks/floors.py [--levels 64] [--draws 32] [--names gymnasium:Taxi-v4]

An environment whose package is missing is left out, and that is said.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from ragen.core.errors import RagenError
from ragen.core.seeding import EVAL_LEVELS
from ragen.core.statistics import Interval, bootstrap_mean, difference, success_rate
from ragen.envs.registry import closing_env, make
from ragen.rollout.groups import run_groups
from ragen.rollout.players import PlayerPolicy, random_player
from ragen.rollout.setup import Setup

Played = tuple[bool, float]
"""Success and return of an episode."""


class Rates(NamedTuple):
    """Success and mean return of random play, with their intervals."""

    success: Interval
    reward: Interval


def through_ragen(name: str, levels: Sequence[int], draws: int) -> list[Played]:
    """Random play as RAGEN evaluates it, level by level."""
    with closing_env(make(name)) as env:
        budgets = (env.max_turns, env.actions_per_turn, env.max_actions)
    setup = Setup(name, lambda: make(name), *budgets, style="paper")
    player = PlayerPolicy(random_player, setup.think, setup.prefill)
    groups = asyncio.run(run_groups(player, setup, levels, draws, (0, "eval")))
    episodes = [episode for group in groups for episode in group.episodes]
    assert all(episode.error is None for episode in episodes)
    return [(episode.success, episode.total_reward) for episode in episodes]


def by_gymnasium(name: str, most: int, level: int, draws: int) -> list[Played]:
    """At most so many uniform actions; an end with a positive last reward is a success."""
    if "MiniGrid" in name:
        import minigrid  # noqa: F401 - which registers them
    env, played = gymnasium.make(name), []
    for draw in range(draws):
        chooser = np.random.default_rng([level, draw, 1])
        env.reset(seed=level)
        env.unwrapped.np_random = np.random.default_rng([level, draw, 2])
        total, ended, reward = 0.0, False, 0.0
        for _ in range(most):
            _, reward, ended, cut, _ = env.step(int(chooser.integers(env.action_space.n)))
            total += float(reward)
            if ended or cut:
                break
        played.append((bool(ended) and float(reward) > 0, total))
    return played


def guess_the_number(level: int, draws: int) -> list[Played]:
    """A new number of twenty in each of eleven guesses."""
    import textarena

    played = []
    for draw in range(draws):
        random.seed(level)  # which hides the number
        game = textarena.make("GuessTheNumber-v0-raw")
        game.reset(num_players=1, seed=level)
        guesses = np.random.default_rng([level, draw]).permutation(20)[:11] + 1
        done = any(game.step(f"[{guess}]")[0] for guess in guesses)
        reward = float(game.close()[0][0]) if done else 0.0
        played.append((done and reward >= 1, reward))
    return played


BARE: dict[str, Callable[[int, int], list[Played]]] = {
    "gymnasium:FrozenLake-v1": partial(by_gymnasium, "FrozenLake-v1", 20),
    "gymnasium:Blackjack-v1": partial(by_gymnasium, "Blackjack-v1", 5),
    "gymnasium:Taxi-v4": partial(by_gymnasium, "Taxi-v4", 40),
    "gymnasium:MiniGrid-Empty-5x5-v0": partial(by_gymnasium, "MiniGrid-Empty-5x5-v0", 30),
    "textarena:GuessTheNumber-v0": guess_the_number,
}
"""The bare library's random play by the environment's name, with RAGEN's budgets for it."""


def rates(played: Sequence[Played], levels: Sequence[int], draws: int) -> Rates:
    successes, returns = zip(*played, strict=True)
    on = [level for level in levels for _ in range(draws)]
    return Rates(success_rate(successes, on), bootstrap_mean(returns, on))


def compared(name: str, levels: Sequence[int], draws: int) -> tuple[Rates, Rates]:
    """Random play through RAGEN and by the bare library.

    Raises:
        RagenError: The library is not installed.
    """
    ours = through_ragen(name, levels, draws)
    theirs = [each for level in levels for each in BARE[name](level, draws)]
    return rates(ours, levels, draws), rates(theirs, levels, draws)


def agrees(ours: Interval, theirs: Interval) -> bool:
    """Whether 0 lies in the interval of the difference."""
    found = difference(ours, theirs)
    return found.low <= 0 <= found.high


def row(name: str, ours: Rates, theirs: Rates) -> str:
    def shown(interval: Interval, spec: str) -> str:
        value, low, high = (format(each, spec) for each in vars_of(interval))
        return f"{value} ({low} to {high})"

    cells: list[str] = []
    for one, other, spec in zip(ours, theirs, (".1%", ".3f"), strict=True):
        cells += [shown(each, spec) for each in (one, other, difference(one, other))]
    return f"| {' | '.join([name, *cells])} |"


def vars_of(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--levels", type=int, default=64)
    parser.add_argument("--draws", type=int, default=32, help="episodes on each level")
    parser.add_argument("--names", nargs="*", default=list(BARE), choices=list(BARE))
    args = parser.parse_args()
    levels: Any = range(EVAL_LEVELS, EVAL_LEVELS + args.levels)
    heads = ("RAGEN", "bare library", "difference")
    columns = [f"{what}, {head}" for what in ("success", "return") for head in heads]
    print(f"| environment | {' | '.join(columns)} |\n{'|---' * 7}|")
    for name in args.names:
        try:
            print(row(name, *compared(name, levels, args.draws)), flush=True)
        except RagenError as missing:
            print(f"left out: {missing}")


if __name__ == "__main__":
    main()
