"""Precision: bfloat16 where it is fast, float32 for sums of weights, gradients and logits."""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ragen.algorithms.batch import Batch
from ragen.config.reading import merge
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.engines.local import LocalEngine
from ragen.learning.learner import Learner
from ragen.learning.models import Models
from ragen.models.loading import load_policy
from ragen.networks import precision
from ragen.networks.precision import (
    WIDENED,
    WideLinear,
    add_product,
    output_logits,
    product,
    widen_products,
)
from tests.bandit_model import settings
from tests.learning.test_learner import PLAIN, batch
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tolerance import assert_close

DTYPES = (torch.float32, torch.bfloat16)


def learner(
    dtype: torch.dtype,
    critic: bool = False,
    weight_decay: float = 0.01,
    **update: Any,
) -> Learner:
    """A learner in either dtype with the same weights, which bfloat16 represents exactly."""
    model = tiny_model(tiny_tokenizer("chatml")).to(torch.bfloat16).to(dtype)
    return Learner(
        Models(model, critic),
        UpdateConfig(**update),
        LossConfig(**PLAIN),
        steps=10_000,
        weight_decay=weight_decay,
    )


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten().double() for each in tensors])


def weight_changes(one: Learner, start: Sequence[Tensor]) -> Tensor:
    pairs = zip(one.masters.trained.values(), start, strict=True)
    return flat([now.detach() - before.float() for now, before in pairs])


# Weights.


def test_small_updates_are_not_lost() -> None:
    """30 updates of 1e-6 change weights of 0.02 by less than half the spacing of bfloat16."""
    changes = []
    for dtype in DTYPES:
        one = learner(dtype, lr=1e-6, weight_decay=0.0)
        part = batch(learner(torch.float32), (6, 8, 10))
        start = [each.detach().clone() for each in one.model.parameters()]
        for step in range(30):
            one.update(part, step)
        changes.append(weight_changes(one, start))
    exact, mixed = changes
    assert 2.9e-5 < float(exact.abs().max()) < 4e-5
    # Gradients in bfloat16 have errors of some thousandths; the division in AdamW makes them some
    # hundredths.
    assert float((mixed - exact).norm() / exact.norm()) < 0.08
    for name, weight in one.model.named_parameters():
        assert torch.equal(weight, one.masters.trained[name].bfloat16())
        assert weight.grad is None and one.masters.trained[name].grad is None
    unchanged = [weight == old for weight, old in zip(one.model.parameters(), start, strict=True)]
    assert 0.6 < float(flat(unchanged).mean()) < 0.8, "most bfloat16 weights have not changed yet"


def test_masters_are_restored_from_saved_tensors() -> None:
    one, other = learner(torch.bfloat16), learner(torch.bfloat16)
    one.update(batch(one), 0)
    other.masters.restore({k: v.clone() for k, v in one.masters.tensors().items()})
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name])
    with pytest.raises(KeyError):
        other.masters.restore({})


def test_a_closed_engine_holds_no_weights() -> None:
    config = merge("bandit", settings(model__dtype="bfloat16", algorithm="starpo/ppo"))
    engine = LocalEngine(config, config.model.path)
    embedding = engine.model.get_input_embeddings().weight.shape

    def num_embeddings() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        return sum(each.shape == embedding and each.device.type == "cpu" for each in tensors)

    before = num_embeddings()
    assert before >= 4  # those of the policy and the critic, each with its master
    asyncio.run(engine.close())
    assert num_embeddings() <= before - 4


# Gradients.


def gradient(one: Learner, part: Batch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    gradients: list[Tensor] = []
    with monkeypatch.context() as patch:

        def norm(masters: Any, _: float) -> Tensor:
            gradients.append(flat([each.grad for each in masters]))
            return torch.tensor(torch.inf)  # a non-finite norm skips the step

        patch.setattr(torch.nn.utils, "clip_grad_norm_", norm)
        one.update(part, 0)
    return gradients[0]


def test_gradients_of_many_microbatches_are_as_exact_as_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = batch(learner(torch.float32), tuple(6 + at % 20 for at in range(16)))
    exact = gradient(learner(torch.float32), part, monkeypatch)
    errors = []
    for tokens in (10_000, 1):
        mixed = gradient(learner(torch.bfloat16, microbatch_tokens=tokens), part, monkeypatch)
        errors.append(float((mixed - exact).norm() / exact.norm()))
    assert max(errors) < 0.008, "hardly more than the rounding of single gradients, 2⁻⁸ at most"
    assert errors[1] < 1.1 * errors[0], "16 microbatches are as exact as one"


def test_gradient_norms_are_accumulated_in_float32() -> None:
    norms = []
    for dtype in DTYPES:
        one = learner(dtype, microbatch_tokens=1)
        part = batch(learner(torch.float32), tuple(range(6, 12)))
        norms.append(one.gradient_norms(part, torch.zeros(6, dtype=torch.long)))
        assert all(weight.grad is None for weight in one.model.parameters())
    for name, metric in norms[0].items():
        assert norms[1][name].value == pytest.approx(metric.value, rel=0.01), name


# Logits.


def test_logits_are_float32_sums_of_bfloat16_products() -> None:
    generator = torch.Generator().manual_seed(0)
    states = 4 * torch.randn(5, 64, generator=generator).bfloat16()
    weight = torch.randn(50, 64, generator=generator).bfloat16()
    bias = torch.randn(50, generator=generator).bfloat16()
    exact = states.double() @ weight.double().t() + bias.double()
    logits = output_logits(states, weight, bias)
    assert logits.dtype == torch.float32
    assert_close(logits.double(), exact, 64)
    rounded = nn.functional.linear(states, weight, bias)
    assert float((rounded - exact).abs().max()) > 0.1, "the error of the plain layer"


# Sampler and learner in bfloat16.


def test_rounding_of_the_sampler_is_reported_and_corrected() -> None:
    """Sampled logprobs with rounding errors, one of them large: the cap acts on that one."""
    one = learner(torch.bfloat16)
    part = batch(one, (7, 12, 5, 9))
    assert part.old_logprobs_BT is not None
    noise = 0.01 * torch.sin(7.0 * torch.arange(part.mask_BT.numel())).view(part.mask_BT.shape)
    # One token was sampled with 1/e of the probability: its weight e is capped at 2.
    noise[0, part.mask_BT[0].nonzero()[0, 0]] = -1.0
    sampled = (part.old_logprobs_BT + noise) * part.mask_BT
    metrics = one.update(replace(part, sampled_logprobs_BT=sampled), 0)
    assert metrics["importance/capped_fraction"].value == pytest.approx(1 / part.num_tokens)
    assert metrics["mismatch/max_abs"].value == pytest.approx(1.0, abs=0.02)
    # k3 of a log-ratio of 1 is e − 1 − 1 = 0.718; of 0.01 it is 5e-5.
    assert metrics["mismatch/kl"].value * part.num_tokens == pytest.approx(0.718, abs=0.02)


# Products.


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without AVX-512."""
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: False)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("shape", [(3, 5, 7), (WIDENED + 9, 6, 2)])
def test_widened_products_are_float32_products_rounded_once(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    torch.manual_seed(m)
    a, b, bias = (torch.randn(*size).bfloat16() for size in ((m, k), (k, n), (n,)))
    exact = a.double() @ b.double()
    for found, wanted in (
        (product(a, b), exact),
        (product(a, b, bias), exact + bias.double()),
        (product(a.t().contiguous().t(), b), exact),
    ):
        assert found.dtype == torch.bfloat16
        # Half a unit in the last of 8 bits, and the float32 sums' own error.
        assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 * 1.001 + 1e-4).all()
    assert torch.equal(product(a.float(), b.float()), a.float() @ b.float())
    for factors in ((a, b), (a.float(), b.float())):
        sums = torch.randn(m, n)
        wanted = sums + exact
        add_product(sums, *factors)
        torch.testing.assert_close(sums, wanted.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("trained", [("weight", "bias"), ()])
def test_a_widened_layer_has_the_gradients_of_a_linear_one(trained: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    wide, plain = nn.Linear(6, 4).bfloat16(), nn.Linear(6, 4)
    widen_products(nn.Sequential(wide))
    assert type(wide) is WideLinear
    plain.load_state_dict({name: each.float() for name, each in wide.state_dict().items()})
    for layer in (wide, plain):
        for name, each in layer.named_parameters():
            each.requires_grad_(name in trained)
    inputs, grad = torch.randn(2, 3, 6).bfloat16(), torch.randn(2, 3, 4).bfloat16()
    found = []
    for layer, dtype in ((copy.deepcopy(wide), torch.bfloat16), (plain, torch.float32)):
        x = inputs.detach().to(dtype).clone().requires_grad_()
        out = layer(x)
        assert out.dtype == dtype
        out.backward(grad.to(dtype))
        assert x.grad is not None
        found.append([out, x.grad, *(each.grad for each in layer.parameters())])
    rows = product(inputs.flatten(0, 1), wide.weight.t(), wide.bias)
    assert torch.equal(found[0][0].flatten(0, 1), rows)
    few = inputs[0]  # widening would take longer
    assert torch.equal(wide(few), nn.functional.linear(few, wide.weight, wide.bias))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.float(), other, rtol=2**-7, atol=0.02)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_model_is_widened_where_it_is_loaded(dtype: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("chatml")
    tiny_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_policy(tmp_path, "cpu", dtype)
    kinds = {type(layer) for layer in model.get_decoder().modules() if isinstance(layer, nn.Linear)}
    assert kinds == {nn.Linear if dtype == "float32" else WideLinear}
