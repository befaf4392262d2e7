"""Losses: goldens, gradients, and invariance to the split and the order of a minibatch."""

from __future__ import annotations

import math
from dataclasses import replace
from inspect import signature
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import samples
from torch import Tensor

from ragen.algorithms.batch import Batch, TokenFields, collate, flatten, row_splits, take
from ragen.algorithms.losses import (
    KL_ESTIMATES,
    LOSSES,
    Aggregation,
    PolicyLoss,
    cispo,
    correct_for_sampler,
    entropy_bonus,
    gspo,
    k1,
    k2,
    k3,
    kl_loss,
    needs_whole_episodes,
    nll,
    policy_loss,
    ppo_clip,
    token_weights,
    value_loss,
)
from ragen.config.extensions import LOSS, LOSS_INPUTS
from ragen.config.sections import LossConfig
from ragen.core.inputs import inputs_of
from ragen.core.metrics import merge
from ragen.core.types import Sample
from tests.tolerance import rounding

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
SUMMED = {"atol": rounding(100, 3.0), "rtol": rounding(100)}  # up to a hundred tokens


def fields(size: int, **known: Tensor) -> TokenFields:
    """`size` tokens of equal weight, with old logprobs 0 by default."""
    blank = TokenFields(
        token_ids_N=torch.zeros(size, dtype=torch.long),
        mask_N=torch.ones(size, dtype=torch.bool),
        weights_N=torch.full((size,), 1 / max(1, size)),
        episode_N=torch.zeros(size, dtype=torch.long),
        sampled_logprobs_N=torch.zeros(size),
        old_logprobs_N=torch.zeros(size),
    )
    return replace(blank, **known)


def gradient_of(value: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(value, at)[0]


def test_config_names_the_losses() -> None:
    def choices(key: str) -> set[str]:
        return set(get_args(LossConfig.model_fields[key].annotation))

    assert LOSS in LossConfig.model_fields["name"].metadata
    assert set(LOSS.names) == set(LOSSES)
    assert choices("kl_kind") == set(KL_ESTIMATES)
    assert choices("aggregation") == set(get_args(Aggregation))


@pytest.mark.parametrize("loss", LOSSES.values())
def test_parameters_of_losses_are_known_inputs(loss: PolicyLoss) -> None:
    named = list(signature(loss).parameters)
    assert named[:2] == ["logprobs_N", "tokens"]
    assert inputs_of(loss, LOSS_INPUTS, 2) == named[2:]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped", "dual"),
    [
        (1.0, 2.0, -2.0, 0, 0),
        (1.5, 1.0, -1.28, 1, 0),  # −min(1.5, 1.28)
        (0.5, 1.0, -0.5, 0, 0),  # already worse: no clip
        (0.5, -1.0, 0.8, 1, 0),  # max(.5, .8)
        (2.0, -1.0, 2.0, 0, 0),  # max(2, 1.28), below the bound 3
        (5.0, -1.0, 3.0, 0, 1),  # min(5, 3)
        (5.0, 0.0, 0.0, 0, 0),
    ],
)
def test_ppo_clip_golden(
    ratio: float, advantage: float, expected: float, clipped: float, dual: float
) -> None:
    tokens = fields(1, advantages_N=torch.tensor([advantage]))
    logprobs_N = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = ppo_clip(logprobs_N, tokens, **CLIP)
    assert loss.value.item() == pytest.approx(expected, abs=rounding(4, 4))
    if dual:  # without a bound, the loss grows with the ratio
        unbounded = ppo_clip(logprobs_N, tokens, **CLIP | {"dual_clip": 0.0})
        assert unbounded.value.item() == pytest.approx(ratio)
    if clipped or dual:
        assert gradient_of(loss.value, logprobs_N).item() == 0
    assert loss.metrics["clip/fraction"].value == clipped
    assert loss.metrics["clip/dual_fraction"].value == dual
    assert loss.metrics["ratio/max"].value == pytest.approx(ratio)
    assert loss.metrics["kl/old"].value == pytest.approx(
        ratio - 1 - math.log(ratio), abs=rounding(4, 4)
    )


@pytest.mark.parametrize("loss", [ppo_clip, cispo])
@given(advantages=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6))
def test_the_gradient_at_ratio_one_equals_that_of_reinforce(
    loss: PolicyLoss, advantages: list[float]
) -> None:
    size, advantages_N = len(advantages), torch.tensor(advantages)
    old_N = -torch.rand(size, generator=torch.Generator().manual_seed(size))
    logprobs_N = old_N.clone().requires_grad_(True)
    tokens = fields(size, old_logprobs_N=old_N, advantages_N=advantages_N)
    found = policy_loss(loss, logprobs_N, tokens, **CLIP)
    torch.testing.assert_close(gradient_of(found.value, logprobs_N), -advantages_N / size)
    assert found.metrics["clip/fraction"].value == 0


@pytest.mark.parametrize(
    ("ratio", "low", "expected", "clipped"),
    [
        (1.1, 0.2, 1.1, 0),  # inside: the ratio itself
        (1.5, 0.2, 1.28, 1),  # above: the bound, where PPO's gradient would be 0 for A > 0
        (0.5, 0.2, 0.8, 1),  # below: the bound
        (0.5, 1.0, 0.5, 0),  # no lower bound
    ],
)
@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_cispo_keeps_the_gradient_of_every_token(
    ratio: float, low: float, expected: float, clipped: float, advantage: float
) -> None:
    logprobs_N = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    tokens = fields(1, old_logprobs_N=-torch.ones(1), advantages_N=torch.tensor([advantage]))
    loss = policy_loss(cispo, logprobs_N, tokens, clip_low=low, clip_high=0.28, dual_clip=3.0)
    assert loss.value.item() == pytest.approx(
        -expected * advantage * (math.log(ratio) - 1), abs=rounding(4, 4)
    )
    assert gradient_of(loss.value, logprobs_N).item() == pytest.approx(
        -expected * advantage, abs=rounding(4, 4)
    )
    assert loss.metrics["clip/fraction"].value == clipped


def test_gspo_golden() -> None:
    # Episode 0: log-ratios ln 1.2 and 0, mean ½ ln 1.2, s = √1.2 = 1.0954 > 1.05: with A = 2
    # clipped to −1.05 · 2 = −2.1, without gradient. Episode 1: log-ratios ln 1.2, −ln 1.2, 0: s = 1
    # although its tokens have changed, so −s A = 1, with a gradient of −s A w on each token.
    far = math.log(1.2)
    logprobs_N = torch.tensor([far, 0.0, far, -far, 0.0], requires_grad=True)
    tokens = fields(
        5,
        episode_N=torch.tensor([4, 4, 7, 7, 7]),
        advantages_N=torch.tensor([2.0, 2.0, -1.0, -1.0, -1.0]),
        weights_N=torch.tensor([0.25, 0.25, 1 / 6, 1 / 6, 1 / 6]),
    )
    loss = policy_loss(gspo, logprobs_N, tokens, clip_low=0.05, clip_high=0.05)
    assert loss.value.item() == pytest.approx((-2.1 + 1) / 2, abs=rounding(8, 2))
    expected = torch.tensor([0, 0, 1, 1, 1]) / 6
    torch.testing.assert_close(gradient_of(loss.value, logprobs_N), expected)
    assert loss.metrics["clip/fraction"].value == pytest.approx(2 / 5)
    assert loss.metrics["ratio/max"].value == pytest.approx(1.2**0.5)
    assert needs_whole_episodes(gspo) and not needs_whole_episodes(ppo_clip)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(-0.5, 0.5, width=32)), min_size=1, max_size=9),
    st.floats(0.01, 0.3),
)
def test_gspo_by_tokens_equals_the_formula_by_episodes(
    drawn: list[tuple[int, float]], clip: float
) -> None:
    """Value and gradient of the mean over episodes of max(−s A, −clip(s) A), one A per episode."""
    episode_N = torch.tensor([episode for episode, _ in drawn])
    logprobs_N = torch.tensor([log_ratio for _, log_ratio in drawn], requires_grad=True)
    advantage_E = torch.tensor([1.5, -0.7, 0.4])
    present = episode_N.unique().tolist()
    count_N = torch.bincount(episode_N, minlength=3)[episode_N]
    tokens = fields(
        len(drawn),
        episode_N=episode_N,
        advantages_N=advantage_E[episode_N],
        weights_N=1 / (count_N * len(present)),
    )
    loss = policy_loss(gspo, logprobs_N, tokens, clip_low=clip, clip_high=clip)
    plain = torch.zeros(())
    for episode in present:
        s, a = logprobs_N[episode_N == episode].mean().exp(), advantage_E[episode]
        plain = plain + torch.maximum(-s * a, -s.clamp(1 - clip, 1 + clip) * a) / len(present)
    torch.testing.assert_close(loss.value, plain, **SUMMED)
    torch.testing.assert_close(
        gradient_of(loss.value, logprobs_N), gradient_of(plain, logprobs_N), **SUMMED
    )


def test_importance_correction_golden() -> None:
    # old − sampled: ln ½, 0, ln 5, so weights ½, 1 and min(5, 2).
    sampled_N = torch.tensor([-1.0, -1.0, -1.0 - math.log(5)])
    old_N = torch.tensor([-1.0 - math.log(2), -1.0, -1.0])
    tokens = fields(
        3,
        sampled_logprobs_N=sampled_N,
        old_logprobs_N=old_N,
        advantages_N=torch.tensor([2.0, -3.0, -1.0]),
    )
    corrected, metrics = correct_for_sampler(tokens, cap=2.0)
    assert corrected.advantages_N is not None
    assert corrected.advantages_N.tolist() == pytest.approx([1, -3, -2])
    assert metrics["importance/mean"].value == pytest.approx(3.5 / 3)
    assert metrics["importance/capped_fraction"].value == pytest.approx(1 / 3)
    same, _ = correct_for_sampler(replace(tokens, old_logprobs_N=sampled_N), cap=2.0)
    assert torch.equal(same.advantages_N, tokens.advantages_N)  # type: ignore[arg-type]


@given(st.floats(0.125, 4, width=32), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))
def test_policy_losses_are_proportional_to_the_advantage(
    factor: float, log_ratio: float, advantage: float
) -> None:
    """Group weights and the importance correction rely on it: they scale the advantage."""
    for name in sorted(LOSSES.keys() - {"nll"}):
        at_N, a_N = torch.tensor([log_ratio]), torch.tensor([advantage])
        one = policy_loss(LOSSES[name], at_N, fields(1, advantages_N=a_N), **CLIP).value
        more = policy_loss(LOSSES[name], at_N, fields(1, advantages_N=factor * a_N), **CLIP).value
        torch.testing.assert_close(more, factor * one, atol=1e-5, rtol=1e-5)


def test_value_loss_golden() -> None:
    # V = 2, V_old = 1, clip .5, so the near value is 1.5.
    # R = 0: ½ max(2², 1.5²) = 2.  R = 3: ½ max(1², 1.5²) = 1.125, clipped with effect.
    tokens = fields(2, values_N=torch.ones(2), returns_N=torch.tensor([0.0, 3.0]))
    loss = value_loss(torch.tensor([2.0, 2.0]), tokens, value_clip=0.5)
    assert loss.value.item() == pytest.approx((2 + 1.125) / 2)
    assert loss.metrics["clip/value_fraction"].value == 0.5


def test_kl_goldens() -> None:
    # x = reference − logprob = ln ½: k1 = ln 2, k2 = (ln 2)²/2, k3 = ½ − 1 + ln 2
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)])
    tolerance = rounding(4, 2)
    assert k1(logprobs, reference).item() == pytest.approx(math.log(2), abs=tolerance)
    assert k2(logprobs, reference).item() == pytest.approx(math.log(2) ** 2 / 2, abs=tolerance)
    assert k3(logprobs, reference).item() == pytest.approx(0.5 - 1 + math.log(2), abs=tolerance)


def test_kl_estimates_equal_enumeration() -> None:
    logits_V = torch.tensor([0.3, -0.5, 1.1], requires_grad=True)
    reference_V = torch.log_softmax(torch.tensor([0.0, 0.4, 0.2]), 0)
    logprobs_V = torch.log_softmax(logits_V, 0)
    chance_V = logprobs_V.exp().detach()
    true = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    for estimate in (k1, k3):
        assert (chance_V * estimate(logprobs_V, reference_V)).sum().item() == pytest.approx(
            true.item(), abs=rounding(8)
        )

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits_V, retain_graph=True)[0]

    mean_k2 = (chance_V * k2(logprobs_V, reference_V)).sum()
    torch.testing.assert_close(gradient(mean_k2), gradient(true))
    mean_k1 = (chance_V * k1(logprobs_V, reference_V)).sum()
    torch.testing.assert_close(gradient(mean_k1), torch.zeros(3))


def test_kl_loss_is_weighted_and_refuses_k1() -> None:
    tokens = fields(2, reference_logprobs_N=torch.tensor([-1.0, -2.0]))
    loss = kl_loss(torch.tensor([-1.0, -1.0]), tokens, kind="k2")
    assert loss.value.item() == pytest.approx(0.25)  # (0 + ½) / 2
    with pytest.raises(ValueError, match="k2 or k3"):
        kl_loss(torch.zeros(2), tokens, kind="k1")


def test_nll_and_entropy_goldens() -> None:
    tokens = fields(2)
    assert nll(torch.tensor([-1.0, -3.0]), tokens).value.item() == 2
    bonus = entropy_bonus(torch.tensor([0.5, 1.5]), tokens)
    assert (bonus.value.item(), bonus.metrics["entropy/mean"].value) == (-1, 1)


def test_losses_of_no_tokens_are_zero() -> None:
    empty = fields(0, **{f"{n}_N": torch.zeros(0) for n in ("advantages", "values", "returns")})
    none = torch.zeros(0, requires_grad=True)
    for loss in (
        *(policy_loss(each, none, empty, **CLIP) for each in LOSSES.values()),
        entropy_bonus(none, empty),
    ):
        assert loss.value.item() == 0
    assert value_loss(none, empty, value_clip=0.5).value.item() == 0


# Splits of a minibatch: the weights are computed once, and the parts sum to the minibatch.


def test_token_weights_golden() -> None:
    # Episode 0 has three sampled tokens in two rows, episode 1 has one.
    off, on = False, True
    rows = [
        Sample((1, 8, 9), (off, on, on), (0.0,) * 3, (-1, 0, 0), (off, off, on), 0, 0),
        Sample((1, 8), (off, on), (0.0,) * 2, (-1, 1), (off, on), 0, 0),
        Sample((1, 8), (off, on), (0.0,) * 2, (-1, 0), (off, on), 1, 0),
    ]
    batch = collate(rows)
    assert token_weights(batch, "token_mean")[batch.mask_BT].tolist() == [0.25] * 4
    weights = token_weights(batch, "episode_mean")[batch.mask_BT]
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    # 2 episodes of at most 5 tokens: 1 / 10 each; they sum to the mean length, 2, ÷ 5.
    weights = token_weights(batch, "constant", longest=5)[batch.mask_BT]
    assert weights.tolist() == pytest.approx([0.1] * 4)


@st.composite
def minibatch(draw: st.DrawFn) -> Batch:
    """A batch with random old logprobs, advantages, values and returns, and token weights."""
    batch = collate(draw(samples()), context_weight=draw(st.sampled_from([0.0, 0.3])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def noise() -> Tensor:
        return torch.randn(batch.mask_BT.shape, generator=generator)

    batch = replace(
        batch, old_logprobs_BT=noise(), advantages_BT=noise(), values_BT=noise(), returns_BT=noise()
    )
    aggregation = draw(st.sampled_from(get_args(Aggregation)))
    return replace(batch, weight_BT=token_weights(batch, aggregation, longest=20))


def _losses(batch: Batch, at_BT: Tensor) -> list[Tensor]:
    """Every loss at the logprobs (or values) of the weighted tokens."""
    tokens = flatten(batch)
    at_N = at_BT[batch.weight_BT > 0]
    return [
        *(policy_loss(loss, at_N, tokens, **CLIP).value for loss in LOSSES.values()),
        value_loss(at_N, tokens, value_clip=0.5).value,
        entropy_bonus(at_N, tokens).value,
    ]


@given(minibatch(), st.integers(1, 30))
def test_losses_and_metrics_of_microbatches_are_those_of_the_minibatch(
    batch: Batch, max_tokens: int
) -> None:
    """In any order of the microbatches."""
    at_BT = torch.sin(torch.arange(batch.mask_BT.numel())).view(batch.mask_BT.shape)
    full = _losses(batch, at_BT)
    ppo = ppo_clip(at_BT[batch.weight_BT > 0], flatten(batch), **CLIP)
    losses, metrics = [], []
    for rows_R in reversed(row_splits(batch, max_tokens, whole_episodes=True)):
        part = take(batch, rows_R)
        at_RT = at_BT[rows_R, : part.mask_BT.shape[1]]
        losses.append(_losses(part, at_RT))
        metrics.append(ppo_clip(at_RT[part.weight_BT > 0], flatten(part), **CLIP).metrics)
    for one, pieces in zip(full, zip(*losses, strict=True), strict=True):
        torch.testing.assert_close(sum(pieces), one, **SUMMED)
    merged, bound = merge(metrics), {"abs": SUMMED["atol"], "rel": SUMMED["rtol"]}
    weighted = merged["loss/policy"].value * batch.weight_BT.sum().item()
    assert weighted == pytest.approx(ppo.value.item(), **bound)
    for name in ("clip/fraction", "clip/dual_fraction", "kl/old", "ratio/max"):
        assert merged[name].value == pytest.approx(ppo.metrics[name].value, **bound)
