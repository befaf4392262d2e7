"""Rewards: from the environment's rewards to the reward of each sampled token.

Axes: **E** episodes, **S** an episode's sampled tokens in time order, **N** values to compare.

There are three kinds of rewards. **Raw** rewards come from the environment
(`Episode.total_reward`); filters and reports read them. **Penalised** rewards include format
penalties and reward terms, which are a separate field of a `Turn` and are added only in
`token_rewards`. **Normalised** rewards are penalised rewards compared with those of other episodes
(`normalise`); estimators read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ragen.algorithms.batch import EpisodeIndex
from ragen.core.statistics import all_equal
from ragen.core.types import Episode

Placement = Literal["episode", "turn"]
"""Where rewards are placed: their sum at the episode's last token, or each at its turn's end."""

Normalise = Literal["identity", "mean", "mean_std", "asym_clip"]
"""How an episode's total is normalised: not, minus the mean, also ÷ the std, also clipped."""

Over = Literal["group", "batch"]
"""Which episodes share a mean and a std: those of one group, or all."""

STD_FLOOR = 1e-6
"""Added to a std before dividing by it, as in GRPO's published code."""

ASYMMETRIC_CLIP = (-1.0, 3.0)
"""Bounds of ``"asym_clip"`` in stds: a rare success counts for more than any failure (code of
arXiv:2504.20073)."""


def token_rewards(
    episodes: Sequence[Episode],
    index: EpisodeIndex,
    placement: Placement,
    *,
    penalties: bool = True,
) -> Tensor:
    """Rewards on the tokens that earned them, ``(E, S)``, 0 on all other tokens.

    With the placement ``"turn"`` each turn's reward is at its last sampled token, with
    ``"episode"`` their sum at the episode's last one; so the sum over an episode is its reward in
    either. `penalties` says whether `Turn.penalty` (0 or negative) is added. `episodes` are those
    that `Batch.episode_B` indexes, and `index` says where their sampled tokens are.
    """
    present = [episodes[e] for e in index.episode_E.tolist()]
    paid = [[t.reward + t.penalty * penalties for t in episode.turns] for episode in present]
    num_ends_E = index.turn_ends_ES.sum(dim=1).tolist()
    assert [len(turns) for turns in paid] == num_ends_E, "every turn has sampled tokens and an end"

    rewards_ES = torch.zeros(index.mask_ES.shape)
    # In row-major order the turn ends come episode by episode, turn by turn, as in `paid`.
    rewards_ES[index.turn_ends_ES] = torch.tensor([reward for turns in paid for reward in turns])
    if placement == "turn":
        return rewards_ES
    return _at_episode_end(rewards_ES.sum(dim=1), index.mask_ES)


def normalise(rewards_ES: Tensor, mask_ES: Tensor, class_E: Tensor, method: Normalise) -> Tensor:
    """Rewards whose sum over each episode is the episode's normalised total.

    With R the episode's total, and m and s mean and unbiased std of the totals in its class:

        identity R        mean R − m        mean_std (R − m) / (s + 1e-6)
        asym_clip: mean_std, clipped to [−1, 3]

    A class of one episode, or of equal totals, gives 0 (except for identity). On the tokens,
    rewards stay in place, divided by s + 1e-6 where the method divides (and the class has any
    spread), and the episode's last token gets the difference to the normalised total. So the order
    of the turns' rewards is kept, and the shift changes the return of every token equally (γ = 1).
    `rewards_ES` are penalised rewards in either placement, 0 off the mask; `class_E` is the class
    of each episode (`comparison_classes`).

    Example:
        >>> paid = torch.tensor([[1.0, 3.0], [0.0, 2.0]])  # totals 4 and 2: m = 3, s = √2
        >>> normalise(paid, paid >= 0, torch.tensor([0, 0]), "mean")
        tensor([[ 1.,  0.],
                [ 0., -1.]])
        >>> normalise(paid, paid >= 0, torch.tensor([0, 0]), "mean_std")  # sums ±1 / √2
        tensor([[ 0.7071,  0.0000],
                [ 0.0000, -0.7071]])
    """
    if method == "identity":
        return rewards_ES
    total_E, std_E = compare_within(rewards_ES.sum(dim=1), class_E)
    if method != "mean":
        scale_E = torch.where(std_E > 0, std_E + STD_FLOOR, torch.ones_like(std_E))
        total_E, rewards_ES = total_E / scale_E, rewards_ES / scale_E[:, None]
    if method == "asym_clip":
        total_E = total_E.clamp(*ASYMMETRIC_CLIP)
    return rewards_ES + _at_episode_end(total_E - rewards_ES.sum(dim=1), mask_ES)


def comparison_classes(index: EpisodeIndex, over: Over) -> Tensor:
    """The class of each episode, ``(E,)``: episodes of one class share a mean and a std."""
    return index.group_E if over == "group" else torch.zeros_like(index.group_E)


def compare_within(values_N: Tensor, class_N: Tensor) -> tuple[Tensor, Tensor]:
    """Each value minus the mean of its class, and the unbiased std of its class.

    Both are exactly 0 in a class of one, and in a class of equal values (`all_equal`).

    Example:
        >>> compare_within(torch.tensor([0.0, 2.0, 7.0]), torch.tensor([0, 0, 1]))
        (tensor([-1.,  1.,  0.]), tensor([1.4142, 1.4142, 0.0000]))
    """
    centred_N, std_N = torch.zeros_like(values_N), torch.zeros_like(values_N)
    for each in torch.unique(class_N).tolist():
        here_N = class_N == each
        values = values_N[here_N]
        if not all_equal(values.tolist()):
            centred_N[here_N] = values - values.mean()
            std_N[here_N] = values.std()
    return centred_N, std_N


def _at_episode_end(reward_E: Tensor, mask_ES: Tensor) -> Tensor:
    """One reward per episode, at its last sampled token."""
    last_E1 = mask_ES.sum(dim=1, keepdim=True) - 1
    return torch.zeros(mask_ES.shape, dtype=reward_E.dtype).scatter_(1, last_E1, reward_E[:, None])


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, coefficient: float) -> Tensor:
    """The penalty for the KL divergence from the reference, to add to each token's reward.

    −β · k1 with k1 = logprob − reference logprob, whose mean over sampled tokens is KL(policy ‖
    reference). It is negative on tokens that are more likely under the policy than under the
    reference. The logprobs, in nats and of any shape, are those of the policy that sampled (the old
    ones); β ≥ 0 is the `coefficient`.

    Example:
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-3.0]), 0.5)  # −.5 · (−1 + 3)
        tensor([-1.])
    """
    return coefficient * (reference_logprobs - logprobs)
