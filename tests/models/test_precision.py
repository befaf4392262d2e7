"""bfloat16 where it is fast, float32 where it adds up: weights, gradients, logits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ragen.algorithms.batch import Batch, take
from ragen.config.reading import resolve
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.engines.engine import Engine
from ragen.engines.learner import Learner
from ragen.models.precision import Masters, output_logits
from tests.bandit_model import settings
from tests.engines.test_learner import PLAIN, batch
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tolerance import assert_close

DTYPES = (torch.float32, torch.bfloat16)


def learner(
    dtype: torch.dtype,
    loss: Any = None,
    critic: bool = False,
    weight_decay: float = 0.01,
    **update: Any,
) -> Learner:
    """In either type from the same weights, those that bfloat16 can hold."""
    model = tiny_model(tiny_tokenizer("chatml")).to(torch.bfloat16).to(dtype)
    loss = LossConfig(**(loss or PLAIN))
    return Learner(
        model,
        UpdateConfig(**update),
        loss,
        critic=critic,
        steps=10_000,
        weight_decay=weight_decay,
    )


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten().double() for each in tensors])


def moved(one: Learner, start: Sequence[Tensor]) -> Tensor:
    pairs = zip(one.masters.trained.values(), start, strict=True)
    return flat([now.detach() - before.float() for now, before in pairs])


# Weights.


@pytest.mark.parametrize("loss", [{"name": "nll"}, PLAIN], ids=["nll", "ppo_clip"])
def test_small_updates_are_not_lost(loss: dict[str, Any]) -> None:
    """30 updates of 1e-6 move weights of 0.02 by less than half the gap between two in bfloat16."""
    paths = []
    for dtype in DTYPES:
        one = learner(dtype, loss, lr=1e-6, weight_decay=0.0)
        part = batch(learner(torch.float32), tuple(range(6, 18)))
        start = [each.detach().clone() for each in one.model.parameters()]
        for step in range(30):
            one.update(part, step)
        paths.append(moved(one, start))
    exact, found = paths
    assert 2.9e-5 < float(exact.abs().max()) < 4e-5
    # Gradients in bfloat16 are off by some thousandths; AdamW's division makes some hundredths.
    assert float((found - exact).norm() / exact.norm()) < 0.08
    for name, weight in one.model.named_parameters():
        assert torch.equal(weight, one.masters.trained[name].bfloat16())
        assert weight.grad is None and one.masters.trained[name].grad is None
    kept = [weight == old for weight, old in zip(one.model.parameters(), start, strict=True)]
    assert 0.6 < float(flat(kept).mean()) < 0.8, "most weights show nothing of it yet"


def test_a_float32_model_is_its_own_master() -> None:
    one = learner(torch.float32, critic=True)
    assert one.critic is not None and not one.named_masters()
    for masters, module in ((one.masters, one.model), (one.critic_masters, one.critic)):
        pairs = zip(masters.trained.items(), module.named_parameters(), strict=True)
        assert all(name == known and mine is weight for (name, mine), (known, weight) in pairs)


def test_what_is_not_trained_has_no_master() -> None:
    """As of a frozen base in bfloat16 under adapters in float32."""
    base, adapter = (nn.Parameter(torch.ones(2)) for _ in range(2))
    base.data = base.data.bfloat16()
    masters = Masters([("base", base.requires_grad_(False)), ("adapter", adapter)])
    assert list(masters.trained) == ["adapter"] and not masters.tensors()


def test_the_value_head_stays_float32() -> None:
    one = learner(torch.bfloat16, critic=True)
    assert one.critic is not None and one.critic.head.weight.dtype == torch.float32
    assert one.critic_masters.trained["head.weight"] is one.critic.head.weight
    assert set(one.named_masters()) == {"masters", "critic-masters"}
    assert all("head" not in name for name in one.critic_masters.tensors())


def test_masters_go_on_from_what_was_saved() -> None:
    one, other = learner(torch.bfloat16), learner(torch.bfloat16)
    one.update(batch(one), 0)
    other.masters.restore({k: v.clone() for k, v in one.masters.tensors().items()})
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name])
    with pytest.raises(KeyError):
        other.masters.restore({})


def test_a_closed_engine_holds_no_weights() -> None:
    config = resolve("bandit", settings(model__dtype="bfloat16", algorithm="starpo/ppo"))
    engine = Engine(config, config.model.path)
    embedding = engine.model.get_input_embeddings().weight.shape

    def held() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        return sum(each.shape == embedding and each.device.type == "cpu" for each in tensors)

    before = held()
    assert before >= 4  # of the policy and the critic, each with its master
    asyncio.run(engine.close())
    assert held() <= before - 4


# Gradients.


def test_gradients_add_up_in_float32() -> None:
    """512 gradients of 1/3: in bfloat16 their sum would stand still at 64 or 128."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = Masters([("w", weight)])
    third = torch.tensor(1 / 3, dtype=torch.bfloat16)
    for _ in range(512):
        (third * weight).sum().backward()
    grad = masters.trained["w"].grad
    assert grad is not None and grad.item() == 512 * third.item()
    assert weight.grad is None


def gradient(one: Learner, part: Batch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    found: list[Tensor] = []
    with monkeypatch.context() as patch:

        def norm(masters: Any, _: float) -> Tensor:
            found.append(flat([each.grad for each in masters]))
            return torch.tensor(torch.inf)  # so that the step is not taken

        patch.setattr(torch.nn.utils, "clip_grad_norm_", norm)
        one.update(part, 0)
    return found[0]


def test_many_microbatches_are_as_good_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    part = batch(learner(torch.float32), tuple(6 + at % 20 for at in range(64)))
    exact = gradient(learner(torch.float32), part, monkeypatch)
    errors = []
    for tokens in (10_000, 100, 1):
        found = gradient(learner(torch.bfloat16, microbatch_tokens=tokens), part, monkeypatch)
        errors.append(float((found - exact).norm() / exact.norm()))
    assert max(errors) < 0.008, "the rounding of single gradients, 2⁻⁸ at most, hardly more"
    assert errors[2] < 1.1 * errors[0], "and no more with 64 microbatches than with one"


def test_gradient_norms_add_up_in_float32_too() -> None:
    norms = []
    for dtype in DTYPES:
        one = learner(dtype, microbatch_tokens=1)
        part = batch(learner(torch.float32), tuple(6 + at % 20 for at in range(32)))
        norms.append(one.gradient_norms(part, torch.zeros(32, dtype=torch.long)))
        assert all(weight.grad is None for weight in one.model.parameters())
    for name, metric in norms[0].items():
        assert norms[1][name].value == pytest.approx(metric.value, rel=0.01), name


# Logits.


def test_logits_are_float32_sums_of_what_bfloat16_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    states = 4 * torch.randn(5, 64, generator=generator).bfloat16()
    weight = torch.randn(50, 64, generator=generator).bfloat16()
    bias = torch.randn(50, generator=generator).bfloat16()
    exact = states.double() @ weight.double().t() + bias.double()
    found = output_logits(states, weight, bias)
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, 64)
    rounded = nn.functional.linear(states, weight, bias)
    assert float((rounded - exact).abs().max()) > 0.1, "what the plain layer gives"


# A sampler and a learner in bfloat16.


def test_a_samplers_rounding_is_reported_and_weighed_out() -> None:
    """Sampled logprobs that rounding has moved, some of them far: the cap acts on those."""
    one = learner(torch.bfloat16)
    part = batch(one, (7, 12, 5, 9))
    assert part.old_logprobs_BT is not None
    noise = 0.01 * torch.sin(7.0 * torch.arange(part.mask_BT.numel())).view(part.mask_BT.shape)
    noise[0, part.mask_BT[0].nonzero()[0, 0]] = -1.0  # sampled e times as rarely: weight 2
    sampled = (part.old_logprobs_BT + noise) * part.mask_BT
    metrics = one.update(replace(part, sampled_logprobs_BT=sampled), 0)
    assert metrics["importance/capped_fraction"].value == pytest.approx(1 / part.num_tokens)
    assert metrics["mismatch/max_abs"].value == pytest.approx(1.0, abs=0.02)
    # k3 of a log-ratio of 1 is e − 1 − 1 = 0.718; of 0.01 it is 5e-5.
    assert metrics["mismatch/kl"].value * part.num_tokens == pytest.approx(0.718, abs=0.02)


def test_scoring_twice_in_bfloat16_gives_the_same() -> None:
    one = learner(torch.bfloat16, critic=True, microbatch_tokens=20)
    part = batch(one)
    assert torch.equal(one.logprobs(part)[0], one.logprobs(part)[0])
    alone = take(part, torch.tensor([1]))
    exact = learner(torch.float32).logprobs(alone)[0]
    assert float((one.logprobs(alone)[0] - exact).abs().max()) < 0.01
