"""Targets of an evaluation: whether they exist, how they play, and what identifies their episodes.

Their settings are in `ragen.settings.target`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.extensions import TOOL_PARSER, load
from ragen.config.reading import flatten
from ragen.core.errors import RagenError
from ragen.envs.registry import env_class
from ragen.evaluation.baselines import files_of, sources
from ragen.models.names import base_of, hash_model_folder, resolve_model
from ragen.rollout.endpoint import ChatEndpoint, Server
from ragen.rollout.players import PLAYERS, PlayerPolicy
from ragen.rollout.policies import Policy
from ragen.rollout.setup import Setup, make_setup
from ragen.settings.target import EPISODE_KEYS, is_local

TARGETS = "base, random, solver"
"""The targets besides runs and model folders, as messages name them."""

VERSION = 1
"""Raise it when equal settings give other episodes, except by an environment's sources: these are
hashed."""


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
    from ragen.cluster.process_engine import load_policy, with_processes
    from ragen.networks.machine import use_threads

    config = with_processes(config)
    use_threads(config.threads, config.engine.processes)
    return load_policy(config, path)


def outcome_settings(
    target: str, config: Config, server: Server | None, seed: int, temperature: float
) -> dict[str, Any]:
    """Everything that determines an evaluation's episodes, except the number of levels and samples.

    The hash of its weights identifies a model on this machine, and its name a model of a hub or a
    server. The settings include the sampler, because vLLM draws other tokens than the local
    sampler. They also include the code of a parser from outside and the state of the files that the
    environment's parameters name.
    """
    env = env_class(config.env.name)
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
