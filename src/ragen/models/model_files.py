"""The files of a model's folder, checked before a library opens them.

A model folder is data that others wrote. Each check is quick, reads no weights, and reports in one
line which file is at fault. Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from ragen.core.errors import RagenError

MOST_BYTES = 2**28
"""Of a file without weights; the largest tokenizers have a tenth of it."""

LOOPED = ("layer", "num_labels", "depth", "stage")
"""Parts of the names of numbers that a library builds so many objects for, and their bound."""
MOST_LOOPS = 2000

INDEX = "model.safetensors.index.json"
OBJECTS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
"""Small files that libraries read without checks of their own."""


def check_files(folder: Path) -> None:
    """Refuse a folder with an entry that is no regular file, is far too large, or is no JSON.

    A symbolic link to a file is a file, as in the cache of the Hub.

    Raises:
        RagenError: It has such an entry.
    """
    for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")]):
        expected = path.suffix in (".json", ".jinja", ".txt", ".model", ".safetensors")
        if (expected and not path.is_file()) or not (path.is_file() or path.is_dir()):
            raise RagenError(f"{path} is no regular file: copy or download the model again")
        if expected and path.suffix != ".safetensors" and path.stat().st_size > MOST_BYTES:
            raise RagenError(
                f"{path} is larger than {MOST_BYTES >> 20} MiB, which no such file has to be: "
                "copy or download the model again"
            )
    for name in OBJECTS:
        if (folder / name).exists():
            read_object(folder / name)


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
    """Refuse a config that names code or weights elsewhere, or counts no library can build.

    Raises:
        RagenError: It does.
    """
    for key, value in _entries(raw):
        if key == "transformers_weights" and value is not None:
            raise RagenError(
                f"{path}: transformers_weights names the file of the weights, which is not "
                "supported; name it model.safetensors and remove this key"
            )
        if key.endswith("_implementation") and "/" in json.dumps(value):
            raise RagenError(
                f"{path}: {key} names code on the Hub, which is never run here; remove this key"
            )
        if (
            any(part in key for part in LOOPED)
            and isinstance(value, int | float)
            and not abs(value) <= MOST_LOOPS
        ):
            raise RagenError(
                f"{path}: {key} = {shown(value)}, but at most {MOST_LOOPS} make sense; use the "
                "model's own config.json"
            )


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 40 else text[:37] + "..."


def weight_files(folder: Path, name: str | Path) -> list[Path]:
    """The safetensors that hold a model's weights: one file, or the shards of its index.

    Raises:
        RagenError: There are none, or the index names anything but safetensors in the folder.
    """
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


def count_weights(files: list[Path]) -> int:
    """How many numbers files of weights hold, by their headers.

    Raises:
        RagenError: A file is damaged, or two files hold a tensor of one name.
    """
    place: dict[str, Path] = {}
    total = 0
    for file in files:
        for tensor, shape in shapes(file).items():
            if tensor in place:
                raise RagenError(
                    f"{file} and {place[tensor].name} both hold {tensor[:80]}: copy or download "
                    "the model again"
                )
            place[tensor] = file
            total += prod(shape)
    return total


def shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of a safetensors file, by name; its header is verified against its size.

    Raises:
        RagenError: It is damaged, or is no safetensors file.
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
    """The keys and values of nested JSON objects."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            yield from each.items()
        if isinstance(each, dict | list):
            pending.extend(each.values() if isinstance(each, dict) else each)
