"""Checkpoints of a run: their names, their state, and writing them atomically. Loads no torch.

A checkpoint is written under a temporary name, flushed to disk and renamed, so that it is either
complete or absent. It holds the policy in Hugging Face's layout, the critic and the optimisers as
safetensors, and the state of the loop as JSON; nothing in it is executable. The state names every
other file with its hash and carries a hash of itself, so that a file that was changed or damaged
later is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError
from ragen.core.files import cannot, file_errors, parse_json, whole_file, whole_folder
from ragen.storage.database import CHECKPOINTS, CONFIG, free_run

STATE = "state.json"
"""The loop's state inside a checkpoint; written last."""

FILES, SEAL = "files", "seal"
"""Keys of the state: the hash of each other file, and the hash of the state itself."""


class Damaged(RagenError):
    """A file of a checkpoint cannot be read or was changed; `reason` says which and why."""

    def __init__(self, path: Path, error: object, remedy: str = "restore it") -> None:
        super().__init__(f"{path} is damaged ({error}); {remedy}")
        self.path, self.error = path, error
        self.reason = f"{path.name} is damaged ({error})"


# Finding checkpoints.


def folders(run: Path, complete: bool = True) -> list[Path]:
    """The run's checkpoints, oldest first; without `complete` also those without a state."""
    inside = run / CHECKPOINTS
    remedy = "make the folder and its contents readable"
    with file_errors("read", inside, remedy), suppress(FileNotFoundError):
        named = [path for path in inside.iterdir() if re.fullmatch(r"step-\d+", path.name)]
        whole = [path for path in named if not complete or (path / STATE).exists()]
        return sorted(whole, key=step_of)
    return []


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def newest(run: Path) -> Path:
    """The run's last complete checkpoint."""
    if complete := folders(run):
        return complete[-1]
    raise _no_checkpoint(run)


def _no_checkpoint(run: Path) -> RagenError:
    return RagenError(f"{run} has no checkpoint to continue from; train again, with another --out")


def checkpoint_of(run: Path, step: int) -> Path | None:
    """The run's complete checkpoint of a step, if it exists."""
    return next((path for path in folders(run) if step_of(path) == step), None)


def choose(run: Path, step: int | None = None, best: bool = False) -> Path:
    """The checkpoint of a step, the one with the best evaluation, or the newest."""
    last = newest(run)
    if best:
        state = sound(last, ())["loop"]
        if state["best_success"] < 0:
            raise RagenError(f"no checkpoint of {run} was evaluated: leave --best out")
        step = int(state["best_step"])
    if step is None:
        return last
    checkpoint = checkpoint_of(run, step)
    if checkpoint is None:
        kept = ", ".join(str(step_of(each)) for each in folders(run))
        raise RagenError(f"{run} has no checkpoint of step {step}; it has those of steps {kept}")
    return checkpoint


def newest_intact(run: Path) -> tuple[Path, dict[str, Any], dict[Path, str]]:
    """The run's newest intact checkpoint, its state, and what is wrong with each later one."""
    wrong: dict[Path, str] = {}
    for folder in reversed(folders(run, complete=False)):
        try:
            return folder, verified_state(folder), wrong
        except Damaged as error:
            wrong[folder] = error.reason
    if not wrong:
        raise _no_checkpoint(run)
    complaints = "; ".join(f"{folder.name}: {reason}" for folder, reason in wrong.items())
    raise RagenError(
        f"no checkpoint of {run} is intact ({complaints}); restore the damaged files, or train "
        "again, with another --out"
    )


def is_checkpoint(folder: Path) -> bool:
    """True for the path of a run's checkpoint, by its name: it may be gone."""
    return folder.parent.name == CHECKPOINTS and bool(re.fullmatch(r"step-\d+", folder.name))


def run_of(name: str | Path) -> Path | None:
    """The run whose folder, or one of whose checkpoints, a name is; else ``None``."""
    path = Path(name)
    run = path.parent.parent if path.parent.name == CHECKPOINTS else path
    return run if (run / CONFIG).is_file() else None


# Reading and writing the state.


def read_state(folder: Path) -> dict[str, Any]:
    """The loop's state in a checkpoint, and under `FILES` the hashes of the other files.

    Raises:
        Damaged: The file is missing or was changed.
    """
    with _read_errors(folder / STATE):
        if not (folder / STATE).is_file():  # reading a pipe would wait for ever
            raise Damaged(folder / STATE, "it is missing")
        text = (folder / STATE).read_text(errors="replace")
    try:
        state = parse_json(text)
    except ValueError as error:
        raise Damaged(folder / STATE, error) from error
    if not isinstance(state, dict):
        raise Damaged(folder / STATE, "not an object")
    if state.pop(SEAL, None) != _seal(json.dumps(state)):
        raise Damaged(folder / STATE, "it is not what was written, or an older RAGEN wrote it")
    return state


def verified_state(folder: Path, patterns: Sequence[str] = ("*",)) -> dict[str, Any]:
    """The state of a checkpoint, after checking the hashes of the files that match `patterns`.

    Raises:
        Damaged: A file is missing, was changed, or cannot be read from the disk.
        RagenError: The permission to read a file is missing.
    """
    state = read_state(folder)
    for name, expected in state[FILES].items():
        path = folder / name
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        with _read_errors(path):
            if not path.is_file():
                raise Damaged(path, "it is missing")
            if hash_file(path) != expected:
                raise Damaged(path, "it is not what was written")
    return state


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Report a file that cannot be read as `Damaged`, unless only the permission is missing."""
    try:
        yield
    except PermissionError as error:
        raise cannot("read", path, error, "make it readable") from None
    except OSError as error:
        raise Damaged(path, error) from error


def sound(folder: Path, patterns: Sequence[str] = ("*",)) -> dict[str, Any]:
    """The verified state of a checkpoint that a user has chosen.

    Raises:
        Damaged: A file is; the message names the checkpoints that can be chosen instead.
        RagenError: The permission to read a file is missing.
    """
    try:
        return verified_state(folder, patterns)
    except Damaged as error:
        run = folder.parent.parent
        remedy = f"restore it, or train this step again: ragen resume {shlex.quote(str(run))}"
        if others := ", ".join(str(step_of(path)) for path in folders(run) if path != folder):
            remedy += f"; or take another checkpoint of {run}, of steps {others}"
        raise Damaged(error.path, error.error, remedy) from error


def is_intact(folder: Path) -> bool:
    """True if every file of a checkpoint is unchanged since it was written."""
    try:
        verified_state(folder)
    except Damaged:
        return False
    return True


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the loop's state into a checkpoint, after all other files: it holds their hashes."""
    hashes = {
        str(path.relative_to(folder)): hash_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / STATE).write_text(_sealed(state | {FILES: hashes}))


def replace_state(folder: Path, state: dict[str, Any]) -> None:
    """Replace the state of a complete checkpoint atomically."""
    try:
        with whole_file(folder / STATE) as temporary:
            temporary.write_text(_sealed(state))
    except OSError as error:
        raise _unwritten(folder, error) from error


def hash_text(text: str) -> str:
    """A hash of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """A hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sealed(state: dict[str, Any]) -> str:
    return json.dumps(state | {SEAL: _seal(json.dumps(state))}, indent=1)


def _seal(text: str) -> str:
    """A hash of the content of a JSON text, whatever its spacing and order of keys."""
    return hash_text(json.dumps(json.loads(text), sort_keys=True))


# Writing folders.


@contextmanager
def writing(
    run: Path, step: int, keep: int, best: int | None = None, every: int = 1
) -> Iterator[Path]:
    """A folder to fill with the checkpoint of `step`; it gets its name once it is complete.

    The `keep` newest regular checkpoints and the one of the best evaluation are kept. Regular
    ones are `every` so many steps; an irregular one, written when a run was stopped, is kept while
    it is the newest and does not count.
    """
    target = run / CHECKPOINTS / f"step-{step}"
    shutil.rmtree(target, ignore_errors=True)  # at most an incomplete one
    try:
        with whole_folder(target) as folder:
            yield folder
    except OSError as error:
        raise _unwritten(target, error) from error
    drop_old(run, keep, best, every)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it gets its name once it is complete, and is removed if that fails."""
    if target.exists():  # renaming would replace an empty folder
        raise RagenError(f"{target} exists already; name a folder that does not")
    try:
        with whole_folder(target) as folder:
            yield folder
    except OSError as error:
        remedy = "free space there or name a folder that can be written"
        raise cannot("write", target, error, remedy) from error


def _unwritten(folder: Path, error: Exception) -> RagenError:
    run = folder.parent.parent
    then = (
        f"continue with: ragen resume {shlex.quote(str(run))}"
        if folders(run)
        else f"start the run again, with another --out: {run} holds no step yet"
    )
    return cannot("write", f"the checkpoint {folder}", error, f"{free_run(run)}; then {then}")


# Dropping checkpoints.


def regular(run: Path, every: int) -> list[Path]:
    """The complete checkpoints at multiples of `every` steps, oldest first."""
    return [path for path in folders(run) if step_of(path) % every == 0]


def drop_old(run: Path, keep: int, best: int | None = None, every: int = 1) -> None:
    """Remove all checkpoints except those that `writing` keeps."""
    kept = {*regular(run, every)[-keep:], *folders(run)[-1:]}
    for path in folders(run):
        if path not in kept and step_of(path) != best:
            shutil.rmtree(path)
    for path in (run / CHECKPOINTS).glob(".step-*"):  # left by a process that was killed
        shutil.rmtree(path, ignore_errors=True)


def drop_after(run: Path, step: int) -> None:
    """Remove the checkpoints later than `step`, which belong to an abandoned attempt.

    The newest one is removed first: after a kill in between, the run resumes from the newest one
    left, and comes here again.
    """
    for path in reversed(folders(run)):
        if step_of(path) > step:
            hidden = path.with_name(f".{path.name}.{os.getpid()}")
            path.rename(hidden)  # atomic: a half-deleted checkpoint would pass for a damaged one
            shutil.rmtree(hidden)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint or file, to be written again; returns the new path."""
    aside = path.with_name(f"damaged-{path.name}")
    with file_errors("rename", path, f"make {path.parent} writable"):
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)
        return path.rename(aside)
