"""Values of states without a critic: every turn of an episode is played on several times.

A continuation is a branch (`BranchSpec`): the environment returns to its snapshot before the turn,
and the policy sees the same prompt. So the continuations of a turn meet the random events of its
episode, and differ by the policy's draws alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

from ragen.core.types import Episode, Group, Turn
from ragen.rollout.episode import require_unchanged
from ragen.rollout.groups import run_episodes
from ragen.rollout.policies import Policy
from ragen.rollout.setup import BranchSpec, Setup

Start = tuple[Episode, int]
"""Where continuations start: an episode, and the first of its turns that is played again."""


async def value_turns(
    policy: Policy,
    setups: Mapping[str, Setup],
    groups: Sequence[Group],
    path: tuple[int | str, ...],
    count: int,
    gamma: float,
    concurrency: int,
    on_episode: Callable[[Episode], None],
) -> tuple[list[Group], int]:
    """The groups with `Turn.state_value`, and how many tokens were sampled for it.

        V(s_t) = mean over `count` continuations from s_t of Σ_{k≥t} γ^(k−t) r_k

    (VinePPO, arXiv:2410.01679), with penalties in r and γ per turn. A continuation that fails is
    left out, unless all of a state do. Turns of a group that began in the same state, with the same
    prompt and budgets left, share their continuations. Failed episodes get no values. `setups` are
    by environment, and `path` is as in `run_groups`, with a purpose of its own.

    Raises:
        RagenError: An environment cannot go back to a turn.
    """
    starts = [_starts(group) for group in groups]
    specs = [
        BranchSpec(
            episode.level_seed,
            episode.group,
            place * count + number,
            path,
            episode.noise_seed,
            episode.turns[: turn + 1],
        )
        for states in starts
        for place, (episode, turn) in enumerate(states.values())
        for number in range(count)
    ]
    envs = [group.env for group, states in zip(groups, starts, strict=True) for _ in states]
    of_spec = [setups[env] for env in envs for _ in range(count)]
    for env in dict.fromkeys(envs):
        require_unchanged(setups[env], specs[envs.index(env) * count])
    played = await run_episodes(policy, of_spec, specs, concurrency, on_episode)
    futures = [each.turns[len(spec.turns) - 1 :] for each, spec in zip(played, specs, strict=True)]
    values = iter(
        [
            _value(played[at : at + count], futures[at : at + count], gamma)
            for at in range(0, len(specs), count)
        ]
    )
    valued = []
    for group, states in zip(groups, starts, strict=True):
        known = dict(zip(states, values, strict=False))  # of this group; the rest stays for others
        valued.append(Group(tuple(_with_values(episode, known) for episode in group.episodes)))
    drawn = [*chain(*futures), *chain.from_iterable(each.others for each in played)]
    return valued, sum(len(turn.completion.token_ids or ()) for turn in drawn)


def _starts(group: Group) -> dict[Hashable, Start]:
    """The different states in which turns of a group began, each where it came first."""
    starts: dict[Hashable, Start] = {}
    for episode in group.episodes:
        for number in range(0 if episode.failed else len(episode.turns)):
            starts.setdefault(_state(episode, number), (episode, number))
    return starts


def _state(episode: Episode, number: int) -> Hashable:
    """All that decides how an episode goes on from a turn, apart from the policy's draws."""
    turn = episode.turns[number]
    actions = sum(len(before.actions_executed) for before in episode.turns[:number])
    return number, actions, turn.prompt.token_ids, json.dumps(turn.snapshot, sort_keys=True)


def _value(played: Sequence[Episode], futures: Sequence[Sequence[Turn]], gamma: float) -> float:
    every = list(zip(played, futures, strict=True))
    kept = [turns for episode, turns in every if not episode.failed] or futures
    return fmean(
        sum(gamma**k * (turn.reward + turn.penalty) for k, turn in enumerate(turns))
        for turns in kept
    )


def _with_values(episode: Episode, known: Mapping[Hashable, float]) -> Episode:
    if episode.failed:
        return episode
    turns = enumerate(episode.turns)
    valued = (replace(turn, state_value=known[_state(episode, k)]) for k, turn in turns)
    return replace(episode, turns=tuple(valued))
