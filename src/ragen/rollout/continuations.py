"""Values of states without a critic: every turn of an episode is played on several times.

A continuation is a branch (`BranchSpec`): the environment returns to its snapshot before the turn,
and the policy sees the same prompt. So the continuations of a turn meet the random events of its
episode, and differ by the policy's draws alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ragen.core.types import Episode, Group
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
    starts: dict[Hashable, Start] = {}
    for episode in (each for group in groups for each in group.episodes if not each.failed):
        for number in range(len(episode.turns)):
            starts.setdefault(_state(episode, number), (episode, number))
    specs = [
        BranchSpec(
            episode.level_seed,
            episode.group,
            place * count + number,
            path,
            episode.noise_seed,
            episode.turns[: first + 1],
        )
        for place, (episode, first) in enumerate(starts.values())
        for number in range(count)
    ]
    envs = [episode.env for episode, _ in starts.values() for _ in range(count)]
    for env in dict.fromkeys(envs):
        require_unchanged(setups[env], specs[envs.index(env)])
    of_specs = [setups[env] for env in envs]
    played = await run_episodes(policy, of_specs, specs, concurrency, on_episode)
    values = {
        state: _value(played[place * count : (place + 1) * count], first, gamma)
        for place, (state, (_, first)) in enumerate(starts.items())
    }
    tokens = sum(
        len(turn.completion.token_ids or ())
        for episode, spec in zip(played, specs, strict=True)
        for turn in (*episode.turns[len(spec.turns) - 1 :], *episode.others)
    )
    return [
        Group(tuple(_valued(each, values) for each in group.episodes)) for group in groups
    ], tokens


def _state(episode: Episode, number: int) -> Hashable:
    """All that decides how an episode goes on from a turn, apart from the policy's draws."""
    turn = episode.turns[number]
    actions = sum(len(before.actions_executed) for before in episode.turns[:number])
    snapshot = json.dumps(turn.snapshot, sort_keys=True)
    return episode.group, number, actions, turn.prompt.token_ids, snapshot


def _value(played: Sequence[Episode], first: int, gamma: float) -> float:
    kept = [episode for episode in played if not episode.failed] or played
    return fmean(
        sum(gamma**k * (turn.reward + turn.penalty) for k, turn in enumerate(episode.turns[first:]))
        for episode in kept
    )


def _valued(episode: Episode, values: Mapping[Hashable, float]) -> Episode:
    if episode.failed:
        return episode
    turns = enumerate(episode.turns)
    valued = (replace(turn, state_value=values[_state(episode, k)]) for k, turn in turns)
    return replace(episode, turns=tuple(valued))
