"""Transfers to the device of a model."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for it; on the CPU the tensor itself.

    A GPU copies from pinned memory while it computes; torch keeps that memory until it is copied.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")
