"""Targets of an evaluation (runs, checkpoints, models, endpoints, players) and their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.extensions import TOOL_PARSER, load
from ragen.config.keys import Flat, canonical_key, show
from ragen.config.reading import flatten, load_recipe, mixed_in, recipes, resolve
from ragen.config.sources import absolute
from ragen.core.errors import RagenError
from ragen.envs.registry import parameter_names, try_env
from ragen.evaluation.baselines import files_of, sources
from ragen.models.names import base_of, hash_model_folder, is_embedded, resolve_model
from ragen.rollout.endpoint import ChatEndpoint, Server
from ragen.rollout.players import PLAYERS, PlayerPolicy
from ragen.rollout.policies import Policy
from ragen.rollout.setup import Setup, by_env, make_setup, refuse_mixture
from ragen.settings.environment import Resolved, brought_by, budgets_of, note_of
from ragen.settings.model import with_prompts
from ragen.settings.saved import run_config
from ragen.storage.checkpoint import run_of

Overrides = Mapping[str, Any]
"""Values by config key."""

TARGETS = "base, random, solver"
"""The targets besides runs and model folders, as messages name them."""

VERSION = 1
"""Raise it when equal settings give other episodes, except by an environment's sources: these are
hashed."""

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


def refuse_absent(target: str, server: Server | None = None, words: str = TARGETS) -> None:
    """Refuse a target that does not exist, without reading weights.

    Names of a server's models are not checked. `words` are the names that a message offers.
    """
    if target == "human":
        raise RagenError("a person plays with `ragen play ENV`; evaluate random or solver")
    if target == "base" or target in PLAYERS or (server is not None and not is_local(target)):
        return
    model = base_of(resolve_model(target, "", words))
    from ragen.models.hub import model_folder
    from ragen.models.pretrained import model_config

    model_config(model_folder(model, weights=False), target)


def config_for(target: str, overrides: Overrides, server: Server | None = None) -> Config:
    """The settings under which a target plays (`resolve_target`)."""
    return resolve_target(target, overrides, server).config


def resolve_target(target: str, overrides: Overrides, server: Server | None = None) -> Resolved:
    """The settings under which a target plays: its run's, or the environment's recipe.

    The environment may be given as a recipe, which then sets budgets and prompts as well: `sokoban`
    and `paper/sokoban` are one environment with different prompts.

    A run in another environment keeps its own prompts and form of observation, and takes the other
    environment's budgets and parameters. A model at an endpoint gets `ENDPOINT_DEFAULTS` and the
    environment's default observation. A local model that is not embedded also gets the default
    observation, and it gets lengths of its own (`with_prompts`), unless the recipe sets
    ``prompt.style``. An environment without a recipe determines the budgets, and for a model also
    the prompts and lengths (`env_settings`). If a run plays another environment than its own, the
    note says which budgets it gets.
    """
    given = {canonical_key(key): value for key, value in overrides.items()}
    env = _env_in(given)
    is_recipe = env in recipes() or str(env).endswith(".toml")
    recipe = resolve(env if is_recipe else None)
    written = load_recipe(str(env))[1] if is_recipe else {}
    if is_recipe:
        refuse_mixture(recipe)
        env = given["env.name"] = recipe.env.name
    of_env = {k: v for k, v in flatten(recipe).items() if k.startswith("env.")}
    run = None if server is not None else run_of(target)
    if run is not None and env is not None:
        env = given["env.name"] = absolute(env)  # as the run has it
    config = _config_in(run, env) if run is not None else None
    if config is not None and env in (None, config.env.name):
        return Resolved(resolve(None, given, saved=flatten(config)))
    brought: Flat = {}
    if env is not None and not is_recipe:
        is_model = config is None and server is None and target not in PLAYERS
        brought = brought_by(env, given, {}, target) if is_model else budgets_of(env, given)[0]
    of_env |= {key: value for key, value in brought.items() if key.startswith("env.")}
    if server is not None:
        of_env.pop("env.params.observation", None)
        config = resolve(None, {**of_env, **ENDPOINT_DEFAULTS, **given})
        if config.prompt.prefill:
            raise RagenError(
                "prompt.prefill: a chat endpoint cannot continue a pre-filled reply; leave it out"
            )
        return Resolved(config)
    if config is None:
        config = resolve(None, given, saved={**flatten(recipe), **brought})
        if target not in PLAYERS:
            config = with_prompts(config, {**written, **brought}, given, target)
        return Resolved(config)
    of_run = {k: v for k, v in flatten(config).items() if not k.startswith("env.params.")}
    saved = {**of_run, **of_env}
    form = config.env.params.get("observation")
    if form and "observation" in parameter_names(str(env)):
        saved["env.params.observation"] = form
    return Resolved(resolve(None, given, saved=saved), note_of(str(env), of_env, given))


def _env_in(given: Flat) -> str | None:
    if mixed := mixed_in(given):
        names = ", ".join(mixed)
        raise RagenError(f"env.mix: an evaluation has one environment; name it with --env: {names}")
    env = given.get("env.name")
    if not isinstance(env, str | None):
        raise RagenError(f"env.name = {show(env)}: expected text")
    return env


def _config_in(run: Path, env: str | None) -> Config:
    """The config of a run; a mixture has the config that a run in `env` alone would have.

    If the mixture does not have `env`, its first environment gives the prompts.
    """
    config = run_config(run)
    envs = by_env(config)
    if len(envs) > 1 and env is None:
        names = ", ".join(envs)
        raise RagenError(f"{run} was trained in several environments: choose with --env {names}")
    return envs.get(str(env), next(iter(envs.values())))


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
    try_env(config.env.name, config.env.params)
    task = task_settings(flatten(config))
    for run in runs:
        own = task_settings(flatten(config_for(run, overrides)))
        for key in sorted(task | own, key=lambda key: (key != "env.name", key)):
            if task.get(key) != own.get(key):
                raise RagenError(
                    f"{first} and {run} were trained in different environments: {key} is "
                    f"{task.get(key)!r} and {own.get(key)!r}; choose one with --{key}"
                )
    keys = flatten(config)
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


def task_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among `keys` that determine the task: its levels, events and budgets."""
    return {k: v for k, v in keys.items() if k.startswith("env.") and k not in DISPLAY_KEYS}


def load_target(
    target: str, config: Config, server: Server | None = None
) -> tuple[Policy | PlayerPolicy, Setup]:
    """The policy or player of a target, and the set-up of its episodes."""
    if server is not None:
        setup = make_setup(config, None)
        return ChatEndpoint(server, target, config.prompt.think, setup.tools), setup
    if target in PLAYERS:
        refuse_absent(target)
        setup = make_setup(config, None)
        make = PLAYERS[target]
        return PlayerPolicy(make, setup.think, setup.prefill, write=setup.write), setup
    path = resolve_model(target, config.env.name, TARGETS)
    from ragen.engines.factory import make_policy
    from ragen.networks.machine import use_threads

    use_threads(config.threads)
    policy, chat = make_policy(config, path)
    return policy, make_setup(config, chat)


def outcome_settings(
    target: str, config: Config, server: Server | None, seed: int, temperature: float
) -> dict[str, Any]:
    """Everything that determines an evaluation's episodes, except the number of levels and samples.

    The hash of its weights identifies a model on this machine, and its name a model of a hub or a
    server. The settings include the sampler, because vLLM draws other tokens than the local
    sampler. They also include the code of a parser from outside and the state of the files that the
    environment's parameters name.
    """
    env = try_env(config.env.name, config.env.params)
    files, parser = files_of(config.env.params), config.prompt.tool_parser
    if server is not None:
        identity = f"{target} at {server.url}"
    elif target in PLAYERS:
        identity = target
    else:
        model = resolve_model(target, config.env.name, TARGETS)
        identity = hash_model_folder(Path(model)) if Path(model).is_dir() else model
    return {
        "version": VERSION,
        "target": identity,
        "seed": seed,
        "temperature": temperature,
        "sources": sources(env),
        **{k: v for k, v in flatten(config).items() if k.startswith(EPISODE_KEYS)},
        "model.path": None,
        **({"rollout.sampler": "vllm"} if config.rollout.sampler == "vllm" else {}),
        **({"files": files} if files else {}),
        **({} if parser in TOOL_PARSER.names else {"parser": load(parser, TOOL_PARSER).source}),
    }
