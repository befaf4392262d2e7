"""What an environment brings to a run's settings: its budgets, and lengths that fit its texts.

They hold where the user sets nothing, without a recipe and with a recipe for another environment:
budgets, parameters and lengths never travel from one environment to another. Loads no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing, suppress
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from ragen.config.config import Config
from ragen.config.keys import BUDGETS, MIX, PARAMS, TASK, Flat, dotted
from ragen.config.reading import OF_ENV, for_env, load_recipe, mixed_in, names_env, recipes, resolve
from ragen.config.sections import EnvConfig
from ragen.core.errors import RagenError
from ragen.core.seeding import BASE_LEVELS
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs.registry import build_env, closing_env, make
from ragen.models.names import is_embedded, taught_style
from ragen.models.prompting import REPLY, positions, resolve_for_model
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import has_random_play, random_player
from ragen.rollout.prompt import Limits, PromptBuilder
from ragen.rollout.setup import Setup, make_setup

PROMPT = ("prompt.style", "prompt.think", "rollout.max_tokens")
"""Keys of the whole run on which the lengths of a mixture's environments depend."""

NOTED = (*(f"env.{each}" for each in BUDGETS), f"{PARAMS}.", *OF_ENV[1:])
"""How the keys begin that a note tells."""

NEUTRAL: Flat = {"algorithm": "starpo-s/grpo", "steps": 100, "filter.value": 0.5}
"""Where a run begins without a recipe."""
SMALL: Flat = {
    "rollout.num_groups": 16,
    "rollout.slots": 128,
    "update.minibatch_episodes": 64,
    "update.lr": 5e-4,
    "update.lr_end": 0.1,
    "update.warmup_steps": 5,
    "update.beta2": 0.99,
}
"""The same for models of half a million parameters, as in their recipes."""

THOUGHT = {"compact": 48, "paper": REPLY // 2}
"""Tokens of a thought, by the style of prompts."""
ANSWER = 64
"""Tokens of an answer in free text whose length nobody knows."""
TAGS = 8
"""Tokens of a reply's tags, and of what a chat template puts around a message."""
LONGEST = 8192
"""Tokens of a context at most; an episode that needs more ends there."""
LEVELS, STEPS = 4, 16
"""Levels whose texts are read, and steps of random play on each of them."""

TOKEN = re.compile(r"[A-Za-z]{1,4}|\S|\n")


class Resolved(NamedTuple):
    """Settings, and what an environment brought to them, in one line if it did."""

    config: Config
    note: str | None = None


def resolve_run(
    recipe: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Resolved:
    """The settings of a run by a recipe, or by an environment alone, as its model needs them.

    Without a recipe, ``env.name`` must be given. It brings its budgets and `NEUTRAL` settings; an
    environment of the embedded models brings its own recipe to them. With a recipe for another
    environment than the given one, the recipe's values in `OF_ENV` are left out. A recipe that
    names no environment keeps them.

    Raises:
        RagenError: As `resolve_for_model`; neither recipe nor environment is named; or there is no
            such environment.
    """
    given = dotted(overrides or {})
    written = {} if recipe is None else load_recipe(recipe)[1]
    if mixed_in(given) or (mixed_in(written) and "env.name" not in given):
        return Resolved(_resolve_mixture(recipe, given, written))
    if recipe is None and "env.name" not in given:
        raise RagenError("name a recipe (ragen help recipes), or an environment with --env")
    if "env.name" in given:
        resolve(None, {"env.name": given["env.name"]})  # whether it can be a name
    name = str(given.get("env.name"))
    if recipe is not None and given.get("env.name") in (None, written.get("env.name")):
        return Resolved(resolve_for_model(recipe, given))
    model = str(given.get("model.path", written.get("model.path", "base")))
    if _has_recipe(name, model):
        if recipe is None:
            return Resolved(resolve_for_model(name, given))
        brought = _of_recipe(name)
    else:
        start = NEUTRAL | (SMALL if is_embedded(model) else {}) if recipe is None else {}
        brought = start | brought_by(name, given, written, model, recipe)
    if not names_env(written):  # a recipe for any environment, whose values go first
        brought = {key: value for key, value in brought.items() if key not in written}
    config = resolve_for_model(recipe, given, brought)
    other = config.recipe if names_env(written) else None
    return Resolved(config, note_of(name, brought, given, other))


def _has_recipe(env: str, model: str) -> bool:
    """Whether an environment brings its own recipe: to the embedded models."""
    return env in recipes() and is_embedded(model) and taught_style(model) is None


def _of_recipe(env: str) -> Flat:
    """What the recipe of an environment holds for it."""
    return {k: v for k, v in load_recipe(env)[1].items() if k.startswith(OF_ENV)}


def _resolve_mixture(recipe: str | Path | None, given: Flat, written: Flat) -> Config:
    """The settings of a run in several environments.

    Each has the budgets and parameters that it brings, below those of its table. The lengths are
    the longest that any of them needs, and prompts have the rules where one of them asks for that.

    Raises:
        RagenError: As `resolve_run`, or an environment is named beside the mixture.
    """
    if "env.name" in given and "+" not in str(given["env.name"]):
        raise RagenError("env.name and env.mix are given: name one environment, or a mixture")
    written = for_env(given, written)
    both = written | given
    mix = resolve(None, {k: v for k, v in both.items() if k.startswith(f"{MIX}.")}).env.mix
    model = str(both.get("model.path", "base"))
    chosen = {k: v for k, v in given.items() if not k.startswith(f"{MIX}.")}
    start = NEUTRAL | (SMALL if is_embedded(model) else {}) if recipe is None else {}
    styles, lengths = list[str](), dict[str, int]()
    for name, entry in mix.items():
        own = entry.model_dump(exclude_unset=True)
        alone = {"env.name": name, PARAMS: own.get("params", {})}
        alone |= {f"env.{key}": own[key] for key in BUDGETS if key in own}
        alone |= {"prompt.style": "compact"} if is_embedded(model) else {}
        alone |= {key: both[key] for key in PROMPT if key in both}
        given_alone = dotted(alone)
        is_known = _has_recipe(name, model)
        brought = _of_recipe(name) if is_known else brought_by(name, given_alone, {}, model)
        config = resolve(None, given_alone, env=brought)
        styles.append(config.prompt.style)
        for key, length in (
            ("rollout.max_tokens", config.rollout.max_tokens),
            ("model.max_length", config.model.max_length),
        ):
            lengths[key] = max(length, lengths.get(key, 0))
        task = {key: getattr(config.env, key) for key in TASK}
        start[f"{MIX}.{name}"] = {"share": entry.share} | task
    style = "paper" if "paper" in styles else "compact"
    brought = lengths | {"prompt.style": style}
    start |= {key: value for key, value in brought.items() if key not in written}
    return resolve_for_model(recipe, chosen, start)


def note_of(name: str, brought: Flat, given: Flat, recipe: str | None = None) -> str | None:
    """Which budgets and lengths are the environment's, without those that are given.

    Example:
        >>> note_of("guess", {"env.max_turns": 3, "model.max_length": 640}, {}, "bandit")
        'recipe bandit is for another environment; budgets from guess: max_turns 3, max_length 640'
    """
    values = {k: v for k, v in brought.items() if k not in given and k.startswith(NOTED)}
    said = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in values.items())
    other = f"recipe {recipe} is for another environment; " if recipe else ""
    return f"{other}budgets from {name}: {said}" if said else None


def budgets_of(name: str, given: Flat) -> tuple[Flat, str | None]:
    """The budgets that an environment states with the given parameters, and its style of prompts.

    Raises:
        RagenError: There is no such environment or parameter, or its attributes cannot be read.
    """
    prefix = f"{PARAMS}."
    params = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
    params |= given.get(PARAMS, {})
    try:
        with closing_env(make(name, **params)) as env, boundary("its budgets"):
            return {f"env.{each}": getattr(env, each) for each in BUDGETS}, env.prompt_style
    except UserCodeError as failure:
        raise RagenError(f"environment {name}: {failure.reason}") from failure


def env_config(given: Flat) -> EnvConfig:
    """The section ``env`` with the environment's own budgets under those that are given.

    Raises:
        RagenError: As `budgets_of`, or a value does not fit.
    """
    return resolve(None, given, env=budgets_of(str(given["env.name"]), given)[0]).env


def brought_by(
    name: str, given: Flat, written: Flat, model: str, recipe: str | Path | None = None
) -> Flat:
    """The budgets, the style of prompts and the lengths that suit an environment and a model.

    `written` are the values of the recipe, `given` those of the user, which decide the lengths with
    them.

    Raises:
        RagenError: As `resolve_run`.
    """
    brought, own_style = budgets_of(name, given)
    if "prompt.style" not in written:
        usual = "compact" if is_embedded(model) else "paper"
        brought["prompt.style"] = taught_style(model) or own_style or usual
    config = resolve(recipe, given, env=brought)
    return brought | _lengths(config, model, given.get("rollout.max_tokens"))


def _lengths(config: Config, model: str, given: int | None) -> Flat:
    """The tokens of a reply, unless given, and of the longest episode: estimates by the texts."""
    prompt, env = config.prompt, config.env
    with closing(make_setup(config, None)) as setup:
        texts = _read(setup)
    builder = PromptBuilder(prompt.style, prompt.think, LONGEST, texts.tools != "")
    limits = Limits(1, env.max_turns, env.max_actions, env.actions_per_turn)
    opening = builder.first(texts.rules, texts.goal, texts.actions, texts.observation, limits)
    first = num_tokens(f"{builder.system() or ''}{texts.tools}{opening}") + 2 * TAGS
    following = num_tokens(builder.following(texts.observation, -0.1, "invalid", limits)) + TAGS
    is_one = texts.actions is None and not texts.tools
    count = 1 if is_one else env.actions_per_turn
    answer = TAGS + count * (texts.answer + 1)
    reply = 8 * ceil((answer + (THOUGHT[prompt.style] if prompt.think else 0)) / 8)
    if prompt.style == "paper" and prompt.think:
        reply = max(reply, REPLY)
    reply = given or reply
    turns = min(prompt.window or env.max_turns, env.max_turns)
    needed = 1.1 * (first + reply + (turns - 1) * (following + reply))
    longest = max(256, min(64 * ceil(needed / 64), LONGEST, positions(model)))
    return {"rollout.max_tokens": min(reply, longest // 2), "model.max_length": longest}


class _Texts(NamedTuple):
    """The texts of an environment.

    `observation` is its longest, `tools` are JSON, `answer` is the number of an action's tokens.
    """

    rules: str
    goal: str
    actions: tuple[str, ...] | None
    observation: str
    tools: str
    answer: int


def _read(setup: Setup) -> _Texts:
    """Read what the environment shows at the start of some levels and in random play.

    Where it fails, the texts before count; the episodes of the run will report the failure.
    """
    observations: list[str] = [""]
    said: list[str] = []
    with closing(build_env(setup.make_env, setup.env)) as env:
        with suppress(UserCodeError):
            for level in range(BASE_LEVELS, BASE_LEVELS + LEVELS):
                observations.append(env.reset(level, level))
                _play(setup, env, level, observations, said)
        answer = max(map(num_tokens, env.actions or said), default=ANSWER)
        longest = max(observations, key=num_tokens)
        tools = json.dumps(env.tools) if env.tools else ""
        return _Texts(env.rules, env.goal, env.actions, longest, tools, answer)


def _play(
    setup: Setup, env: GuardedEnv, seed: int, observations: list[str], said: list[str]
) -> None:
    """Random play on a level for some steps, if there is such play."""
    player, left = random_player(seed), min(STEPS, setup.actions)
    if not has_random_play(env.env):
        return
    while left > 0:
        for action in player(env.env, 1, left, setup.actions_per_turn):
            said.append(action)
            env.step(action)
            observations.append(env.observation)
            left -= 1
            if env.terminated or env.truncated:
                return


def num_tokens(text: str) -> int:
    """About how many tokens a text has: four letters, another character or a line break each.

    Example:
        >>> num_tokens("Reach the goal: __G")
        8
    """
    return len(TOKEN.findall(text))
