"""The model that a run began with, which its adapter or its KL reference needs until the end.

A run that begins with another run's policy begins with one checkpoint of it. The config names that
checkpoint, not the run, whose newest one changes. Where the new run needs the weights later, the
checkpoint is held: the other run drops it no more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragen.config.config import Config
from ragen.config.reading import changed
from ragen.core.errors import RagenError
from ragen.engines.factory import load_model, prepare_model
from ragen.models.adapter_folder import BASE, fingerprint_of_base, hash_tensors
from ragen.models.model_files import read_object
from ragen.models.names import is_adapter, resolve_model
from ragen.storage.checkpoint import folders, held, hold, is_checkpoint, is_intact, run_of


def pin_first(config: Config) -> Config:
    """The config with the checkpoint in the place of the run that it names.

    Raises:
        RagenError: The run has no checkpoint.
    """
    if run_of(config.model.path) is None:
        return config
    return changed(config, {"model.path": resolve_model(config.model.path, config.env.name)})


def hold_first(config: Config, path: str, note: Callable[[str], None]) -> None:
    """Keep the checkpoint that a run began with, if the run needs its weights later.

    Raises:
        RagenError: The other run has dropped it.
    """
    if not (is_checkpoint(Path(path)) and _is_needed(config, path)):
        return
    try:
        hold(Path(path))
    except OSError as error:
        if not Path(path).is_dir():
            raise RagenError(
                f"{path} is gone: its run has gone on; begin with a later checkpoint"
            ) from None
        note(
            f"{path} cannot be kept ({error.strerror}): this run cannot be resumed once that one "
            "drops it; to be safe, begin with a copy (ragen export)"
        )


def find_first(config: Config, checkpoint: Path, engine_state: dict[str, Any]) -> str:
    """The folder or hub id of the model that a run began with, to continue from its `checkpoint`.

    If it is another run's checkpoint, any that has the same weights will do. Where the weights do
    not matter, because the checkpoint replaces them all, any of that run will do.

    Raises:
        RagenError: It is gone.
    """
    name = Path(config.model.path)
    run = run_of(name)
    if run is None:
        return resolve_model(config.model.path, config.env.name)
    others = [*reversed(folders(run)), *held(run)]
    candidates = [path for path in dict.fromkeys([name, *others]) if path in others]
    expected = _recorded(config, checkpoint, engine_state)
    if expected is None:
        is_any = name == run or not _is_needed(config, str(candidates[0] if candidates else name))
        intact = (path for path in candidates if path == name or (is_any and is_intact(path)))
        first = next(intact, None)
    else:
        first = next((path for path in candidates if _identity(config, path) == expected), None)
    if first is None:
        raise RagenError(
            f"the model that this run began with is lost: no checkpoint of {run} has its weights; "
            f"restore {name}"
        )
    return str(first)


def _is_needed(config: Config, path: str) -> bool:
    """Whether a run needs the weights that it began with after its first checkpoint."""
    return config.may_use_kl or (config.lora.rank > 0 and not is_adapter(path))


def _recorded(config: Config, checkpoint: Path, engine_state: dict[str, Any]) -> str | None:
    """What identifies the model that a run began with; ``None`` if its weights do not matter."""
    known: str | None = engine_state["reference"] if config.may_use_kl else None
    if is_adapter(checkpoint) and (checkpoint / BASE).exists():
        known = read_object(checkpoint / BASE).get("fingerprint")
    return known


def _identity(config: Config, path: Path) -> str | None:
    """The same of another run's checkpoint; ``None`` if it is damaged."""
    if not is_intact(path):
        return None
    model, _ = load_model(config, str(path))
    if config.lora.rank:
        return fingerprint_of_base(model)
    return hash_tensors(prepare_model(config, str(path), model, False).state_dict().items())
