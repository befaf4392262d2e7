"""The advantage estimators by name: how much better each sampled token was than expected.

`gae` and `bi_level_gae` compare rewards with a critic's values, `vine` with the returns of
continuations, the others with other episodes.

Axes: **E** episodes, **S** an episode's sampled tokens in time order, **K** an episode's turns,
**N** turns of all episodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen.algorithms.estimator import (
    STD_FLOOR,
    Credit,
    Estimator,
    compare_within,
    whiten_tokens,
)
from ragen.config.extensions import ESTIMATOR

THOUGHT_WEIGHT = 0.1
"""Weight of a thought's token in `act_focus`, as published (arXiv:2605.14558)."""


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

    After the last token V = 0. λ = 1 gives return − value, λ = 0 the TD error. Only A is whitened.
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
    gamma: float,
    gae_lambda: float,
    whiten: bool,
) -> Credit:
    """GAE over turns, then over the tokens inside each turn (arXiv:2510.16907).

    With e(k) the last token of turn k, first along the turns:

        δ_k = r_e(k) + γ (ρ_{k+1} + V_e(k+1)) − V_e(k)        A_e(k) = δ_k + γλ A_e(k+1)

    where γ is per turn and ρ_{k+1} is the sum of the rewards of turn k+1 before its last token
    (a KL penalty; 0 where each turn is rewarded at its end). After the last turn V = 0. Then inside
    a turn, whose return A_e + V_e replaces the reward at its end, with discount 1 and no value
    beyond the end:

        δ_t = r_t + V_{t+1} − V_t                             A_t = δ_t + λ A_{t+1}

    So a turn is discounted by one γ, whatever its length and its reward. λ = 1 gives
    Σ_i γ^(turns from t to i) r_i − V_t; a single turn gives `gae` with γ = 1. λ < 1 assumes that a
    turn's last token decides nothing, as is true of an end-of-turn token.
    """
    num_episodes, num_tokens = mask_ES.shape
    advantages_ES = torch.zeros_like(values_ES)
    # `next` follows a token inside its turn. `end` follows the end of a turn: it is the end of the
    # next turn, with the rewards on the way there.
    next_value_E = next_advantage_E = torch.zeros(num_episodes)
    end_value_E = end_advantage_E = torch.zeros(num_episodes)
    for s in reversed(range(num_tokens)):
        here_E, end_E = mask_ES[:, s], turn_ends_ES[:, s]
        reward_E, value_E = rewards_ES[:, s], values_ES[:, s]
        following_E = torch.where(
            end_E,
            gamma * (end_value_E + gae_lambda * end_advantage_E),
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
    if whiten:
        magnitude = float(torch.maximum(values_ES.abs(), returns_ES.abs()).max())
        advantages_ES = whiten_tokens(advantages_ES, mask_ES, magnitude)
    return Credit(advantages_ES, returns_ES)


def grpo(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit:
    """Group-relative advantage (arXiv:2402.03300): the same on every token of an episode.

        A = (R − mean of the group) / (std of the group + 1e-6)

    R is the sum of the episode's rewards, and the std divides by G − 1. A group whose rewards are
    all equal gives exactly 0. There is no discount.
    """
    centred_E, std_E = compare_within(rewards_ES.sum(dim=1), group_E)
    return Credit((centred_E / (std_E + STD_FLOOR))[:, None] * mask_ES)


def dr_grpo(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit:
    """Group-relative advantage without the division by the group's spread (arXiv:2503.20783).

        A = R − mean of the group

    The division would give one success among many failures the scale of an evenly split group.
    """
    centred_E, _ = compare_within(rewards_ES.sum(dim=1), group_E)
    return Credit(centred_E[:, None] * mask_ES)


def act_focus(
    *, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor, thought_ES: Tensor
) -> Credit:
    """GRPO's advantage, with a tenth of the weight on the tokens of thoughts (arXiv:2605.14558).

        A_t = A w_t / (mean of w over all tokens),   w = 0.1 on thoughts, else 1

    The paper also weights actions by the energy of a frozen reference, which is left out.
    """
    weight_ES = torch.where(thought_ES, THOUGHT_WEIGHT, 1.0) * mask_ES
    share_ES = weight_ES * mask_ES.sum() / weight_ES.sum()
    credit = grpo(rewards_ES=rewards_ES, mask_ES=mask_ES, group_E=group_E)
    return Credit(credit.advantages_ES * share_ES)


def raft(*, mask_ES: Tensor, success_E: Tensor) -> Credit:
    """Rejection sampling: only episodes that succeeded are learned from (arXiv:2304.06767).

        A = N / (number of tokens of successful episodes) on these, 0 on all others

    N is the number of all tokens. So with equal weight per token and at ratio 1, the loss is the
    mean negative log-likelihood of the successful episodes, without any negative signal.
    """
    kept_ES = mask_ES & success_E[:, None]
    return Credit(kept_ES * (mask_ES.sum() / kept_ES.sum().clamp_min(1)))


def rloo(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit:
    """REINFORCE with the group's other episodes as baseline (arXiv:2402.14740).

        A = R − mean of the other episodes = G / (G − 1) · (R − mean of the group)

    The baseline is independent of the episode itself, so the gradient is unbiased for every G. The
    gradient of `dr_grpo` is (G − 1) / G of it.
    """
    centred_E, _ = compare_within(rewards_ES.sum(dim=1), group_E)
    _, rank_E, size_G = torch.unique(group_E, return_inverse=True, return_counts=True)
    size_E = size_G[rank_E]
    return Credit((centred_E * size_E / (size_E - 1).clamp_min(1))[:, None] * mask_ES)


def reinforce_pp(*, rewards_ES: Tensor, mask_ES: Tensor, gamma: float) -> Credit:
    """REINFORCE++ (arXiv:2501.03262): returns, whitened over all trained tokens of the batch.

        G_t = r_t + γ G_{t+1}        A_t = (G_t − mean) / √(variance + 1e-8)

    All prompts share one baseline, so the episodes of a hard prompt get low advantages.
    """
    returns_ES = _discounted(rewards_ES, gamma)
    return Credit(whiten_tokens(returns_ES, mask_ES))


def reinforce_pp_baseline(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit:
    """REINFORCE++ with the group as baseline (arXiv:2501.03262).

        B = R − mean of the group        A = (B − mean) / √(variance + 1e-8)

    on every token of an episode, with mean and variance over all trained tokens of the batch.
    Unlike in `grpo`, all groups share one scale, so a group of small spread keeps small advantages.
    """
    centred_E, _ = compare_within(rewards_ES.sum(dim=1), group_E)
    return Credit(whiten_tokens(centred_E[:, None] * mask_ES, mask_ES))


def gigpo(
    *,
    rewards_ES: Tensor,
    mask_ES: Tensor,
    turn_ES: Tensor,
    state_ES: Tensor,
    group_E: Tensor,
    gamma: float,
    step_weight: float,
) -> Credit:
    """Group-in-group advantage (arXiv:2505.10978): per episode, and per turn in its state.

        A = A_episode + ω · A_turn
        A_turn = (R_k − mean of the class) / (std of the class + 1e-6)        R_k = r_k + γ R_{k+1}

    A_episode is the advantage of `grpo`, γ is per turn, ω is `step_weight`, and r_k is the sum
    of the rewards of turn k. A class is all turns of a group that began in the same state, in any
    episode and at any time. A turn alone in its class, or in a class of equal returns, gets
    A_turn = 0. The division by the std is the paper's default; it also gives a form without.
    """
    centred_E, std_E = compare_within(rewards_ES.sum(dim=1), group_E)
    turn_at_ES = turn_ES.clamp_min(0)
    shape_EK = (len(mask_ES), int(turn_at_ES.max()) + 1)
    return_EK = _discounted(
        rewards_ES.new_zeros(shape_EK).scatter_add_(1, turn_at_ES, rewards_ES), gamma
    )
    played_EK = torch.zeros(shape_EK, dtype=torch.bool)
    state_EK = torch.zeros(shape_EK, dtype=torch.long)
    episode_N = mask_ES.nonzero()[:, 0]
    played_EK[episode_N, turn_ES[mask_ES]] = True
    state_EK[episode_N, turn_ES[mask_ES]] = state_ES[mask_ES]

    group_EK = group_E[:, None].expand(shape_EK)
    class_N2 = torch.stack([group_EK[played_EK], state_EK[played_EK]], dim=1)
    _, class_N = torch.unique(class_N2, dim=0, return_inverse=True)
    centred_N, std_N = compare_within(return_EK[played_EK], class_N)
    advantage_EK = torch.zeros_like(return_EK)
    advantage_EK[played_EK] = centred_N / (std_N + STD_FLOOR)

    episode_E = centred_E / (std_E + STD_FLOOR)
    advantages_ES = episode_E[:, None] + step_weight * advantage_EK.gather(1, turn_at_ES)
    return Credit(advantages_ES.masked_fill(~mask_ES, 0))


def vine(
    *,
    rewards_ES: Tensor,
    mask_ES: Tensor,
    turn_ES: Tensor,
    state_values_ES: Tensor,
    gamma: float,
    whiten: bool,
) -> Credit:
    """Monte Carlo values in place of a critic (VinePPO, arXiv:2410.01679), the same in a turn.

        A_k = r_k + γ V_{k+1} − V_k

    r_k is the sum of the rewards of turn k, γ is per turn, and V_k the mean return of continuations
    from before it. After the last turn V = 0. As A_k is linear in each V, and V_k a baseline, it is
    unbiased for every number of continuations, before it is whitened.
    """
    episode_N, turn_N = mask_ES.nonzero()[:, 0], turn_ES[mask_ES]
    value_EK = rewards_ES.new_zeros(len(mask_ES), int(turn_ES.max()) + 2)
    value_EK[episode_N, turn_N] = state_values_ES[mask_ES]
    reward_EK = torch.zeros_like(value_EK)
    reward_EK.index_put_((episode_N, turn_N), rewards_ES[mask_ES], accumulate=True)
    advantage_EK = (reward_EK + gamma * value_EK.roll(-1, dims=1) - value_EK)[:, :-1]
    advantages_ES = advantage_EK.gather(1, turn_ES.clamp_min(0)).masked_fill(~mask_ES, 0)
    if whiten:
        magnitude = float(torch.maximum(reward_EK.abs(), value_EK.abs()).max())
        advantages_ES = whiten_tokens(advantages_ES, mask_ES, magnitude)
    return Credit(advantages_ES)


def _discounted(rewards_EX: Tensor, gamma: float) -> Tensor:
    """Discounted returns, R_x = r_x + γ R_{x+1}, along the second axis."""
    returns_EX = torch.zeros_like(rewards_EX)
    next_E = torch.zeros_like(rewards_EX[:, 0])
    for x in reversed(range(rewards_EX.shape[1])):
        next_E = returns_EX[:, x] = rewards_EX[:, x] + gamma * next_E
    return returns_EX


ADVANTAGES: dict[str, Estimator] = {
    "gae": gae,
    "bi_level_gae": bi_level_gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "act_focus": act_focus,
    "raft": raft,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gigpo": gigpo,
    "vine": vine,
}
"""RAGEN's own estimators by their name in the config."""


def find_estimator(name: str) -> Estimator:
    """The estimator of a name in the config, RAGEN's own or from outside."""
    return ESTIMATOR.find(name, ADVANTAGES)
