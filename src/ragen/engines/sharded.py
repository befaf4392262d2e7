"""A process that trains: a model and its learner, alone or as one of several.

A `LocalEngine` is a `Rank` that is alone, with a sampler. Several are joined by torch's FSDP2. The
caller then calls the same method in all processes, and takes the answer of rank 0.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ragen.algorithms.batch import Batch
from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics
from ragen.core.types import Role
from ragen.engines.factory import load_for_training, make_learner
from ragen.learning.ranks import ALONE, join, leave
from ragen.learning.saving import load_learner, refuse_another_first, save_learner
from ragen.models.adapter_folder import fingerprint_of_base, hash_tensors
from ragen.networks import lora
from ragen.networks.sharding import whole
from ragen.rollout.setup import make_chat


class Rank:
    """This process's part of `num_ranks` learners; a single one needs no communication.

    Every method is called in all processes at once with the same arguments. A batch is given whole,
    and each process computes its share. If one process raises an error, all raise it. If one dies,
    the others wait for it, at most for `ranks.TIMEOUT_S`.

    `path` is the folder or hub id of the policy's first weights, which each process reads.
    `store_address` is ``host:port`` on the machine of rank 0, where the processes meet.

    Raises:
        RagenError: The model cannot be loaded, or the KL reference would not be the policy that the
            run begins with.
    """

    def __init__(
        self,
        config: Config,
        path: str,
        rank: int = 0,
        num_ranks: int = 1,
        store_address: str = "",
    ) -> None:
        self.ranks = ALONE
        if num_ranks > 1:
            self.ranks = join(rank, num_ranks, store_address)
        device = "cpu" if num_ranks > 1 else ""  # a GPU gets its part when the weights are split
        self.model, self.tokenizer = self.ranks.together(
            lambda: load_for_training(config, path, device)
        )
        self.chat = make_chat(config, self.tokenizer)
        self._first, self._base = None, None
        # Recorded even without a KL term, because a resumed run may add one. An adapter does not
        # need it: it has the fingerprint of its base.
        if config.lora.rank:
            self._base = fingerprint_of_base(self.model)
        else:
            self._first = hash_tensors(self.model.state_dict().items())
        self._max_length = config.model.max_length
        self.learner = make_learner(config, self.model, self.ranks)

    def score(self, batch: Batch, role: Role) -> Batch:
        """The batch with the scores of its trained tokens by `role`."""
        return self.learner.score(batch, role)

    def update(self, batch: Batch, step: int) -> Metrics:
        """One optimiser step on one minibatch."""
        assert batch.born_BK is not None, (
            "a run trains on sampled tokens and verifies their fingerprints"
        )
        return self.learner.update(batch, step)

    def cross_scores(
        self, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]
    ) -> Tensor:
        """Log-probability of each thought under each prompt, (N, M)."""
        return self.learner.cross_scores(prompts, thoughts)

    def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        """Gradient norms of each term of the loss, by bucket."""
        return self.learner.gradient_norms(batch, bucket_B)

    def weights(self) -> list[tuple[str, Tensor]]:
        """The policy's weights by name, or its adapter's, on the CPU; empty except in rank 0.

        All processes gather them together, one at a time, so that a GPU holds only one whole
        weight. A rank that is alone on a CPU returns the weights themselves, not copies.
        """
        tensors = (
            lora.adapter_tensors(self.model).items()
            if lora.has_adapters(self.model)
            else self.model.named_parameters()
        )
        found = []
        for name, weight in tensors:
            full = whole(weight.detach())
            if self.ranks.rank == 0:
                found.append((name, full.cpu()))
        return found

    def published(self) -> None:
        """Note that the samplers have these weights, so that the next samples are on-policy."""
        self.learner.synced = True

    def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimisers into a folder that all processes reach; returns the rest.

        Raises:
            NotFiniteError: The weights do not work.
            RagenError: A process does not see the folder, which exists.
        """

        def refuse_another() -> None:
            if not folder.is_dir():
                raise RagenError(
                    f"a learner on {socket.gethostname()} does not see {folder.parent}: put the "
                    "run into a folder that all machines see under the same path (--out)"
                )

        self.ranks.together(refuse_another)
        save_learner(
            self.learner,
            self.tokenizer,
            folder,
            chat=self.chat,
            max_length=self._max_length,
            base=self._base,
        )
        return {"reference": self._first}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Load what `save` wrote with any number of processes, or a `LocalEngine`.

        Raises:
            RagenError: The folder's contents are damaged or belong to another run.
        """
        self._first = refuse_another_first(self._first, state["reference"], self.learner)
        load_learner(self.learner, folder, self._base)
        self.learner.synced = True

    def close(self) -> None:
        """Part from the other processes."""
        leave(self.ranks)
