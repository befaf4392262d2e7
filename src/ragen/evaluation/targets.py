"""Who can be evaluated: a run, a checkpoint, a model, an endpoint, a player; and how each plays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ragen.config.config import Config
from ragen.config.keys import canonical_key
from ragen.config.reading import flatten, read_config, recipes, resolve
from ragen.core.errors import RagenError
from ragen.envs.registry import make, parameter_names
from ragen.evaluation.baselines import sources
from ragen.models.names import hash_model_folder, resolve_model
from ragen.rollout.endpoint import ChatEndpoint, Server
from ragen.rollout.players import PLAYERS, PlayerPolicy
from ragen.rollout.policies import Policy
from ragen.rollout.rollout import Setup, setup_of
from ragen.storage.database import CONFIG

VERSION = 1
"""Incremented when equal settings start to play differently; environment sources are hashed."""

SERVED: Mapping[str, Any] = MappingProxyType(
    {
        "prompt.style": "paper",
        "prompt.prefill": False,
        "rollout.max_tokens": 1024,
        "model.max_length": 2**20,
    }
)
"""How an endpoint's model is prompted unless told otherwise: in full words, with room to think. How
long a conversation may be, the server knows."""

PLAYED_UNDER = ("env.", "prompt.", "model.", "rollout.max_tokens")
"""Beginnings of the keys that decide how an episode is played."""


def run_of(target: str) -> Path | None:
    """The run folder that a target is, or whose checkpoint it is.

    Example:
        >>> run_of("random") is None
        True
    """
    folder = Path(target)
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    return folder if (folder / CONFIG).is_file() else None


def is_local(target: str) -> bool:
    """Whether a target is found here, by its name or as a folder, whatever a server may have.

    Example:
        >>> is_local("base"), is_local("gpt-5")
        (True, False)
    """
    return target == "base" or target in PLAYERS or Path(target).exists()


def refuse_absent(target: str, server: Server | None = None) -> None:
    """What cannot play is known before anyone else has played; no weights are read.

    A server's model is left to the server.

    Raises:
        RagenError: There is no such run or model, or it is not one.
    """
    if target == "human":
        raise RagenError("a person plays with `ragen play WORLD`; random and solver are measured")
    if target == "base" or target in PLAYERS or (server is not None and not is_local(target)):
        return
    from ragen.models.names import base_of
    from ragen.models.pretrained import model_config, model_folder

    model = base_of(resolve_model(target, ""))
    model_config(model_folder(model, weights=False), target)


def config_for(target: str, overrides: Mapping[str, Any], server: Server | None = None) -> Config:
    """The settings under which a target plays: its run's, or the recipe's of the environment.

    A recipe may be named as the environment: it stands for its own, played as the recipe says.
    `sokoban` and `paper/sokoban` are one environment, told in other words.

    A run that is evaluated in another environment keeps how it is prompted, the form of its
    observations
    included, and takes the other's budgets and parameters. A model at an endpoint sees an
    environment as the environment itself shows it (`SERVED`), not as the embedded models know it.

    Raises:
        RagenError: No such key or environment, or values that exclude each other.
    """
    wanted = {canonical_key(key): value for key, value in overrides.items()}
    env = wanted.get("env.name")
    is_recipe = env in recipes() or str(env).endswith(".toml")
    recipe = resolve(env if is_recipe else None)
    if is_recipe:
        env = wanted["env.name"] = recipe.env.name
    of_env = {k: v for k, v in flatten(recipe).items() if k.startswith("env.")}
    if server is not None:
        of_env.pop("env.params.observation", None)
        config = resolve(None, {**of_env, **SERVED, **wanted})
        if config.prompt.prefill:
            raise RagenError("prompt.prefill: a chat endpoint's reply cannot be begun for it")
        return config
    run = run_of(target)
    if run is None:
        return resolve(None, wanted, saved=flatten(recipe))
    config = read_config(run / CONFIG)
    if env is None or env == config.env.name:
        return resolve(None, wanted, saved=flatten(config))
    of_run = {k: v for k, v in flatten(config).items() if not k.startswith("env.params.")}
    seen = config.env.params.get("observation")
    shown = (
        {"env.params.observation": seen} if seen and "observation" in parameter_names(env) else {}
    )
    return resolve(None, wanted, saved={**of_run, **of_env, **shown})


def opponent(
    target: str, config: Config, server: Server | None = None
) -> tuple[Policy | PlayerPolicy, Setup]:
    """Who plays, and how.

    Raises:
        RagenError: There is no such target, or its model cannot be loaded.
    """
    if server is not None:
        return ChatEndpoint(server, target, config.prompt.think), setup_of(config, None)
    if target in PLAYERS:
        refuse_absent(target)
        setup = setup_of(config, None)
        return PlayerPolicy(PLAYERS[target], setup.think, setup.prefill), setup
    from ragen.engines.local import policy_of  # torch is needed from here on
    from ragen.engines.threads import use_threads

    use_threads(config.threads)

    policy, chat = policy_of(config, resolve_model(target, config.env.name))
    return policy, setup_of(config, chat)


def settings_of(
    target: str, config: Config, server: Server | None, seed: int, temperature: float
) -> dict[str, Any]:
    """All that an evaluation's episodes follow from, but for which levels are played how often.

    A model on this machine goes by its weights, one from a hub or a server by its name. vLLM draws
    other tokens than the local sampler does.

    Raises:
        RagenError: There is no such target or environment.
    """
    env = make(config.env.name, **config.env.params)
    env.close()
    return {
        "version": VERSION,
        "target": _identity(target, config.env.name, server),
        "seed": seed,
        "temperature": temperature,
        "sources": sources(type(env)),
        **{k: v for k, v in flatten(config).items() if k.startswith(PLAYED_UNDER)},
        "model.path": None,
        **({"rollout.sampler": "vllm"} if config.rollout.sampler == "vllm" else {}),
    }


def _identity(target: str, env: str, server: Server | None) -> str:
    if server is not None:
        return f"{target} at {server.url}"
    if target in PLAYERS:
        return target
    model = resolve_model(target, env)
    return hash_model_folder(Path(model)) if Path(model).is_dir() else model
