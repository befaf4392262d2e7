"""From a scored batch to one with advantages: rewards, KL penalty and estimator put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ragen.advantages import ADVANTAGES
from ragen.batch import Batch, episode_index, to_episodes, to_samples
from ragen.config import AdvantageConfig, LossConfig
from ragen.rewards import Placement, kl_penalty, token_rewards
from ragen.types import Episode


def credit(
    batch: Batch,
    episodes: Sequence[Episode],
    placement: Placement,
    advantage: AdvantageConfig,
    loss: LossConfig,
) -> Batch:
    """The batch with rewards, advantages and (with a critic) returns.

    Args:
        batch: With old logprobs; with values for `gae`; with reference logprobs for a KL penalty.
        episodes: The episodes that `Batch.episode_B` indexes, their format penalties set.
        placement: Where rewards are paid.
        advantage: The estimator and its constants.
        loss: For the weight of a KL penalty in the reward.
    """
    index = episode_index(batch)
    rewards_ES = token_rewards(episodes, index, placement)
    if loss.kl > 0 and loss.kl_place == "reward":
        assert batch.old_logprobs_BT is not None and batch.reference_logprobs_BT is not None
        penalty_BT = kl_penalty(batch.old_logprobs_BT, batch.reference_logprobs_BT, loss.kl)
        rewards_ES = rewards_ES + to_episodes(penalty_BT, index)
    values_BT = batch.values_BT
    found = ADVANTAGES[advantage.name](
        rewards_ES=rewards_ES,
        mask_ES=index.mask_ES,
        values_ES=None if values_BT is None else to_episodes(values_BT, index),
        bootstrap_E=None,
        turn_ES=index.turn_ES,
        turn_ends_ES=index.turn_ends_ES,
        group_E=index.group_E,
        gamma=advantage.gamma,
        lam=advantage.lam,
        whiten=advantage.whiten,
    )
    returns_ES = found.returns_ES
    return replace(
        batch,
        rewards_BT=to_samples(rewards_ES, index),
        advantages_BT=to_samples(found.advantages_ES, index),
        returns_BT=None if returns_ES is None else to_samples(returns_ES, index),
    )
