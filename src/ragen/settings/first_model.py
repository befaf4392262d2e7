"""The model that a run begins with, which its adapter or its KL reference needs until the end.

A run that begins with the policy of another run begins with one of its checkpoints. The config
names this checkpoint, because the newest checkpoint of the other run changes. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path

from ragen.config.config import Config
from ragen.config.reading import changed
from ragen.core.errors import RagenError
from ragen.models.names import resolve_model
from ragen.storage.checkpoint import is_checkpoint, run_of


def pin_first(config: Config) -> Config:
    """The config with its newest checkpoint in place of each run that is named as a model.

    Raises:
        RagenError: The run has no checkpoint.
    """
    env, models = config.env.name, config.local_models
    runs = {key: name for key, name in models.items() if run_of(name) is not None}
    return changed(config, {key: resolve_model(name, env) for key, name in runs.items()})


def find_first(config: Config, checkpoint: Path) -> str:
    """The folder or hub id of the model that a run began with, to continue from its `checkpoint`.

    If the run began with a checkpoint that is gone, `checkpoint` takes its place, unless a KL
    reference needs the first weights. The base of an adapter is looked for when it is loaded.

    Raises:
        RagenError: The KL reference, or the model that `model.path` names, is gone.
    """
    first = config.model.path
    if Path(first).is_dir() or not is_checkpoint(Path(first)):
        return resolve_model(first, config.env.name)
    if config.may_use_kl:
        raise RagenError(
            f"the run's KL reference is the checkpoint {first}, which is gone: restore it"
        )
    return str(checkpoint)
