"""A pretrained model's files: finding them, and checking them before weights are read.

A model is a folder in Hugging Face layout, or the id of one on the Hub. An id is resolved to its
folder in the local cache; after that, no request goes to the network.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from ragen.core.errors import RagenError

PATIENCE_S = 5.0
"""Seconds without an answer after which the Hub counts as unreachable; its own library tries for
half a minute."""

WORDS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model on the Hub that are read: config, tokenizer, chat template."""
OTHERS = ("*/*", "consolidated*")
"""Files that hold the same weights in other layouts."""

LOAD_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RuntimeError, ImportError, SafetensorError, StrictDataclassError),
)
"""What transformers raises for files that it cannot read."""

LFS = b"version https://git-lfs.github.com/"
"""The beginning of the pointer file that git-lfs leaves in place of a large file."""


def model_folder(name: str | Path, weights: bool = True) -> Path:
    """The folder that holds a model.

    `name` is a local folder or the id of a model on the Hub. Missing files are downloaded, the
    weights only if `weights`; if the Hub is unreachable, the local cache is used.

    Raises:
        RagenError: There is no such model, access is denied, or it is neither reachable nor cached.
    """
    if Path(name).exists():
        return Path(name)
    wanted = [*WORDS, "*.safetensors"] if weights else [*WORDS]
    offline = constants.HF_HUB_OFFLINE or not _hub_answers()
    try:
        found = snapshot_download(
            str(name), allow_patterns=wanted, ignore_patterns=[*OTHERS], local_files_only=offline
        )
    except GatedRepoError as error:
        raise RagenError(
            f"the model '{name}' is gated: accept its terms on its page of the Hub, then log in "
            "with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise RagenError(
            f"the Hub has no model '{name}' that may be read from here: check the name; for a "
            "private one log in with `hf auth login`"
        ) from error
    except HFValidationError as error:
        raise RagenError(
            f"there is no model '{name}': name a folder that exists, or an id of the Hub"
        ) from error
    except OSError as error:
        reach = "cannot be reached" if offline else "failed while the model was fetched"
        raise RagenError(
            f"the model '{name}' is not in the local cache (not all of it), and the Hub {reach}: "
            "check the name and the network, or name a local folder"
        ) from error
    return Path(found)


def model_config(folder: Path, name: str | Path, max_length: int = 0) -> PreTrainedConfig:
    """The config of a causal language model; its weights are not read.

    `name` is the user's name for the model, for error messages.

    Raises:
        RagenError: The folder holds no causal language model, one that brings code of its own, one
            whose weights are quantised, or one whose positions end before `max_length`.
    """
    try:
        text = (folder / "config.json").read_text("utf-8")
    except NotADirectoryError as error:
        raise RagenError(f"{name} is a file: name the folder of the model") from error
    except OSError as error:
        raise RagenError(f"{name}: this folder holds no model (config.json is missing)") from error
    with load_errors(name):
        raw = json.loads(text)
        if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
            raise RagenError(
                f"the model '{name}' brings code of its own, which is never run here; use one "
                "whose architecture is part of transformers"
            )
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RagenError(
            f"the model '{name}' ({config.model_type}) is no causal language model: it does not "
            "write on where a text ends; use one such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise RagenError(
            f"the weights of '{name}' are quantised and cannot be trained; use the model that it "
            "was made from"
        )
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max_length > most:
        raise RagenError(
            f"model.max_length = {max_length}: the model '{name}' knows {most} positions; "
            f"set model.max_length to {most} or less"
        )
    return config


def check_weights(folder: Path, name: str | Path) -> None:
    """Check that all shards of the weights exist as safetensors.

    Raises:
        RagenError: They do not, or are pointer files of git-lfs.
    """
    for file in folder.glob("*.safetensors"):
        with load_errors(name), file.open("rb") as opened:
            start = opened.read(len(LFS))
        if start == LFS:
            raise RagenError(
                f"the model '{name}' was cloned without its weights: {file.name} is a note of "
                "git-lfs; run `git lfs pull` in the folder, or name the model by its id"
            )
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return
    if not index.is_file():
        raise RagenError(
            f"the model '{name}' has no weights as safetensors (model.safetensors is missing); "
            "pickles can run code when they are read: where you trust them, convert them once with "
            "transformers (from_pretrained, then save_pretrained)"
        )
    with load_errors(name):
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise RagenError(
            f"the model '{name}' is not complete: {missing[0]} is missing "
            f"({len(missing)} of {len(shards)} shards); copy or download it again"
        )


@contextmanager
def load_errors(name: str | Path) -> Iterator[None]:
    """Turn an error of transformers about a model into one line."""
    try:
        yield
    except RagenError:
        raise
    except LOAD_ERRORS as error:
        raise RagenError(
            f"cannot load the model '{name}': {first_line(error)}; "
            "name a folder in Hugging Face layout, a model id of the Hub, or base"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    text = str(error).strip() or type(error).__name__
    return text.split("\n", 1)[0].rstrip(".:")


def _hub_answers() -> bool:
    """Whether the Hub answers at all within `PATIENCE_S`."""
    # Nothing is sent, and the answer only decides whether the Hub is asked. Certificates are left
    # to its library, which checks those of the system or of a proxy when it downloads.
    try:
        httpx.head(constants.ENDPOINT, timeout=PATIENCE_S, verify=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True
