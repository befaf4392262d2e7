"""What the loop needs of the machines that train: one protocol, from a laptop to a cluster."""

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
    """A policy whose weights are pushed to it: the local sampler, vLLM, a server.

    `version` is that of the weights it samples with, and what its completions carry. `stats` count
    its tokens from when they were last set.
    """

    version: int
    stats: Stats

    async def publish(self, model: PreTrainedModel, version: int) -> None:
        """Sample with these weights from now on, and forget what was computed with others.

        Called while nothing is sampled.
        """
        ...

    def forget(self) -> None:
        """Drop what is remembered of earlier prompts."""
        ...

    def rest(self) -> None:
        """Leave the memory that only sampling needs to the learner, until it is asked again.

        Called while nothing is sampled.
        """
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


class Engine(Protocol):
    """Samples from the policy and trains it; `version` counts the publications."""

    chat: Chat
    version: int

    @property
    def policy(self) -> Policy:
        """Samples with the weights of the last `publish`."""
        ...

    async def score(self, batch: Batch, role: Role) -> Batch:
        """The batch with what `role` says of its trained tokens.

        ``"policy"`` fills `old_logprobs_BT` and `entropies_BT`, ``"reference"``
        `reference_logprobs_BT`, ``"critic"`` `values_BT`, each by the weights as they are now and
        without gradient.
        """
        ...

    async def update(self, batch: Batch, step: int) -> Metrics:
        """One optimiser step on one minibatch.

        `step` is where the run stands (from 0, in the unit of `Config.budget`); it sets the
        learning rate and ends the critic's warm-up.
        """
        ...

    async def cross_scores(
        self, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]
    ) -> Tensor:
        """Log-probability of each thought under each prompt, (N, M), by the weights as they are.

        Under the sampling temperature, as all logprobs. Changes no state.
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
        """Drop what the policy remembers of earlier prompts.

        Called before each collection: a resumed run has no such memory, and must sample the same.
        """
        ...

    def metrics(self) -> Metrics:
        """What it has to tell of the last collection and of the last publication.

        ``rollout/prefix_cache_hit_fraction`` is the share of prompt tokens that the policy
        remembered; ``publish/logprob_difference`` see `ragen.engines.parity`.
        """
        ...

    async def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimisers into `folder`; returns what else is kept, as JSON values."""
        ...

    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Take back what `save` wrote.

        Raises:
            RagenError: The folder's contents are damaged or belong to another run.
        """
        ...

    async def close(self) -> None:
        """Free what the engine holds."""
        ...
