"""Credit: how much better each sampled token turned out than was to be expected.

Axes: **E** episodes, **S** an episode's sampled tokens in time order (tokens of prompts and
observations take no time), **G** members of a group, **N** trained tokens. Arrays are
episode-major, so full-history, windowed and single-turn contexts get the same numbers, and group
statistics count episodes, never rows.

Every estimator takes the same keyword arguments and ignores those it has no use for:

- `rewards_ES`: reward at each token, penalties included, 0 off the mask;
- `mask_ES`: true on the episode's tokens, which come first in each row;
- `values_ES`: the critic's estimate of the state before each token, or ``None``;
- `bootstrap_E`: value of the state after the last token; 0 where the task itself ended the episode;
- `turn_ES`, `turn_ends_ES`: the turn of each token, and whether it is the turn's last;
- `group_E`: which episodes answered the same prompt;
- `gamma`, `lam`: the discount γ and GAE's λ, in [0, 1] a token;
- `whiten`: whether `gae` gives its advantages mean 0 and deviation 1.
"""

from __future__ import annotations

from collections.abc import Callable
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
    advantages_ES = advantages_ES.masked_fill(~mask_ES, 0)
    returns_ES = (advantages_ES + values_ES).masked_fill(~mask_ES, 0)
    return Credit(whiten_tokens(advantages_ES, mask_ES) if whiten else advantages_ES, returns_ES)


def grpo(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor, **_: object) -> Credit:
    """Group-relative advantage (arXiv:2402.03300): the same on every token of an episode.

        A = (R − mean of the group) / (std of the group + 1e-6)

    R is the episode's summed reward; std divides by G − 1. A group whose rewards are all equal
    gives exactly 0. γ plays no part.

    Raises:
        ValueError: A group has one member.

    Example:
        >>> rewards, group = torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0])
        >>> grpo(rewards_ES=rewards, mask_ES=rewards >= 0, group_E=group).advantages_ES  # ∓1 / √2
        tensor([[-0.7071],
                [ 0.7071]])
    """
    centred_E, std_E = _group_statistics(rewards_ES, group_E)
    return _on_every_token(centred_E / (std_E + 1e-6), mask_ES)


def dr_grpo(*, rewards_ES: Tensor, mask_ES: Tensor, group_E: Tensor, **_: object) -> Credit:
    """Group-relative advantage without the division by the group's spread (arXiv:2503.20783).

        A = R − mean of the group

    Dividing by the std gives a group without a single win the weight of one with many; this does
    not.

    Raises:
        ValueError: A group has one member.

    Example:
        >>> rewards, group = torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0])
        >>> dr_grpo(rewards_ES=rewards, mask_ES=rewards >= 0, group_E=group).advantages_ES
        tensor([[-1.],
                [ 1.]])
    """
    centred_E, _std_E = _group_statistics(rewards_ES, group_E)
    return _on_every_token(centred_E, mask_ES)


ADVANTAGES: dict[str, Callable[..., Credit]] = {"gae": gae, "grpo": grpo, "dr_grpo": dr_grpo}
"""Estimators by their name in the config."""

COMPARES_MEMBERS = frozenset({"grpo", "dr_grpo"})
"""Estimators that refuse a group with fewer than two members."""


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


def _group_statistics(rewards_ES: Tensor, group_E: Tensor) -> tuple[Tensor, Tensor]:
    """Each episode's R − group mean and its group's unbiased std, both exactly 0 if flat."""
    total_E = rewards_ES.sum(dim=1)
    centred_E, std_E = torch.zeros_like(total_E), torch.zeros_like(total_E)
    for group in torch.unique(group_E).tolist():
        members_E = group_E == group
        rewards_G = total_E[members_E]
        if len(rewards_G) < 2:
            raise ValueError(
                f"group {group} has one member and nothing to be compared with: "
                "use two or more members a prompt, or the estimator gae"
            )
        if rewards_G.max() > rewards_G.min():
            centred_E[members_E] = rewards_G - rewards_G.mean()
            std_E[members_E] = rewards_G.std()
    return centred_E, std_E


def _on_every_token(advantage_E: Tensor, mask_ES: Tensor) -> Credit:
    return Credit(advantage_E[:, None] * mask_ES, None)
