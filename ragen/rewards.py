"""From what the worlds paid to what each sampled token is credited with.

Axes: **E** episodes, **S** an episode's sampled tokens in time order.

The world's reward and the format penalty live in two fields of a `Turn` and meet only here: filters
and reports read the raw sums (`Episode.total_reward`), the estimators read `token_rewards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ragen.batch import EpisodeIndex
from ragen.types import Episode

Placement = Literal["episode", "turn"]
"""Where rewards are paid: their sum at the episode's last token, or each at its turn's last."""


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
    last_E1 = index.mask_ES.sum(dim=1, keepdim=True) - 1
    return torch.zeros_like(rewards_ES).scatter_(1, last_E1, rewards_ES.sum(dim=1, keepdim=True))


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
