"""The model behind a name: embedded, a run, a folder, an adapter or a hub id. Loads no torch."""

from __future__ import annotations

import hashlib
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError
from ragen.models.model_files import check_files, read_object
from ragen.storage.checkpoint import STATE, hash_file, newest

EMBEDDED = {
    "bandit": "bandit",
    "bandit-rev": "bandit",
    "frozen-lake": "frozen-lake",
    "frozen-lake-still": "frozen-lake-still",
    "frozen-lake-picture": "frozen-lake-picture",
    "sokoban": "sokoban",
    "sokoban-picture": "sokoban-picture",
    "sokoban-large": "sokoban",
    "sokoban-new-symbols": "sokoban",
}
"""The embedded model of each environment, by its folder in ``ragen/models/bases``."""

WEIGHT_FILES = "model*.safetensors", "adapter*.safetensors", "pytorch_model*.bin"
POLICY_FILES = *WEIGHT_FILES, "*.json", "*.jinja", "*.txt", "*.model"
"""Files of a model folder that decide what the policy says; a checkpoint has more files."""

ADAPTER_CONFIG = "adapter_config.json"
"""The config file of an adapter's folder in PEFT's layout."""
BASE = "base.json"
"""Holds the hash of the weights of the base that RAGEN trained an adapter on."""

TEMPLATE, WORDS, SETTINGS = "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"
"""The files of a tokenizer."""
PROMPT_STYLE = "prompt_style"
"""Entry of a model's config: the only style of prompts that it was taught to read."""

NO_OWNERS = ("", ".", "..", "~", "runs")
"""Beginnings that no hub id has, so that a path that leads nowhere is not looked for there."""

CONFIGS = ("config.json", ADAPTER_CONFIG)
"""The files of which a model folder has one."""


def base_folder(env: str) -> Path:
    """The embedded model that was prepared for `env`; of a mixture, for its first environment.

    Raises:
        RagenError: The environment has none.
    """
    folder = embedded_folder(EMBEDDED.get(env.partition("+")[0], "none"))
    if not folder.is_dir():
        raise RagenError(
            f"there is no embedded model for environment {env!r} (only for {', '.join(EMBEDDED)}); "
            f"name a model with --model, or make one with `ragen base --env {env} --out DIR`"
        )
    return folder


def embedded_folder(name: str) -> Path:
    """Where the package keeps the embedded model of this name, whether it exists or not."""
    return Path(str(resources.files("ragen.models") / "bases" / name))


def resolve_model(name: str, env: str, words: str = "base") -> str:
    """The folder or hub id of a name: ``base`` (for `env`), a run, a model folder or a hub id.

    A run's folder gives its newest checkpoint. `words` are the names that a message offers.

    Raises:
        RagenError: A run folder has no checkpoint, or a path does not exist or holds no model.
    """
    if name == "base":
        return str(base_folder(env))
    path = Path(newest_of(name))
    if path != Path(name):
        return str(path)
    owner, *rest = name.split("/")  # a hub id is owner/name, and no folder here has that owner
    mistyped = owner in NO_OWNERS or path.parent.is_dir()
    if not path.exists() and owner == "models":
        raise RagenError(
            f"there is no model {name!r} here: make it first (docs/small-models.md has the "
            "warm-ups of the recipes), or name another with --model"
        )
    if not path.exists() and (mistyped or len(rest) != 1):
        hides = len(rest) == 1 and owner not in NO_OWNERS
        raise RagenError(
            f"there is no model or run {name!r}: name a run or model folder that exists, {words}, "
            "or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
            + (f" (none of {owner}/ while the folder {owner} is here)" if hides else "")
        )
    if path.is_dir() and not any((path / config).exists() for config in CONFIGS):
        raise RagenError(
            f"{name}: this folder holds no model and no run (config.json is missing); name a run's "
            "folder, such as runs/bandit-1, or a model's"
        )
    return name


def newest_of(name: str) -> str:
    """The newest checkpoint of a run's folder; any other name stays as it is.

    Raises:
        RagenError: The run has no checkpoint.
    """
    return str(newest(Path(name))) if (Path(name) / "config.toml").exists() else name


def is_embedded(name: str) -> bool:
    """True for an embedded model or one that descends from it: it reads whole words.

    A model or run on this machine is known by its tokenizer and chat template. So is one that
    `ragen base --env` made, by its config. An id of the Hub counts as another model.

    Raises:
        RagenError: A run has no checkpoint, or a file of the model cannot be read.
    """
    if name == "base":  # also where a folder has this name
        return True
    path = Path(newest_of(name))
    if not (path / SETTINGS).is_file() and is_adapter(path):
        path = Path(base_of(path))
    own = embedded_folder("bandit")  # all embedded models have this tokenizer
    if (path / TEMPLATE).is_file() and (path / WORDS).is_file():
        same_template = (path / TEMPLATE).read_bytes() == (own / TEMPLATE).read_bytes()
        if same_template and read_object(path / WORDS) == read_object(own / WORDS):
            return True
    return taught_style(str(path)) == "compact"


def taught_style(name: str) -> str | None:
    """The only style of prompts that a model here was taught, if `ragen base --env` made it.

    A run's model has the style of the model that the run began with, an adapter its base's style.

    Raises:
        RagenError: As `is_embedded`, or an adapter's base is gone.
    """
    if name == "base":
        return None
    config = Path(base_of(newest_of(name))) / "config.json"
    style = read_object(config).get(PROMPT_STYLE) if config.is_file() else None
    return style if style in ("compact", "paper") else None


def local_file(name: str | Path, file: str) -> Path | None:
    """A file of a model that is a folder here, or an id in the Hub's local cache."""
    from huggingface_hub import try_to_load_from_cache  # importing it takes time
    from huggingface_hub.errors import HFValidationError

    if Path(name).exists():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        cached = try_to_load_from_cache(str(name), file)
    except HFValidationError:  # not an id
        cached = None
    return Path(cached) if isinstance(cached, str) else None


def local_config(name: str) -> dict[str, Any]:
    """The part of a model's config about text; empty if it is not on this machine.

    Raises:
        RagenError: The config cannot be read.
    """
    file = local_file(base_of(newest_of(name)), "config.json")
    config = {} if file is None else read_object(file)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def is_available_offline(name: str | Path) -> bool:
    """True for a folder here, or an id whose config is in the Hub's local cache."""
    return Path(name).exists() or local_file(name, "config.json") is not None


def hash_model_folder(folder: Path) -> str:
    """A hash of the files that decide what a policy says: weights, tokenizer, template, config.

    An adapter's base counts if it is a folder. RAGEN's own adapters have a hash of its weights.

    Raises:
        RagenError: An entry is no file, or an adapter's base is gone.
    """
    check_files(folder)
    digest = hashlib.blake2b(digest_size=16)
    paths = sorted(chain.from_iterable(map(folder.glob, POLICY_FILES)))
    for path in paths:
        if path.is_file() and path.name != STATE:
            digest.update(f"{path.name} {hash_file(path)}\n".encode())
    if is_adapter(folder) and not (folder / BASE).exists():
        base = Path(base_of(folder))
        if base.is_dir() and not is_adapter(base):
            digest.update(f"base {hash_model_folder(base)}\n".encode())
    return digest.hexdigest()


def is_adapter(path: str | Path) -> bool:
    """True for a PEFT folder.

    Raises:
        RagenError: It is a model's folder too.
    """
    folder = Path(path)
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    if (folder / "config.json").is_file():
        raise RagenError(
            f"{folder} holds both a model and an adapter ({ADAPTER_CONFIG}): move one of them into "
            "a folder of its own, and name the one to use"
        )
    return True


def base_of(path: str | Path) -> str:
    """The folder or hub id of the base model: for a PEFT folder the one in its config, else `path`.

    A relative path is looked for in the working directory, then in the PEFT folder. An embedded
    model that another installation names is found in this one.

    Raises:
        RagenError: The config cannot be read or names no base, or the base's folder is gone.
    """
    if not is_adapter(path):
        return str(path)
    folder = Path(path)
    name = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise RagenError(
            f"{folder / ADAPTER_CONFIG} names no base model: set base_model_name_or_path to its "
            "folder or hub id"
        )
    base = Path(name)
    embedded = embedded_folder(base.name)
    if base.is_dir():
        return name
    if base.parts[-4:-1] == ("ragen", "models", "bases") and embedded.is_dir():
        return str(embedded)
    if (folder / base).is_dir():
        return str(folder / base)
    if base.is_absolute() or name[0] in ".~" or len(base.parts) > 2:  # a hub id is owner/name
        raise RagenError(
            f"the adapter {folder} belongs to the model {name}, which is gone: put it back, or set "
            f"base_model_name_or_path in {ADAPTER_CONFIG} to the full path of its new place"
        )
    return name
