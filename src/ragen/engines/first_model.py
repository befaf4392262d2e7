"""The model that a run began with, which its adapter or its KL reference needs until the end.

A run that begins with another run's policy begins with one of its checkpoints. The config names
this checkpoint, because the newest checkpoint of the other run changes. If the new run needs the
weights later, it holds the checkpoint, and the other run does not delete it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.reading import changed
from ragen.core.errors import RagenError
from ragen.engines.factory import load_model, prepare_model
from ragen.models.adapter_folder import fingerprint_of_base, hash_tensors
from ragen.models.model_files import read_object
from ragen.models.names import BASE, is_adapter, resolve_model
from ragen.storage.checkpoint import folders, held, hold, is_checkpoint, is_intact, run_of


def pin_first(config: Config) -> Config:
    """The config with its newest checkpoint in place of each run that is named as a model.

    Raises:
        RagenError: The run has no checkpoint.
    """
    env, models = config.env.name, config.local_models
    runs = {key: name for key, name in models.items() if run_of(name) is not None}
    return changed(config, {key: resolve_model(name, env) for key, name in runs.items()})


def hold_first(config: Config, path: str, note: Callable[[str], None]) -> Callable[[], None]:
    """Keep the checkpoint that a run began with, if the run needs its weights later.

    `note` gets a warning if the checkpoint cannot be kept.

    Returns:
        What takes this back (`hold`), if nothing comes of the run.

    Raises:
        RagenError: The other run has deleted it.
    """
    if not (is_checkpoint(Path(path)) and _is_needed(config, path)):
        return lambda: None
    try:
        return hold(Path(path))
    except OSError as error:
        if not Path(path).is_dir():
            raise RagenError(
                f"{path} is gone: its run has deleted it; begin with a later checkpoint"
            ) from None
        note(
            f"{path} cannot be kept ({error.strerror}): once its run deletes it, this run cannot "
            "be resumed; to be safe, begin with a copy (ragen export)"
        )
        return lambda: None


def find_first(config: Config, checkpoint: Path, engine_state: dict[str, Any]) -> str:
    """The folder or hub id of the model that a run began with, to continue from its `checkpoint`.

    If the run began with another run's checkpoint, any of that run's checkpoints with the same
    weights serves. If `checkpoint` replaces all weights, any intact one serves. `engine_state` is
    the state that the engine saved with `checkpoint`.

    Raises:
        RagenError: No such checkpoint is left.
    """
    name = Path(config.model.path)
    run = run_of(name)
    if run is None:
        return resolve_model(config.model.path, config.env.name)
    others = [*reversed(folders(run)), *held(run)]
    candidates = [path for path in dict.fromkeys([name, *others]) if path in others]
    expected = _expected_hash(config, checkpoint, engine_state)
    if expected is None:
        any_serves = name == run or not _is_needed(
            config, str(candidates[0] if candidates else name)
        )
        serving = (path for path in candidates if path == name or (any_serves and is_intact(path)))
        first = next(serving, None)
    else:
        first = next((path for path in candidates if _hash_of(config, path) == expected), None)
    if first is None:
        raise RagenError(
            f"the model that this run began with is lost: no checkpoint of {run} has its weights; "
            f"restore {name}"
        )
    return str(first)


def _is_needed(config: Config, path: str) -> bool:
    """True if a run needs the model that it began with after its first checkpoint."""
    return config.may_use_kl or (config.lora.rank > 0 and not is_adapter(path))


def _expected_hash(config: Config, checkpoint: Path, engine_state: dict[str, Any]) -> str | None:
    """The recorded hash of the model that a run began with; ``None`` if any weights serve."""
    known: str | None = engine_state["reference"] if config.may_use_kl else None
    if is_adapter(checkpoint) and (checkpoint / BASE).exists():
        known = read_object(checkpoint / BASE).get("fingerprint")
    return known


def _hash_of(config: Config, path: Path) -> str | None:
    """The hash of another run's checkpoint, as a run would record it; ``None`` if damaged."""
    if not is_intact(path):
        return None
    model, _ = load_model(config, str(path))
    if config.lora.rank:
        return fingerprint_of_base(model)
    return hash_tensors(prepare_model(config, str(path), model, False).state_dict().items())
