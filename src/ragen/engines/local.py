"""The local engine: learner and sampler in one process, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.batch import Batch
from ragen.algorithms.estimator import needs_values
from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics
from ragen.core.types import Role
from ragen.engines.engine import WeightedPolicy
from ragen.engines.factory import (
    load_model,
    make_chat,
    make_sampler,
    may_use_kl,
    prepare_model,
    save_trained,
)
from ragen.engines.learner import Learner
from ragen.engines.parity import check_parity
from ragen.engines.sampler import Sampler
from ragen.engines.sampler_server import VllmServer
from ragen.engines.sampler_vllm import VllmSampler
from ragen.engines.sampling import Stats
from ragen.engines.tensors import (
    hash_weights,
    load_tensors,
    optimizer_tensors,
    restore_optimizer,
    save_tensors,
)
from ragen.models import lora
from ragen.models.adapter_folder import fingerprint_of_base, load_adapter
from ragen.models.loading import load_policy
from ragen.models.precision import Masters
from ragen.storage.checkpoint import Damaged


class LocalEngine:
    """An `Engine` on CPU or one GPU.

    The local sampler reads the learner's weights in place, so publishing only drops the cache of
    keys and values. vLLM has weights of its own, so publishing pushes the learner's and checks that
    they arrived (`ragen.engines.parity`). `path` is the folder or hub id of the policy's first
    weights.

    Raises:
        RagenError: The model cannot be loaded or has no usable chat template, vLLM cannot serve
            it, or the KL reference would not be the policy that the run begins with.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.model, self.tokenizer = load_model(config, path)
        if config.lora.rank and may_use_kl(config) and lora.has_adapters(self.model):
            raise RagenError(
                "the KL reference is the policy that the run begins with, but with LoRA it is the "
                'base without an adapter: set loss.kl = 0 and no guard.remedy = "kl", or merge the '
                "adapter first (for a run: `ragen export RUN --merge`) and name the merged model"
            )
        critic = needs_values(find_estimator(config.advantage.name))
        self.model = prepare_model(config, path, self.model, critic)
        self.chat = make_chat(config, self.tokenizer)
        self.version = 0
        self.policy: WeightedPolicy = make_sampler(config, self.model, self.chat, path)
        loss = config.loss
        self.learner = Learner(
            self.model,
            config.update,
            loss,
            critic=critic,
            shared=config.model.critic == "shared",
            reference=loss.kl > 0,
            steps=config.steps,
            temperature=config.rollout.temperature,
            longest=config.env.max_turns * config.rollout.max_tokens,
        )
        self._dtype, self._temperature = config.model.dtype, config.rollout.temperature
        self._parity = self._check_parity()

    @cached_property
    def _base(self) -> str | None:
        """The fingerprint of the adapters' base, which never changes."""
        return fingerprint_of_base(self.model) if lora.has_adapters(self.model) else None

    async def score(self, batch: Batch, role: Role) -> Batch:
        """See `Engine.score`."""
        self.policy.rest()
        if role == "critic":
            return replace(batch, values_BT=self.learner.values(batch))
        logprobs_BT, entropies_BT = self.learner.logprobs(batch, reference=role == "reference")
        if role == "reference":
            return replace(batch, reference_logprobs_BT=logprobs_BT)
        return replace(batch, old_logprobs_BT=logprobs_BT, entropies_BT=entropies_BT)

    async def update(self, batch: Batch, step: int) -> Metrics:
        """See `Engine.update`."""
        assert batch.born_BK is not None, (
            "a run trains on sampled tokens and verifies their fingerprints"
        )
        self.policy.rest()
        return self.learner.update(batch, step)

    async def cross_scores(
        self, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]
    ) -> Tensor:
        """See `Engine.cross_scores`."""
        self.policy.rest()
        return self.learner.cross_scores(prompts, thoughts)

    async def gradient_norms(self, batch: Batch, bucket_B: Tensor) -> Metrics:
        """See `Engine.gradient_norms`."""
        self.policy.rest()
        return self.learner.gradient_norms(batch, bucket_B)

    async def publish(self) -> None:
        """See `Engine.publish`."""
        self.version += 1
        await self._push()

    async def _push(self) -> None:
        await self.policy.publish(self.model, self.version)
        self.learner.synced = True
        self._parity = self._check_parity()

    def _check_parity(self) -> Metrics:
        """The difference between sampler and learner, if the sampler has weights of its own."""
        if isinstance(self.policy, Sampler):
            return {}
        assert isinstance(self.policy, VllmSampler | VllmServer)
        return check_parity(self.policy, self.learner, self.chat, self._temperature, self._dtype)

    def forget(self) -> None:
        """See `Engine.forget`."""
        self.policy.forget()
        self.policy.stats = Stats()

    def metrics(self) -> Metrics:
        """See `Engine.metrics`."""
        return self.policy.stats.metrics() | self._parity

    async def save(self, folder: Path) -> dict[str, Any]:
        """See `Engine.save`: the model in Hugging Face layout, the rest as safetensors.

        With LoRA the adapter is saved instead of the model, as a PEFT folder.
        """
        learner = self.learner
        save_trained(self.model, self.tokenizer, folder, self._base)
        if learner.critic is not None:
            save_tensors(learner.critic.state_dict(), folder / "critic.safetensors")
        for name, optimizer in learner.named_optimizers().items():
            save_tensors(optimizer_tensors(optimizer), folder / f"{name}.safetensors")
        for name, masters in learner.named_masters().items():
            save_tensors(masters.tensors(), folder / f"{name}.safetensors")
        return {"version": self.version, "reference": self._reference_hash()}

    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        """See `Engine.load`."""
        learner = self.learner
        saved = state["reference"]  # None if the guard added the KL term after the save
        current = self._reference_hash()
        if current is not None and saved not in (None, current):
            raise RagenError(
                "the model that this run began with has changed, so its KL reference is lost; "
                "restore the old weights where model.path points"
            )
        if lora.has_adapters(self.model):
            load_adapter(self.model, folder)
        else:
            _restore(self.model, _saved_weights(folder), folder)
        if learner.critic is not None:
            _restore(learner.critic, load_tensors(folder / "critic.safetensors"), folder)
        for name, optimizer in learner.named_optimizers().items():
            restore_optimizer(optimizer, load_tensors(folder / f"{name}.safetensors"))
        for name, masters in learner.named_masters().items():
            masters.restore(load_tensors(folder / f"{name}.safetensors"))
        self.version = int(state["version"])
        await self._push()

    def _reference_hash(self) -> str | None:
        """A hash of the reference; none with LoRA, whose adapter folder identifies the base."""
        reference = self.learner.reference
        return None if reference is None or reference is self.model else hash_weights(reference)

    async def close(self) -> None:
        """See `Engine.close`: frees the memory even while the engine itself is still referenced."""
        await self.policy.close()
        learner = self.learner
        modules: list[nn.Module | None] = [self.model, learner.critic, learner.reference]
        for module in modules:
            if module is not None:
                module.to("meta")  # frees the storage
        for optimizer in learner.named_optimizers().values():
            optimizer.state.clear()
            optimizer.param_groups.clear()
        learner.masters = learner.critic_masters = Masters(())


def _saved_weights(folder: Path) -> dict[str, Tensor]:
    try:
        saved, _ = load_policy(str(folder), "cpu", "float32")
    except RagenError as error:
        raise Damaged(folder / "model.safetensors", error.__cause__ or error) from error
    return saved.state_dict()


def _restore(module: nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise RagenError(f"the checkpoint {folder} is of another model: {first}") from error
