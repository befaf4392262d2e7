"""Watching or playing one episode in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from ragen.config.sections import EnvConfig
from ragen.core.errors import RagenError, last_line
from ragen.core.pictures import Picture, for_people
from ragen.core.seeding import EVAL_LEVELS, derive
from ragen.core.types import Episode
from ragen.core.user_code import UserCodeError
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import Player
from ragen.rollout.setup import open_env

MOST_COLUMNS = 64
"""Maximum number of columns of a picture."""


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
            _ending(console, guarded.observation, guarded.pictures, how, total)
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
            _show(console, env.observation, env.pictures)
        most = min(actions_left, budget.actions_per_turn)  # as in an episode
        for action in player(env.env, turns_left, actions_left, budget.actions_per_turn)[:most]:
            reward = env.step(action)
            total += reward
            actions_left -= 1
            console.print(Text(f"> {action}  ({reward:+g})", style="bold"))
            if env.tools:  # each call has a result of its own
                _show(console, env.observation, env.pictures)
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
            _show(console, turn.observation, turn.pictures)
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
    _ending(console, error, (), episode.stop_reason.replace("_", " "), episode.reward)


def _ending(
    console: Console, observation: str, pictures: Sequence[Picture], how: str, total: float
) -> None:
    console.rule(align="left")
    if observation:
        _show(console, observation, pictures)
    console.print(Text(f"{how}, reward {total:g}", style="bold"))


def _show(console: Console, observation: str, pictures: Sequence[Picture]) -> None:
    """Print an observation and, where the terminal has colours, its pictures."""
    console.print(Text(for_people(observation)))
    for picture in pictures if console.color_system else ():
        console.print(_in_blocks(picture, min(console.width, MOST_COLUMNS)))


def _in_blocks(picture: Picture, columns: int) -> Text:
    """A picture as half blocks, which show two pixels each, shrunk to so many columns."""
    image = Image.fromarray(picture.pixels)
    image.thumbnail((columns, columns))
    pixels = np.pad(np.asarray(image), ((0, image.height % 2), (0, 0), (0, 0)), "edge")
    lines = [
        Text.assemble(
            *(
                ("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
                for above, below in zip(upper.tolist(), lower.tolist(), strict=True)
            )
        )
        for upper, lower in zip(pixels[::2], pixels[1::2], strict=True)
    ]
    return Text("\n").join(lines)
