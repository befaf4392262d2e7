"""One optimiser step: its gradient, its invariants, and what it skips."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ragen.algorithms.batch import Batch, collate, take
from ragen.algorithms.losses import Loss
from ragen.config.sections import LossConfig, UpdateConfig
from ragen.core.errors import NotFiniteError
from ragen.core.types import Sample
from ragen.learning.learner import IMPORTANCE_CAP, Learner
from ragen.learning.models import Models
from ragen.learning.optimizers import optimizer_tensors, optimizers, restore_optimizer
from ragen.networks.model import Critic
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tolerance import GRADIENT, LOGPROB, assert_close, rounding

VOCABULARY = 400
PLAIN = {"entropy": 0.0, "kl": 0.0}


def model(seed: int = 0) -> Any:
    return tiny_model(tiny_tokenizer("chatml"), seed)


def sample(episode: int, length: int, generator: torch.Generator) -> Sample:
    ids = torch.randint(1, VOCABULARY // 2, (length,), generator=generator).tolist()
    mask = [False, False] + [bool(at % 4) for at in range(length - 2)]
    mask[-1] = True
    ends = [on and (at == length - 1 or not mask[at + 1]) for at, on in enumerate(mask)]
    turn, turns = 0, []
    for on, end in zip(mask, ends, strict=True):
        turns.append(turn if on else -1)
        turn += end
    zeros = (0.0,) * length
    return Sample(tuple(ids), tuple(mask), zeros, tuple(turns), tuple(ends), episode, episode // 2)


def batch(learner: Learner, lengths: tuple[int, ...] = (7, 12, 5, 9)) -> Batch:
    """Random tokens with the learner's logprobs as old logprobs, and random advantages."""
    generator = torch.Generator().manual_seed(len(lengths))
    collated = collate([sample(e, length, generator) for e, length in enumerate(lengths)])
    shape, logprobs_BT = collated.mask_BT.shape, learner.logprobs(collated)[0]
    return replace(
        collated,
        sampled_logprobs_BT=logprobs_BT,
        old_logprobs_BT=logprobs_BT,
        reference_logprobs_BT=logprobs_BT - 0.1 * collated.mask_BT.float(),
        advantages_BT=torch.randn(shape, generator=generator) * collated.mask_BT,
        returns_BT=torch.randn(shape, generator=generator) * collated.mask_BT,
        values_BT=0.1 * torch.randn(shape, generator=generator) * collated.mask_BT,
    )


def learner(
    seed: int = 0,
    critic: bool = False,
    shared: bool = False,
    loss: Any = None,
    muon_lr: float = 0.0,
    **update: Any,
) -> Learner:
    return Learner(
        Models(model(seed), critic, shared),
        UpdateConfig(**({"lr": 1e-2, "critic_lr": 1e-2} | update)),
        LossConfig(**(PLAIN if loss is None else loss)),
        steps=10,
        longest=20,
        muon_lr=muon_lr,
    )


def gradient(one: Learner, part: Batch, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The gradient that `update` gives to the optimiser; the weights do not change."""
    gradients: dict[str, Tensor] = {}
    with monkeypatch.context() as patch:

        def norm(parameters: Any, _: float) -> Tensor:
            named = one.model.named_parameters()
            gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
            return torch.tensor(torch.inf)  # skips the step

        patch.setattr(torch.nn.utils, "clip_grad_norm_", norm)
        one.update(part, 0)
    return gradients


def weights(one: Learner) -> dict[str, Tensor]:
    tensors = {f"policy.{k}": v.clone() for k, v in one.model.state_dict().items()}
    if one.critic is not None:
        tensors |= {f"critic.{k}": v.clone() for k, v in one.critic.state_dict().items()}
    return tensors


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Assert that gradients, or weights with gradients added, are equal except for rounding."""
    assert a.keys() == b.keys()
    assert_close(a, b, GRADIENT)


# The gradient.


def test_the_gradient_at_ratio_1_equals_that_of_reinforce(monkeypatch: pytest.MonkeyPatch) -> None:
    """∇ −(1/N) Σ A log π(token | before), by transformers and autograd."""
    one = learner()
    part = batch(one)
    actual = gradient(one, part, monkeypatch)

    plain = model()
    loss = torch.zeros(())
    for row in range(part.num_rows):
        length = int(part.lengths_B[row])
        ids = part.token_ids_BT[row, :length]
        logprobs = plain(ids[None]).logits[0].log_softmax(-1)
        for at in range(1, length):
            if part.mask_BT[row, at]:
                assert part.advantages_BT is not None
                loss = loss - part.advantages_BT[row, at] * logprobs[at - 1, ids[at]]
    (loss / part.num_tokens).backward()
    close(actual, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})


def test_episode_mean_weights_episodes_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner(loss=PLAIN | {"aggregation": "episode_mean"})
    part = batch(one)
    mean = gradient(one, part, monkeypatch)
    parts = [
        gradient(one, take(part, torch.tensor([row])), monkeypatch) for row in range(part.num_rows)
    ]
    # One row per episode: the mean of the gradients of single episodes.
    close(mean, {n: sum(p[n] for p in parts) / len(parts) for n in mean})


LOSSES: dict[str, dict[str, Any]] = {
    "kl": {"entropy": 0.01, "kl": 0.1, "kl_kind": "k3", "aggregation": "constant"},
    "gspo": PLAIN | {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "shared": PLAIN | {"name": "cispo", "clip_low": 1.0, "aggregation": "episode_mean"},
}


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_do_not_depend_on_the_microbatch_size(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for tokens in (10_000, 14):
        shared = kind == "shared"
        one = learner(loss=LOSSES[kind], critic=True, shared=shared, microbatch_tokens=tokens)
        part = batch(one)
        results.append((gradient(one, part, monkeypatch), one.logprobs(part)[0], one.values(part)))
    (gradients, logprobs, values), (parted, *others) = results
    close(parted, gradients)
    assert_close(others, [logprobs, values])


def test_gspo_has_one_ratio_per_episode_for_any_microbatch_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GSPO with one row per turn, at weights that have changed since sampling."""
    results = []
    for tokens in (10_000, 1):
        one = learner(
            loss=PLAIN | {"name": "gspo", "clip_low": 0.01, "clip_high": 0.01},
            microbatch_tokens=tokens,
        )
        part = batch(one)
        turns = replace(part, episode_B=torch.tensor([0, 1, 0, 1]))
        old = part.sampled_logprobs_BT - 0.1 * torch.sin(part.token_ids_BT.float())
        moved = replace(turns, old_logprobs_BT=old, advantages_BT=part.mask_BT.float())
        results.append((gradient(one, moved, monkeypatch), one.update(moved, 0)))
    close(results[1][0], results[0][0])
    assert any(bool(each.any()) for each in results[0][0].values())
    assert results[0][1]["ratio/max"].value == pytest.approx(
        results[1][1]["ratio/max"].value, abs=LOGPROB
    )
    assert results[0][1]["ratio/max"].value != pytest.approx(1, abs=1e-3)


def test_updates_do_not_depend_on_the_order_of_rows() -> None:
    results = []
    for rows in ([0, 1, 2, 3], [2, 0, 3, 1]):
        one = learner(critic=True)
        metrics = one.update(take(batch(one), torch.tensor(rows)), 0)
        results.append((one, metrics))
    (a, metrics_a), (b, metrics_b) = results
    assert metrics_a.keys() == metrics_b.keys()
    off = rounding(GRADIENT)
    for name, metric in metrics_a.items():
        assert metric.value == pytest.approx(metrics_b[name].value, rel=off, abs=off), name
    probe = batch(learner())
    torch.testing.assert_close(a.logprobs(probe)[0], b.logprobs(probe)[0], atol=1e-3, rtol=1e-3)


def test_gradients_do_not_depend_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner()
    part = batch(one)
    columns = ("token_ids_BT", "mask_BT", "sampled_logprobs_BT", "turn_BT", "turn_ends_BT")
    columns += ("weight_BT", "old_logprobs_BT", "reference_logprobs_BT", "values_BT")
    columns += ("advantages_BT", "returns_BT")
    wider = {
        name: torch.nn.functional.pad(getattr(part, name), (0, 5), value=0) for name in columns
    }
    close(gradient(one, replace(part, **wider), monkeypatch), gradient(one, part, monkeypatch))


def test_logprobs_equal_those_of_the_plain_model() -> None:
    one = Learner(Models(model(), temperature=0.7), UpdateConfig(), LossConfig())
    part = batch(one)
    actual = one.logprobs(part)[0]
    for row in range(part.num_rows):
        ids = part.token_ids_BT[row, : int(part.lengths_B[row])]
        plain = (model()(ids[None]).logits[0] / 0.7).log_softmax(-1)
        expected = plain[:-1].gather(1, ids[1:, None])[:, 0] * part.mask_BT[row, 1 : len(ids)]
        assert_close(actual[row, 1 : len(ids)], expected)
        assert not actual[row, len(ids) :].any() and not actual[row, 0]


# Skipped updates, the shared critic, importance weights and the reference.


def test_an_infinite_loss_with_a_finite_gradient_is_never_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = learner()
    monkeypatch.setattr(one, "_task_loss", lambda x, _: Loss(x.mean() + torch.inf, {}))
    before = weights(one)
    assert one.update(batch(one), 0)["update/skipped_policy"].value == 1
    assert equal(weights(one), before)


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_scores_that_are_not_finite_are_an_error(role: str) -> None:
    one = learner(critic=True)
    part = batch(one)
    module = one.critic.head if role == "critic" else one.model.get_output_embeddings()
    with torch.no_grad():
        module.weight.fill_(torch.nan)
    with pytest.raises(NotFiniteError, match=role):
        one.values(part) if role == "critic" else one.logprobs(part)
    if role == "policy":
        with pytest.raises(NotFiniteError, match="scores of thoughts"):
            one.cross_scores([(5, 6)], [(7, 8)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_never_applied(value: float) -> None:
    one = learner(critic=True)
    part = batch(one)
    before = weights(one)
    bad = torch.where(part.mask_BT, value, 0.0)
    metrics = one.update(replace(part, advantages_BT=bad, returns_BT=bad), 0)
    assert metrics["update/skipped_policy"].value == metrics["update/skipped_critic"].value == 1
    assert equal(weights(one), before)
    assert all(p.grad is None for p in one.model.parameters())
    metrics = one.update(part, 0)
    assert metrics["update/skipped_policy"].value == metrics["update/skipped_critic"].value == 0
    assert not equal(weights(one), before)
    assert all(bool(torch.isfinite(value).all()) for value in weights(one).values())


def test_a_shared_critic_adds_its_gradient_to_that_of_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradient of the backbone: that of the policy plus half that of ½ (V − R)²."""
    one = learner(critic=True, shared=True)
    assert one.critic is not None
    assert {name for name, _ in one.critic.named_parameters()} == {"head.weight", "head.bias"}
    assert not one.values(batch(one)).any()
    torch.nn.init.normal_(one.critic.head.weight, generator=torch.Generator().manual_seed(0))
    part = batch(one)
    part = replace(part, values_BT=one.values(part))
    actual = gradient(one, part, monkeypatch)

    alone = learner()
    policy = gradient(alone, part, monkeypatch)
    errors = []
    for row in range(part.num_rows):
        ids = part.token_ids_BT[row, : int(part.lengths_B[row])]
        states = alone.model.model(ids[None]).last_hidden_state[0]
        values = one.critic.head(states)[:-1, 0]
        assert part.returns_BT is not None
        on = part.mask_BT[row, 1 : len(ids)]
        errors.append(((values - part.returns_BT[row, 1 : len(ids)]) ** 2)[on])
    (0.5 * 0.5 * torch.cat(errors).mean()).backward()
    expected = {
        name: policy[name] + (0 if weight.grad is None else weight.grad)
        for name, weight in alone.model.named_parameters()
    }
    close(actual, expected)
    assert any(not torch.allclose(actual[name], policy[name], atol=1e-5) for name in actual)


def test_importance_is_one_if_sampler_and_learner_agree() -> None:
    one = learner()
    part = batch(one)
    metrics = one.update(part, 0)
    assert (metrics["importance/mean"].value, metrics["importance/capped_fraction"].value) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_first_update_computes_its_own_old_logprobs(dtype: torch.dtype) -> None:
    """The same update as with those computed before it, and all ratios are exactly 1."""
    pair = []
    for _ in range(2):
        one = learner()
        models = Models(one.model.to(dtype))
        pair.append(Learner(models, UpdateConfig(lr=1e-2), LossConfig(**PLAIN)))
    before, inside = pair
    part = batch(before)
    expected = before.update(part, 0)
    metrics = inside.update(replace(part, old_logprobs_BT=None), 0)
    assert equal(weights(before), weights(inside)) and metrics == expected
    assert metrics["kl/old"].value == 0.0
    with pytest.raises(AssertionError, match="weights that sampled"):
        inside.update(replace(part, old_logprobs_BT=None), 1)


def test_importance_weights_correct_a_mismatch_up_to_their_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens sampled with two thirds of the learner's probability get a weight of 1.5."""
    one = learner()
    part = batch(one)
    rare = replace(
        part, sampled_logprobs_BT=part.sampled_logprobs_BT - torch.log(torch.tensor(1.5))
    )
    actual, plain = gradient(one, rare, monkeypatch), gradient(one, part, monkeypatch)
    close(actual, {name: 1.5 * each for name, each in plain.items()})
    rarer = replace(part, sampled_logprobs_BT=part.sampled_logprobs_BT - 9)
    actual = gradient(one, rarer, monkeypatch)
    close(actual, {name: IMPORTANCE_CAP * each for name, each in plain.items()})


def test_mismatch_is_reported_only_at_equal_weights() -> None:
    one = learner()
    part = batch(one)
    assert one.update(part, 0)["mismatch/max_abs"].value < LOGPROB
    assert "mismatch/max_abs" not in one.update(part, 0)


def test_updates_do_not_change_the_reference() -> None:
    one = Learner(Models(model(), reference=True), UpdateConfig(lr=1e-2), LossConfig())
    part = batch(one)
    before = one.logprobs(part, reference=True)[0]
    assert_close(before, one.logprobs(part)[0])
    one.update(part, 0)
    assert torch.equal(one.logprobs(part, reference=True)[0], before)
    assert not torch.equal(one.logprobs(part)[0], before)


# The optimiser.


def test_learning_rates_golden() -> None:
    """Warm-up by (step + 1) / (warmup_steps + 1); decay from 1 at step 0 towards lr_end."""
    one = learner(lr=1.0, warmup_steps=3, lr_end=0.0)  # 10 steps
    # 1/4 · 1, 2/4 · .9, 3/4 · .8, 1 · .7, …, 1 · .1
    expected = [0.25, 0.45, 0.6, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert [one._learning_rate(step) for step in range(10)] == pytest.approx(expected)
    flat = learner(lr=1.0)
    assert {flat._learning_rate(step) for step in range(30)} == {1.0}
    half = learner(lr=1.0, lr_end=0.5)
    assert half._learning_rate(5) == 0.75 and half._learning_rate(99) == 0.5


def test_the_learning_rate_reaches_every_parameter_group() -> None:
    one = learner(critic=True, lr=0.1, critic_lr=0.2, muon_lr=0.3, lr_end=0.0)
    one.update(batch(one), 5)
    rates = [g["lr"] for o in one.named_optimizers().values() for g in o.param_groups]
    assert rates == pytest.approx([0.05, 0.15, 0.1, 0.15])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("muon_lr", [0.0, 0.02])
def test_every_parameter_has_one_optimiser(tied: bool, muon_lr: float) -> None:
    policy = tiny_model(tiny_tokenizer("chatml"), tie_word_embeddings=tied)
    for module in (policy, Critic(policy)):
        trained = dict(module.named_parameters())
        built = optimizers(trained, 1e-3, 0.999, muon_lr)
        held = [id(p) for o in built for group in o.param_groups for p in group["params"]]
        assert sorted(held) == sorted({id(p) for p in module.parameters()})
        assert len(built) == (2 if muon_lr else 1)
        if muon_lr:
            names = {id(p): name for name, p in module.named_parameters()}
            muon = {names[id(p)] for group in built[1].param_groups for p in group["params"]}
            assert all("proj" in name for name in muon), "neither embeddings nor heads"


def test_restored_optimisers_continue_identically() -> None:
    """AdamW and Muon."""
    one = learner(critic=True, muon_lr=0.02)
    part = batch(one)
    one.update(part, 0)
    other = learner(seed=1, critic=True, muon_lr=0.02)
    other.model.load_state_dict(one.model.state_dict())
    assert one.critic is not None and other.critic is not None
    other.critic.load_state_dict(one.critic.state_dict())
    for name, optimizer in other.named_optimizers().items():
        saved = copy.deepcopy(optimizer_tensors(one.named_optimizers()[name]))
        restore_optimizer(optimizer, saved)
    for step in (1, 2):
        one.update(part, step)
        other.update(part, step)
        assert equal(weights(one), weights(other))
