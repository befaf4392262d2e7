"""Weights in shared memory, for other processes of the machine."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from ragen.core.errors import RagenError
from ragen.sampling import weights
from ragen.sampling.weights import offered, pack


def test_offered_weights_are_read_back_and_then_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MEMORY", tmp_path)
    tensors = {"w": torch.arange(5.0), "b": torch.ones(3, 2).bfloat16(), "s": torch.tensor(2)}
    with offered(pack(tensors.items())) as shared:
        found = {name: tensor.clone() for name, tensor in shared.tensors()}
    assert all(torch.equal(found[name], each) for name, each in tensors.items())
    assert found.keys() == tensors.keys() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [100, 100_000])
def test_too_little_shared_memory_is_one_clear_line(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small tensor is written when the file is flushed, and again when it is closed."""
    monkeypatch.setattr(weights, "MEMORY", tmp_path)
    block = pack([("w", torch.ones(size))])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(RagenError, match=r"allow for more shared memory"), offered(block):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
