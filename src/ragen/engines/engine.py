"""The engine protocol: what the training loop needs, from a laptop to a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from ragen.algorithms.batch import Batch
from ragen.core.metrics import Metrics
from ragen.core.types import Role
from ragen.engines.sampling import Stats
from ragen.rollout.chat import Chat
from ragen.rollout.policies import Policy


class WeightedPolicy(Policy, Protocol):
    """A policy whose weights are published to it: the local sampler, vLLM, a server.

    `version` is the policy version of its weights, which its completions carry. `stats` count its
    tokens since they were last reset.
    """

    version: int
    stats: Stats

    async def publish(self, model: PreTrainedModel, version: int) -> None:
        """Sample with these weights from now on, and drop all keys and values of earlier ones.

        Called while nothing is sampled.
        """
        ...

    def forget(self) -> None:
        """Drop the prefix cache."""
        ...

    def rest(self) -> None:
        """Free the memory that only sampling needs, until the next completion or publication.

        Called while nothing is sampled.
        """
        ...

    async def close(self) -> None:
        """Free its resources."""
        ...


class Engine(Protocol):
    """Samples from the policy and trains it; `version` counts its publications."""

    chat: Chat
    version: int

    @property
    def policy(self) -> Policy:
        """Samples with the weights of the last `publish`."""
        ...

    async def score(self, batch: Batch, role: Role) -> Batch:
        """The batch with the scores of its trained tokens by `role`.

        ``"policy"`` fills `old_logprobs_BT` and `entropies_BT`, ``"reference"``
        `reference_logprobs_BT`, ``"critic"`` `values_BT`, each with the current weights and without
        gradient.
        """
        ...

    async def update(self, batch: Batch, step: int) -> Metrics:
        """One optimiser step on one minibatch.

        `step` is the run's progress (from 0, in the unit of `Config.budget`); it sets the learning
        rate.
        """
        ...

    async def cross_scores(
        self, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]
    ) -> Tensor:
        """Log-probability of each thought under each prompt, (N, M), with the current weights.

        At the sampling temperature, like all logprobs. Changes no state.
        """
        ...

    async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        """Norms of the gradients of task, entropy and KL in each bucket of rows.

        ``<bucket>/<term>_per_token`` and ``<bucket>/<term>_per_sample``; see
        `Learner.gradient_norms`. Changes no state.
        """
        ...

    async def publish(self) -> None:
        """Make the learner's weights the policy's."""
        ...

    def forget(self) -> None:
        """Drop the policy's prefix cache.

        Called before each collection: a resumed run starts without one, and must sample the same.
        """
        ...

    def metrics(self) -> Metrics:
        """Metrics of the last collection and the last publication.

        ``rollout/prefix_cache_hit_fraction`` is the share of prompt tokens found in the cache; for
        ``publish/logprob_difference`` see `ragen.engines.parity`.
        """
        ...

    async def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimisers into `folder`; returns the rest as JSON values."""
        ...

    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Load what `save` wrote.

        Raises:
            RagenError: The folder's contents are damaged or belong to another run.
        """
        ...

    async def close(self) -> None:
        """Free the engine's resources."""
        ...
