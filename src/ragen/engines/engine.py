"""The engine: what samples from the policy and trains it, on one device or on many machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ragen.algorithms.batch import Batch
from ragen.chat.chat import Chat
from ragen.core.metrics import Metrics
from ragen.core.pictures import Picture
from ragen.core.types import Role, TokenRows
from ragen.rollout.policies import Policy


class Engine(Protocol):
    """The interface of an engine to the training loop.

    `policy` samples with the weights of the last `publish`; each completion has the version of the
    weights that it began with. `version` counts the publications. Every coroutine method may wait
    for other processes. If one of these is lost, the method raises `ragen.core.errors.EngineLost`,
    and the run continues from its last checkpoint with a new engine.
    """

    policy: Policy
    chat: Chat
    version: int

    async def score(self, batch: Batch, role: Role) -> Batch:
        """The batch with the scores of its trained tokens by `role`.

        ``"policy"`` fills `old_logprobs_BT` and `entropies_BT`, ``"reference"``
        `reference_logprobs_BT`, ``"critic"`` `values_BT`, each with the current weights and without
        gradient.
        """

    async def update(self, batch: Batch, step: int) -> Metrics:
        """One optimiser step on one minibatch.

        `step`, from 0 in the unit of `Config.budget`, sets the learning rate.

        Raises:
            RagenError: The tokens to be trained are not those that were sampled.
            MismatchError: With the weights that sampled them, they get other logprobs.
        """

    async def cross_scores(
        self, prompts: TokenRows, thoughts: TokenRows, pictures: Sequence[Picture] = ()
    ) -> Tensor:
        """Log-probability of each thought under each prompt, (N, M), with the current weights.

        `pictures` are those that the prompts show.
        """

    async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        """Gradient norms of each term of the loss, by bucket (`Learner.gradient_norms`)."""

    async def publish(self) -> None:
        """Make the learner's weights the policy's.

        Raises:
            RagenError: A sampler does not hold the weights that were sent.
        """

    def forget(self) -> None:
        """Drop the policy's prefix cache: a resumed run has none, and must sample the same."""

    def metrics(self) -> Metrics:
        """Metrics of the last collection and the last publication."""

    async def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimisers into `folder`; returns the rest as JSON values.

        The model, or with LoRA its adapter, is a Hugging Face folder, the rest are safetensors.

        Raises:
            NotFiniteError: The weights do not work.
        """

    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Load what `save` wrote.

        Raises:
            RagenError: The folder's contents are damaged or belong to another run.
        """

    async def close(self) -> None:
        """Free its memory and end its processes, even while the engine is still referenced."""


def assert_sampled(batch: Batch) -> None:
    """Assert that a batch has the fingerprints of sampled tokens, which an update verifies."""
    assert batch.born_BK is not None, "a run trains on sampled tokens and verifies them"
