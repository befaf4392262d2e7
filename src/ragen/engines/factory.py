"""Making what a run needs from its config: model, tokenizer, adapters, chat and sampler."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen.config.config import Config
from ragen.engines.engine import WeightedPolicy
from ragen.engines.sampler import Sampler
from ragen.engines.sampler_server import VllmServer
from ragen.engines.sampler_vllm import VllmSampler
from ragen.engines.vllm_engine import Vllm
from ragen.models import lora
from ragen.models.adapter_folder import fingerprint_of_base, put_on, save_adapter
from ragen.models.loading import (
    load_policy,
    load_tokenizer,
    recompute_layers,
    save_model,
    usable_device,
)
from ragen.models.names import base_of, is_adapter
from ragen.rollout.chat import Chat


def may_use_kl(config: Config) -> bool:
    """Whether a run has a KL term, or may get one when the guard rolls it back."""
    guard = config.guard
    rollback_adds_kl = guard.remedy == "kl" and "rollback" in guard.responses.values()
    return config.loss.kl > 0 or rollback_adds_kl


def make_sampler(
    config: Config, model: PreTrainedModel, chat: Chat, path: str
) -> Sampler | VllmSampler | VllmServer:
    """The sampler that `rollout.sampler` names, with the weights of `model`, loaded from `path`.

    Raises:
        RagenError: vLLM is missing, cannot be reached, or cannot serve the model.
    """
    sampler, max_length = config.rollout.sampler, config.model.max_length
    if sampler == "local":
        return make_local_sampler(config, model, chat)
    if sampler == "vllm":
        return make_vllm_sampler(config, model, chat, path)
    return VllmServer(sampler, model, chat.end_ids, chat.decode, max_length=max_length)


def make_local_sampler(config: Config, model: PreTrainedModel, chat: Chat) -> Sampler:
    """A sampler that reads the model's weights in place."""
    return Sampler(
        model,
        chat.end_ids,
        chat.decode,
        slots=config.rollout.slots,
        max_length=config.model.max_length,
    )


def make_vllm_sampler(config: Config, model: PreTrainedModel, chat: Chat, path: str) -> VllmSampler:
    """A vLLM engine in this process, with the weights of `model`, loaded from `path`.

    Raises:
        RagenError: As `Vllm`.
    """
    max_length = config.model.max_length
    vllm = Vllm(
        str(model.name_or_path),  # the folder that was loaded, so that the Hub is not asked again
        dtype=config.model.dtype,
        max_length=max_length,
        slots=config.rollout.slots,
        gpu_memory=config.rollout.gpu_memory,
        adapter_rank=config.lora.rank if lora.has_adapters(model) else 0,
    )
    sampler = VllmSampler(vllm, chat.end_ids, chat.decode, max_length=max_length)
    if is_adapter(path):  # it has loaded the base alone
        sampler.push(model)
    return sampler


def make_policy(config: Config, path: str) -> tuple[WeightedPolicy, Chat]:
    """A policy for evaluation, without a learner.

    A server belongs to the run that trains with it, so the local sampler takes its place here.

    Raises:
        RagenError: As `LocalEngine`.
    """
    model, tokenizer = load_model(config, path)
    chat = make_chat(config, tokenizer)
    if config.rollout.sampler != "vllm":
        return make_local_sampler(config, model, chat), chat
    plain = lora.merge(model) if lora.has_adapters(model) else model
    return make_vllm_sampler(config, plain, chat, path), chat


def load_model(config: Config, path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer that a config names; for a PEFT folder the base with the adapter.

    Raises:
        RagenError: As `load_policy` and `put_on`.
    """
    settings = config.model
    model, tokenizer = load_policy(
        base_of(path),
        usable_device(),
        settings.dtype,
        max_length=settings.max_length,
    )
    if is_adapter(path):
        put_on(model, Path(path))
        if (Path(path) / "tokenizer_config.json").is_file():  # its template may be another
            tokenizer = load_tokenizer(Path(path), path, model)
    if settings.gradient_checkpointing:
        recompute_layers(model)
    return model, tokenizer


def make_chat(config: Config, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The chat of a tokenizer's template, with a config's settings.

    Raises:
        RagenError: As `Chat`.
    """
    return Chat(tokenizer, config.prompt.think, config.prompt.history_thoughts)


def prepare_model(
    config: Config, path: str, model: PreTrainedModel, critic: bool
) -> PreTrainedModel:
    """A loaded model made ready for training: with adapters for LoRA, without them otherwise.

    The model comes from `load_model(config, path)`. Its adapter is trained further, or merged if
    LoRA is off.

    Raises:
        RagenError: As `ragen.models.lora.attach`.
    """
    settings = config.lora
    if not settings.rank:
        return lora.merge(model) if lora.has_adapters(model) else model
    own_critic = critic and config.model.critic == "separate"
    lora.attach(
        model,
        ("policy", "critic") if own_critic else ("policy",),
        rank=settings.rank,
        alpha=settings.alpha,
        targets=settings.targets,
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
    """Write the trained model, or its adapter as a PEFT folder, with the tokenizer.

    `base` is the `fingerprint_of_base`, if known already.
    """
    if not lora.has_adapters(model):
        save_model(model, tokenizer, folder)
        return
    save_adapter(model, folder, base or fingerprint_of_base(model))
    tokenizer.save_pretrained(str(folder))
