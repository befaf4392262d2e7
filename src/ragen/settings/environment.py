"""The settings that an environment brings: budgets, and lengths that fit its texts. Loads no torch.

They apply if the user sets nothing and there is no recipe, or only one for another environment.
Budgets, parameters and lengths of one environment never apply to another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import NamedTuple

from ragen.chat.prompt import Limits, PromptBuilder
from ragen.config.config import Config
from ragen.config.keys import Flat
from ragen.config.reading import merge
from ragen.config.sections import EnvConfig, PromptConfig
from ragen.core.errors import RagenError
from ragen.core.pictures import PLACE
from ragen.core.seeding import BASE_LEVELS
from ragen.core.user_code import UserCodeError
from ragen.envs.adapters.agent import AgentEnv
from ragen.models.names import is_embedded, taught_style
from ragen.rollout.context import SHORT
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import has_random_play, random_player
from ragen.rollout.setup import open_env, read_facts
from ragen.settings.model import REPLY, positions

THOUGHT = {"compact": 48, "paper": REPLY // 2}
"""Tokens of a thought, by the style of prompts."""
ANSWER = 64
"""Tokens of an answer in free text if its length is unknown."""
PICTURE = 256
"""Tokens of a picture, of which models of the Hub take 64 to 576."""
TAGS = 8
"""Tokens of a reply's tags, and of what a chat template puts around a message."""
LONGEST = 8192
"""Greatest number of tokens of a context; an episode that needs more ends there."""
SIDE_BY_SIDE = 128
"""Slots where environments wait: all episodes of a usual step then wait together."""
LEVELS, STEPS = 4, 16
"""Levels whose texts are read, and steps of random play on each of them."""

TOKEN = re.compile(r"[A-Za-z]{1,4}|\S|\n")


def with_budgets(given: Flat) -> Config:
    """The given values, with the environment's own budgets under them."""
    with _built(given) as env:
        return merge(None, given, env=_budgets(env))


def budgets_of(given: Flat) -> Flat:
    """The budgets of the environment with the given parameters, by key."""
    with _built(given) as env:
        return _budgets(env)


def brought_by(given: Flat, written: Flat, model: str, recipe: str | Path | None = None) -> Flat:
    """The budgets, the style of prompts and the lengths that suit an environment and a model.

    `written` are the values of the recipe, `given` those of the user; the lengths depend on both.
    """
    with _built(given, recipe) as env:
        brought = _budgets(env)
        is_agent = isinstance(env.env, AgentEnv)
        if env.env.waits != "no" or is_agent:
            brought["rollout.slots"] = SIDE_BY_SIDE
        if is_agent and "prompt.think" not in written:
            brought["prompt.think"] = False  # it reads replies as it always did
        if "prompt.style" not in written:
            usual = "compact" if is_embedded(model) else "paper"
            brought["prompt.style"] = taught_style(model) or env.prompt_style() or usual
        config = merge(recipe, given, env=brought)
        sizes = _sizes(env, config.env, config.prompt)
    return brought | _lengths(config, sizes, positions(model), given.get("rollout.max_tokens"))


@contextmanager
def _built(given: Flat, recipe: str | Path | None = None) -> Iterator[GuardedEnv]:
    env = merge(recipe, given).env
    with open_env(env) as built:
        try:
            read_facts(env, built)
            yield built
        except UserCodeError as failure:
            raise RagenError(f"environment {env.name}: {failure.reason}") from failure


def _budgets(env: GuardedEnv) -> Flat:
    return {f"env.{name}": value for name, value in env.budgets().items()}


def _lengths(config: Config, sizes: _Sizes, positions: int, given: int | None) -> Flat:
    """The tokens of a reply, unless given, and of the longest episode: estimated from the texts."""
    prompt = config.prompt
    reply = 8 * ceil((sizes.answer + (THOUGHT[prompt.style] if prompt.think else 0)) / 8)
    if prompt.style == "paper" and prompt.think:
        reply = max(reply, REPLY)
    reply = given or reply
    turns = config.env.max_turns
    shown = min(prompt.window or turns, turns)
    needed = sizes.first + (shown - 1) * (sizes.following + reply) + reply
    if turns > shown and prompt.summary != "none":
        line = sizes.action + TAGS
        if prompt.summary == "observations":
            needed += sizes.observation
            line += min(sizes.observation, SHORT // 4)
        needed += (turns - shown) * line
    longest = max(256, min(64 * ceil(1.1 * needed / 64), LONGEST, positions))
    return {"rollout.max_tokens": min(reply, longest // 2), "model.max_length": longest}


class _Sizes(NamedTuple):
    """Estimates of the largest number of tokens in each part of an episode.

    `first` is the message that opens a prompt, `observation` what the environment shows in it,
    `following` a later message, `answer` a reply without its thought, `action` what a turn does.
    """

    first: int
    observation: int
    following: int
    answer: int
    action: int


def _sizes(built: GuardedEnv, env: EnvConfig, prompt: PromptConfig) -> _Sizes:
    """Sizes of the texts at the start of some levels and in random play.

    If the environment fails, the texts so far count: the run's episodes will report the failure.
    """
    observations, said = [""], list[str]()
    with suppress(UserCodeError):
        for level in range(BASE_LEVELS, BASE_LEVELS + LEVELS):
            observations.append(built.reset(level, level))
            _play(built, env, level, observations, said)
    observation = max(observations, key=num_tokens)
    tools = json.dumps(built.tools) if built.tools else ""
    builder = PromptBuilder(prompt.style, prompt.think, LONGEST, tools != "")
    limits = Limits(1, env.max_turns, env.max_actions, env.actions_per_turn)
    opening = builder.first(built.rules, built.goal, built.actions, observation, limits)
    following = builder.following(observation, -0.1, "invalid", limits)
    longest = max(map(num_tokens, built.actions or said), default=ANSWER)
    count = 1 if built.actions is None and not tools else env.actions_per_turn
    return _Sizes(
        num_tokens(f"{builder.system() or ''}{tools}{opening}") + 2 * TAGS,
        num_tokens(observation),
        num_tokens(following) + TAGS,
        TAGS + count * (longest + 1),
        count * (min(longest, SHORT // 4) + 1),
    )


def _play(
    built: GuardedEnv, env: EnvConfig, seed: int, observations: list[str], said: list[str]
) -> None:
    """Play at random for up to `STEPS` steps, if there is random play."""
    player, left = random_player(seed), min(STEPS, env.max_actions)
    if not has_random_play(built.env):
        return
    while left > 0:
        for action in player(built.env, 1, left, env.actions_per_turn):
            said.append(action)
            built.step(action)
            observations.append(built.observation)
            left -= 1
            if built.terminated or built.truncated:
                return


def num_tokens(text: str) -> int:
    """An estimate of a text's tokens: one for up to four letters, a line break or another sign.

    A picture counts as `PICTURE`.

    Example:
        >>> num_tokens("Reach the goal: __G")
        8
    """
    return len(TOKEN.findall(text)) + (PICTURE - 1) * text.count(PLACE)
