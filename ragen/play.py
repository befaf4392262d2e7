"""Watching or playing one episode in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ragen.config import WorldConfig
from ragen.env import make
from ragen.players import Player
from ragen.seeding import derive, eval_level
from ragen.types import Episode


def play_world(console: Console, world: WorldConfig, player: Player, seed: int) -> bool:
    """Let a player (a person, a solver, chance) play a level; returns whether it was solved.

    Args:
        console: Where the world is shown.
        world: The world and its budgets.
        player: Who chooses the actions; a person is asked in the terminal.
        seed: Counts evaluation levels, so that ``--seed 0`` is the first level of ``ragen eval``.
    """
    env = make(world.name, **world.params)
    level = eval_level(seed)
    observation, _ = env.reset(seed=level, options={"noise_seed": derive(seed, "play")})
    console.print(Text(env.rules), soft_wrap=True)
    actions_left, total = world.actions, 0.0
    for turn in range(world.turns):
        turns_left = world.turns - turn
        console.rule(f"turn {turn + 1} of {world.turns}, {actions_left} actions left", align="left")
        console.print(Text(observation))
        actions = player.act(env, turns_left, actions_left, world.actions_per_turn)
        for action in actions:
            observation, reward, terminated, truncated, info = env.step(action)
            total += float(reward)
            actions_left -= 1
            console.print(Text(f"> {action}  ({reward:+g})", style="bold"))
            if terminated or truncated:
                success = bool(info.get("success", False))
                _ending(console, observation, "solved" if success else "failed", total)
                return success
        if actions_left == 0:
            break
    _ending(console, observation, "out of turns" if actions_left else "out of actions", total)
    return False


def show_episode(console: Console, episode: Episode) -> None:
    """Print an episode that was played: what the agent saw, thought, answered and got."""
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
