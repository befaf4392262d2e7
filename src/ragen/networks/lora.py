"""LoRA: three roles share one frozen base, and each has small matrices (arXiv:2106.09685).

Each role that learns adds a pair of matrices to a linear layer W of the base:

    y = W x + (α / r) B A x        A (r, in),  B (out, r),  both float32, B zero at first

The policy computes with its own pair, the critic with another, the reference with the base alone.
There is one copy of W, and only the pairs have gradients and optimisers.

peft, which only this module imports, adds the pairs to an otherwise unchanged transformers model. A
model computes as the policy by default; `acting` switches the role temporarily.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ragen.core.errors import RagenError
from ragen.core.seeding import derive
from ragen.core.types import Role
from ragen.networks.pictures import reader_of
from ragen.networks.sizes import adapted

MATRICES = ("lora_A", "lora_B")


def has_adapters(model: PreTrainedModel) -> bool:
    """True if the model carries adapters."""
    return bool(getattr(model, "peft_config", None))


def attach(
    model: PreTrainedModel,
    roles: Sequence[Role],
    *,
    rank: int,
    alpha: int,
    targets: str,
    seed: int,
    base: str,
) -> None:
    """Add an adapter for each role; an existing adapter of the policy is kept if its shape matches.

    The base is frozen. A is uniform within ±1/√in as in peft, and depends on seed and role alone; B
    is zero, so that every role begins as the base. `targets` is ``all-linear``, or layer names
    separated by commas. `base` is the folder or hub id that a saved adapter names.

    Raises:
        RagenError: The model has no such layers, or its adapter has another shape.
    """
    from peft import LoraConfig

    shapes = {name: tuple(layer.weight.shape) for name, layer in linear_layers(model).items()}
    names = adapted(shapes, targets, rank)
    chosen: list[str] | str = names
    if reader_of(model) is not None:  # a pattern of paths: its tower has layers of the same names
        decoder = model.get_decoder()
        path = next(name for name, each in model.named_modules() if each is decoder)
        chosen = rf"{re.escape(path)}\..*\.({'|'.join(map(re.escape, names))})"
    for role in roles:
        if role == "policy" and has_adapters(model):
            _refuse_other_shape(model, rank, alpha, names)
            continue
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=chosen,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        _inject(model, role, config, base)
        generator = torch.Generator().manual_seed(derive(seed, "lora", role))
        for layer in _adapted_layers(model).values():
            drawn = torch.empty(layer.lora_A[role].weight.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            with torch.no_grad():
                layer.lora_A[role].weight.copy_(drawn)
                layer.lora_B[role].weight.zero_()
    _act(model, "policy")


def attach_saved(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Add the policy's adapter in the shape of a PEFT folder's config, but without its weights.

    Raises:
        ValueError, TypeError: The config does not fit the model.
        RagenError: The adapter changes the output layer or an embedding.
    """
    from peft import LoraConfig, PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    assert isinstance(config, LoraConfig)
    config.inference_mode, config.lora_dropout, config.init_lora_weights = False, 0.0, True
    _inject(model, "policy", config, base)
    _act(model, "policy")


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Linear layers, adapted or not, of the language model.

    Without the output layer: it is read as a matrix, and may be tied.
    """
    head, inside = model.get_output_embeddings(), {*model.get_decoder().modules()}
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and module in inside
        and not is_adapter_weight(name)
    }


@contextmanager
def acting(model: PreTrainedModel, role: Role) -> Iterator[None]:
    """Let a model with adapters compute as `role` inside, and as the policy again afterwards.

    The backward pass belongs inside too: gradient checkpointing computes activations again there.
    Models without adapters do not change: there each role has its own weights.
    """
    if role == "policy" or not has_adapters(model):
        yield
        return
    _act(model, role)
    try:
        yield
    finally:
        _act(model, "policy")


def adapter_of(model: PreTrainedModel, role: Role) -> nn.Module:
    """A role's adapter as a module: its parameters are those in the model, and no others."""
    return nn.ModuleDict(
        {
            name.replace(".", "/"): nn.ModuleDict(
                {matrix: getattr(layer, matrix)[role] for matrix in MATRICES}
            )
            for name, layer in _adapted_layers(model).items()
        }
    )


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The policy's matrices under their names in a PEFT folder."""
    weights = adapter_of(model, "policy").named_parameters()
    return {f"base_model.model.{name.replace('/', '.')}": weight for name, weight in weights}


def scale_of(model: PreTrainedModel) -> float:
    """The factor α / r of the policy's adapter, which all layers share (`attach`)."""
    layer = next(iter(_adapted_layers(model).values()))
    return float(layer.scaling["policy"])


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Add the policy's adapter to the base's weights for good; returns the same model, now plain.

    Computed in float32 and rounded once to the base's dtype. All parameters have gradients again.
    """
    for name, layer in _adapted_layers(model).items():
        layer.merge(adapter_names=["policy"])
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    return model.requires_grad_(True)


def is_adapter_weight(name: str) -> bool:
    """True if a parameter or module of this name belongs to an adapter."""
    return any(f".{matrix}." in name for matrix in MATRICES)


def _inject(model: PreTrainedModel, role: Role, config: Any, base: str) -> None:
    """Let peft add its layers, but none to the output layer, which is read as a matrix."""
    from peft import inject_adapter_in_model

    # peft's linear layers begin with random weights, which are replaced: draw none of the run's.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second role
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # Conv1D, handled
        inject_adapter_in_model(config, model, role)
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    head = model.get_output_embeddings()
    for name, layer in _adapted_layers(model).items():
        if layer is head or not isinstance(layer.get_base_layer(), nn.Linear | Conv1D):
            raise RagenError(
                f"the adapter changes {name}, but only linear layers before the output layer can "
                "be adapted here: merge it into its base with peft, and name the merged model"
            )
        for matrix in MATRICES:
            getattr(layer, matrix)[role].float()  # peft gives it the base's dtype
        layer.forward = partial(_forward, layer)


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The forward of peft's layer, bit for bit, with one tensor of its output's size beside it.

    peft makes three. They are freed between activations that are kept, and leave holes in the heap
    that larger tensors do not fit in. This doubled the memory of the activations.
    """
    result: Tensor = layer.base_layer(x)
    for role in () if layer.disable_adapters else layer.active_adapters:
        thin, wide = layer.lora_A[role], layer.lora_B[role]
        part = wide(thin(x.to(thin.weight.dtype))).mul_(layer.scaling[role])
        # With a bfloat16 base the sum is computed in float32, and rounded.
        result = (
            result.add_(part) if result.dtype == part.dtype else (result + part).to(result.dtype)
        )
    return result


def _act(model: PreTrainedModel, role: Role) -> None:
    """Compute as `role` from now on; all adapters keep their gradients.

    peft freezes other adapters, and a weight frozen in the backward pass silently gets no gradient.
    """
    for layer in _adapted_layers(model).values():
        layer.enable_adapters(role != "reference")
        if role != "reference":
            layer.set_adapter(role)
        layer.set_requires_grad(list(layer.lora_A))


def _adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    return {name: each for name, each in model.named_modules() if hasattr(each, "lora_A")}


def _refuse_other_shape(model: PreTrainedModel, rank: int, alpha: int, names: list[str]) -> None:
    layers = _adapted_layers(model)
    shapes = {(layer.r["policy"], layer.scaling["policy"]) for layer in layers.values()}
    expected = [name for name in linear_layers(model) if name.rpartition(".")[2] in names]
    if shapes != {(rank, alpha / rank)} or list(layers) != expected:
        actual = " or ".join(f"rank {r} and alpha {r * scale:g}" for r, scale in sorted(shapes))
        covered = ",".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise RagenError(
            f"the adapter that model.path names has {actual} on {len(layers)} layers ({covered}), "
            f"and lora.rank, lora.alpha and lora.targets ask for {rank} and {alpha} on "
            f"{len(expected)}: make them equal, or set lora.rank = 0 to merge the adapter and "
            "train all weights"
        )
