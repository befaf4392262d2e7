"""An adapter as a folder in PEFT's layout: for peft, transformers, vLLM and checkpoints."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ragen.core.errors import RagenError
from ragen.models.model_files import check_files, read_object, shapes
from ragen.models.names import ADAPTER_CONFIG, BASE, base_of
from ragen.models.pretrained import load_errors
from ragen.networks.lora import adapter_tensors, attach_saved, is_adapter_weight
from ragen.networks.sharding import fill

ADAPTER_WEIGHTS = "adapter_model.safetensors"

PLAIN = (
    "peft_type peft_version task_type auto_mapping base_model_name_or_path revision inference_mode "
    "r lora_alpha lora_dropout target_modules exclude_modules fan_in_fan_out use_rslora "
    "layers_to_transform layers_pattern rank_pattern alpha_pattern init_lora_weights loftq_config "
    "eva_config corda_config lora_ga_config megatron_core qalora_group_size"
)
"""Keys of an adapter's config with which the equation of `ragen.networks.lora` is complete."""


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    base: str | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the policy's adapter as a PEFT folder.

    `base` is the `fingerprint_of_base`, for a folder that is kept: loading compares it. `tensors`
    are the `adapter_tensors`, if those of `model` are split (`ragen.networks.sharding`).

    Raises:
        OSError, SafetensorError: The disk is full or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors or adapter_tensors(model)
    written = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(written, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    config: Any = copy.copy(model.peft_config["policy"])
    config.inference_mode = True
    if isinstance(config.target_modules, set):  # its order would differ from process to process
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    if base is not None:
        (folder / BASE).write_text(json.dumps({"fingerprint": base}))


def load_adapter(model: PreTrainedModel, folder: Path, own_base: str | None = None) -> None:
    """Load a PEFT folder's weights into the policy's adapter, which the model already has.

    `own_base` is the model's `fingerprint_of_base`, computed if it is not given.

    Raises:
        RagenError: They cannot be read, are not finite, or belong to another model or base.
    """
    path = folder / ADAPTER_WEIGHTS
    found = shapes(path)
    base = read_object(folder / BASE) if (folder / BASE).exists() else {}
    trained_on = base.get("fingerprint")
    if trained_on is not None and trained_on != (own_base or fingerprint_of_base(model)):
        name = model.peft_config["policy"].base_model_name_or_path
        raise RagenError(
            f"the adapter {folder} was trained on another base than {name} is now: restore the "
            "weights that it was trained on"
        )
    own = adapter_tensors(model)
    for name in sorted(own.keys() | found.keys()):
        here = list(own[name].shape) if name in own else None
        there = found.get(name)
        if here != there:
            raise RagenError(
                f"the adapter {folder} is of another model: {name} is {there or 'missing'} in it "
                f"and {here or 'missing'} here"
            )
    tensors = load_file(path)
    for name in sorted(tensors):
        if not bool(torch.isfinite(tensors[name]).all()):
            raise RagenError(f"the adapter {folder} is damaged: {name} holds NaN or infinity")
    fill(own, tensors)


def put_on(model: PreTrainedModel, folder: Path) -> None:
    """Add the adapter of a PEFT folder to its base, as the policy's.

    Raises:
        RagenError: As `load_adapter`, or the adapter is more than LoRA, or its config is malformed.
    """
    check_files(folder)
    raw = read_object(folder / ADAPTER_CONFIG)
    for key, value in raw.items():
        is_plain = key in PLAIN.split() or not value or value == "none"
        if key == "peft_type":
            is_plain = value == "LORA"
        elif key == "init_lora_weights":  # others change the base
            is_plain = value in (True, False, "gaussian")
        if not is_plain:
            raise RagenError(
                f"the adapter {folder} is not plain LoRA ({key} = {json.dumps(value)} in "
                f"{ADAPTER_CONFIG}): merge it into its base with peft, and name the merged model"
            )
    with load_errors(folder, "the adapter does not fit its base"):
        attach_saved(model, folder, base_of(folder))
    load_adapter(model, folder)


def fingerprint_of_base(model: PreTrainedModel) -> str:
    """A hash of the base's weights, by which an adapter recognises its base.

    The weights are rounded to bfloat16 first: a base has the same hash in float32 and bfloat16.
    """
    return hash_tensors(
        (name.replace(".base_layer.", "."), weight.to(torch.bfloat16))
        for name, weight in model.named_parameters()
        if not is_adapter_weight(name)
    )


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names and tensors, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(name.encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)  # a scalar cannot be viewed as bytes
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
