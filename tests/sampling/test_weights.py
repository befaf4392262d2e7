"""Weights in shared memory, for other processes of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragen.core.errors import RagenError
from ragen.sampling import weights
from ragen.sampling.vllm_private import tensors_of
from ragen.sampling.weights import offered
from tests.limits import largest_file


def test_offered_weights_are_read_back_and_then_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MEMORY", tmp_path)
    tensors = {"w": torch.arange(5.0), "b": torch.ones(3, 2).bfloat16(), "s": torch.tensor(2)}
    with offered(tensors.items()) as file:
        found = dict(tensors_of(file))
    assert all(torch.equal(found[name], each) for name, each in tensors.items())
    assert found.keys() == tensors.keys() and not list(tmp_path.iterdir())


def test_too_little_shared_memory_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MEMORY", tmp_path)
    weights_ = [("w", torch.ones(100_000))]
    refused = pytest.raises(RagenError, match=r"allow for more shared memory")
    with largest_file(100), refused, offered(weights_):
        pass
    assert not list(tmp_path.iterdir())
