"""Advantages with a critic: an episode's rewards compared with what the critic expected.

Axes: **E** episodes, **S** an episode's sampled tokens in time order. The inputs are described in
`estimator.INPUTS`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen.algorithms.estimator import Credit, whiten_tokens


def gae(
    *,
    rewards_ES: Tensor,
    mask_ES: Tensor,
    values_ES: Tensor,
    gamma: float,
    gae_lambda: float,
    whiten: bool,
) -> Credit:
    """Generalised advantage estimation over sampled tokens (arXiv:1506.02438).

        δ_t = r_t + γ V_{t+1} − V_t        A_t = δ_t + γλ A_{t+1}        return_t = A_t + V_t

    After the last token V = 0. λ = 1 gives return − value, λ = 0 the TD error. Returns are computed
    before the advantages are whitened.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.8]])
        >>> arrays = {"rewards_ES": rewards, "values_ES": values, "mask_ES": rewards >= 0}
        >>> gae(**arrays, gamma=1, gae_lambda=1, whiten=False).advantages_ES
        tensor([[0.5000, 0.2000]])
    """
    num_episodes, num_tokens = mask_ES.shape
    next_value_E = next_advantage_E = torch.zeros(num_episodes)
    advantages_ES = torch.zeros_like(values_ES)
    for s in reversed(range(num_tokens)):
        here_E = mask_ES[:, s]
        delta_E = rewards_ES[:, s] + gamma * next_value_E - values_ES[:, s]
        advantages_ES[:, s] = delta_E + gamma * gae_lambda * next_advantage_E
        next_advantage_E = torch.where(here_E, advantages_ES[:, s], next_advantage_E)
        next_value_E = torch.where(here_E, values_ES[:, s], next_value_E)
    return _credit(advantages_ES, values_ES, mask_ES, whiten)


def bi_level_gae(
    *,
    rewards_ES: Tensor,
    mask_ES: Tensor,
    values_ES: Tensor,
    turn_ends_ES: Tensor,
    turn_gamma: float,
    gae_lambda: float,
    whiten: bool,
) -> Credit:
    """GAE over turns, then over the tokens inside each turn (arXiv:2510.16907).

    With e(k) the last token of turn k, first along the turns, from end to end:

        δ_k = r_e(k) + γ (ρ_{k+1} + V_e(k+1)) − V_e(k)        A_e(k) = δ_k + γλ A_e(k+1)

    where γ is `turn_gamma` and ρ_{k+1} is the sum of the rewards of turn k+1 before its last token
    (a KL penalty; 0 where each turn is rewarded at its end). After the last turn V = 0. Then inside
    a turn, whose return A_e + V_e replaces the reward at its end, with discount 1 and no value
    beyond the end:

        δ_t = r_t + V_{t+1} − V_t                             A_t = δ_t + λ A_{t+1}

    So a turn of any length costs one γ. Turn ends come from the record: a turn of reward 0 is a
    turn. λ = 1 gives Σ_i γ^(turns from t to i) r_i − V_t; a single turn is `gae` with γ = 1. With
    λ < 1 it assumes that a turn's last token decides nothing, as is true of an end-of-turn token.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.8]])
        >>> ends = torch.tensor([[False, True, True]])  # a turn of two tokens, a turn of one
        >>> arrays = {"rewards_ES": rewards, "values_ES": values, "mask_ES": rewards >= 0}
        >>> constants = {"turn_gamma": 0.5, "gae_lambda": 1, "whiten": False}
        >>> bi_level_gae(**arrays, turn_ends_ES=ends, **constants).advantages_ES  # .5 · 1 − .5, …
        tensor([[ 0.0000, -0.1000,  0.2000]])
    """
    num_episodes, num_tokens = mask_ES.shape
    advantages_ES = torch.zeros_like(values_ES)
    # What follows a token inside its turn, and what follows a turn's end: the next turn's end, with
    # the rewards on the way there.
    next_value_E = next_advantage_E = torch.zeros(num_episodes)
    end_value_E = end_advantage_E = torch.zeros(num_episodes)
    for s in reversed(range(num_tokens)):
        here_E, end_E = mask_ES[:, s], turn_ends_ES[:, s]
        reward_E, value_E = rewards_ES[:, s], values_ES[:, s]
        following_E = torch.where(
            end_E,
            turn_gamma * (end_value_E + gae_lambda * end_advantage_E),
            next_value_E + gae_lambda * next_advantage_E,
        )
        advantage_E = reward_E + following_E - value_E
        advantages_ES[:, s] = advantage_E
        next_value_E = torch.where(here_E, value_E, next_value_E)
        next_advantage_E = torch.where(here_E, advantage_E, next_advantage_E)
        end_value_E = torch.where(end_E, value_E, end_value_E + reward_E)
        end_advantage_E = torch.where(end_E, advantage_E, end_advantage_E)
    return _credit(advantages_ES, values_ES, mask_ES, whiten)


def _credit(advantages_ES: Tensor, values_ES: Tensor, mask_ES: Tensor, whiten: bool) -> Credit:
    """Returns are advantage + value before whitening."""
    advantages_ES = advantages_ES.masked_fill(~mask_ES, 0)
    returns_ES = (advantages_ES + values_ES).masked_fill(~mask_ES, 0)
    return Credit(whiten_tokens(advantages_ES, mask_ES) if whiten else advantages_ES, returns_ES)
