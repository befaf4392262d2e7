"""An adapter as a folder in PEFT's layout: for peft, transformers, vLLM and checkpoints."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ragen.core.errors import RagenError
from ragen.models.lora import adapter_tensors, attach_saved, is_adapter_weight
from ragen.models.names import ADAPTER_CONFIG, base_of, read_adapter_json

ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"
"""Holds the `fingerprint_of_base` of the model that the adapter was trained on."""

PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "init_lora_weights": (True, False, "gaussian"),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""What an adapter's config must say, so that the equation of `ragen.models.lora` is complete."""


def save_adapter(model: PreTrainedModel, folder: Path, base: str | None = None) -> None:
    """Write the policy's adapter as a PEFT folder.

    `base` is the `fingerprint_of_base`, for a folder that is kept: loading compares it.

    Raises:
        OSError, SafetensorError: The disk is full or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in adapter_tensors(model).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    config: Any = copy.copy(model.peft_config["policy"])
    config.inference_mode = True
    if isinstance(config.target_modules, set):  # its order would differ from process to process
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    if base is not None:
        (folder / BASE).write_text(json.dumps({"fingerprint": base}))


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a PEFT folder into the policy's adapter, which the model already has.

    Raises:
        RagenError: The weights cannot be read, are not finite, fit another model, or were trained
            on another base.
    """
    path = folder / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RagenError(f"cannot read the adapter {path}: {error}") from error
    base = read_adapter_json(folder / BASE) if (folder / BASE).exists() else {}
    if base.get("fingerprint") not in (None, fingerprint_of_base(model)):
        name = model.peft_config["policy"].base_model_name_or_path
        raise RagenError(
            f"the adapter {folder} was trained on another base than {name} is now: restore the "
            "weights that it was trained on"
        )
    own = adapter_tensors(model)
    for name in sorted(own.keys() | tensors.keys()):
        here, there = (list(each[name].shape) if name in each else None for each in (own, tensors))
        if here != there:
            raise RagenError(
                f"the adapter {folder} is of another model: {name} is {there or 'missing'} in it "
                f"and {here or 'missing'} here"
            )
        if not bool(torch.isfinite(tensors[name]).all()):
            raise RagenError(f"the adapter {folder} is damaged: {name} holds NaN or infinity")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(tensors[name])


def put_on(model: PreTrainedModel, folder: Path) -> None:
    """Add the adapter of a PEFT folder to its base, as the policy's.

    Raises:
        RagenError: As `load_adapter`, or the adapter is more than LoRA.
    """
    raw = read_adapter_json(folder / ADAPTER_CONFIG)
    for key, allowed in PLAIN.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise RagenError(
                f"the adapter {folder} is not plain LoRA ({key} = {json.dumps(raw[key])} in "
                f"{ADAPTER_CONFIG}): merge it into its base with peft, and name the merged model"
            )
    try:
        attach_saved(model, folder, base_of(folder))
    except (ValueError, TypeError) as error:
        raise RagenError(f"the adapter {folder} does not fit its base: {error}") from error
    load_adapter(model, folder)


def fingerprint_of_base(model: PreTrainedModel) -> str:
    """A hash of the base's weights, by which an adapter recognises its base.

    The weights are rounded to bfloat16 first, so that a base loaded as float32 or as bfloat16 has
    the same hash.
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
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
