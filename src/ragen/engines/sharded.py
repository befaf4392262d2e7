"""A process that trains: a model and its learner, alone or as one of several.

A `LocalEngine` is a `Rank` with a sampler. Several ranks split the weights by torch's FSDP2, or, as
the processes of one machine (`engine.processes`), hold them whole and add up their gradients.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.estimator import needs_values
from ragen.config.config import Config
from ragen.config.sections import most_turns
from ragen.core.errors import RagenError
from ragen.engines.factory import TOLERANCES, load_model, prepare_model
from ragen.learning.learner import Learner, Mismatch
from ragen.learning.models import Models
from ragen.learning.ranks import ALONE, join, join_here, leave
from ragen.learning.saving import load_learner, refuse_another_first, save_learner
from ragen.models.adapter_folder import fingerprint_of_base, hash_tensors
from ragen.networks import lora
from ragen.networks.sharding import gathered
from ragen.rollout.setup import make_chat
from ragen.sampling.weights import published

ONE_ARITHMETIC_TOLERANCE = 1e-3
"""The tolerance of a sampler that computes as the learner does, at temperatures of 1 and above.
The worst of 50,000 tokens of a trained model differs by 1.1e-4. A lower temperature divides the
logits, and their rounding errors with them."""


class Rank:
    """This process's part of `num_ranks` learners; a single one needs no communication.

    Every method, also of the `learner`, is called in all processes at once with the same arguments;
    the answer of rank 0 counts. Each process gets a batch whole and computes its share. If one
    raises an error, all raise it. If one dies, the others wait at most for `ranks.TIMEOUT_S`.

    `path` is the folder or hub id of the policy's first weights, which each process reads.
    `store_address` is where the processes meet: ``host:port`` on the machine of rank 0, or for
    `engine.processes` ``file://`` and the path of a new file.

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
        meet = join_here if config.engine.processes > 1 else join
        self.ranks = meet(rank, num_ranks, store_address) if num_ranks > 1 else ALONE
        device = "cpu" if num_ranks > 1 else ""  # a GPU gets its part when the weights are split
        critic, shared = uses_critic(config.advantage.name), config.model.critic == "shared"

        def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
            model, tokenizer = load_model(config.model, path, device)
            if config.lora.rank and config.may_use_kl and lora.has_adapters(model):
                raise RagenError(
                    "the KL reference is the policy that the run begins with, but with LoRA it is "
                    'the base without an adapter: set loss.kl = 0 and no guard.remedy = "kl", or '
                    "merge the adapter first (for a run: `ragen export RUN --merge`) and name the "
                    "merged model"
                )
            own_critic = critic and not shared
            about = config.lora, config.seed, own_critic, config.model.train_vision
            return prepare_model(model, path, *about), tokenizer

        self.model, self.tokenizer = self.ranks.together(load)
        self.chat = make_chat(config, self.tokenizer)
        self._first, self._base = None, None
        # Recorded even without a KL term, because a resumed run may add one. An adapter does not
        # need it: it has the fingerprint of its base.
        if config.lora.rank:
            self._base = fingerprint_of_base(self.model)
        else:
            self._first = hash_tensors(self.model.state_dict().items())
        self._max_length = config.model.max_length
        temperature, exact = config.rollout.temperature, config.one_arithmetic
        bound = ONE_ARITHMETIC_TOLERANCE if exact else TOLERANCES[config.model.dtype]
        self.learner = Learner(
            Models(self.model, critic, shared, config.loss.kl > 0, temperature, self.ranks),
            config.update,
            config.loss,
            steps=config.steps,
            longest=most_turns(config.env) * config.rollout.max_tokens,
            mismatch=Mismatch(
                bound / min(1.0, temperature),
                is_refused=exact and config.guard.responses.get("mismatch", "stop") == "stop",
                on_policy=config.engine.max_staleness == 0,
            ),
        )

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights by name, or its adapter's, on the CPU; empty except in rank 0.

        All processes gather them together, one at a time, so that a GPU holds only one whole
        weight. A rank that is alone on a CPU returns the weights themselves, not copies.
        """
        return gathered(published(self.model).items(), keep=self.ranks.rank == 0)

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


def uses_critic(estimator: str) -> bool:
    """True if an estimator needs a critic."""
    return needs_values(find_estimator(estimator))
