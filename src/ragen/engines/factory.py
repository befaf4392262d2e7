"""Builds the parts of an engine: model, tokenizer, adapters, chat and sampler."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen.chat.chat import Chat
from ragen.config.config import Config
from ragen.config.sections import LoraConfig, ModelConfig, RolloutConfig
from ragen.models.adapter_folder import put_on
from ragen.models.loading import load_policy, load_tokenizer, recompute_layers
from ragen.models.names import POLICY_FILES, base_of, is_adapter
from ragen.networks import lora
from ragen.networks.machine import available, usable_device
from ragen.networks.pictures import freeze_vision
from ragen.rollout.setup import make_chat
from ragen.sampling.local_sampler import Sampler
from ragen.sampling.server import VllmServer
from ragen.sampling.vllm import VllmSampler
from ragen.sampling.vllm_engine import Vllm
from ragen.sampling.weighted_policy import WeightedPolicy
from ragen.storage.checkpoint import STATE, is_checkpoint, sound

TOLERANCES = {"float32": 1e-2, "bfloat16": 0.5}
"""Largest allowed difference of a logprob, in nats, between two programs with the same weights.

On a CPU float32 agrees to 1e-5; on a GPU its products may be rounded to the 10 bits of TF32, some
1e-3 of a logit. A bfloat16 logit between 16 and 32 is a multiple of 1/8, and another order of
summation changes it, or a competing logit, by a few of these multiples."""


def make_sampler(
    model: PreTrainedModel,
    chat: Chat,
    path: str,
    settings: ModelConfig,
    rollout: RolloutConfig,
    *,
    adapter_rank: int = 0,
    tensor_parallel: int = 1,
) -> Sampler | VllmSampler | VllmServer:
    """The sampler that `rollout.sampler` names, with the weights of `model`.

    `path` is the folder or hub id that the model was loaded from.

    Raises:
        RagenError: vLLM is missing, cannot be reached, or cannot serve the model.
    """
    name, max_length = rollout.sampler, settings.max_length
    sampler: Sampler | VllmSampler | VllmServer
    if name == "local":
        sampler = Sampler(model, chat, slots=rollout.slots, max_length=max_length)
    elif name == "vllm":
        vllm = Vllm(
            str(model.name_or_path),  # the folder that was loaded; the Hub is not asked again
            dtype=settings.dtype,
            max_length=max_length,
            slots=rollout.slots,
            gpu_memory=rollout.gpu_memory,
            adapter_rank=adapter_rank if lora.has_adapters(model) else 0,
            tensor_parallel=tensor_parallel,
        )
        sampler = VllmSampler(vllm, chat, max_length)
        if is_adapter(path):  # vLLM has loaded only the base
            sampler.push(model)
    else:
        sampler = VllmServer(name, model, chat, max_length)
    sampler.source = path
    return sampler


def make_policy(config: Config, path: str) -> tuple[WeightedPolicy, Chat]:
    """A policy for evaluation, without a learner.

    A server belongs to the run that trains with it, so the local sampler takes its place here.
    """
    model, tokenizer = load_model(config.model, path)
    chat, rollout = make_chat(config, tokenizer), config.rollout
    if rollout.sampler != "vllm":
        rollout = rollout.model_copy(update={"sampler": "local"})
    elif lora.has_adapters(model):
        model = lora.merge(model)
    parallel = config.engine.tensor_parallel
    return make_sampler(model, chat, path, config.model, rollout, tensor_parallel=parallel), chat


def load_model(
    settings: ModelConfig, path: str, device: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model at `path`, with its tokenizer; a PEFT folder gives base and adapter.

    Raises:
        RagenError: The model or its adapter cannot be loaded, or a run's checkpoint is damaged.
    """
    if is_checkpoint(Path(path)) and (Path(path) / STATE).exists():
        sound(Path(path), POLICY_FILES)
    device = device or usable_device()
    model, tokenizer = load_policy(
        base_of(path),
        device,
        settings.dtype,
        max_length=settings.max_length,
        free=available(device),
    )
    if is_adapter(path):
        put_on(model, Path(path))
        if (Path(path) / "tokenizer_config.json").is_file():  # its chat template may differ
            tokenizer = load_tokenizer(Path(path), path, model)
    if settings.gradient_checkpointing:
        recompute_layers(model)
    return model, tokenizer


def prepare_model(
    model: PreTrainedModel,
    path: str,
    settings: LoraConfig,
    seed: int,
    own_critic: bool = False,
    train_vision: bool = True,
) -> PreTrainedModel:
    """A model of `load_model` made ready for training: with adapters for LoRA, else without.

    An adapter that the model already has is trained further, or merged if LoRA is off. With
    `own_critic`, a critic gets an adapter of its own. Without `train_vision`, or with LoRA, vision
    tower and projector stay as they are.
    """
    if not settings.rank:
        if lora.has_adapters(model):
            lora.merge(model)
        if not train_vision:
            freeze_vision(model)
        return model
    lora.attach(
        model,
        ("policy", "critic") if own_critic else ("policy",),
        rank=settings.rank,
        alpha=settings.alpha,
        targets=settings.targets,
        seed=seed,
        base=base_of(path),
    )
    return model
