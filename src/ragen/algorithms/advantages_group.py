"""Advantages without a critic: an episode's reward compared with that of other episodes.

Axes: **E** episodes, **S** an episode's sampled tokens in time order, **K** an episode's turns,
**N** turns of all episodes. The inputs are described in `estimator.INPUTS`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen.algorithms.estimator import Credit, whiten_tokens
from ragen.algorithms.rewards import STD_FLOOR, compare_within


def grpo(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit:
    """Group-relative advantage (arXiv:2402.03300): the same on every token of an episode.

        A = (R − mean of the group) / (std of the group + 1e-6)

    R is the sum of the episode's rewards, and the std divides by G − 1. A group whose rewards are
    all equal gives exactly 0. There is no discount.

    Raises:
        ValueError: A group has one episode.

    Example:
        >>> rewards, group = torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0])
        >>> grpo(rewards_ES=rewards, mask_ES=rewards >= 0, group_E=group).advantages_ES  # ∓1 / √2
        tensor([[-0.7071],
                [ 0.7071]])
    """
    centred_E, std_E = _group_statistics(rewards_ES, group_E)
    return _on_every_token(centred_E / (std_E + STD_FLOOR), mask_ES)


def dr_grpo(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit:
    """Group-relative advantage without the division by the group's spread (arXiv:2503.20783).

        A = R − mean of the group

    Dividing by the std gives a group with one success among many failures the same scale as a
    group with as many successes as failures. Without the division it keeps its smaller spread.

    Raises:
        ValueError: A group has one episode.

    Example:
        >>> rewards, group = torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0])
        >>> dr_grpo(rewards_ES=rewards, mask_ES=rewards >= 0, group_E=group).advantages_ES
        tensor([[-1.],
                [ 1.]])
    """
    centred_E, _std_E = _group_statistics(rewards_ES, group_E)
    return _on_every_token(centred_E, mask_ES)


def rloo(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit:
    """REINFORCE with the group's other episodes as baseline (arXiv:2402.14740).

        A = R − mean of the other episodes = G / (G − 1) · (R − mean of the group)

    The baseline is independent of the episode itself, so the gradient is unbiased for every G. The
    gradient of `dr_grpo` is (G − 1) / G of it.

    Raises:
        ValueError: A group has one episode.

    Example:
        >>> rewards, group = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 0])
        >>> rloo(rewards_ES=rewards, mask_ES=rewards >= 0, group_E=group).advantages_ES.flatten()
        tensor([-3.0000, -1.5000,  4.5000])
    """
    centred_E, _std_E = _group_statistics(rewards_ES, group_E)
    _, rank_E, size_G = torch.unique(group_E, return_inverse=True, return_counts=True)
    size_E = size_G[rank_E]
    return _on_every_token(centred_E * size_E / (size_E - 1), mask_ES)


def reinforce_pp(*, rewards_ES: Tensor, mask_ES: Tensor, gamma: float) -> Credit:
    """REINFORCE++ (arXiv:2501.03262): returns, whitened over all trained tokens of the batch.

        G_t = r_t + γ G_{t+1}        A_t = (G_t − mean) / √(variance + 1e-8)

    All prompts share one baseline, so the episodes of a hard prompt get low advantages. Rewards
    before a token do not count in its return.

    Example:
        >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])  # returns 1 1 and 0 0
        >>> reinforce_pp(rewards_ES=rewards, mask_ES=rewards >= 0, gamma=1.0).advantages_ES
        tensor([[ 0.8660,  0.8660],
                [-0.8660, -0.8660]])
    """
    returns_ES = _discounted(rewards_ES, gamma)
    return Credit(whiten_tokens(returns_ES, mask_ES))


def reinforce_pp_baseline(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor) -> Credit:
    """REINFORCE++ with the group as baseline (arXiv:2501.03262).

        B = R − mean of the group        A = (B − mean) / √(variance + 1e-8)

    on every token of an episode, with mean and variance over all trained tokens of the batch.
    Unlike in `grpo`, all groups share one scale, so a group of small spread keeps small advantages.

    Raises:
        ValueError: A group has one episode.

    Example:
        >>> rewards, group = torch.tensor([[0.0], [2.0], [5.0], [5.0]]), torch.tensor([0, 0, 1, 1])
        >>> arrays = {"rewards_ES": rewards, "mask_ES": rewards >= 0, "group_E": group}
        >>> reinforce_pp_baseline(**arrays).advantages_ES.flatten()  # ∓1 0 0 over √(2/3)
        tensor([-1.2247,  1.2247,  0.0000,  0.0000])
    """
    centred_E, _std_E = _group_statistics(rewards_ES, group_E)
    return Credit(whiten_tokens(centred_E[:, None] * mask_ES, mask_ES))


def gigpo(
    *,
    rewards_ES: Tensor,
    mask_ES: Tensor,
    turn_ES: Tensor,
    state_ES: Tensor,
    group_E: Tensor,
    turn_gamma: float,
    step_weight: float,
) -> Credit:
    """Group-in-group advantage (arXiv:2505.10978): per episode, and per turn in its state.

        A = A_episode + ω · A_turn
        A_turn = (R_k − mean of the class) / (std of the class + 1e-6)        R_k = r_k + γ R_{k+1}

    A_episode is the advantage of `grpo`. A class is all turns of a group that began in the same
    state, in any episode and at any time. γ is `turn_gamma`, ω is `step_weight`, and r_k is the sum
    of the rewards of turn k. Both parts divide by the std (the paper's default; it also gives a
    form without). A turn alone in its class, or in a class of equal returns, gets A_turn = 0. Every
    token of a turn gets the turn's advantage.

    Raises:
        ValueError: A group has one episode.

    Example:
        >>> rewards, turn = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[0, 1], [0, 1]])
        >>> arrays = {"rewards_ES": rewards, "mask_ES": rewards >= 0, "turn_ES": turn}
        >>> more = {"group_E": torch.tensor([0, 0]), "turn_gamma": 0.5, "step_weight": 1.0}
        >>> state = torch.tensor([[5, 6], [5, 7]])  # both begin in state 5, then differ
        >>> gigpo(**arrays, state_ES=state, **more).advantages_ES
        tensor([[ 1.4142,  0.7071],
                [-1.4142, -0.7071]])
    """
    centred_E, std_E = _group_statistics(rewards_ES, group_E)
    turn_at_ES = turn_ES.clamp_min(0)
    shape_EK = (len(mask_ES), int(turn_at_ES.max()) + 1)
    return_EK = _discounted(
        rewards_ES.new_zeros(shape_EK).scatter_add_(1, turn_at_ES, rewards_ES), turn_gamma
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


def _group_statistics(rewards_ES: Tensor, group_E: Tensor) -> tuple[Tensor, Tensor]:
    """Each episode's R − group mean, and its group's unbiased std. Equal rewards give exactly 0."""
    groups, sizes = torch.unique(group_E, return_counts=True)
    for group, size in zip(groups.tolist(), sizes.tolist(), strict=True):
        if size < 2:
            raise ValueError(
                f"group {group} has one episode, and this estimator compares episodes: use groups "
                'of two or more, or advantage.name = "gae"'
            )
    return compare_within(rewards_ES.sum(dim=1), group_E)


def _discounted(rewards_EX: Tensor, gamma: float) -> Tensor:
    """Discounted returns, R_x = r_x + γ R_{x+1}, along the second axis."""
    returns_EX = torch.zeros_like(rewards_EX)
    next_E = torch.zeros_like(rewards_EX[:, 0])
    for x in reversed(range(rewards_EX.shape[1])):
        next_E = returns_EX[:, x] = rewards_EX[:, x] + gamma * next_E
    return returns_EX


def _on_every_token(advantage_E: Tensor, mask_ES: Tensor) -> Credit:
    return Credit(advantage_E[:, None] * mask_ES)
