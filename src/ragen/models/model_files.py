"""The files of a model's folder, checked before a library opens them. Loads no torch.

Others wrote them. Each check is quick, reads no weights, and names the file at fault in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError

LFS = b"version https://git-lfs.github.com/"
"""The beginning of the pointer file that git-lfs leaves in place of a large file."""
INDEX = "model.safetensors.index.json"
OBJECTS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
"""Small files that libraries read without checks of their own."""


def check_files(folder: Path) -> None:
    """Refuse a folder with malformed JSON, or an entry that is neither a file nor a link to one.

    Raises:
        RagenError: It has such an entry.
    """
    for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")]):
        expected = path.suffix in (".json", ".jinja", ".txt", ".model", ".safetensors")
        if (expected and not path.is_file()) or not (path.is_file() or path.is_dir()):
            raise RagenError(f"{path} is no regular file: copy or download the model again")
    for name in OBJECTS:
        if (folder / name).exists():
            read_object(folder / name)


def read_config(folder: Path, name: str | Path) -> dict[str, Any]:
    """The config as it is written, after a check of the folder's files; messages name `name`.

    Raises:
        RagenError: The folder holds no model, a quantised one, or a malformed file.
    """
    path = folder / "config.json"
    if folder.is_file():
        raise RagenError(f"{name} is a file: name the folder of the model")
    if not path.exists():
        raise RagenError(f"{name}: this folder holds no model (config.json is missing)")
    check_files(folder)
    raw = read_object(path)
    check_config(raw, path)
    if raw.get("quantization_config") is not None:
        raise RagenError(
            f"the weights of '{name}' are quantised and cannot be trained; use the model that it "
            "was made from"
        )
    return raw


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model or adapter.

    Raises:
        RagenError: The file cannot be read or holds something else.
    """
    try:
        if not path.is_file():
            raise OSError("it is no regular file" if path.exists() else "it is missing")
        content = json.loads(path.read_text("utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # a lone surrogate cannot be saved again
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise RagenError(
            f"cannot read {path}: {reason}; copy or download the folder again"
        ) from error
    if not isinstance(content, dict):
        raise RagenError(
            f"cannot read {path}: it holds no JSON object; copy or download the folder again"
        )
    return content


def check_config(raw: dict[str, Any], path: Path) -> None:
    """Refuse a config that names code or weights elsewhere.

    Raises:
        RagenError: It does.
    """
    for key, value in _entries(raw):
        is_weights = key == "transformers_weights" and value is not None
        if is_weights or (key.endswith("_implementation") and "/" in json.dumps(value)):
            raise RagenError(
                f"{path}: {key} names weights or code elsewhere, which are never used here; remove "
                "this key"
            )


def shown(value: Any) -> str:
    """A value in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def weight_files(folder: Path, name: str | Path) -> list[Path]:
    """The safetensors that hold a model's weights: one file, or the shards of its index.

    Raises:
        RagenError: There are none, they are pointers of git-lfs, or the index names other files.
    """
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                is_note = opened.read(len(LFS)) == LFS
        except OSError as error:
            raise RagenError(f"cannot read {file}: {error.strerror}") from error
        if is_note:
            raise RagenError(
                f"the model '{name}' was cloned without its weights: {file.name} is a note of "
                "git-lfs; run `git lfs pull` in the folder, or name the model by its id"
            )
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / INDEX
    if not index.is_file():
        raise RagenError(
            f"the model '{name}' has no weights as safetensors (model.safetensors is missing); "
            "pickles can run code when they are read: where you trust them, convert them once with "
            "transformers (from_pretrained, then save_pretrained)"
        )
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise RagenError(f"{index} has no table weight_map: copy or download the model again")
    for shard in places.values():
        is_name = isinstance(shard, str) and shard == Path(shard).name
        if not is_name or not shard.endswith(".safetensors"):
            raise RagenError(
                f"{index} names {shown(shard)} as weights, but only safetensors inside the folder "
                "are read: where you trust it, convert the model once with transformers "
                "(from_pretrained, then save_pretrained)"
            )
    shards = sorted(set(places.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise RagenError(
            f"the model '{name}' is not complete: {missing[0][:80]} is missing "
            f"({len(missing)} of {len(shards)} shards); copy or download it again"
        )
    return [folder / shard for shard in shards]


def shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of a safetensors file, by name; its header is verified against its size.

    Raises:
        RagenError: It is damaged, or is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, MemoryError, SafetensorError) as error:
        raise RagenError(
            f"cannot read {file}: {error}; copy or download the model again"
        ) from error


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            yield from each.items()
        if isinstance(each, dict | list):
            pending.extend(each.values() if isinstance(each, dict) else each)
