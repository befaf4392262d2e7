"""Decoding in fixed shapes gives the general decoder's logits, and a CUDA graph is recorded once.

Without a GPU, a graph is replayed by calling what it recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ragen.core.errors import RagenError
from ragen.engines import sampler as sampler_module
from ragen.engines.sampler import Sampler
from ragen.models import graphs
from ragen.models.graphs import GraphDecoder, recorder
from tests.engines.test_gpu import model, sampled
from tests.models.test_packed import assert_equals_the_general_decoder, build
from tests.waits import DEVICE, Waits


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


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GPT2", "Qwen3Moe", "Gemma2", "GptOss"])
def test_decoding_in_fixed_shapes_equals_the_general_decoder(name: str) -> None:
    records = Records()
    assert_equals_the_general_decoder(GraphDecoder(build(name), 8, 48, records))
    # Five of the eight slots in place, twice; three as four rows; all eight, twice.
    assert records.replays == [2, 1, 2]


def test_samples_are_those_of_the_general_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more requests than slots, and in the end fewer rows than slots."""
    policy = model("cpu", torch.float32)
    expected, records = sampled(policy), Records()
    monkeypatch.setattr(
        sampler_module, "make_decoder", lambda *sizes, fast: GraphDecoder(*sizes, records)
    )
    actual = sampled(policy)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert len(records.replays) < sum(records.replays) / 2
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_a_replay_reads_inputs_at_the_same_addresses() -> None:
    decoder = GraphDecoder(model("cpu", torch.float32), 3, 16, Records())
    decoder.prefill([0, 1, 2], [0] * 3, [[1, 2], [3, 4], [5, 6]])
    addresses = set()
    for at in range(2, 4):
        decoder.decode(torch.arange(3), torch.full((3,), at), torch.tensor([7, 8, 9]))
        addresses |= {inputs.data_ptr() for inputs, _ in decoder._graphs.values()}
    assert len(addresses) == len(decoder._graphs) == 1


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


def test_a_decode_in_fixed_shapes_waits_for_no_device() -> None:
    decoder = GraphDecoder(model(DEVICE, torch.bfloat16), 4, 16, Records())
    decoder.prefill([0, 1, 3], [0] * 3, [[1, 2]] * 3)
    with Waits() as waits:
        for slots in ([0, 1, 3], [1, 3], [3]):
            rows = torch.tensor(slots)
            assert decoder.decode(rows, rows + 2, rows).shape[0] == len(slots)
    assert not waits.counts


def fake_cuda(monkeypatch: pytest.MonkeyPatch, calls: list[str], capture: Any) -> None:
    """Stands for the parts of `torch.cuda` that recording calls, and notes the calls."""

    def stream(name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda o: calls.append(f"{name} waits {o.name}")
        )

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        calls.append(f"on {stream.name}")
        yield
        calls.append(f"off {stream.name}")

    def make_graph() -> Any:
        return SimpleNamespace(replay=lambda: calls.append("replay"))

    fakes = {
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda: stream("side"),
        "current_stream": lambda: stream("main"),
        "stream": on,
        "CUDAGraph": make_graph,
        "graph": capture,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def test_a_graph_is_warmed_up_on_another_stream_then_captured_then_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    @contextmanager
    def capture(graph: Any, pool: str, capture_error_mode: str) -> Iterator[None]:
        calls.append(f"capture in {pool}")
        yield
        calls.append("captured")

    def compute() -> Tensor:
        calls.append("compute")
        return torch.ones(1)

    fake_cuda(monkeypatch, calls, capture)
    replay = recorder()(compute)
    assert replay() is replay()
    assert calls == [
        *("side waits main", "on side", *["compute"] * graphs.WARM_UPS, "off side"),
        *("main waits side", "capture in pool", "compute", "captured", "replay", "replay"),
    ]


def test_a_model_that_cannot_be_recorded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(*_: Any, **__: Any) -> Iterator[None]:
        yield
        raise torch.AcceleratorError("operation not permitted when stream is capturing\nmore")

    fake_cuda(monkeypatch, [], capture)
    with pytest.raises(RagenError, match=r"capturing\): set rollout\.cuda_graphs = false$"):
        recorder()(lambda: torch.ones(1))


def test_graphs_change_nothing_without_a_gpu() -> None:
    policy = model("cpu", torch.float32)
    with_graphs = Sampler(policy, [2], lambda _: "", slots=2, max_length=16, graphs=True)
    without = Sampler(policy, [2], lambda _: "", slots=2, max_length=16)
    assert type(with_graphs._decoder) is type(without._decoder)
