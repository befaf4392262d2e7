"""Weights on their way to samplers: one block of bytes that processes can share, and its checksum.

Shared memory is mapped by all processes of a machine, so no sampler there copies the block before
it reads from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ragen.core.errors import RagenError
from ragen.models.adapter_folder import hash_tensors
from ragen.models.lora import adapter_tensors, has_adapters


@dataclass(frozen=True, slots=True)
class Block:
    """Tensors as bytes, one after the other.

    Attributes:
        data: Their bytes, with zeros up to the next multiple of 16.
        entries: Of each tensor the name, the dtype's name and the shape.

    Example:
        >>> block = pack([("w", torch.ones(2, 3))])
        >>> block.data.nbytes, block.entries
        (32, (('w', 'float32', (2, 3)),))
    """

    data: NDArray[np.uint8]
    entries: tuple[tuple[str, str, tuple[int, ...]], ...]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, which share the memory and may only be read."""
        with warnings.catch_warnings(action="ignore"):  # the memory is read-only, and not written
            flat = torch.from_numpy(self.data)
        start = 0
        for name, kind, shape in self.entries:
            dtype = getattr(torch, kind)
            end = start + int(np.prod(shape)) * dtype.itemsize
            yield name, flat[start:end].view(dtype).reshape(shape)
            start = end + _gap(end)


def pack(tensors: Iterable[tuple[str, Tensor]]) -> Block:
    """The tensors as one block; each begins at a multiple of 16 bytes."""
    entries, parts = [], list[NDArray[Any]]()
    size = 0
    for name, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        entries.append((name, str(plain.dtype).removeprefix("torch."), tuple(plain.shape)))
        part = plain.reshape(-1).view(torch.uint8).numpy()
        size += part.nbytes
        gap = _gap(size)
        size += gap
        parts += [part, np.zeros(gap, dtype=np.uint8)]
    return Block(np.concatenate(parts), tuple(entries))


def published(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """The weights that a publication sends: the adapter's where there is one, else all."""
    return adapter_tensors(model) if has_adapters(model) else dict(model.named_parameters())


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names and bits that does not depend on the order."""
    return hash_tensors(sorted(tensors, key=lambda pair: pair[0]))


@torch.no_grad()
def take_over(model: PreTrainedModel, block: Block) -> str:
    """Copy a block into a model; returns the checksum of what the model then holds.

    Raises:
        RagenError: It is of another model.
    """
    own, given = published(model), dict(block.tensors())
    if own.keys() != given.keys():
        name = sorted(own.keys() ^ given.keys())[0]
        raise RagenError(
            f"a sampler has another model than the learner, which shows in {name}: give all "
            "machines the same files where model.path points"
        )
    for name, weight in own.items():
        weight.copy_(given[name])
    return checksum(own.items())


def _gap(size: int) -> int:
    return -size % 16
