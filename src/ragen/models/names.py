"""What a model's name refers to: an embedded model, a run, a folder or a hub id. Loads no torch."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from ragen.core.errors import RagenError
from ragen.storage.checkpoint import STATE, hash_file, newest

EMBEDDED = {
    "bandit": "bandit",
    "bandit-rev": "bandit",
    "frozen-lake": "frozen-lake",
    "frozen-lake-still": "frozen-lake-still",
    "sokoban": "sokoban",
    "sokoban-large": "sokoban",
    "sokoban-new-symbols": "sokoban",
}
"""The embedded model of each environment, by its folder in ``ragen/models/bases``."""

POLICY_FILES = (
    *("model*.safetensors", "adapter*.safetensors", "pytorch_model*.bin"),
    *("*.json", "*.jinja", "*.txt", "*.model"),
)
"""Files of a model folder that decide what the policy says; a checkpoint has others besides."""


def base_folder(env: str) -> Path:
    """The embedded model that was prepared for `env`.

    Raises:
        RagenError: The environment has none.
    """
    folder = embedded_folder(EMBEDDED.get(env, "none"))
    if not folder.is_dir():
        raise RagenError(
            f"there is no embedded model for environment {env!r} (only for {', '.join(EMBEDDED)}); "
            "name a model with --model"
        )
    return folder


def embedded_folder(name: str) -> Path:
    """Where the package keeps the embedded model of this name, whether it exists or not."""
    return Path(str(resources.files("ragen.models") / "bases" / name))


def resolve_model(name: str, env: str) -> str:
    """The folder or hub id that a model's name refers to.

    Args:
        name: ``base``, a run folder (its newest checkpoint), a model folder, or a hub id.
        env: The environment to be played, for ``base``.

    Raises:
        RagenError: A run folder has no checkpoint, or a path does not exist.
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
    """Whether a name is ``owner/name`` and not a mistyped path: no folder here has that owner."""
    owner, slash, rest = name.partition("/")
    mistyped = owner in ("", ".", "..", "~", "runs") or path.parent.is_dir()
    return bool(slash) and "/" not in rest and not mistyped


def is_available_offline(name: str | Path) -> bool:
    """Whether a model is a folder here, or an id whose config is in the Hub's local cache."""
    from huggingface_hub import try_to_load_from_cache  # not needed by whoever imports this module
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(str(name), "config.json")
    except HFValidationError:  # not an id
        cached = None
    return Path(name).exists() or isinstance(cached, str)


def hash_model_folder(folder: Path) -> str:
    """A hash of the files that decide what a policy says: weights, tokenizer, template, config."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for pattern in POLICY_FILES for path in folder.glob(pattern)):
        if path.name != STATE:
            digest.update(f"{path.name} {hash_file(path)}\n".encode())
    return digest.hexdigest()
