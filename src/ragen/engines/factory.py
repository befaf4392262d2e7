"""Builds what a run needs from its config: model, tokenizer, adapters, chat, sampler, learner."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragen.algorithms.advantages import find_estimator
from ragen.algorithms.estimator import needs_values
from ragen.chat.chat import Chat
from ragen.config.config import Config
from ragen.config.sections import most_turns
from ragen.core.errors import RagenError
from ragen.learning.learner import Learner
from ragen.learning.ranks import ALONE, Ranks
from ragen.models.adapter_folder import put_on
from ragen.models.loading import load_policy, load_tokenizer, recompute_layers
from ragen.models.names import POLICY_FILES, base_of, is_adapter
from ragen.networks import lora
from ragen.networks.machine import available, usable_device
from ragen.rollout.setup import make_chat
from ragen.sampling.local_sampler import Sampler
from ragen.sampling.sampler import WeightedPolicy
from ragen.sampling.server import VllmServer
from ragen.sampling.vllm import VllmSampler
from ragen.sampling.vllm_engine import Vllm
from ragen.storage.checkpoint import STATE, is_checkpoint, sound

TOLERANCES = {"float32": 1e-2, "bfloat16": 0.5}
"""Largest allowed difference of a logprob, in nats, between two programs with the same weights.

On a CPU float32 agrees to 1e-5; on a GPU its products may be rounded to the 10 bits of TF32, some
1e-3 of a logit. A bfloat16 logit between 16 and 32 is a multiple of 1/8, and another order of
summation changes it, or a competing logit, by a few of these multiples."""

ONE_ARITHMETIC_TOLERANCE = 1e-3
"""The tolerance of a sampler that computes as the learner does, at temperatures of 1 and above.
The worst of 50,000 tokens of a trained model differs by 1.1e-4. A lower temperature divides the
logits, and their rounding errors with them."""


def make_sampler(
    name: str, config: Config, model: PreTrainedModel, chat: Chat, path: str
) -> Sampler | VllmSampler | VllmServer:
    """The sampler of this name (`rollout.sampler`), with the weights of `model`.

    `path` is the folder or hub id that the model was loaded from.

    Raises:
        RagenError: vLLM is missing, cannot be reached, or cannot serve the model.
    """
    end_ids, decode, slots = chat.end_ids, chat.decode, config.rollout.slots
    max_length, control_ids = config.model.max_length, chat.control_ids
    if name == "local":
        return Sampler(
            *(model, end_ids, decode),
            slots=slots,
            max_length=max_length,
            control_ids=control_ids,
        )
    if name != "vllm":
        return VllmServer(
            name, model, end_ids, decode, max_length=max_length, control_ids=control_ids
        )
    vllm = Vllm(
        str(model.name_or_path),  # the folder that was loaded, so that the Hub is not asked again
        dtype=config.model.dtype,
        max_length=max_length,
        slots=slots,
        gpu_memory=config.rollout.gpu_memory,
        adapter_rank=config.lora.rank if lora.has_adapters(model) else 0,
        tensor_parallel=config.engine.tensor_parallel,
    )
    sampler = VllmSampler(vllm, end_ids, decode, max_length=max_length, control_ids=control_ids)
    if is_adapter(path):  # vLLM has loaded only the base
        sampler.push(model)
    return sampler


def make_policy(config: Config, path: str) -> tuple[WeightedPolicy, Chat]:
    """A policy for evaluation, without a learner.

    A server belongs to the run that trains with it, so the local sampler takes its place here.
    """
    model, tokenizer = load_model(config, path)
    chat = make_chat(config, tokenizer)
    name = "vllm" if config.rollout.sampler == "vllm" else "local"
    if name == "vllm" and lora.has_adapters(model):
        model = lora.merge(model)
    policy = make_sampler(name, config, model, chat, path)
    policy.source = path
    return policy, chat


def load_model(
    config: Config, path: str, device: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model at `path` under a config, with its tokenizer; a PEFT folder gives base and adapter.

    Without a `device`, the model is on that of `usable_device`.

    Raises:
        RagenError: As `load_policy` and `put_on`, or a run's checkpoint is damaged.
    """
    if is_checkpoint(Path(path)) and (Path(path) / STATE).exists():
        sound(Path(path), POLICY_FILES)
    settings, base, device = config.model, base_of(path), device or usable_device()
    model, tokenizer = load_policy(
        *(base, device, settings.dtype),
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
    config: Config, path: str, model: PreTrainedModel, critic: bool
) -> PreTrainedModel:
    """A model of `load_model` made ready for training: with adapters for LoRA, else without.

    An adapter that the model already has is trained further, or merged if LoRA is off. `critic`
    says whether a critic is trained: unless it is shared, it gets an adapter of its own.
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


def load_for_training(
    config: Config, path: str, device: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, ready for training, and the tokenizer of a run that begins with `path`.

    Raises:
        RagenError: As `load_model` and `prepare_model`, or the KL reference would not be the policy
            that the run begins with.
    """
    model, tokenizer = load_model(config, path, device)
    if config.lora.rank and config.may_use_kl and lora.has_adapters(model):
        raise RagenError(
            "the KL reference is the policy that the run begins with, but with LoRA it is the "
            'base without an adapter: set loss.kl = 0 and no guard.remedy = "kl", or merge the '
            "adapter first (for a run: `ragen export RUN --merge`) and name the merged model"
        )
    return prepare_model(config, path, model, has_critic(config)), tokenizer


def has_critic(config: Config) -> bool:
    """True if a run trains a critic."""
    return needs_values(find_estimator(config.advantage.name))


def make_learner(config: Config, model: PreTrainedModel, ranks: Ranks = ALONE) -> Learner:
    """The learner of a run, for a model of `load_for_training`."""
    temperature, exact = config.rollout.temperature, config.one_arithmetic
    bound = ONE_ARITHMETIC_TOLERANCE if exact else TOLERANCES[config.model.dtype]
    return Learner(
        model,
        config.update,
        config.loss,
        critic=has_critic(config),
        shared=config.model.critic == "shared",
        reference=config.loss.kl > 0,
        steps=config.steps,
        temperature=temperature,
        longest=most_turns(config.env) * config.rollout.max_tokens,
        mismatch_bound=bound / min(1.0, temperature),
        on_policy=config.engine.max_staleness == 0,
        refuses_mismatch=exact and config.guard.responses.get("mismatch", "stop") == "stop",
        ranks=ranks,
    )
