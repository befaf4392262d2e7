"""The settings under which a target is evaluated: a run, a model, an endpoint or a player.

`parse` finds what a target is, and each kind has its own rule: a run plays as it was trained, a
player by the environment's budgets, a model also by prompts that suit it, a server's model by
`ENDPOINT_DEFAULTS`. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from ragen.config.config import Config
from ragen.config.keys import Flat, canonical_key, show
from ragen.config.reading import flatten, load_recipe, merge, mixed_in, recipes
from ragen.core.errors import RagenError
from ragen.envs.registry import parameter_names
from ragen.models.names import is_embedded
from ragen.rollout.endpoint import Server
from ragen.rollout.players import PLAYERS
from ragen.rollout.setup import facts_of
from ragen.settings.code import absolute
from ragen.settings.environment import brought_by, budgets_of
from ragen.settings.model import with_prompts
from ragen.settings.resolve import Note, note_of
from ragen.settings.saved import run_config
from ragen.storage.checkpoint import run_of

Overrides = Mapping[str, Any]
"""Values by config key."""

ENDPOINT_DEFAULTS: Mapping[str, Any] = {
    "prompt.style": "paper",
    "prompt.prefill": False,
    "rollout.max_tokens": 1024,
    "model.max_length": 2**20,
}
"""Default settings for an endpoint's model: prompts in full words, and long replies. The server
itself limits the length of a conversation."""

EPISODE_KEYS = ("env.", "prompt.", "model.", "rollout.max_tokens")
"""Prefixes of the keys that determine an episode."""

LIMITS = ("env.timeout_s", "env.isolate")
"""Keys of an environment that determine how it runs and how much it may use."""

DISPLAY_KEYS = ("env.params.observation", *LIMITS)
"""Keys of an environment that change only how the task is shown and run, not the task itself."""

PROMPT_KEYS = ("prompt.", "rollout.max_tokens", "model.max_length", "env.params.observation")
"""Prefixes of the keys that determine an agent's prompts. A model folder does not record them."""


def is_measured(key: str) -> bool:
    """True if a key decides what the evaluations of a run measure."""
    if key.startswith("eval."):
        return key != "eval.every"
    return key.startswith(EPISODE_KEYS) and key not in (*LIMITS, "model.gradient_checkpointing")


def is_local(target: str) -> bool:
    """True if a target is found on this machine, by its name or as a folder."""
    return target == "base" or target in PLAYERS or Path(target).exists()


def task_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among `keys` that determine the task: its levels, events and budgets."""
    return {k: v for k, v in keys.items() if k.startswith("env.") and k not in DISPLAY_KEYS}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user asks a target to play.

    `given` are the user's values. `env` is the environment among them, ``None`` without one. It may
    be given as a recipe, which then sets budgets and prompts as well: `sokoban` and `paper/sokoban`
    are one environment with different prompts. `written` are that recipe's values, and `usual` its
    whole config, or the defaults.
    """

    given: Flat
    env: str | None
    written: Flat
    usual: Flat

    @property
    def is_recipe(self) -> bool:
        """True if the environment was given as a recipe."""
        return bool(self.written)

    def budgets(self) -> Flat:
        """The settings of the environment: those of its recipe, or with its own budgets."""
        own = {} if self.env is None or self.is_recipe else budgets_of(self.given)
        return {k: v for k, v in self.usual.items() if k.startswith("env.")} | own


def asked(overrides: Overrides) -> Asked:
    """Read what is asked.

    Raises:
        RagenError: An unknown key, several environments, or a recipe for several.
    """
    given = {canonical_key(key): value for key, value in overrides.items()}
    if mixed := mixed_in(given):
        names = ", ".join(mixed)
        raise RagenError(f"env.mix: an evaluation has one environment; name it with --env: {names}")
    env = given.get("env.name")
    if not isinstance(env, str | None):
        raise RagenError(f"env.name = {show(env)}: expected text")
    if env is None or not (env in recipes() or env.endswith(".toml")):
        return Asked(given, env, {}, flatten(merge()))
    recipe = merge(env)
    recipe.require_one_env()
    given["env.name"] = recipe.env.name
    return Asked(given, recipe.env.name, load_recipe(env)[1], flatten(recipe))


class Target(Protocol):
    """A kind of target."""

    def settings(self, asked: Asked, note: Note) -> Config:
        """The settings under which it plays; `note` receives a line for the user."""
        ...


class Player(Target):
    """Random or optimal play, or the user."""

    @override
    def settings(self, asked: Asked, note: Note) -> Config:
        return merge(None, asked.given, saved=asked.usual | asked.budgets())


class Served(Target):
    """A server's model, with `ENDPOINT_DEFAULTS` and the environment's default observation."""

    @override
    def settings(self, asked: Asked, note: Note) -> Config:
        env = asked.budgets()
        env.pop("env.params.observation", None)
        if str(asked.env).startswith("agent:"):
            env["prompt.think"] = False  # it reads replies as it always did
        config = merge(None, {**env, **ENDPOINT_DEFAULTS, **asked.given})
        if config.prompt.prefill:
            raise RagenError(
                "prompt.prefill: a chat endpoint cannot continue a pre-filled reply; leave it out"
            )
        return config


@dataclass(frozen=True, slots=True)
class Model(Target):
    """A model without a run, which gets prompts and lengths that suit it (`with_prompts`)."""

    name: str

    @override
    def settings(self, asked: Asked, note: Note) -> Config:
        own: Flat = {}
        if asked.env is not None and not asked.is_recipe:
            own = brought_by(asked.given, {}, self.name)
        config = merge(None, asked.given, saved=asked.usual | own)
        return with_prompts(config, asked.written | own, asked.given, self.name)


@dataclass(frozen=True, slots=True)
class Trained(Target):
    """A run's policy, which plays as it was trained.

    In another environment it keeps its own prompts and form of observation, and takes the other
    environment's budgets and parameters; the note says which budgets.
    """

    run: Path

    @override
    def settings(self, asked: Asked, note: Note) -> Config:
        given, env = asked.given, asked.env
        if env is not None:
            env = given["env.name"] = absolute(env)  # as the run has it
        config = self._config_in(env)
        if env in (None, config.env.name):
            return merge(None, given, saved=flatten(config))
        of_env = asked.budgets()
        of_run = {k: v for k, v in flatten(config).items() if not k.startswith("env.params.")}
        saved = of_run | of_env
        form = config.env.params.get("observation")
        if form and "observation" in parameter_names(str(env)):
            saved["env.params.observation"] = form
        if line := note_of(str(env), of_env, given):
            note(line)
        return merge(None, given, saved=saved)

    def _config_in(self, env: str | None) -> Config:
        """The run's config; a mixture has the config that a run in `env` alone would have.

        If the mixture does not have `env`, its first environment gives the prompts.
        """
        envs = run_config(self.run).by_env()
        if len(envs) > 1 and env is None:
            raise RagenError(
                f"{self.run} was trained in several environments: choose with --env "
                f"{', '.join(envs)}"
            )
        return envs.get(str(env), next(iter(envs.values())))


def parse(target: str, server: Server | None = None) -> Target:
    """The kind of a target; with a server, `target` is the name of one of its models."""
    if server is not None:
        return Served()
    if (run := run_of(target)) is not None:
        return Trained(run)
    return Player() if target in PLAYERS else Model(target)


def config_for(
    target: str,
    overrides: Overrides,
    server: Server | None = None,
    note: Note = lambda line: None,
) -> Config:
    """The settings under which a target plays.

    Raises:
        RagenError: There is no such environment, run or key, a value does not fit, or a run in
            several environments is asked without naming one.
    """
    return parse(target, server).settings(asked(overrides), note)


def envs_of(target: str, server: Server | None = None) -> list[str]:
    """The environments of a run that trained on a mixture; for any other target, an empty list."""
    run = None if server is not None else run_of(target)
    return [] if run is None else list(run_config(run).env.mix)


def shared_settings(
    targets: Sequence[str], overrides: Overrides, is_served: bool = False
) -> dict[str, dict[str, Any]]:
    """The settings of each target with which all of them play the same task.

    The first run's environment, parameters, budgets and limits hold for targets without a run. Each
    run keeps its own prompts and form of observation. If no environment is given, a model is
    prompted like the first run, except for the embedded model, a model that does not suit compact
    prompts, and, if `is_served`, models of a server.
    """
    runs = [target for target in targets if run_of(target)]
    first = (runs or targets)[0]
    config = config_for(first, overrides)
    facts_of(config.env)
    keys = flatten(config)
    task = task_settings(keys)
    for run in runs:
        own = task_settings(flatten(config_for(run, overrides)))
        for key in sorted(task | own, key=lambda key: (key != "env.name", key)):
            if task.get(key) != own.get(key):
                raise RagenError(
                    f"{first} and {run} were trained in different environments: {key} is "
                    f"{task.get(key)!r} and {own.get(key)!r}; choose one with --{key}"
                )
    limits = {k: keys[k] for k in LIMITS if k in keys}
    prompts = {k: v for k, v in keys.items() if k.startswith(PROMPT_KEYS)}
    if not runs or not overrides.keys().isdisjoint(("env", "env.name")):
        prompts = {}  # the given environment sets a model's prompts

    def settings(target: str) -> dict[str, Any]:
        if target in runs:
            return dict(overrides)
        has_own = target == "base" or target in PLAYERS or (is_served and not is_local(target))
        if prompts.get("prompt.style") == "compact" and not has_own:
            has_own = not is_embedded(target)
        return {**task, **limits, **({} if has_own else prompts), **overrides}

    return {target: settings(target) for target in targets}
