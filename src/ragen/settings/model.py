"""The prompts and lengths that a model gets if the user chose none. Loads no torch.

The embedded models read whole words: compact prompts, and replies of a few dozen tokens. Any other
model gets the papers' prompts (``prompt.style = "paper"``) and room for tokens of ordinary text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.keys import Flat, dotted
from ragen.config.reading import flatten, load_recipe, merge, recipes
from ragen.config.sections import MOST_TOKENS
from ragen.core.errors import RagenError
from ragen.models.names import is_embedded, local_config, resolve_model

REPLY = 400
"""Tokens of a reply, as in the papers."""
MESSAGE = 112
"""Tokens of a message to the model, beside its reply. With `REPLY` that is 512 a turn; as many
again hold the description of the environment, so that the papers' 5 turns have 3072 tokens."""
SUMMED = {"none": 0, "actions": 16, "observations": 40, "learned": 0}
"""Tokens of a turn in a summary."""
OF_WORDS = ("rollout.max_tokens", "model.max_length", "env.params.observation")
"""Settings that recipes for the embedded models choose for their tokens, besides prompts."""


def suited(
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    env: Flat | None = None,
) -> Config:
    """The settings of a run as its model needs them.

    `env` is what the environment brings; it chooses the prompts if it holds ``prompt.style``.
    A recipe that sets neither ``prompt.style`` nor ``model.path`` is for the embedded models. It
    takes another model only if `overrides` set ``prompt.style``.

    Raises:
        RagenError: As `merge`; the recipe is for the embedded models, or there is no such model.
    """
    given = dotted(overrides or {})
    config = merge(recipe, given, env=env)
    written = {} if recipe is None else load_recipe(recipe)[1]
    model = config.model.path
    is_chosen = "prompt.style" in written | given or "model.path" in written
    if recipe is not None and not is_chosen and not is_embedded(model):
        resolve_model(model, config.env.name)
        reply = written.get("rollout.max_tokens", config.rollout.max_tokens)
        raise RagenError(
            f"recipe {config.recipe} is for the embedded models: replies have {reply} tokens, "
            f"update.lr is {config.update.lr:g}; {_instead(config)}"
        )
    return with_prompts(config, {**written, **(env or {})}, given, model)


def with_prompts(config: Config, written: Flat, given: Flat, model: str) -> Config:
    """A config as `model` needs it, unless its recipe or the user have chosen the prompts.

    `written` are the recipe's values, `given` the user's; both are part of the config.
    """
    if "prompt.style" in written or given.get("prompt.style") == "compact" or is_embedded(model):
        return config
    chosen = given | written if "model.path" in written else given
    reply, longest = config.rollout.max_tokens, config.model.max_length
    if "model.max_length" not in chosen:
        reply = reply if "rollout.max_tokens" in chosen else REPLY
        turns = min(config.prompt.window or config.env.max_turns, config.env.max_turns)
        hidden = (config.env.max_turns - turns) * SUMMED[config.prompt.summary]
        longest = min((reply + MESSAGE) * (1 + turns) + hidden, positions(model))
    if "rollout.max_tokens" not in chosen:
        reply = min(REPLY, longest // 2)
    kept = {k: v for k, v in flatten(config).items() if k not in OF_WORDS or k in chosen}
    lengths = {"rollout.max_tokens": reply, "model.max_length": longest}
    return merge(None, given, saved={**kept, "prompt.style": "paper", **lengths})


def advice(style: str, model: str) -> str | None:
    """The note about a model that is not embedded and gets compact prompts."""
    if style == "paper" or is_embedded(model):
        return None
    return (
        'prompt.style = "compact" is for the embedded models: it tells neither rules nor the form '
        f'of a reply; for {model} use "paper"'
    )


def positions(model: str) -> int:
    """The longest sequence that a model knows, if its config is on this machine."""
    config = local_config(model)
    most = config.get("max_position_embeddings", config.get("n_positions"))  # GPT-2 and its kin
    return most if isinstance(most, int) and 16 <= most <= MOST_TOKENS else MOST_TOKENS


def _instead(config: Config) -> str:
    env, paper = config.env.name, f"paper/{config.env.name}"
    others = f"use {paper}" if paper in recipes() else f"leave the recipe out (--env {env})"
    return f"for {config.model.path} {others}, or set prompt.style"
