"""Credit assignment: from the rewards of turns to the advantages of sampled tokens.

Axes: **E** episodes, **S** an episode's sampled tokens in time order.

There are three kinds of rewards. **Raw** rewards come from the environment and from reward terms of
whole episodes (`Episode.reward`); filters and reports read them. **Penalised** rewards include
format penalties and reward terms of turns (`Turn.penalty`), added only in `token_rewards`.
**Normalised** rewards are penalised rewards compared across episodes; estimators read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.batch import Batch, EpisodeIndex, episode_index, scatter_to_rows, to_episodes
from ragen.algorithms.estimator import STD_FLOOR, compare_within, estimate
from ragen.config.sections import AdvantageConfig, LossConfig, RewardConfig
from ragen.core.inputs import names_input
from ragen.core.types import Episode

ASYMMETRIC_CLIP = (-1.0, 3.0)
"""Bounds of ``"asym_clip"`` in stds: a rare success counts for more than any failure (code of
arXiv:2504.20073)."""

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

    The batch has values if the estimator needs them, and old and reference logprobs for a KL
    penalty in the reward (``k1``), which is added after the normalisation. `Batch.episode_B`
    indexes `episodes`; `Batch.group_B` indexes `group_weights`, which are factors on advantages.
    """
    index = episode_index(batch)
    penalised_ES = token_rewards(episodes, index, reward.placement)
    class_E = compared_with(episodes, index, reward.over)
    rewards_ES = normalise(penalised_ES, index.mask_ES, class_E, reward.normalise)
    if loss.kl > 0 and loss.kl_kind == "k1":
        assert batch.old_logprobs_BT is not None and batch.reference_logprobs_BT is not None
        penalty_BT = kl_penalty(batch.old_logprobs_BT, batch.reference_logprobs_BT, loss.kl)
        rewards_ES = rewards_ES + to_episodes(penalty_BT, index)
    values_BT = batch.values_BT
    estimator = find_estimator(advantage.name)
    names = partial(names_input, estimator)
    credit = estimate(
        estimator,
        rewards_ES=rewards_ES,
        mask_ES=index.mask_ES,
        values_ES=None if values_BT is None else to_episodes(values_BT, index),
        turn_ES=index.turn_ES,
        turn_ends_ES=index.turn_ends_ES,
        state_ES=state_numbers(episodes, index) if names("state_ES") else None,
        thought_ES=thought_tokens(episodes, index) if names("thought_ES") else None,
        state_values_ES=state_values(episodes, index) if names("state_values_ES") else None,
        success_E=torch.tensor([episodes[e].success for e in index.episode_E.tolist()]),
        group_E=index.group_E,
        gamma=advantage.gamma,
        gae_lambda=advantage.gae_lambda,
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


def compared_with(episodes: Sequence[Episode], index: EpisodeIndex, over: str) -> Tensor:
    """The class of each episode, ``(E,)``: episodes of one class are normalised together.

    `over` is ``"group"``, ``"env"`` (the environment of a mixture) or ``"batch"``.
    """
    if over == "group":
        return index.group_E
    envs = [episodes[number].env if over == "env" else "" for number in index.episode_E.tolist()]
    numbers = {env: number for number, env in enumerate(dict.fromkeys(envs))}
    return torch.tensor([numbers[env] for env in envs], device=index.group_E.device)


def state_numbers(episodes: Sequence[Episode], index: EpisodeIndex) -> Tensor:
    """A number for the `Turn.state_key` of each token's turn: ``(E, S)``, −1 off the mask."""
    numbers: dict[str, int] = {}
    state_ES = torch.full(index.mask_ES.shape, -1)
    for e, episode in enumerate(episodes[number] for number in index.episode_E.tolist()):
        states = [numbers.setdefault(turn.state_key, len(numbers)) for turn in episode.turns]
        mask_S = index.mask_ES[e]
        state_ES[e, mask_S] = torch.tensor(states)[index.turn_ES[e, mask_S]]
    return state_ES


def state_values(episodes: Sequence[Episode], index: EpisodeIndex) -> Tensor:
    """The `Turn.state_value` of each token's turn: ``(E, S)``, 0 off the mask."""
    values_ES = torch.zeros(index.mask_ES.shape)
    for e, episode in enumerate(episodes[number] for number in index.episode_E.tolist()):
        values, mask_S = [turn.state_value for turn in episode.turns], index.mask_ES[e]
        values_ES[e, mask_S] = torch.tensor(values)[index.turn_ES[e, mask_S]]
    return values_ES


def thought_tokens(episodes: Sequence[Episode], index: EpisodeIndex) -> Tensor:
    """True on the tokens that spell a thought: ``(E, S)``."""
    thought_ES = torch.zeros_like(index.mask_ES)
    for e, number in enumerate(index.episode_E.tolist()):
        start = 0
        for turn in episodes[number].turns:
            first, end = turn.thought_span or (0, 0)
            thought_ES[e, start + first : start + end] = True
            start += len(turn.completion.token_ids or ())
    return thought_ES


def token_rewards(episodes: Sequence[Episode], index: EpisodeIndex, placement: str) -> Tensor:
    """Rewards on the tokens that earned them, ``(E, S)``, 0 on all other tokens.

    With the placement ``"turn"`` each turn's reward, penalties included, is at its last sampled
    token. With ``"episode"`` the sum of these rewards is at the episode's last sampled token.
    """
    present = [episodes[e] for e in index.episode_E.tolist()]
    paid = [[turn.reward + turn.penalty for turn in episode.turns] for episode in present]
    num_ends_E = index.turn_ends_ES.sum(dim=1).tolist()
    assert [len(turns) for turns in paid] == num_ends_E, "every turn has sampled tokens and an end"

    rewards_ES = torch.zeros(index.mask_ES.shape)
    # In row-major order the turn ends come episode by episode, turn by turn, as in `paid`.
    rewards_ES[index.turn_ends_ES] = torch.tensor([reward for turns in paid for reward in turns])
    if placement == "turn":
        return rewards_ES
    return _at_episode_end(rewards_ES.sum(dim=1), index.mask_ES)


def normalise(rewards_ES: Tensor, mask_ES: Tensor, class_E: Tensor, method: str) -> Tensor:
    """Rewards whose sum over each episode is the episode's normalised total.

    With R the episode's total, and m and s the mean and std of the totals in its class (the std
    divides by n − 1):

        identity R        mean R − m        mean_std (R − m) / (s + 1e-6)
        asym_clip: mean_std, clipped to [−1, 3]

    In a class of one episode, or of equal totals, the normalised total is 0 (except for identity).
    Rewards stay on their tokens, divided by s + 1e-6 where the method divides (and the class has
    any spread), and the episode's last token gets the difference to the normalised total. With
    γ = 1 this shift changes the return of every token of the episode equally. `rewards_ES` are
    penalised rewards in either placement, 0 off the mask.
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


def _at_episode_end(reward_E: Tensor, mask_ES: Tensor) -> Tensor:
    last_E1 = mask_ES.sum(dim=1, keepdim=True) - 1
    return torch.zeros(mask_ES.shape, dtype=reward_E.dtype).scatter_(1, last_E1, reward_E[:, None])


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, coefficient: float) -> Tensor:
    """The penalty for the KL divergence from the reference, to add to each token's reward.

    −β · k1 with k1 = old − reference logprob in nats, whose mean over sampled tokens is
    KL(policy ‖ reference); β ≥ 0 is the `coefficient`.
    """
    return coefficient * (reference_logprobs - logprobs)
