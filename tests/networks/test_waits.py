"""A GPU is waited for once in an update, and once for each token that is sampled."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ragen.algorithms.batch import Batch, collate
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.models.loading import recompute_layers
from ragen.sampling.local_sampler import draw
from tests.engines.test_gpu import TOKENS, model, sampled
from tests.learning.test_learner import sample
from tests.waits import DEVICE, Waits

WAYS: dict[str, dict[str, Any]] = {
    "grpo with kl": {"loss": {"kl": 0.1, "kl_kind": "k3", "entropy": 0.01}},
    "gspo, muon": {
        "loss": {
            "name": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "episode_mean",
        },
        "muon_lr": 1e-3,
    },
    "ppo, recomputed": {"critic": True, "recomputes": True},
}


@pytest.fixture
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has a fused optimiser and attention for rows of various lengths, as GPUs do."""
    optimizer = sys.modules["torch.optim.optimizer"]  # torch.optim deletes its own reference
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: [DEVICE])

    def kernel(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return query + 0 * key.sum() + 0 * value.sum()

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)


def learner(
    *, loss: Any = None, recomputes: bool = False, muon_lr: float = 0.0, **models: Any
) -> Learner:
    policy = model("cpu", torch.bfloat16)
    if recomputes:
        recompute_layers(policy)
    update = UpdateConfig(lr=1e-2, critic_lr=1e-2, microbatch_tokens=12)
    made = Models(policy.to(DEVICE), **models)
    settings = LossConfig(**(loss or {}))
    return Learner(made, update, settings, steps=10, longest=20, muon_lr=muon_lr)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows = collate([sample(e, length, generator) for e, length in enumerate((5, 7, 4))])
    field = 0.1 * rows.mask_BT
    return replace(
        rows,
        old_logprobs_BT=-field,
        reference_logprobs_BT=-field,
        advantages_BT=field,
        returns_BT=field,
        values_BT=field,
    )


@pytest.mark.usefixtures("_with_kernels")
@pytest.mark.parametrize(
    ("way", "packs"),
    [
        ("grpo with kl", False),
        ("gspo, muon", True),
        *(pytest.param("ppo, recomputed", each, marks=pytest.mark.slow) for each in (True, False)),
    ],
)
def test_an_update_waits_for_the_device_once(
    way: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragen.networks.packed.longest", lambda _: torch.inf if packs else 0)
    one = learner(**WAYS[way])
    with Waits() as waits:
        metrics = one.update(batch(), 0)
    assert waits.counts == Counter({"to the host": 1})
    assert metrics["update/skipped_policy"].value == 0  # what was read is 1


def test_sampling_waits_for_the_device_once_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads drawn ids and logprobs together: it looks for the end, and hashes them."""
    draws = []

    def counted(*arguments: Any) -> Any:
        draws.append(arguments)
        return draw(*arguments)

    monkeypatch.setattr("ragen.sampling.local_sampler.draw", counted)
    policy = model(DEVICE, torch.bfloat16)
    with Waits() as waits:
        completions = sampled(policy)
    assert [len(each.token_ids or ()) for each in completions] == [TOKENS] * 4
    assert waits.counts == Counter({"to the host": len(draws)})


def test_every_wait_is_counted() -> None:
    ways: list[Callable[[Tensor], object]] = [
        Tensor.item,
        Tensor.cpu,
        Tensor.tolist,
        lambda x: bool(x.any()),
        lambda x: torch.zeros(2)[x.long()[0]],  # an index of one number
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([0])],  # an index on the host
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.zeros(1).to(x.device),
        lambda x: x.copy_(torch.zeros(1)),
    ]
    for number, wait in enumerate(ways):
        with Waits() as waits, suppress(NotImplementedError, RuntimeError):
            wait(torch.zeros(1, device=DEVICE))
        assert waits.counts.total() >= 1, number
