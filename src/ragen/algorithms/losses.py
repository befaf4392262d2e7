"""Losses: weighted sums over the tokens with weight in the loss.

Axes: **N** tokens of a microbatch with weight in the loss, **B** rows, **T** positions.

A loss never counts its own tokens. `token_weights` sets the weights once per minibatch (over all
learners), and `Batch.weight_BT` carries them. So a loss is Σ w_t ℓ_t with Σ w_t = 1 over the
minibatch (less with constant weights), and neither padding, nor order, nor the split into
microbatches or learners changes it. Only `gspo` needs all of an episode in one microbatch
(`needs_whole_episodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ragen.algorithms.batch import Batch, TokenFields
from ragen.config.extensions import LOSS
from ragen.core.errors import RagenError
from ragen.core.inputs import call, names_input
from ragen.core.metrics import Kind, Metric, Metrics, largest, mean

Aggregation = Literal["token_mean", "episode_mean", "constant"]


LARGEST_LOG_RATIO = 20.0
"""Limit of a log-ratio's size, in nats. Beyond it, a ratio counts as e²⁰ or e⁻²⁰ and has no
gradient; float32 overflows at e⁸⁸."""


class Measured(NamedTuple):
    """A `Metric` whose numbers are still on the device: reading one would wait for the device."""

    value: Tensor
    weight: Tensor | float = 1.0
    kind: Kind = "mean"


Measurements = dict[str, Metric | Measured]


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar to minimise, and metrics about it."""

    value: Tensor
    metrics: Measurements


PolicyLoss = Callable[..., Loss]
"""The signature of every policy loss: ``loss(logprobs_N, tokens, *, <inputs that it names>)``.

    def reinforce(logprobs_N: Tensor, tokens: TokenFields) -> Loss: ...

The gradient flows through `logprobs_N`, the logprobs under the weights being trained. The value is
Σ w_t ℓ_t with `TokenFields.weights_N`, and proportional to the advantages. The inputs that a loss
may name are `config.extensions.LOSS_INPUTS`; naming ``episode_N`` keeps each episode in one
microbatch.
"""


def token_weights(batch: Batch, aggregation: Aggregation, longest: int = 1) -> Tensor:
    """Each token's share of the loss, ``(B, T)``, over a whole minibatch.

    With base weights b_t (1 on sampled tokens, or what `Batch.weight_BT` says):

    - ``"token_mean"``: w_t = b_t ÷ Σ b: every token has the same weight;
    - ``"episode_mean"``: w_t = b_t ÷ (Σ b of its episode) ÷ episodes: every episode has the same
      weight, in however many rows it is (the form of GRPO);
    - ``"constant"``: w_t = b_t ÷ longest ÷ episodes: a token has the same weight in a long episode
      as in a short one, whatever the other episodes' lengths (Dr. GRPO, arXiv:2503.20783).

    The first two sum to 1, the last to the episodes' mean length as a share of the longest.
    `longest` is the number of sampled tokens of the longest possible episode.
    """
    weight_BT = batch.weight_BT
    if aggregation == "token_mean":
        return weight_BT / weight_BT.sum()
    episode_E, rank_B = torch.unique(batch.episode_B, return_inverse=True)
    total_E = torch.zeros(len(episode_E)).index_add_(0, rank_B, weight_BT.sum(dim=1))
    num_episodes = (total_E > 0).sum()
    if aggregation == "constant":
        return weight_BT / (longest * num_episodes)
    return weight_BT / (total_E[rank_B].clamp_min(1e-30) * num_episodes)[:, None]


def ratio(log_ratio: Tensor) -> Tensor:
    """The importance ratio eˣ, with x within ±`LARGEST_LOG_RATIO` so that gradients are finite."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def ppo_clip(
    logprobs_N: Tensor,
    tokens: TokenFields,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Loss:
    """PPO's clipped objective with separate bounds and the dual clip.

        r = exp(logprob − old logprob)
        ℓ = max(−r A, −clip(r, 1 − ε₋, 1 + ε₊) A),   and for A < 0   ℓ = min(ℓ, −c A)

    arXiv:1707.06347, arXiv:1912.09729. At r = 1 the gradient is REINFORCE's, −A ∇logprob. ε₋ is
    `clip_low`, ε₊ is `clip_high`, and c > 1 is `dual_clip`; 0 sets no bound c.
    """
    old_N, advantages_N = _trained(tokens)
    ratio_N = ratio(logprobs_N - old_N)
    free_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    bounded_N = (advantages_N < 0) & (dual_clip > 0)
    bound_N = torch.where(bounded_N, -dual_clip * advantages_N, torch.inf)
    loss_N = torch.maximum(free_N, clipped_N)
    value = (tokens.weights_N * torch.minimum(loss_N, bound_N)).sum()
    metrics = _policy_metrics(value, logprobs_N, tokens, ratio_N, clipped_N > free_N)
    return Loss(value, metrics | {"clip/dual_fraction": _share(loss_N > bound_N)})


def gspo(
    logprobs_N: Tensor,
    tokens: TokenFields,
    *,
    episode_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """Group sequence policy optimisation: one ratio and one clip per episode (arXiv:2507.18071).

        s_e = exp(mean over the episode's sampled tokens of (logprob − old logprob))
        ℓ_t = max(−s_t A_t, −clip(s_t, 1 − ε₋, 1 + ε₊) A_t),   s_t = stop-gradient(s_e ÷ π_t) · π_t

    This is the paper's form per token: s_t has the value s_e and the gradient s_e ∇logprob_t. If A
    is equal on all tokens of an episode, the mean over the episode has the value and the gradient
    of max(−s_e A, −clip(s_e, …) A).

    The ratio of an episode stays much closer to 1 than the ratio of a token: the paper uses
    ε₋ = 3e-4 (`clip_low`) and ε₊ = 4e-4 (`clip_high`).
    """
    old_N, advantages_N = _trained(tokens)
    with torch.no_grad():
        # Each episode sums at its own place among N: counting the episodes would wait for a GPU.
        place_N = torch.searchsorted(episode_N.sort().values, episode_N)
        total_N = torch.zeros_like(old_N).index_add(0, place_N, logprobs_N - old_N)
        count_N = torch.zeros_like(old_N).index_add(0, place_N, torch.ones_like(old_N))
        mean_N = (total_N / count_N)[place_N]
    ratio_N = ratio(mean_N + logprobs_N - logprobs_N.detach())
    free_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    value = (tokens.weights_N * torch.maximum(free_N, clipped_N)).sum()
    return Loss(value, _policy_metrics(value, logprobs_N, tokens, ratio_N, clipped_N > free_N))


def cispo(logprobs_N: Tensor, tokens: TokenFields, *, clip_low: float, clip_high: float) -> Loss:
    """CISPO: REINFORCE with a clipped importance weight (arXiv:2506.13585).

        ℓ = −stop-gradient(clip(r, 1 − ε₋, 1 + ε₊)) A logprob

    PPO's clip removes the gradient of tokens whose ratio has moved, rare tokens first. Here every
    token keeps its gradient, with a bounded weight. The paper sets no lower bound (ε₋ = 1) and
    tunes ε₊. At r = 1 the gradient is REINFORCE's. ε₋ is `clip_low`, ε₊ is `clip_high`.
    """
    old_N, advantages_N = _trained(tokens)
    ratio_N = ratio(logprobs_N - old_N).detach()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    value = -(tokens.weights_N * weight_N * advantages_N * logprobs_N).sum()
    return Loss(value, _policy_metrics(value, logprobs_N, tokens, ratio_N, weight_N != ratio_N))


def nll(logprobs_N: Tensor, tokens: TokenFields) -> Loss:
    """Negative log-likelihood in nats, for supervised learning: ℓ = −logprob."""
    value = -(tokens.weights_N * logprobs_N).sum()
    return Loss(value, {"loss/nll": _weighted(value, tokens)})


LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "nll": nll,
}
"""RAGEN's own policy losses by their name in the config. All but `nll` are proportional to the
advantage."""


def find_loss(name: str) -> PolicyLoss:
    """The policy loss of a name in the config, RAGEN's own or from outside."""
    return LOSS.find(name, LOSSES)


def policy_loss(loss: PolicyLoss, logprobs_N: Tensor, tokens: TokenFields, **inputs: float) -> Loss:
    """Call a policy loss with those of `inputs` and `episode_N` that it names."""
    result = call(loss, logprobs_N, tokens, inputs=inputs | {"episode_N": tokens.episode_N})
    value = result.value if isinstance(result, Loss) else None
    if not isinstance(value, Tensor) or value.ndim:
        shape = f" with a value of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        found = f"{type(result).__name__}{shape}"
        name = getattr(loss, "__name__", loss)
        raise RagenError(f"the loss {name} returned {found}: a Loss with a scalar is expected")
    return result


def needs_whole_episodes(loss: PolicyLoss) -> bool:
    """True if a loss needs all tokens of an episode in one microbatch."""
    return names_input(loss, "episode_N")


def correct_for_sampler(tokens: TokenFields, cap: float) -> tuple[TokenFields, Measurements]:
    """Truncated importance sampling between the sampler and the learner, at equal weights.

        A ← min(exp(old logprob − sampled logprob), cap) · A

    The old logprob is the learner's; a sampler may compute differently (bfloat16, another engine).
    Every policy loss is proportional to A, so a weight on A is a weight on the token's term.
    """
    old_N, advantages_N = _trained(tokens)
    exact_N = ratio(old_N - tokens.sampled_logprobs_N)
    weight_N = exact_N.clamp(max=cap)
    metrics: Measurements = {
        "importance/mean": _average(weight_N),
        "importance/capped_fraction": _share(exact_N > cap),
    }
    return replace(tokens, advantages_N=weight_N * advantages_N), metrics


def value_loss(values_N: Tensor, tokens: TokenFields, *, value_clip: float) -> Loss:
    """The critic's squared error, clipped near the values that the advantages used.

        ℓ = ½ max((V − R)², (V_old + clip(V − V_old, −c, c) − R)²)

    V_old and R are the values and returns of `tokens`; c is `value_clip` > 0, in units of reward.
    """
    assert tokens.values_N is not None and tokens.returns_N is not None
    near_N = tokens.values_N + (values_N - tokens.values_N).clamp(-value_clip, value_clip)
    free_N, clipped_N = (values_N - tokens.returns_N) ** 2, (near_N - tokens.returns_N) ** 2
    value = (tokens.weights_N * 0.5 * torch.maximum(free_N, clipped_N)).sum()
    with torch.no_grad():
        metrics: Measurements = {
            "loss/value": _weighted(value, tokens),
            "clip/value_fraction": _share(clipped_N > free_N),
        }
    return Loss(value, metrics)


def entropy_bonus(entropies_N: Tensor, tokens: TokenFields) -> Loss:
    """Minus the policy's entropy in nats: minimising it raises the entropy."""
    value = -(tokens.weights_N * entropies_N).sum()
    return Loss(value, {"entropy/mean": _average(entropies_N.detach())})


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The plain estimate of KL(policy ‖ reference): −x with x = reference logprob − logprob.

    It is unbiased, but its gradient has mean zero: it serves in the reward, not in the loss.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio, x² / 2. Its on-policy gradient is that of the reverse KL."""
    return (reference_logprobs - logprobs) ** 2 / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """eˣ − 1 − x with x = reference logprob − logprob: unbiased, never negative (Schulman 2020).

    x is limited to ±`LARGEST_LOG_RATIO`, so that the value and its gradient are finite.
    """
    x = (reference_logprobs - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.expm1(x) - x


KL_ESTIMATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimates of the KL divergence by their name in the config."""


def kl_loss(logprobs_N: Tensor, tokens: TokenFields, *, kind: str) -> Loss:
    """The KL divergence to the reference as a term of the loss.

    Raises:
        ValueError: `kind` is k1, whose expected gradient is zero.
    """
    if kind == "k1":
        raise ValueError("k1 has zero expected gradient in the loss: use k2 or k3 there")
    assert tokens.reference_logprobs_N is not None
    kl_N = KL_ESTIMATES[kind](logprobs_N, tokens.reference_logprobs_N)
    value = (tokens.weights_N * kl_N).sum()
    with torch.no_grad():
        estimate_N = k3(logprobs_N, tokens.reference_logprobs_N)
        return Loss(value, {"loss/kl": _weighted(value, tokens), "kl/loss": _average(estimate_N)})


def _trained(tokens: TokenFields) -> tuple[Tensor, Tensor]:
    """Old logprobs and advantages, which every policy loss except `nll` needs."""
    assert tokens.old_logprobs_N is not None and tokens.advantages_N is not None
    return tokens.old_logprobs_N, tokens.advantages_N


@torch.no_grad()
def _policy_metrics(
    value: Tensor, logprobs_N: Tensor, tokens: TokenFields, ratio_N: Tensor, clamped_N: Tensor
) -> Measurements:
    """The metrics of every clipped loss. `clamped_N` is true where the clip had an effect."""
    assert tokens.old_logprobs_N is not None
    return {
        "loss/policy": _weighted(value, tokens),
        "clip/fraction": _share(clamped_N),
        "ratio/max": _largest(ratio_N) if len(ratio_N) else largest(0.0),
        "kl/old": _average(k3(tokens.old_logprobs_N, logprobs_N)),
    }


def _weighted(value: Tensor, tokens: TokenFields) -> Measured:
    """A loss as a weighted mean, so that microbatches merge to the loss of the minibatch."""
    weight = tokens.weights_N.sum().double()
    return Measured(torch.where(weight != 0, value.detach().double() / weight, 0.0), weight)


def _average(field_N: Tensor) -> Metric | Measured:
    return Measured(field_N.detach().mean(), len(field_N)) if len(field_N) else mean(0.0, 0)


def _share(condition_N: Tensor) -> Metric | Measured:
    return _average(condition_N.float())


def _largest(field_N: Tensor) -> Measured:
    return Measured(field_N.detach().max(), kind="max")


def mismatch_kl(sampled_logprobs_N: Tensor, recomputed_logprobs_N: Tensor) -> Measurements:
    """The difference between the learner's and the sampler's logprobs at equal weights, in nats.

    ``mismatch/kl`` is the mean of k3 with x = recomputed − sampled logprob, and
    ``mismatch/max_abs`` is the largest |x|.
    """
    if not len(sampled_logprobs_N):
        return {}
    return {
        "mismatch/kl": _average(k3(sampled_logprobs_N, recomputed_logprobs_N)),
        "mismatch/max_abs": _largest((recomputed_logprobs_N - sampled_logprobs_N).abs()),
    }


def read(
    parts: Sequence[Mapping[str, Metric | Measured]], *scalars: Tensor
) -> tuple[list[Metrics], list[float]]:
    """The metrics and the scalars as numbers, copied from their device at once: the only wait."""
    metrics = [metric for part in parts for metric in part.values()]
    fields = (field for each in metrics for field in (each.value, each.weight))
    waiting = [*scalars, *(field for field in fields if isinstance(field, Tensor))]
    numbers = iter(torch.stack([each.double() for each in waiting]).tolist() if waiting else ())

    def number(field: Tensor | float) -> float:
        return next(numbers) if isinstance(field, Tensor) else field

    found = [number(each) for each in scalars]
    return [
        {
            name: Metric(number(each.value), number(each.weight), each.kind)
            for name, each in part.items()
        }
        for part in parts
    ], found
