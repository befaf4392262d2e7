"""Credit assignment: from a scored batch to advantages, by rewards, KL penalty and estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.batch import Batch, EpisodeIndex, episode_index, scatter_to_rows, to_episodes
from ragen.algorithms.estimator import estimate
from ragen.algorithms.rewards import comparison_classes, kl_penalty, normalise, token_rewards
from ragen.config.sections import AdvantageConfig, LossConfig, RewardConfig
from ragen.core.types import Episode

STEP_WEIGHT = 1.0
"""Weight ω of a turn's advantage relative to its episode's in GiGPO, as published
(arXiv:2505.10978)."""


def credit(
    batch: Batch,
    episodes: Sequence[Episode],
    reward: RewardConfig,
    advantage: AdvantageConfig,
    loss: LossConfig,
    group_weights: Sequence[float] | None = None,
) -> Batch:
    """The batch with rewards, advantages and (with a critic) returns.

    The batch has old logprobs, values for an estimator that needs them, and reference logprobs for
    a KL penalty, which is added after the normalisation. `episodes` are those that
    `Batch.episode_B` indexes. `group_weights` are factors on the advantages of the groups that
    `Batch.group_B` indexes (`filters.group_weights`).

    Raises:
        ValueError: The estimator needs what there is not: values, or a second episode in a group.
    """
    index = episode_index(batch)
    penalised_ES = token_rewards(episodes, index, reward.placement)
    class_E = comparison_classes(index, reward.over)
    rewards_ES = normalise(penalised_ES, index.mask_ES, class_E, reward.normalise)
    if loss.kl > 0 and loss.kl_kind == "k1":
        assert batch.old_logprobs_BT is not None and batch.reference_logprobs_BT is not None
        penalty_BT = kl_penalty(batch.old_logprobs_BT, batch.reference_logprobs_BT, loss.kl)
        rewards_ES = rewards_ES + to_episodes(penalty_BT, index)
    values_BT = batch.values_BT
    credit = estimate(
        find_estimator(advantage.name),
        rewards_ES=rewards_ES,
        mask_ES=index.mask_ES,
        values_ES=None if values_BT is None else to_episodes(values_BT, index),
        turn_ES=index.turn_ES,
        turn_ends_ES=index.turn_ends_ES,
        state_ES=state_numbers(episodes, index),
        group_E=index.group_E,
        gamma=advantage.gamma,
        gae_lambda=advantage.gae_lambda,
        turn_gamma=advantage.turn_gamma,
        step_weight=STEP_WEIGHT,
        whiten=True,
    )
    returns_ES, advantages_BT = credit.returns_ES, scatter_to_rows(credit.advantages_ES, index)
    if group_weights is not None:
        advantages_BT = advantages_BT * torch.tensor(group_weights)[batch.group_B][:, None]
    return replace(
        batch,
        rewards_BT=scatter_to_rows(rewards_ES, index),
        advantages_BT=advantages_BT,
        returns_BT=None if returns_ES is None else scatter_to_rows(returns_ES, index),
    )


def state_numbers(episodes: Sequence[Episode], index: EpisodeIndex) -> Tensor:
    """The state in which each token's turn began, as a number: ``(E, S)``, −1 off the mask.

    Equal `Turn.state_key`, in any episode, gives equal numbers.
    """
    numbers: dict[str, int] = {}
    state_ES = torch.full(index.mask_ES.shape, -1)
    for e, episode in enumerate(episodes[number] for number in index.episode_E.tolist()):
        states = [numbers.setdefault(turn.state_key, len(numbers)) for turn in episode.turns]
        mask_S = index.mask_ES[e]
        state_ES[e, mask_S] = torch.tensor(states)[index.turn_ES[e, mask_S]]
    return state_ES
