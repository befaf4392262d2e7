"""Watching or playing one episode in the terminal."""

from __future__ import annotations

import json

from rich.console import Console
from rich.text import Text

from ragen.config.sections import EnvConfig
from ragen.core.errors import RagenError, last_line
from ragen.core.pictures import for_people
from ragen.core.seeding import EVAL_LEVELS, derive
from ragen.core.types import Episode
from ragen.core.user_code import UserCodeError
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import Player
from ragen.rollout.setup import open_env


def play_env(console: Console, env: EnvConfig, player: Player, seed: int) -> None:
    """Let a player (a human, the solver, random play) play a level.

    The level `seed` counts evaluation levels, so that ``--seed 0`` is the first of ``ragen eval``.
    """
    try:
        with open_env(env) as guarded:
            guarded.reset(EVAL_LEVELS + seed, derive(seed, "play"))
            console.print(Text(guarded.rules), soft_wrap=True)
            for tool in guarded.tools:
                call = '{"name": …, "arguments": {…}}'
                console.print(Text(f"Tool, called as {call}: {json.dumps(tool['function'])}"))
            how, total = _play(console, guarded, env, player)
            _ending(console, guarded.observation, how, total)
    except UserCodeError as failure:
        raise RagenError(
            f"the environment {env.name!r} failed: {failure.reason}; run `ragen check` on it"
        ) from failure


def _play(
    console: Console, env: GuardedEnv, budget: EnvConfig, player: Player
) -> tuple[str, float]:
    actions_left, total = budget.max_actions, 0.0
    for turns_left in range(budget.max_turns, 0, -1):
        turn = budget.max_turns - turns_left + 1
        title = f"turn {turn} of {budget.max_turns}, {actions_left} actions left"
        console.rule(title, align="left")
        if not env.tools or turn == 1:
            console.print(Text(for_people(env.observation)))
        most = min(actions_left, budget.actions_per_turn)  # as in an episode
        for action in player(env.env, turns_left, actions_left, budget.actions_per_turn)[:most]:
            reward = env.step(action)
            total += reward
            actions_left -= 1
            console.print(Text(f"> {action}  ({reward:+g})", style="bold"))
            if env.tools:  # each call has a result of its own
                console.print(Text(for_people(env.observation)))
            if env.terminated or env.truncated:
                solved = env.terminated and env.info.get("success", False)
                return "solved" if solved else "failed", total
        if actions_left == 0:
            return "out of actions", total
    return "out of turns", total


def show_episode(console: Console, episode: Episode) -> None:
    """Print an episode: observations, thoughts, actions and rewards."""
    for number, turn in enumerate(episode.turns, 1):
        console.rule(f"turn {number}", align="left")
        if number == 1 or episode.turns[number - 2].results is None:
            console.print(Text(for_people(turn.observation)))
        if turn.thought is not None:
            console.print(Text(turn.thought.strip(), style="italic dim"))
        actions = ", ".join(turn.actions_executed) or "no action"
        if not turn.valid:
            console.print(Text(turn.completion.text, style="red"))
            actions += ", the reply was invalid"
        console.print(Text(f"> {actions}  ({turn.reward + turn.penalty:+g})", style="bold"))
        for result in turn.results or ():
            console.print(Text(for_people(result)))
    error = last_line(episode.error)
    _ending(console, error, episode.stop_reason.replace("_", " "), episode.reward)


def _ending(console: Console, observation: str, how: str, total: float) -> None:
    console.rule(align="left")
    if observation:
        console.print(Text(for_people(observation)))
    console.print(Text(f"{how}, reward {total:g}", style="bold"))
