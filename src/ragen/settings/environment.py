"""The settings that an environment brings to a run: budgets, and lengths that fit its texts.

They apply if the user sets nothing and there is no recipe, or only one for another environment.
Budgets, parameters and lengths of one environment never apply to another. Loads no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing, suppress
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from ragen.chat.prompt import Limits, PromptBuilder
from ragen.config.config import Config
from ragen.config.keys import BUDGETS, MIX, PARAMS, TASK, Flat, dotted
from ragen.config.reading import OF_ENV, for_env, load_recipe, mixed_in, names_env, recipes, resolve
from ragen.core.errors import RagenError
from ragen.core.seeding import BASE_LEVELS
from ragen.core.user_code import UserCodeError, boundary
from ragen.envs.registry import build_env, closing_env, make
from ragen.models.names import is_embedded, taught_style
from ragen.rollout.context import SHORT
from ragen.rollout.guarded import GuardedEnv
from ragen.rollout.players import has_random_play, random_player
from ragen.rollout.setup import Setup, make_setup
from ragen.settings.model import REPLY, positions, resolve_for_model

PROMPT = ("prompt.style", "prompt.think", "rollout.max_tokens")
"""Keys of the whole run on which the lengths of a mixture's environments depend."""

NOTED = (*(f"env.{each}" for each in BUDGETS), f"{PARAMS}.", *OF_ENV[1:])
"""How the keys begin that a note mentions."""

NEUTRAL: Flat = {"algorithm": "starpo-s/grpo", "steps": 100, "filter.value": 0.5}
"""The settings that a run without a recipe starts from."""
SMALL: Flat = {
    "rollout.num_groups": 16,
    "rollout.slots": 128,
    "update.minibatch_episodes": 64,
    "update.lr": 5e-4,
    "update.lr_end": 0.1,
    "update.warmup_steps": 5,
    "update.beta2": 0.99,
}
"""Further settings for the embedded models, as in their recipes."""

THOUGHT = {"compact": 48, "paper": REPLY // 2}
"""Tokens of a thought, by the style of prompts."""
ANSWER = 64
"""Tokens of an answer in free text if its length is unknown."""
TAGS = 8
"""Tokens of a reply's tags, and of what a chat template puts around a message."""
LONGEST = 8192
"""Greatest number of tokens of a context; an episode that needs more ends there."""
LEVELS, STEPS = 4, 16
"""Levels whose texts are read, and steps of random play on each of them."""

TOKEN = re.compile(r"[A-Za-z]{1,4}|\S|\n")


class Resolved(NamedTuple):
    """Settings, and one line about what an environment brought to them, if it brought anything."""

    config: Config
    note: str | None = None


def resolve_run(
    recipe: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Resolved:
    """The settings of a run by a recipe, or by an environment alone, as its model needs them.

    Without a recipe, ``env.name`` or a mixture must be given. The environment then brings its
    budgets, on top of the `NEUTRAL` settings; if it has a recipe for the embedded models and runs
    with one of them, it brings that recipe. With a recipe for another environment than the given
    one, the recipe's values in `OF_ENV` are left out. A recipe that names no environment keeps
    them.

    Raises:
        RagenError: As `resolve_for_model`; neither recipe nor environment is named; there is no
            such environment; or an environment is named beside a mixture.
    """
    given = dotted(overrides or {})
    written = {} if recipe is None else load_recipe(recipe)[1]
    if mixed_in(given) or (mixed_in(written) and "env.name" not in given):
        return Resolved(_resolve_mixture(recipe, given, written))
    if recipe is None and "env.name" not in given:
        raise RagenError("name a recipe (ragen help recipes), or an environment with --env")
    if "env.name" in given:
        resolve(None, {"env.name": given["env.name"]})  # refuses what cannot be a name
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
    if not names_env(written):  # the recipe is for any environment and takes precedence
        brought = {key: value for key, value in brought.items() if key not in written}
    config = resolve_for_model(recipe, given, brought)
    other = config.recipe if names_env(written) else None
    return Resolved(config, note_of(name, brought, given, other))


def _has_recipe(env: str, model: str) -> bool:
    """True if an environment brings its own recipe, which only the embedded models get."""
    return env in recipes() and is_embedded(model) and taught_style(model) is None


def _of_recipe(env: str) -> Flat:
    return {k: v for k, v in load_recipe(env)[1].items() if k.startswith(OF_ENV)}


def _resolve_mixture(recipe: str | Path | None, given: Flat, written: Flat) -> Config:
    """The settings of a run in several environments.

    Each has the budgets and parameters that it brings, below those of its table. The lengths are
    the longest that any of them needs, and prompts have the paper style if one of them needs it.
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
    """A line that names the budgets and lengths of the environment, except those that are given.

    Example:
        >>> note_of("guess", {"env.max_turns": 3, "model.max_length": 640}, {}, "bandit")
        'recipe bandit is for another environment; budgets from guess: max_turns 3, max_length 640'
    """
    values = {k: v for k, v in brought.items() if k not in given and k.startswith(NOTED)}
    said = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in values.items())
    other = f"recipe {recipe} is for another environment; " if recipe else ""
    return f"{other}budgets from {name}: {said}" if said else None


def budgets_of(name: str, given: Flat) -> tuple[Flat, str | None]:
    """The budgets of an environment with the given parameters, and its style of prompts."""
    prefix = f"{PARAMS}."
    params = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
    whole = given.get(PARAMS, {})
    params |= whole if isinstance(whole, Mapping) else {}  # `resolve` refuses other values
    try:
        with closing_env(make(name, **params)) as env, boundary("its budgets"):
            return {f"env.{each}": getattr(env, each) for each in BUDGETS}, env.prompt_style
    except UserCodeError as failure:
        raise RagenError(f"environment {name}: {failure.reason}") from failure


def config_of_env(given: Flat) -> Config:
    """The given values, with the environment's own budgets under them."""
    return resolve(None, given, env=budgets_of(str(given["env.name"]), given)[0])


def brought_by(
    name: str, given: Flat, written: Flat, model: str, recipe: str | Path | None = None
) -> Flat:
    """The budgets, the style of prompts and the lengths that suit an environment and a model.

    `written` are the values of the recipe, `given` those of the user; the lengths depend on both.
    """
    brought, own_style = budgets_of(name, given)
    if "prompt.style" not in written:
        usual = "compact" if is_embedded(model) else "paper"
        brought["prompt.style"] = taught_style(model) or own_style or usual
    config = resolve(recipe, given, env=brought)
    return brought | _lengths(config, model, given.get("rollout.max_tokens"))


def _lengths(config: Config, model: str, given: int | None) -> Flat:
    """The tokens of a reply, unless given, and of the longest episode: estimated from the texts."""
    prompt, sizes = config.prompt, _sizes_of(config)
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
    longest = max(256, min(64 * ceil(1.1 * needed / 64), LONGEST, positions(model)))
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


def _sizes_of(config: Config) -> _Sizes:
    prompt, env = config.prompt, config.env
    with closing(make_setup(config, None)) as setup:
        texts = _read(setup)
    builder = PromptBuilder(prompt.style, prompt.think, LONGEST, texts.tools != "")
    limits = Limits(1, env.max_turns, env.max_actions, env.actions_per_turn)
    opening = builder.first(texts.rules, texts.goal, texts.actions, texts.observation, limits)
    following = builder.following(texts.observation, -0.1, "invalid", limits)
    is_one = texts.actions is None and not texts.tools
    count = 1 if is_one else env.actions_per_turn
    return _Sizes(
        num_tokens(f"{builder.system() or ''}{texts.tools}{opening}") + 2 * TAGS,
        num_tokens(texts.observation),
        num_tokens(following) + TAGS,
        TAGS + count * (texts.answer + 1),
        count * (min(texts.answer, SHORT // 4) + 1),
    )


class _Texts(NamedTuple):
    """The texts of an environment.

    `observation` is its longest, `tools` are JSON, `answer` counts its longest action's tokens.
    """

    rules: str
    goal: str
    actions: tuple[str, ...] | None
    observation: str
    tools: str
    answer: int


def _read(setup: Setup) -> _Texts:
    """The texts that the environment shows at the start of some levels and in random play.

    If it fails, the texts so far count; the episodes of the run will report the failure.
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
    """Play at random for up to `STEPS` steps, if there is random play."""
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
    """An estimate of a text's tokens: one for up to four letters, a line break or another sign.

    Example:
        >>> num_tokens("Reach the goal: __G")
        8
    """
    return len(TOKEN.findall(text))
