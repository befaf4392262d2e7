"""The policy, the critic and the reference of a learner, and what they compute for its tokens.

Axes: **N** sampled tokens of a microbatch, **D** width, **T** positions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragen.algorithms.batch import Batch
from ragen.core.pictures import Picture
from ragen.core.types import TokenRows
from ragen.learning.ranks import ALONE, Ranks
from ragen.networks.device import to_device
from ragen.networks.lora import adapter_of, has_adapters
from ragen.networks.machine import usable_device
from ragen.networks.model import (
    Critic,
    cross_scores,
    hidden_states,
    is_fast,
    shares_prompts,
    token_logprobs,
)
from ragen.networks.pictures import Features, features
from ragen.networks.sharding import Unit, Units


class Models:
    """Policy, critic and reference; all logprobs are computed at the sampling temperature.

    The reference is a frozen copy of the policy. The critic is a value head on a copy of the
    policy's backbone, or on the policy's own (`shared`). With LoRA (`ragen.networks.lora`) there
    are no copies: all three are the policy's model, with the policy's adapter, no adapter, or the
    critic's, and only the adapters and the value head are trained. The `policy` comes with these
    adapters. `trained` is the part of it that is trained: all of it, or its adapter.

    With several `ranks` all processes call the same methods at the same time. If `ranks` split the
    weights, each process keeps a part of every weight (`ragen.networks.sharding`), its `units`.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        critic: bool = False,
        shared: bool = False,
        reference: bool = False,
        temperature: float = 1.0,
        ranks: Ranks = ALONE,
    ) -> None:
        adapted = has_adapters(policy)
        self.policy, self.ranks, self.units = policy, ranks, Units()
        self.trained: nn.Module = adapter_of(policy, "policy") if adapted else policy
        # Each part is split before the next is copied, so that few whole weights are in memory.
        self.critic = Critic(policy, shared) if critic else None
        head = [self.critic.head] if self.critic is not None else []
        if self.critic is not None and self.critic.has_backbone:
            self._split([self.critic], head)
            head = []
        self.reference: PreTrainedModel | None = None
        if reference and adapted:
            self.reference = policy  # without its adapter, which does not change
        elif reference:
            self.reference = copy.deepcopy(policy).requires_grad_(False)
            self._split([self.reference])
        self._split([policy, *head], head)
        self._temperature = temperature
        self.device = next(policy.parameters()).device

    def _split(self, modules: Sequence[nn.Module], apart: Sequence[nn.Module] = ()) -> None:
        """Split the weights of modules that compute together; one of another dtype is `apart`."""
        if self.ranks.splits_weights:
            fast = usable_device() == "cpu" and is_fast(self.policy)
            self.units.add(Unit(modules, apart, in_layers=not fast), *modules)

    @cached_property
    def shares_prompts(self) -> bool:
        """True if rows are not padded, and a prompt that several share is computed only once."""
        return self.units.within(self.policy, lambda: shares_prompts(self.policy))

    def logprobs(self, part: Batch, reference: bool = False) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies ``(N,)`` of the tokens that the loss covers."""
        model = self.reference if reference else self.policy
        assert model is not None, "this learner keeps no reference"
        targets_N = to_device(part.token_ids_BT[part.weight_BT > 0], self.device)

        def compute() -> tuple[Tensor, Tensor]:
            hidden_ND = hidden_states(model, *_inputs(part), _seen(model, part))
            return token_logprobs(model, hidden_ND, targets_N, self._temperature)

        return self.units.within(model, compute)

    def logprobs_and_values(self, part: Batch, targets_N: Tensor) -> tuple[Tensor, ...]:
        """`logprobs` of the tokens `targets_N`, and with a shared critic their values ``(N,)``."""
        shared = self.critic if self.critic is not None and self.critic.shared else None

        def compute() -> tuple[Tensor, ...]:
            hidden_ND = hidden_states(self.policy, *_inputs(part), _seen(self.policy, part))
            scores = token_logprobs(self.policy, hidden_ND, targets_N, self._temperature)
            return scores if shared is None else (*scores, shared.read(hidden_ND))

        return self.units.within(self.policy, compute)

    def values(self, part: Batch) -> Tensor:
        """The critic's values ``(N,)`` of the states before the tokens that the loss covers."""
        critic = self.critic
        assert critic is not None, "this learner trains no critic"
        module, seen = critic if critic.has_backbone else self.policy, None
        if part.pictures:
            with torch.no_grad():
                seen = self.units.within(self.policy, lambda: _seen(self.policy, part))
        return self.units.within(module, lambda: critic.values(*_inputs(part), seen))

    def cross_scores(
        self,
        prompts: TokenRows,
        thoughts: TokenRows,
        max_tokens: int,
        pictures: Sequence[Picture] = (),
    ) -> Tensor:
        """Log-probability of each thought under each prompt (`ragen.networks.model.cross_scores`).

        At most `max_tokens` tokens are in memory at once, in all processes together.
        """
        ranks = self.ranks
        most = max_tokens // ranks.size
        scores_NM = self.units.within(
            self.policy,
            lambda: cross_scores(
                self.policy,
                prompts,
                thoughts,
                self._temperature,
                most,
                ranks.rank,
                ranks.size,
                pictures,
            ),
        )
        self.units.rest()
        return ranks.sum(scores_NM)


def _seen(model: PreTrainedModel, part: Batch) -> Features | None:
    return features(model, part.token_ids_BT, part.pictures) if part.pictures else None


def _inputs(part: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, lengths, and the positions whose states predict the tokens that the loss covers."""
    before_BT = torch.zeros_like(part.mask_BT)
    before_BT[:, :-1] = part.weight_BT[:, 1:] > 0
    return part.token_ids_BT, part.lengths_B, before_BT
