"""The files of a model's folder, checked before a library opens them.

A model folder is data that others wrote. Each check is quick, reads no weights, and reports in one
line which file is at fault. Loads no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any

from ragen.core.errors import RagenError

MOST_BYTES = 2**28
"""Greatest size of a file without weights; the largest tokenizers have a tenth of it."""

LOOPED, MOST_LOOPS = ("layer", "num_labels", "depth", "stage"), 2000
"""Parts of the names of counts of objects that a library builds, and their bound."""
POSITIONS, MOST_POSITIONS = ("position", "seq", "ctx", "context"), 2**24
"""Parts of the names of lengths that a library builds masks and tables for, and their bound; the
longest models know 10 million positions."""

KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model_type", "tokenizer_class"), (str, NoneType)),
    **dict.fromkeys(("_attn_implementation", "attn_implementation"), (str, dict, NoneType)),
    **dict.fromkeys(("id2label", "quantization_config", "watermarking_config"), (dict, NoneType)),
    **dict.fromkeys(("added_tokens_decoder", "per_layer_config"), (dict,)),
    "auto_map": (dict, list),
    "model_input_names": (list,),
    "model_max_length": (int, float, NoneType),
    "num_labels": (int,),
    "pad_token_id": (int, NoneType),
    "return_dict": (bool,),
    "split_special_tokens": (bool,),
}
"""The types of values that libraries use without a check, by key."""
DTYPE = r"None|auto|(torch\.)?b?float\w+"
"""Types of weights, as torch names them."""
INTERNAL = ("attribute_map", "sub_configs", "tokenizer_object", "init_inputs", "gguf_file")
"""Names of a library's own attributes and arguments, which a file must not set."""

LFS = b"version https://git-lfs.github.com/"
"""The beginning of the pointer file that git-lfs leaves in place of a large file."""
INDEX = "model.safetensors.index.json"
OBJECTS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
"""Small files that libraries read without checks of their own."""


def check_files(folder: Path) -> None:
    """Refuse a folder with an entry that is no regular file, is malformed JSON, or far too large.

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
            _check_kinds(read_object(folder / name), folder / name)


def read_config(folder: Path, name: str | Path) -> dict[str, Any]:
    """The config of a model as it is written, after a check of the folder's files.

    `name` is the user's name for the model, for error messages.

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
    """Refuse a config that names code or weights elsewhere, or has counts too large to build.

    Raises:
        RagenError: It does.
    """
    _check_kinds(raw, path)
    if raw.get("return_dict") is False:
        raise RagenError(
            f"{path}: return_dict = false, but a model's outputs are read by name; remove this key"
        )
    for key, value in _entries(raw):
        if key in ("dtype", "torch_dtype") and not re.fullmatch(DTYPE, str(value)):
            raise RagenError(
                f"{path}: {key} = {shown(value)} is no type of weights; use one such as bfloat16"
            )
        if key == "transformers_weights" and value is not None:
            raise RagenError(
                f"{path}: transformers_weights names the file of the weights, which is not "
                "supported; name it model.safetensors and remove this key"
            )
        if key.endswith("_implementation") and "/" in json.dumps(value):
            raise RagenError(
                f"{path}: {key} names code on the Hub, which is never run here; remove this key"
            )
        for parts, most in ((LOOPED, MOST_LOOPS), (POSITIONS, MOST_POSITIONS)):
            # A vocabulary is a tensor, even if it is one "per layer" (as in Gemma 3n).
            is_counted = any(part in key for part in parts) and "vocab" not in key
            if is_counted and isinstance(value, int | float) and not abs(value) <= most:
                raise RagenError(
                    f"{path}: {key} = {shown(value)}, but at most {most} make sense; use the "
                    "model's own config.json"
                )


def _check_kinds(raw: dict[str, Any], path: Path) -> None:
    """Refuse values of a wrong kind, for which a library's message would not name the key."""
    for key, value in raw.items():
        if key in INTERNAL:
            raise RagenError(f"{path}: {key} is no setting of a model; remove this key")
        if key in KINDS and not isinstance(value, KINDS[key]):
            names = {
                **{bool: "true or false", dict: "an object", float: "a number"},
                **{int: "a whole number", list: "a list", str: "text"},
            }
            expected = " or ".join(names[kind] for kind in KINDS[key] if kind in names)
            raise RagenError(
                f"{path}: {key} = {shown(value)}, but it must be {expected}; use the model's own "
                f"{path.name}"
            )


def shown(value: Any) -> str:
    """A value in a message, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 40 else text[:37] + "..."


def weight_files(folder: Path, name: str | Path) -> list[Path]:
    """The safetensors that hold a model's weights: one file, or the shards of its index.

    Raises:
        RagenError: There are none, they are pointer files of git-lfs, or the index names
            files that are not safetensors in the folder.
    """
    for file in folder.glob("*.safetensors"):
        if _begins_with(file, LFS):
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
    content = read_object(index)
    for key in ("weight_map", "metadata"):
        if not isinstance(content.get(key), dict) or not content["weight_map"]:
            raise RagenError(f"{index} has no table {key}: copy or download the model again")
    places = content["weight_map"]
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


def _begins_with(file: Path, start: bytes) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(start)) == start
    except OSError as error:
        raise RagenError(f"cannot read {file}: {error.strerror}") from error


def refuse_huge(files: list[Path]) -> None:
    """Refuse weights that cannot be loaded here, before they are read: a sparse file takes no disk.

    Raises:
        RagenError: They take more than twice the machine's memory (bfloat16 halves float32).
    """
    size = sum(file.stat().st_size for file in files)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > 2 * memory:
        raise RagenError(
            f"{files[0]}: the weights take {size / 2**30:.0f} GiB, and this machine has "
            f"{memory / 2**30:.0f} GiB of memory: use a smaller model"
        )


def count_weights(files: list[Path]) -> int:
    """How many numbers files of weights hold, by their headers.

    Raises:
        RagenError: A file is damaged, or two files hold a tensor of the same name.
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
