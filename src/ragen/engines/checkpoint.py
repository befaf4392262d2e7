"""Checkpoints that are whole or not there, and finding the weights that a name stands for.

A checkpoint is written under a temporary name, flushed to the disk and renamed. It holds the policy
in Hugging Face's layout, the critic and the optimisers as safetensors, and the state of the loop as
JSON: nothing in it is executable. The state names every file with its hash and carries a hash of
itself, so that what a disk or a copy has spoilt since is not mistaken for what was saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ragen.core.errors import RagenError

STATE = "state.json"
"""The loop's state inside a checkpoint; written last."""

FILES, SEAL = "files", "seal"
"""Keys of the state: the hash of each other file, and the hash of the state itself."""

PLAYED_WITH = (
    *("model*.safetensors", "adapter*.safetensors", "pytorch_model*.bin"),
    *("*.json", "*.jinja", "*.txt", "*.model"),
)
"""Files of a model's folder that decide what it says; a checkpoint has others, for training."""

EMBEDDED = {
    "bandit": "bandit",
    "bandit-rev": "bandit",
    "frozen-lake": "frozen-lake",
    "frozen-lake-still": "frozen-lake-still",
    "sokoban": "sokoban",
    "sokoban-large": "sokoban",
    "sokoban-new-symbols": "sokoban",
}
"""The embedded model of each environment, by its folder in ``ragen/bases``."""


def base_folder(env: str) -> Path:
    """The embedded model that was prepared for `env`.

    Raises:
        RagenError: The environment has none.
    """
    folder = Path(str(resources.files("ragen.models") / "bases" / EMBEDDED.get(env, "none")))
    if not folder.is_dir():
        raise RagenError(
            f"there is no embedded model for environment {env!r} (only for {', '.join(EMBEDDED)}); "
            "name a model with --model"
        )
    return folder


def resolve_model(name: str, env: str) -> str:
    """The folder or hub id that a model's name stands for.

    Args:
        name: ``base``, a run folder (its newest checkpoint), a model folder, or a hub id.
        env: The environment that will be played, for ``base``.

    Raises:
        RagenError: A run folder without a checkpoint, or a path that does not exist.
    """
    if name == "base":
        return str(base_folder(env))
    path = Path(name)
    if (path / "config.toml").exists():
        return str(newest(path))
    if not path.exists() and not _may_be_hub_id(path, name):
        raise RagenError(
            f"there is no model or run {name!r}: name a run or model folder that exists, base, "
            "random, solver, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    return name


def _may_be_hub_id(path: Path, name: str) -> bool:
    """``owner/name``, and no mistyped path: its owner is no folder here, nor where runs go."""
    owner, slash, rest = name.partition("/")
    mistyped = owner in ("", ".", "..", "~", "runs") or path.parent.is_dir()
    return bool(slash) and "/" not in rest and not mistyped


def folders(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    return [path for path in _named(run) if (path / STATE).exists()]


def _named(run: Path) -> list[Path]:
    found = [
        path
        for path in (run / "checkpoints").glob("step-*")
        if re.fullmatch(r"step-\d+", path.name)
    ]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name says it is of.

    Example:
        >>> step_of(Path("runs/bandit-1/checkpoints/step-20"))
        20
    """
    return int(folder.name.removeprefix("step-"))


def newest(run: Path) -> Path:
    """The run's last complete checkpoint.

    Raises:
        RagenError: There is none.
    """
    complete = folders(run)
    if not complete:
        raise _no_checkpoint(run)
    return complete[-1]


def _no_checkpoint(run: Path) -> RagenError:
    return RagenError(
        f"{run} has no checkpoint to go on from; delete it and start it again with `ragen train`"
    )


def newest_whole(run: Path) -> tuple[Path, dict[str, Any], dict[Path, str]]:
    """The run's last checkpoint whose files are as they were written.

    Returns:
        The checkpoint, its state, and for each later one what is wrong with it.

    Raises:
        RagenError: There is no checkpoint, or none is whole.
    """
    wrong: dict[Path, str] = {}
    for folder in reversed(_named(run)):
        try:
            return folder, verified_state(folder), wrong
        except Damaged as error:
            wrong[folder] = error.reason
    if not wrong:
        raise _no_checkpoint(run)
    complaints = "; ".join(f"{folder.name}: {reason}" for folder, reason in wrong.items())
    raise RagenError(
        f"no checkpoint of {run} is whole ({complaints}); put back what they held, or start it "
        "again with `ragen train`"
    )


def verified_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint all of whose files are as they were written.

    Raises:
        Damaged: One of them is not.
    """
    state = read_state(folder)
    for name, written in state[FILES].items():
        path = folder / name
        if not path.is_file():
            raise Damaged(path, "it is missing")
        if _hash(path) != written:
            raise Damaged(path, "it is not what was written")
    return state


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that the step can be saved again; returns its new place.

    Raises:
        RagenError: The run's folder cannot be written.
    """
    aside = folder.with_name(f"damaged-{folder.name}")
    try:
        if aside.exists():
            shutil.rmtree(aside)
        return folder.rename(aside)
    except OSError as error:
        raise RagenError(f"could not set {folder} aside ({error}); make it writable") from error


def checkpoint_of(run: Path, step: int) -> Path | None:
    """The run's complete checkpoint of a step, if there is one."""
    return next((path for path in folders(run) if path.name == f"step-{step}"), None)


@contextmanager
def writing(
    run: Path, step: int, keep: int, best: int | None = None, every: int = 1
) -> Iterator[Path]:
    """A folder to fill with the checkpoint of `step`; it gets its name when it is whole.

    Args:
        run: The run folder.
        step: Steps that are finished.
        keep: How many of the newest regular checkpoints stay.
        best: A step whose checkpoint stays too.
        every: Steps between regular checkpoints. One between them, of a run that was stopped, stays
            while it is the newest and pushes no regular one out.

    Raises:
        RagenError: The disk is full or cannot be written; earlier checkpoints are untouched.

    Example:
        >>> import tempfile
        >>> run = Path(tempfile.mkdtemp())
        >>> with writing(run, 7, keep=2) as folder:
        ...     write_state(folder, {"step": 7})
        >>> newest(run).name
        'step-7'
    """
    parent = run / "checkpoints"
    target, temporary = parent / f"step-{step}", parent / f".step-{step}.{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        shutil.rmtree(target, ignore_errors=True)  # at most an incomplete one
        temporary.rename(target)
        _flush(parent)
    except (OSError, SafetensorError) as error:
        raise _unwritten(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    drop_old(run, keep, best, every)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it gets its name when it is whole, and is gone where that never comes.

    Raises:
        RagenError: `target` exists already, or the disk is full or cannot be written.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "model"
        >>> with new_folder(target) as folder:
        ...     _ = (folder / "config.json").write_text("{}")
        ...     target.exists()
        False
        >>> (target / "config.json").exists()
        True
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists():  # renaming would replace an empty folder
            raise RagenError(f"{target} exists already; name a folder that does not")
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        temporary.rename(target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:
        raise RagenError(
            f"could not write {target} ({error}); make room, or name a folder that can be written"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the loop's state into a checkpoint, after all other files: it names their hashes."""
    hashes = {
        str(path.relative_to(folder)): _hash(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / STATE).write_text(_sealed(state | {FILES: hashes}))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sealed(state: dict[str, Any]) -> str:
    return json.dumps(state | {SEAL: _seal(json.dumps(state))}, indent=1)


def _seal(text: str) -> str:
    """A hash of what a JSON text says."""
    said = json.dumps(json.loads(text), sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def replace_state(folder: Path, state: dict[str, Any]) -> None:
    """Give a complete checkpoint another state of the loop, at once or not at all.

    Raises:
        RagenError: The disk is full or cannot be written; the old state stays.
    """
    temporary = folder / f".{STATE}.{os.getpid()}"
    try:
        temporary.write_text(_sealed(state))
        _flush(temporary)
        temporary.replace(folder / STATE)
        _flush(folder)
    except OSError as error:
        raise _unwritten(folder, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _unwritten(folder: Path, error: Exception) -> RagenError:
    run = folder.parent.parent
    then = (
        f"go on with: ragen resume {run}"
        if folders(run)
        else f"remove {run}, which holds no step yet, and start again"
    )
    return RagenError(
        f"could not write the checkpoint {folder.name} ({error}); make room or make "
        f"{folder.parent} writable, then {then}"
    )


def regular(run: Path, every: int) -> list[Path]:
    """The complete checkpoints that a run writes whether it is stopped or not, oldest first."""
    return [path for path in folders(run) if step_of(path) % every == 0]


def drop_old(run: Path, keep: int, best: int | None = None, every: int = 1) -> None:
    """Remove all checkpoints but those that `writing` says stay."""
    kept = {*regular(run, every)[-keep:], *folders(run)[-1:]}
    for path in folders(run):
        if path not in kept and step_of(path) != best:
            shutil.rmtree(path)
    for path in (run / "checkpoints").glob(".step-*"):  # of a process that was killed
        shutil.rmtree(path, ignore_errors=True)


def drop_after(run: Path, step: int) -> None:
    """Remove the checkpoints later than `step`, whose attempt is given up.

    Newest first: whatever a kill leaves behind, the newest that remains leads here again.
    """
    for path in reversed(folders(run)):
        if step_of(path) > step:
            hidden = path.with_name(f".{path.name}.{os.getpid()}")
            path.rename(hidden)  # at once: half a checkpoint would pass for a damaged one
            shutil.rmtree(hidden)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_state(folder: Path) -> dict[str, Any]:
    """The loop's state in a checkpoint, and under `FILES` the hashes of the other files.

    Raises:
        Damaged: The file is missing or not what was written.
    """
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise Damaged(folder / STATE, error) from error
    if not isinstance(state, dict):
        raise Damaged(folder / STATE, "not an object")
    if state.pop(SEAL, None) != _seal(json.dumps(state)):
        raise Damaged(folder / STATE, "it is not what was written, or by an older RAGEN")
    return state


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write named tensors as safetensors."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read what `save_tensors` wrote.

    Raises:
        Damaged: The file is missing or cannot be read.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(path, error) from error


class Damaged(RagenError):
    """A checkpoint's file cannot be read or is not what was written; `reason` says which and why.

    Example:
        >>> Damaged(Path("step-3/model.safetensors"), "it is missing").reason
        'model.safetensors is damaged (it is missing)'
    """

    def __init__(self, path: Path, error: object) -> None:
        super().__init__(
            f"{path} is damaged ({error}); delete {path.parent} to go on from the checkpoint "
            "before it"
        )
        self.reason = f"{path.name} is damaged ({error})"


def weights_hash(folder: Path) -> str:
    """A hash of all that a model's folder plays with: weights, tokenizer, template, settings."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for pattern in PLAYED_WITH for path in folder.glob(pattern)):
        if path.name != STATE:
            digest.update(f"{path.name} {_hash(path)}\n".encode())
    return digest.hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimiser's state as flat names: ``"3.exp_avg"`` is `exp_avg` of its parameter 3."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, values in state.items()
        for name, value in values.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give an optimiser the state that `optimizer_tensors` took."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for path, value in tensors.items():
        index, name = path.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of all weights, by which a run knows its reference again."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def chosen(run: Path, step: int | None = None, best: bool = False) -> Path:
    """The checkpoint of a step, the one that was evaluated best, or the newest.

    Raises:
        RagenError: The run has none, none of that step, or none was evaluated.
    """
    last = newest(run)
    if best:
        state = read_state(last)["loop"]
        if state["best_success"] < 0:
            raise RagenError(f"no checkpoint of {run} was evaluated: leave --best out")
        step = int(state["best_step"])
    if step is None:
        return last
    found = checkpoint_of(run, step)
    if found is None:
        kept = ", ".join(f"{step_of(each)}" for each in folders(run))
        raise RagenError(f"{run} has no checkpoint of step {step}: it keeps those of {kept}")
    return found
