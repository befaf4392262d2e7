"""What is minimised: weighted sums over the tokens that the loss looks at.

Axes: **N** tokens of a microbatch that the loss looks at, **B** rows, **T** positions.

A loss never counts its own tokens. How much a token weighs is settled once a minibatch by
`token_weights` (over all learners) and carried by `Batch.weight_BT`; so a loss is Σ w_t ℓ_t with Σ
w_t = 1 over the minibatch, and neither padding, nor order, nor the split into microbatches or
learners changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragen.batch import Batch, TokenFields
from ragen.metrics import Metric, Metrics, largest, mean

Aggregation = Literal["token_mean", "episode_mean"]


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar to minimise, and what is worth knowing about it."""

    value: Tensor
    metrics: Metrics


def token_weights(batch: Batch, aggregation: Aggregation) -> Tensor:
    """Each token's share of the loss, ``(B, T)``, summing to 1 over a whole minibatch.

    With base weights b_t (1 on sampled tokens, or what `Batch.weight_BT` says):

    - ``"token_mean"``: w_t = b_t ÷ Σ b, every token counts the same;
    - ``"episode_mean"``: w_t = b_t ÷ (Σ b of its episode) ÷ episodes, every episode counts the same
      (GRPO's form), however its turns were cut into rows.

    Call it once on the minibatch, before it is split: ``replace(batch,
    weight_BT=token_weights(batch, …))``.
    """
    weight_BT = batch.weight_BT
    if aggregation == "token_mean":
        return weight_BT / weight_BT.sum()
    episode_E, rank_B = torch.unique(batch.episode_B, return_inverse=True)
    total_E = torch.zeros(len(episode_E)).index_add_(0, rank_B, weight_BT.sum(dim=1))
    num_episodes = (total_E > 0).sum()
    return weight_BT / (total_E[rank_B].clamp_min(1e-30) * num_episodes)[:, None]


def ppo_clip(
    logprobs_N: Tensor,
    tokens: TokenFields,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    **_: object,
) -> Loss:
    """PPO's clipped objective with separate bounds and the dual clip.

        r = exp(logprob − old logprob)
        ℓ = max(−r A, −clip(r, 1 − ε₋, 1 + ε₊) A),   and for A < 0   ℓ = min(ℓ, −c A)

    arXiv:1707.06347, arXiv:1912.09729. At r = 1 the gradient is REINFORCE's, −A ∇logprob.

    Args:
        logprobs_N: Under the weights being trained; the gradient flows through these.
        tokens: With old logprobs and advantages.
        clip_low: ε₋.
        clip_high: ε₊.
        dual_clip: c > 1: bounds the loss where A < 0 and r is huge.

    Example:
        >>> one = torch.ones(1)
        >>> ids, on = one.long(), one.bool()
        >>> tokens = TokenFields(ids, on, one, ids, 0 * one, 0 * one, advantages_N=one)
        >>> logprobs = torch.log(torch.tensor([1.5]))
        >>> loss = ppo_clip(logprobs, tokens, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        >>> round(loss.value.item(), 4), loss.metrics["clip/fraction"].value
        (-1.28, 1.0)
    """
    assert tokens.old_logprobs_N is not None and tokens.advantages_N is not None
    advantages_N = tokens.advantages_N
    log_ratio_N = logprobs_N - tokens.old_logprobs_N
    ratio_N = log_ratio_N.exp()
    free_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    bound_N = torch.where(advantages_N < 0, -dual_clip * advantages_N, torch.inf)
    loss_N = torch.maximum(free_N, clipped_N)
    value = (tokens.weights_N * torch.minimum(loss_N, bound_N)).sum()
    with torch.no_grad():
        metrics = {
            "loss/policy": _weighted(value, tokens),
            "clip/fraction": _share(clipped_N > free_N),
            "clip/dual_fraction": _share(loss_N > bound_N),
            "ratio/max": _maximum(ratio_N),
            "kl/old": _average(k3(tokens.old_logprobs_N, logprobs_N)),
        }
    return Loss(value, metrics)


def nll(logprobs_N: Tensor, tokens: TokenFields, **_: object) -> Loss:
    """Negative log-likelihood in nats: supervised learning, ℓ = −logprob.

    Context tokens take part where `collate` gave them a weight (base preparation's auxiliary loss).
    """
    value = -(tokens.weights_N * logprobs_N).sum()
    return Loss(value, {"loss/nll": _weighted(value, tokens)})


LOSSES: dict[str, Callable[..., Loss]] = {"ppo_clip": ppo_clip, "nll": nll}
"""Policy losses by their name in the config."""


def value_loss(values_N: Tensor, tokens: TokenFields, *, value_clip: float) -> Loss:
    """The critic's squared error, with the value kept near the one that the advantages used.

        ℓ = ½ max((V − R)², (V_old + clip(V − V_old, −c, c) − R)²)

    Args:
        values_N: Of the critic being trained.
        tokens: With old values and returns.
        value_clip: c > 0, in units of reward.
    """
    assert tokens.values_N is not None and tokens.returns_N is not None
    near_N = tokens.values_N + (values_N - tokens.values_N).clamp(-value_clip, value_clip)
    free_N, clipped_N = (values_N - tokens.returns_N) ** 2, (near_N - tokens.returns_N) ** 2
    value = (tokens.weights_N * 0.5 * torch.maximum(free_N, clipped_N)).sum()
    with torch.no_grad():
        metrics = {
            "loss/value": _weighted(value, tokens),
            "clip/value_fraction": _share(clipped_N > free_N),
        }
    return Loss(value, metrics)


def entropy_bonus(entropies_N: Tensor, tokens: TokenFields) -> Loss:
    """Minus the policy's entropy in nats, so that minimising it keeps the policy undecided."""
    value = -(tokens.weights_N * entropies_N).sum()
    return Loss(value, {"entropy/mean": _average(entropies_N.detach())})


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(policy ‖ reference) of sampled tokens, plain: −x with x = reference logprob − logprob.

    Unbiased, but of either sign, and its gradient has mean zero: a measure and a reward, not a
    loss.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio, x² / 2, whose on-policy gradient is that of the reverse KL."""
    return (reference_logprobs - logprobs) ** 2 / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Unbiased and never negative: eˣ − 1 − x with x = reference logprob − logprob (Schulman 2020).

    Example:
        >>> k3(torch.tensor([-1.0]), torch.tensor([-2.0]))  # e⁻¹ − 1 + 1
        tensor([0.3679])
    """
    x = reference_logprobs - logprobs
    return torch.expm1(x) - x


KL_ESTIMATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""KL estimates by their name in the config."""


def kl_loss(logprobs_N: Tensor, tokens: TokenFields, *, kind: str) -> Loss:
    """The KL divergence to the reference as a term of the loss.

    Raises:
        ValueError: `kind` is k1, whose expected gradient is zero.
    """
    if kind == "k1":
        raise ValueError("k1 in the loss has zero expected gradient: use k2 or k3, or k1 as reward")
    assert tokens.reference_logprobs_N is not None
    kl_N = KL_ESTIMATES[kind](logprobs_N, tokens.reference_logprobs_N)
    value = (tokens.weights_N * kl_N).sum()
    with torch.no_grad():
        estimate_N = k3(logprobs_N, tokens.reference_logprobs_N)
        return Loss(value, {"loss/kl": _weighted(value, tokens), "kl/loss": _average(estimate_N)})


def _weighted(value: Tensor, tokens: TokenFields) -> Metric:
    """A loss as a metric: parts of a minibatch merge to its sum, minibatches to their mean."""
    weight = float(tokens.weights_N.sum())
    return mean(value.item() / weight if weight else 0.0, weight)


def _average(field_N: Tensor) -> Metric:
    return mean(field_N.mean().item() if len(field_N) else 0.0, len(field_N))


def _share(condition_N: Tensor) -> Metric:
    return _average(condition_N.float())


def _maximum(field_N: Tensor) -> Metric:
    return largest(field_N.max().item() if len(field_N) else 0.0)
