"""The one entry: from a recipe, an environment and a user's values to the settings of a run.

Precedence, weakest first: defaults, the algorithm's preset, what the environment brings, the
recipe, the user. A recipe for another environment than the user's loses its values in `OF_ENV`. The
model then decides the prompts, unless the recipe or the user did (`ragen.settings.model`). Loads no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.keys import BUDGETS, MIX, PARAMS, TASK, Flat, dotted
from ragen.config.reading import (
    OF_ENV,
    for_env,
    load_recipe,
    merge,
    mixed_in,
    names_env,
    recipes,
)
from ragen.core.errors import RagenError
from ragen.models.names import is_embedded, taught_style
from ragen.settings.environment import brought_by
from ragen.settings.model import suited

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

ON_PROMPTS = ("prompt.style", "prompt.think", "rollout.max_tokens")
"""Keys of the whole run on which the lengths of a mixture's environments depend."""

NOTED = (*(f"env.{each}" for each in BUDGETS), f"{PARAMS}.", *OF_ENV[1:])
"""How the keys begin that a note mentions."""

Note = Callable[[str], None]
"""Receives a line for the user."""


def resolve(
    recipe: str | Path | Config | None = None,
    overrides: Mapping[str, Any] | None = None,
    note: Note = lambda line: None,
) -> Config:
    """The settings of a run.

    Args:
        recipe: A recipe's name, the path of a ``.toml``, or a config that Python built. Without
            one, the environment brings its budgets on top of `NEUTRAL`; if it has a recipe for the
            embedded models and runs with one of them, it brings this recipe.
        overrides: The user's values by dotted key or in nested tables.
        note: Receives a line that names the budgets and lengths of the environment, if it brought
            any that the user did not give.

    Raises:
        RagenError: There is no such recipe, environment, model or key; a value has the wrong type,
            is never read, or excludes another; the recipe is for the embedded models and the model
            is none; neither recipe nor environment is named, or an environment beside a mixture.
    """
    given = dotted(overrides or {})
    if isinstance(recipe, Config):
        return suited(None, dotted(recipe.model_dump(exclude_unset=True)) | given)
    written = {} if recipe is None else load_recipe(recipe)[1]
    if mixed_in(given) or (mixed_in(written) and "env.name" not in given):
        return _mixture(recipe, given, written)
    if "env.name" not in given:
        if recipe is None:
            raise RagenError("name a recipe (ragen help recipes), or an environment with --env")
        return suited(recipe, given)
    name = merge(None, {"env.name": given["env.name"]}).env.name  # refuses what is not a name
    if recipe is not None and name == written.get("env.name"):
        return suited(recipe, given)
    model = str(given.get("model.path", written.get("model.path", "base")))
    if recipe is None and _has_recipe(name, model):
        return suited(name, given)
    brought = _brought(name, given, written, model, recipe)
    if not names_env(written):  # the recipe is for any environment and takes precedence
        brought = {key: value for key, value in brought.items() if key not in written}
    config = suited(recipe, given, brought)
    if line := note_of(name, brought, given, config.recipe if names_env(written) else None):
        note(line)
    return config


def _has_recipe(env: str, model: str) -> bool:
    """True if an environment brings its own recipe, which only the embedded models get."""
    return env in recipes() and is_embedded(model) and taught_style(model) is None


def _brought(
    env: str, given: Flat, written: Flat, model: str, recipe: str | Path | None = None
) -> Flat:
    """The settings that an environment brings: from its own recipe, or by its budgets and texts."""
    if _has_recipe(env, model):
        return {k: v for k, v in load_recipe(env)[1].items() if k.startswith(OF_ENV)}
    return _start(recipe, model) | brought_by(given, written, model, recipe)


def _start(recipe: str | Path | None, model: str) -> Flat:
    return {} if recipe is not None else NEUTRAL | (SMALL if is_embedded(model) else {})


def _mixture(recipe: str | Path | None, given: Flat, written: Flat) -> Config:
    """The settings of a run in several environments.

    Each has the budgets and parameters that it brings, below those of its table. The lengths are
    the longest that any of them needs, and prompts have the paper style if one of them needs it.
    """
    if "env.name" in given and "+" not in str(given["env.name"]):
        raise RagenError("env.name and env.mix are given: name one environment, or a mixture")
    written = for_env(given, written)
    both = written | given
    mix = merge(None, {k: v for k, v in both.items() if k.startswith(f"{MIX}.")}).env.mix
    model = str(both.get("model.path", "base"))
    start = _start(recipe, model)
    styles, lengths = list[str](), dict[str, int]()
    for name, entry in mix.items():
        own = entry.model_dump(exclude_unset=True)
        alone = {"env.name": name, PARAMS: own.get("params", {})}
        alone |= {f"env.{key}": own[key] for key in BUDGETS if key in own}
        alone |= {"prompt.style": "compact"} if is_embedded(model) else {}
        alone |= {key: both[key] for key in ON_PROMPTS if key in both}
        given_alone = dotted(alone)
        config = merge(None, given_alone, env=_brought(name, given_alone, {}, model, recipe))
        styles.append(config.prompt.style)
        for key, length in (
            ("rollout.max_tokens", config.rollout.max_tokens),
            ("model.max_length", config.model.max_length),
        ):
            lengths[key] = max(length, lengths.get(key, 0))
        task = {key: getattr(config.env, key) for key in TASK}
        start[f"{MIX}.{name}"] = {"share": entry.share} | task
    shared = lengths | {"prompt.style": "paper" if "paper" in styles else "compact"}
    start |= {key: value for key, value in shared.items() if key not in written}
    return suited(recipe, {k: v for k, v in given.items() if not k.startswith(f"{MIX}.")}, start)


def note_of(name: str, brought: Flat, given: Flat, recipe: str | None = None) -> str | None:
    """A line that names the budgets and lengths of the environment, except those that are given."""
    values = {k: v for k, v in brought.items() if k not in given and k.startswith(NOTED)}
    said = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in values.items())
    other = f"recipe {recipe} is for another environment; " if recipe else ""
    return f"{other}budgets from {name}: {said}" if said else None
