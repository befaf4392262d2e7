"""Credit with a critic: rewards to come against what the critic expected, along an episode.

Axes: **E** episodes, **S** an episode's sampled tokens in time order, **N** trained tokens. The
arguments that all estimators share are described in `advantages`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages for the policy, and the returns for the critic to learn (where there is one)."""

    advantages_ES: Tensor
    returns_ES: Tensor | None


def gae(
    *,
    rewards_ES: Tensor,
    mask_ES: Tensor,
    values_ES: Tensor | None,
    bootstrap_E: Tensor | None,
    gamma: float,
    lam: float,
    whiten: bool,
    **_: object,
) -> Credit:
    """Generalised advantage estimation over sampled tokens (arXiv:1506.02438).

        δ_t = r_t + γ V_{t+1} − V_t        A_t = δ_t + γλ A_{t+1}        return_t = A_t + V_t

    After the last token V is `bootstrap_E`. λ = 1 gives return − value, λ = 0 the TD error. Returns
    are formed before whitening.

    Raises:
        ValueError: There are no values.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.8]])
        >>> arrays = {"rewards_ES": rewards, "values_ES": values, "mask_ES": rewards >= 0}
        >>> gae(**arrays, bootstrap_E=None, gamma=1, lam=1, whiten=False).advantages_ES
        tensor([[0.5000, 0.2000]])
    """
    if values_ES is None:
        raise ValueError('the estimator "gae" needs a critic\'s values; without one use "grpo"')
    num_episodes, num_tokens = mask_ES.shape
    next_value_E = torch.zeros(num_episodes) if bootstrap_E is None else bootstrap_E
    next_advantage_E = torch.zeros(num_episodes)
    advantages_ES = torch.zeros_like(values_ES)
    for s in reversed(range(num_tokens)):
        here_E = mask_ES[:, s]
        delta_E = rewards_ES[:, s] + gamma * next_value_E - values_ES[:, s]
        advantages_ES[:, s] = delta_E + gamma * lam * next_advantage_E
        next_advantage_E = torch.where(here_E, advantages_ES[:, s], next_advantage_E)
        next_value_E = torch.where(here_E, values_ES[:, s], next_value_E)
    return _credit(advantages_ES, values_ES, mask_ES, whiten)


def bi_level_gae(
    *,
    rewards_ES: Tensor,
    mask_ES: Tensor,
    values_ES: Tensor | None,
    bootstrap_E: Tensor | None,
    turn_ends_ES: Tensor,
    turn_gamma: float,
    lam: float,
    whiten: bool,
    **_: object,
) -> Credit:
    """GAE over turns, then inside each turn over its tokens (arXiv:2510.16907).

    With e(k) the last token of turn k, first along the turns, from end to end:

        δ_k = r_e(k) + γ (ρ_{k+1} + V_e(k+1)) − V_e(k)        A_e(k) = δ_k + γλ A_e(k+1)

    where γ is `turn_gamma` and ρ_{k+1} what the tokens of turn k+1 earn before its end (a KL
    penalty; 0 where each turn is paid at its end). Then inside a turn, whose return A_e + V_e takes
    the place of the reward at its end, with discount 1 and nothing beyond it:

        δ_t = r_t + V_{t+1} − V_t                             A_t = δ_t + λ A_{t+1}

    So a turn of any length costs one γ. Turn ends come from the record: a turn that pays 0 is a
    turn. λ = 1 gives Σ_i γ^(turns from t to i) r_i − V_t; one turn alone is `gae` with γ = 1. After
    the last turn V is `bootstrap_E`. With λ < 1 it counts on a turn being over before its last
    token, as a reply is when only its end-of-turn token is missing.

    Raises:
        ValueError: There are no values.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.8]])
        >>> ends = torch.tensor([[False, True, True]])  # two turns, of two tokens and of one
        >>> arrays = {"rewards_ES": rewards, "values_ES": values, "mask_ES": rewards >= 0}
        >>> how = {"bootstrap_E": None, "turn_gamma": 0.5, "lam": 1, "whiten": False}
        >>> bi_level_gae(**arrays, turn_ends_ES=ends, **how).advantages_ES  # .5 · 1 − .5, and so on
        tensor([[ 0.0000, -0.1000,  0.2000]])
    """
    if values_ES is None:
        raise ValueError('the estimator "bi_level_gae" needs a critic\'s values')
    num_episodes, num_tokens = mask_ES.shape
    advantages_ES = torch.zeros_like(values_ES)
    # What follows a token inside its turn, and what follows a turn's end: the next turn's end, with
    # the rewards on the way there.
    next_value_E = next_advantage_E = end_advantage_E = torch.zeros(num_episodes)
    end_value_E = torch.zeros(num_episodes) if bootstrap_E is None else bootstrap_E
    for s in reversed(range(num_tokens)):
        here_E, end_E = mask_ES[:, s], turn_ends_ES[:, s]
        reward_E, value_E = rewards_ES[:, s], values_ES[:, s]
        to_come_E = torch.where(
            end_E,
            turn_gamma * (end_value_E + lam * end_advantage_E),
            next_value_E + lam * next_advantage_E,
        )
        advantage_E = reward_E + to_come_E - value_E
        advantages_ES[:, s] = advantage_E
        next_value_E = torch.where(here_E, value_E, next_value_E)
        next_advantage_E = torch.where(here_E, advantage_E, next_advantage_E)
        end_value_E = torch.where(end_E, value_E, end_value_E + reward_E)
        end_advantage_E = torch.where(end_E, advantage_E, end_advantage_E)
    return _credit(advantages_ES, values_ES, mask_ES, whiten)


def _credit(advantages_ES: Tensor, values_ES: Tensor, mask_ES: Tensor, whiten: bool) -> Credit:
    """Returns are advantage + value as they are; whitening comes after."""
    advantages_ES = advantages_ES.masked_fill(~mask_ES, 0)
    returns_ES = (advantages_ES + values_ES).masked_fill(~mask_ES, 0)
    return Credit(whiten_tokens(advantages_ES, mask_ES) if whiten else advantages_ES, returns_ES)


def whiten_tokens(field_ES: Tensor, mask_ES: Tensor) -> Tensor:
    """Shift and scale to mean 0 and deviation 1 over the masked tokens.

    (x − mean) / √(variance + 1e-8), where the variance divides by n − 1; a single token gives 0.

    Example:
        >>> whiten_tokens(torch.tensor([[1.0, 3.0, 7.0]]), torch.tensor([[True, True, False]]))
        tensor([[-0.7071,  0.7071,  0.0000]])
    """
    tokens_N = field_ES[mask_ES]
    if len(tokens_N) < 2:
        return torch.zeros_like(field_ES)
    scaled_ES = (field_ES - tokens_N.mean()) * torch.rsqrt(tokens_N.var() + 1e-8)
    return scaled_ES.masked_fill(~mask_ES, 0)
