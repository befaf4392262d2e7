"""One process, one device: the learner, and the sampler beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.batch import Batch
from ragen.algorithms.estimator import needs_values
from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.core.metrics import Metrics
from ragen.core.types import Role
from ragen.engines.engine import WeightedPolicy
from ragen.engines.learner import Learner
from ragen.engines.parity import compared
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
from ragen.engines.vllm_engine import Vllm
from ragen.models import lora
from ragen.models.adapter_folder import fingerprint_of_base, load_adapter, put_on, save_adapter
from ragen.models.loading import (
    load_policy,
    load_tokenizer,
    recompute_layers,
    save_model,
    usable_device,
)
from ragen.models.names import base_of, is_adapter
from ragen.models.precision import Masters
from ragen.rollout.chat import Chat
from ragen.storage.checkpoint import Damaged


class LocalEngine:
    """An `Engine` on CPU or one GPU.

    The local sampler reads the learner's weights in place, so publishing costs nothing but the
    cache of keys and values, which belongs to the old weights. vLLM has weights of its own, which
    are pushed, and then compared by what is sampled with them (`ragen.engines.parity`).

    Args:
        config: The run's settings.
        path: The folder or hub id of the policy's first weights.

    Raises:
        RagenError: The model cannot be loaded or has no usable chat template, vLLM cannot sample
            from it, or a KL penalty would be measured from another policy than the run begins with.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.model, self.tokenizer = loaded(config, path)
        if config.lora.rank and measures_kl(config) and lora.has_adapters(self.model):
            raise RagenError(
                "loss.kl measures from the policy that the run began with, and with LoRA the "
                'reference is the base alone: set loss.kl = 0 and no guard.remedy = "kl", or merge '
                "the adapter first (that of a run: `ragen export RUN --merge`) and name the merged "
                "model"
            )
        critic = needs_values(find_estimator(config.advantage.name))
        self.model = prepared(config, path, self.model, critic)
        self.chat = chat_of(config, self.tokenizer)
        self.version = 0
        self.policy: WeightedPolicy = sampler_of(config, self.model, self.chat, path)
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
        self._parity = self._compared()

    @cached_property
    def _base(self) -> str | None:
        """What the base of the adapters is known by; it never changes."""
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
        assert batch.born_BK is not None, "a run trains on what was sampled, and can prove it"
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
        self._parity = self._compared()

    def _compared(self) -> Metrics:
        """How far sampler and learner are apart, where the sampler has weights of its own."""
        if isinstance(self.policy, Sampler):
            return {}
        assert isinstance(self.policy, VllmSampler | VllmServer)
        return compared(self.policy, self.learner, self.chat, self._temperature, self._dtype)

    def forget(self) -> None:
        """See `Engine.forget`."""
        self.policy.forget()
        self.policy.stats = Stats()

    def metrics(self) -> Metrics:
        """See `Engine.metrics`."""
        return self.policy.stats.metrics() | self._parity

    async def save(self, folder: Path) -> dict[str, Any]:
        """See `Engine.save`: the model in Hugging Face layout, the rest as safetensors.

        With LoRA the adapter takes the model's place, as a PEFT folder.
        """
        learner = self.learner
        save_trained(self.model, self.tokenizer, folder, self._base)
        if learner.critic is not None:
            save_tensors(learner.critic.state_dict(), folder / "critic.safetensors")
        for name, optimizer in learner.named_optimizers().items():
            save_tensors(optimizer_tensors(optimizer), folder / f"{name}.safetensors")
        for name, masters in learner.named_masters().items():
            save_tensors(masters.tensors(), folder / f"{name}.safetensors")
        return {"version": self.version, "reference": self._reference()}

    async def load(self, folder: Path, state: dict[str, Any]) -> None:
        """See `Engine.load`."""
        learner = self.learner
        known = state["reference"]  # none where the guard switched the KL term on since
        here = self._reference()
        if here is not None and known not in (None, here):
            raise RagenError(
                "the model this run began with has changed since, so its KL reference is lost; "
                "put the old weights back where model.path points"
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

    def _reference(self) -> str | None:
        """What the reference is known by; with LoRA it is the base, which the adapter knows."""
        reference = self.learner.reference
        return None if reference is None or reference is self.model else hash_weights(reference)

    async def close(self) -> None:
        """See `Engine.close`: a rollback builds the next engine while this one is still named."""
        await self.policy.close()
        learner = self.learner
        modules: list[nn.Module | None] = [self.model, learner.critic, learner.reference]
        for module in modules:
            if module is not None:
                module.to("meta")  # no storage
        for optimizer in learner.named_optimizers().values():
            optimizer.state.clear()
            optimizer.param_groups.clear()
        learner.masters = learner.critic_masters = Masters(())


def measures_kl(config: Config) -> bool:
    """Whether a run has a KL term, or may come to one when the guard rolls it back."""
    guard = config.guard
    anchors = guard.remedy == "kl" and "rollback" in guard.responses.values()
    return config.loss.kl > 0 or anchors


def sampler_of(
    config: Config, model: PreTrainedModel, chat: Chat, path: str
) -> Sampler | VllmSampler | VllmServer:
    """What samples, as `rollout.sampler` says, with the weights of `model`, loaded from `path`.

    Raises:
        RagenError: vLLM is not there, or cannot sample from the model.
    """
    sampler, max_length = config.rollout.sampler, config.model.max_length
    if sampler == "local":
        return local_sampler(config, model, chat)
    if sampler == "vllm":
        return embedded_vllm(config, model, chat, path)
    return VllmServer(sampler, model, chat.end_ids, chat.decode, max_length=max_length)


def local_sampler(config: Config, model: PreTrainedModel, chat: Chat) -> Sampler:
    """The sampler of a model whose weights it reads in place."""
    return Sampler(
        model,
        chat.end_ids,
        chat.decode,
        slots=config.rollout.slots,
        max_length=config.model.max_length,
    )


def embedded_vllm(config: Config, model: PreTrainedModel, chat: Chat, path: str) -> VllmSampler:
    """An engine of vLLM in this process, with the weights of `model`, loaded from `path`.

    Raises:
        RagenError: As `Vllm`.
    """
    max_length = config.model.max_length
    vllm = Vllm(
        str(model.name_or_path),  # the folder that was loaded: the Hub need not be asked again
        dtype=config.model.dtype,
        max_length=max_length,
        slots=config.rollout.slots,
        gpu_memory=config.rollout.gpu_memory,
        adapter_rank=config.lora.rank if lora.has_adapters(model) else 0,
    )
    sampler = VllmSampler(vllm, chat.end_ids, chat.decode, max_length=max_length)
    if is_adapter(path):  # what it has loaded is the base alone
        sampler.push(model)
    return sampler


def policy_of(config: Config, path: str) -> tuple[WeightedPolicy, Chat]:
    """A policy to be evaluated, without a learner.

    A server is left to the run that trains on it: its place is taken by the local sampler.

    Raises:
        RagenError: As `LocalEngine`.
    """
    model, tokenizer = loaded(config, path)
    chat = chat_of(config, tokenizer)
    if config.rollout.sampler != "vllm":
        return local_sampler(config, model, chat), chat
    plain = lora.merge(model) if lora.has_adapters(model) else model
    return embedded_vllm(config, plain, chat, path), chat


def loaded(config: Config, path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer that a config asks for; of a PEFT folder its base, adapter on.

    Raises:
        RagenError: As `load_policy` and `ragen.models.put_on`.
    """
    asked = config.model
    model, tokenizer = load_policy(
        base_of(path),
        usable_device(),
        asked.dtype,
        max_length=asked.max_length,
    )
    if is_adapter(path):
        put_on(model, Path(path))
        if (Path(path) / "tokenizer_config.json").is_file():  # its template may be another
            tokenizer = load_tokenizer(Path(path), path, model)
    if asked.gradient_checkpointing:
        recompute_layers(model)
    return model, tokenizer


def chat_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The chat by a tokenizer's template, as a config asks for it.

    Raises:
        RagenError: As `Chat`.
    """
    return Chat(tokenizer, config.prompt.think, config.prompt.history_thoughts)


def prepared(config: Config, path: str, model: PreTrainedModel, critic: bool) -> PreTrainedModel:
    """A loaded model as it is trained: with its adapters for LoRA, without them otherwise.

    Args:
        config: The run's settings.
        path: What the model was loaded from.
        model: From `loaded`; an adapter on it is trained further, or merged.
        critic: Whether a critic is trained.

    Raises:
        RagenError: As `ragen.models.lora.attach`.
    """
    wanted = config.lora
    if not wanted.rank:
        return lora.merge(model) if lora.has_adapters(model) else model
    own_critic = critic and config.model.critic == "separate"
    lora.attach(
        model,
        ("policy", "critic") if own_critic else ("policy",),
        rank=wanted.rank,
        alpha=wanted.alpha,
        targets=wanted.targets,
        seed=config.seed,
        base=base_of(path),
    )
    return model


def save_trained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    base: str | None = None,
) -> None:
    """Write what was trained and its tokenizer: a model, or its adapter as a PEFT folder.

    `base` is what the adapter's base is known by, if known already.
    """
    if not lora.has_adapters(model):
        save_model(model, tokenizer, folder)
        return
    save_adapter(model, folder, base or fingerprint_of_base(model))
    tokenizer.save_pretrained(str(folder))


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
