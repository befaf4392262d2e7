"""Watching or playing one episode in the terminal."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console
from rich.text import Text

from ragen.config.sections import EnvConfig
from ragen.core.boundary import UserCodeError
from ragen.core.errors import RagenError
from ragen.core.seeding import EVAL_LEVELS, derive
from ragen.core.types import Episode
from ragen.envs.registry import env_factory, make
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import Player


def play_env(console: Console, env: EnvConfig, player: Player, seed: int) -> bool:
    """Let a player (a human, the solver, random play) play a level; returns whether it solved it.

    The level `seed` counts evaluation levels, so that ``--seed 0`` is the first of ``ragen eval``.

    Raises:
        RagenError: The environment or its solver fails.
    """
    make(env.name, **env.params).close()  # refuses wrong parameters now
    try:
        with closing(GuardedEnv(env_factory(env.name, **env.params), env.timeout_s)) as guarded:
            return _play(console, guarded, env, player, seed)
    except UserCodeError as failure:
        raise RagenError(
            f"the environment {env.name!r} failed: {failure.reason}; run `ragen check` on it"
        ) from failure


def _play(
    console: Console, env: GuardedEnv, settings: EnvConfig, player: Player, seed: int
) -> bool:
    env.reset(EVAL_LEVELS + seed, derive(seed, "play"))
    console.print(Text(env.rules), soft_wrap=True)
    actions_left, total = settings.max_actions, 0.0
    for turn in range(settings.max_turns):
        turns_left = settings.max_turns - turn
        console.rule(
            f"turn {turn + 1} of {settings.max_turns}, {actions_left} actions left", align="left"
        )
        console.print(Text(env.observation))
        for action in player(env.env, turns_left, actions_left, settings.actions_per_turn):
            reward = env.step(action)
            total += reward
            actions_left -= 1
            console.print(Text(f"> {action}  ({reward:+g})", style="bold"))
            if env.terminated or env.truncated:
                success = env.terminated and bool(env.info.get("success", False))
                _ending(console, env.observation, "solved" if success else "failed", total)
                return success
        if actions_left == 0:
            break
    _ending(console, env.observation, "out of turns" if actions_left else "out of actions", total)
    return False


def show_episode(console: Console, episode: Episode) -> None:
    """Print an episode: observations, thoughts, actions and rewards."""
    for number, turn in enumerate(episode.turns, 1):
        console.rule(f"turn {number}", align="left")
        console.print(Text(turn.observation))
        if turn.thought is not None:
            console.print(Text(turn.thought.strip(), style="italic dim"))
        actions = ", ".join(turn.actions_executed) or "no action"
        if not turn.well_formed:
            console.print(Text(turn.completion.text, style="red"))
            actions += ", the reply was invalid"
        console.print(Text(f"> {actions}  ({turn.reward + turn.penalty:+g})", style="bold"))
    observation = ""
    if episode.error is not None:
        observation = episode.error.strip().splitlines()[-1]
    _ending(console, observation, episode.stop_reason.replace("_", " "), episode.total_reward)


def _ending(console: Console, observation: str, how: str, total: float) -> None:
    console.rule(align="left")
    if observation:
        console.print(Text(observation))
    console.print(Text(f"{how}, reward {total:g}", style="bold"))
