"""Decoding in fixed shapes gives the general decoder's logits, and a CUDA graph is recorded once.

Without a GPU, a graph is replayed by calling what it recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ragen.networks import graphs
from ragen.networks.graphs import CannotRecord, GraphDecoder
from tests.engines.test_gpu import model
from tests.networks.test_packed import assert_equals_the_general_decoder, build


class Records:
    """Replays by calling; counts what is recorded and how often each is replayed."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        number = len(self.replays)
        self.replays.append(0)
        for _ in range(2):  # warming up stores the same keys and values once more
            compute()

        def replay() -> Tensor:
            self.replays[number] += 1
            return compute()

        return replay


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LEAST_ROWS", 2)
    monkeypatch.setattr(graphs, "LEAST_WIDTH", 4)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GptOss"])
def test_decoding_in_fixed_shapes_equals_the_general_decoder(name: str) -> None:
    records = Records()
    assert_equals_the_general_decoder(GraphDecoder(build(name), 8, 48, records))
    # Five of the eight slots in place, twice; three as four rows; all eight, twice.
    assert records.replays == [2, 1, 2]


def test_a_model_that_cannot_be_recorded_is_decoded_without() -> None:
    asked = 0

    def refuse(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        nonlocal asked
        asked += 1
        compute()  # as the forwards that come before a recording
        raise CannotRecord

    assert_equals_the_general_decoder(GraphDecoder(build("Llama"), 8, 48, refuse))
    assert asked == 1


def test_graphs_are_recorded_anew_only_when_weights_are_elsewhere() -> None:
    records, policy = Records(), model("cpu", torch.float32)
    decoder = GraphDecoder(policy, 2, 8, records)

    def logits() -> Tensor:
        decoder.refresh()
        decoder.prefill([0, 1], [0, 0], [[1, 2], [3, 4]])
        return decoder.decode(torch.arange(2), torch.tensor([2, 2]), torch.tensor([5, 6]))

    first = logits()
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(2)  # an update in place is seen
    assert not torch.equal(logits(), first) and records.replays == [2]
    moved = policy.get_input_embeddings().weight
    moved.data = moved.data.clone()
    logits()
    assert records.replays == [2, 1]
