"""Tensors of a checkpoint: weights and optimiser states as safetensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ragen.storage.checkpoint import Damaged


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write named tensors as safetensors.

    Raises:
        OSError, SafetensorError: The disk is full or cannot be written.
    """
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


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimiser's state under flat names: ``"3.exp_avg"`` is `exp_avg` of its parameter 3."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, values in state.items()
        for name, value in values.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Load what `optimizer_tensors` returned into an optimiser."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for path, value in tensors.items():
        index, name = path.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def hash_weights(model: torch.nn.Module) -> str:
    """A hash of a model's names and weights, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
