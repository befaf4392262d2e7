"""From what the environments paid to what each sampled token is credited with.

Axes: **E** episodes, **S** an episode's sampled tokens in time order, **N** what is compared.

Rewards exist three times over. **Raw**, what the environment paid (`Episode.total_reward`):
filters and
reports read this. **Penalised**, with format penalties and reward terms, which have a field of
their own in a `Turn` and meet the environment's reward only in `token_rewards`. **Normalised**
(`normalise`): compared with the other episodes', once penalised. The estimators read the last.
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
"""Where rewards are paid: their sum at the episode's last token, or each at its turn's last."""

Normalise = Literal["identity", "mean", "mean_std", "asym_clip"]
"""What becomes of an episode's total: as it is, less the mean, also over the std, also clipped."""

Over = Literal["group", "env", "batch"]
"""Whose episodes share a mean and a std: those of one prompt, of one environment, or all."""

STD_FLOOR = 1e-6
"""Added to a std before dividing by it, as in GRPO's published code."""


ASYMMETRIC_CLIP = (-1.0, 3.0)
"""Bounds of ``"asym_clip"`` in stds: a rare win counts for more than any loss (arXiv:2504.20073's
code)."""


def token_rewards(
    episodes: Sequence[Episode],
    index: EpisodeIndex,
    placement: Placement,
    *,
    penalties: bool = True,
) -> Tensor:
    """Rewards on the tokens that earned them.

    Args:
        episodes: The step's episodes, as `Batch.episode_B` counts them.
        index: Where their sampled tokens are.
        placement: ``"turn"`` pays each turn's reward at its last sampled token, ``"episode"`` their
            sum at the episode's.
        penalties: Whether `Turn.penalty` (0 or negative) is added, in either placement.

    Returns:
        ``(E, S)``, 0 everywhere else. Its sum over an episode is the episode's reward whatever the
        placement.
    """
    present = [episodes[e] for e in index.episode_E.tolist()]
    paid = [[t.reward + t.penalty * penalties for t in episode.turns] for episode in present]
    num_ends_E = index.turn_ends_ES.sum(dim=1).tolist()
    assert [len(turns) for turns in paid] == num_ends_E, "every turn has sampled tokens, and an end"

    rewards_ES = torch.zeros(index.mask_ES.shape)
    # Row-major order of the turn ends is episode by episode, turn by turn: the order of `paid`.
    rewards_ES[index.turn_ends_ES] = torch.tensor([pay for turns in paid for pay in turns])
    if placement == "turn":
        return rewards_ES
    return _at_the_end(rewards_ES.sum(dim=1), index.mask_ES)


def normalise(rewards_ES: Tensor, mask_ES: Tensor, class_E: Tensor, method: Normalise) -> Tensor:
    """Rewards whose sum over each episode is the episode's normalised total.

    With R the episode's total, and m and s mean and unbiased std of the totals in its class:

        identity R        mean R − m        mean_std (R − m) / (s + 1e-6)
        asym_clip: mean_std, clipped to [−1, 3]

    A class of one, or of equal totals, gives 0 (identity excepted). On the tokens, rewards stay
    where they were paid, divided by s + 1e-6 where the method divides (and the class has any
    spread), and the episode's last token pays what then lacks to the normalised total. So turns
    keep their order of merit, and the shift moves the return of every token alike (γ = 1).

    Args:
        rewards_ES: Penalised rewards in either placement, 0 off the mask.
        mask_ES: The episodes' tokens.
        class_E: Which episodes are compared (`comparison_classes`).
        method: What becomes of a total.

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
    return rewards_ES + _at_the_end(total_E - rewards_ES.sum(dim=1), mask_ES)


def comparison_classes(episodes: Sequence[Episode], index: EpisodeIndex, over: Over) -> Tensor:
    """Which episodes are compared with which: ``(E,)``, equal numbers for those that are.

    Args:
        episodes: The step's episodes, as `Batch.episode_B` counts them.
        index: Where their sampled tokens are.
        over: Whose episodes share a mean and a std.
    """
    if over == "group":
        return index.group_E
    if over == "batch":
        return torch.zeros_like(index.group_E)
    envs = [episodes[e].env for e in index.episode_E.tolist()]
    return torch.tensor([envs.index(env) for env in envs])


def compare_within(values_N: Tensor, class_N: Tensor) -> tuple[Tensor, Tensor]:
    """Each value less the mean of its class, and the class's unbiased std.

    Both are exactly 0 in a class of one and in one whose values are `all_equal`.

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


def _at_the_end(pay_E: Tensor, mask_ES: Tensor) -> Tensor:
    """One payment an episode, at its last sampled token."""
    last_E1 = mask_ES.sum(dim=1, keepdim=True) - 1
    return torch.zeros(mask_ES.shape, dtype=pay_E.dtype).scatter_(1, last_E1, pay_E[:, None])


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, coefficient: float) -> Tensor:
    """The KL divergence to the reference as a reward: what to add to each token's reward.

    −β · k1 with k1 = logprob − reference logprob, whose mean over sampled tokens is KL(policy ‖
    reference). A token that the policy now likes better than the reference did is charged for.

    Args:
        logprobs: Of the policy that sampled (the old logprobs), any shape, nats.
        reference_logprobs: The same shape.
        coefficient: β ≥ 0.

    Example:
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-3.0]), 0.5)  # −.5 · (−1 + 3)
        tensor([-1.])
    """
    return coefficient * (reference_logprobs - logprobs)
