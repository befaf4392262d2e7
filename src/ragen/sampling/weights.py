"""Weights on their way to samplers: bytes that processes can share, and their checksums.

Shared memory is mapped by all processes of a machine, so no sampler there copies a block before it
reads from it.
"""

from __future__ import annotations

import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ragen.core.errors import RagenError
from ragen.core.files import file_errors
from ragen.networks.lora import adapter_tensors, has_adapters

Entry = tuple[str, str, tuple[int, ...]]
"""A tensor's name, its dtype's name and its shape."""

MEMORY = Path("/dev/shm")
"""On Linux a folder in memory, which all processes of a machine can read."""

MORE_MEMORY = "allow for more shared memory (docker: --shm-size)"
"""The remedy if that folder is full."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tensors as bytes; on a CPU the `parts` are the tensors' own memory, not copies.

    Example:
        >>> block = pack([("w", torch.ones(2, 3))])
        >>> block.num_bytes, block.entries
        (24, (('w', 'float32', (2, 3)),))
    """

    parts: tuple[NDArray[np.uint8], ...]
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return sum(part.nbytes for part in self.parts)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, which share the memory and may only be read."""
        for (name, kind, shape), part in zip(self.entries, self.parts, strict=True):
            with warnings.catch_warnings(action="ignore"):  # the memory is read-only
                flat = torch.from_numpy(part)
            yield name, flat.view(getattr(torch, kind)).reshape(shape)


def pack(tensors: Iterable[tuple[str, Tensor]]) -> Block:
    """The tensors as a block; on a CPU it shares their memory."""
    entries, parts = list[Entry](), list[NDArray[np.uint8]]()
    for name, tensor in tensors:
        entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        parts.append(_bytes(tensor))
    return Block(tuple(parts), tuple(entries))


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    plain = tensor.detach().cpu().contiguous()
    found: NDArray[np.uint8] = plain.reshape(-1).view(torch.uint8).numpy()
    return found


@contextmanager
def offered(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
    """A file of tensors in shared memory, for other processes, while the body runs.

    Raises:
        RagenError: There is too little shared memory.
    """
    with file_errors("write", MEMORY, MORE_MEMORY):
        place = tempfile.TemporaryDirectory(prefix="ragen-weights-", dir=MEMORY)
    with place as folder:
        path = Path(folder) / "weights.safetensors"
        with file_errors("write", MEMORY, MORE_MEMORY):
            save_file({name: each.detach().cpu().contiguous() for name, each in tensors}, path)
        yield path


def published(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """The weights that a publication sends: the adapter's if there is one, else all."""
    return adapter_tensors(model) if has_adapters(model) else dict(model.named_parameters())


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """The CRC-32 of each tensor's bytes; it detects any single burst error of up to 32 bits."""
    return {name: zlib.crc32(_bytes(tensor).data) for name, tensor in tensors}


def some(names: Sequence[str]) -> str:
    """The first of some names, and how many others there are: ``a and 2 more``."""
    others = len(names) - 1
    return f"{names[0]} and {others} more" if others else names[0]


def refuse_other_names(own: Iterable[str], given: Iterable[str]) -> None:
    """Refuse weights of another model: `own` are the names of a sampler's, `given` those sent.

    Raises:
        RagenError: The names differ.
    """
    if other := sorted({*own} ^ {*given}):
        raise RagenError(
            f"a sampler has another model than the learner, which shows in {other[0]}: give all "
            "machines the same files where model.path points"
        )


@torch.no_grad()
def take_over(model: PreTrainedModel, block: Block) -> dict[str, int]:
    """Copy a block into a model; returns the checksums of what the model then holds.

    Raises:
        RagenError: It is of another model.
    """
    own, given = published(model), dict(block.tensors())
    refuse_other_names(own, given)
    for name, weight in own.items():
        weight.copy_(given[name])
    return checksums(own.items())
