"""LoRA: three roles on one frozen base, each with thin matrices of its own (arXiv:2106.09685).

Beside a linear layer W of the base stands, for each role that learns, a pair of matrices:

    y = W x + (α / r) B A x        A (r, in),  B (out, r),  both float32, B zero at first

The policy computes with its own pair, the critic with another, the reference with none: then the
base alone speaks. There is one copy of W, and only the pairs have gradients and optimisers.

peft puts the pairs into the model, which stays the transformers model that it was, and defines the
folder that an adapter is saved as; no other module knows peft. A model at rest is the policy;
`acting` makes it another role for a while.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ragen.core.errors import RagenError
from ragen.core.seeding import derive
from ragen.core.types import Role
from ragen.models.names import embedded_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a PEFT folder."""
BASE = "base.json"
"""Beside them, the `fingerprint_of_base` of the model that the adapter was trained on."""
MATRICES = ("lora_A", "lora_B")
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "init_lora_weights": (True, False, "gaussian"),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""What an adapter's config must say for the equation above to be all there is to it."""


def adapted(model: PreTrainedModel) -> bool:
    """Whether the model carries adapters."""
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
    """Give roles an adapter each; a policy's that is there already stays and must be of this shape.

    The base is frozen. A is drawn from generators that follow from the seed and the role alone,
    uniformly within ±1/√in as in peft; B is zero, so that every role begins as the base.

    Args:
        model: The base, or the base with the policy's adapter on it (`put_on`).
        roles: ``"policy"``, or ``"policy"`` and ``"critic"``.
        rank: Rows of A, columns of B: r.
        alpha: The adapter counts α / r times.
        targets: ``all-linear``, or names of layers with commas in between.
        seed: The run's seed.
        base: The folder or hub id of the base, by which the saved adapter names it.

    Raises:
        RagenError: The model has no such layers, or its adapter has another shape.
    """
    from peft import LoraConfig

    names = target_names(model, targets, rank)
    for role in roles:
        if role == "policy" and adapted(model):
            _refuse_other_shape(model, rank, alpha, names)
            continue
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        _inject(model, role, config, base)
        generator = torch.Generator().manual_seed(derive(seed, "lora", role))
        for layer in _layers(model).values():
            drawn = torch.empty(layer.lora_A[role].weight.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            with torch.no_grad():
                layer.lora_A[role].weight.copy_(drawn)
                layer.lora_B[role].weight.zero_()
    _act(model, "policy")


def target_names(model: PreTrainedModel, targets: str, rank: int) -> list[str]:
    """Names of the layers that get an adapter, each the last part of a module's name.

    Those that may are all linear layers but the output layer, which is read as a matrix and may be
    the embedding.

    Raises:
        RagenError: The model has no layer of one of these names, or none of so high a rank.
    """
    layers = linear_layers(model)
    highest = max((min(layer.weight.shape) for layer in layers.values()), default=0)
    if rank > highest:
        raise RagenError(
            f"lora.rank = {rank}: no layer of the model has a rank above {highest}, so an adapter "
            "would be larger than what it adapts; set fewer, or lora.rank = 0 to train all weights"
        )
    there = sorted({name.rpartition(".")[2] for name in layers})
    if targets == "all-linear":
        return there
    wanted = [name.strip() for name in targets.split(",")]
    for name in wanted:
        if name not in there:
            raise RagenError(
                f"lora.targets: the model has no linear layer {name!r} that may get an adapter; "
                f"there are {', '.join(there)}, and all-linear for all of them"
            )
    return wanted


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers that may get an adapter, by name, adapted or not."""
    head = model.get_output_embeddings()
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and not _is_thin(name)
    }


@contextmanager
def acting(model: PreTrainedModel, role: Role) -> Iterator[None]:
    """Let a model with adapters compute as `role` inside, and as the policy again afterwards.

    The backward pass belongs inside too: where activations are computed twice (gradient
    checkpointing), the second time must be in the same role. Other models are left alone: there
    each role has weights of its own.
    """
    if role == "policy" or not adapted(model):
        yield
        return
    _act(model, role)
    try:
        yield
    finally:
        _act(model, "policy")


def adapter_of(model: PreTrainedModel, role: Role) -> nn.Module:
    """A role's adapter alone: a module whose parameters are those in the model, and no others."""
    return nn.ModuleDict(
        {
            name.replace(".", "/"): nn.ModuleDict(
                {matrix: getattr(layer, matrix)[role] for matrix in MATRICES}
            )
            for name, layer in _layers(model).items()
        }
    )


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Add the policy's adapter to the base's weights for good; returns the same model, now plain.

    Computed in float32 and rounded once to the base's dtype. All parameters have gradients again.
    """
    for name, layer in _layers(model).items():
        layer.merge(adapter_names=["policy"])
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False
    return model.requires_grad_(True)


def save_adapter(model: PreTrainedModel, folder: Path, base: str | None = None) -> None:
    """Write the policy's adapter as a PEFT folder: for peft, transformers and vLLM.

    Args:
        model: With adapters.
        folder: Where `CONFIG` and `WEIGHTS` go.
        base: `fingerprint_of_base`, for a folder that is kept: whoever loads it compares.

    Raises:
        OSError, SafetensorError: The disk is full or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in _tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config: Any = copy.copy(model.peft_config["policy"])
    config.inference_mode = True
    if isinstance(config.target_modules, set):  # its order would differ from process to process
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    if base is not None:
        (folder / BASE).write_text(json.dumps({"fingerprint": base}))


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Give the policy's adapter, which is in the model, the weights of a PEFT folder.

    Raises:
        RagenError: The weights cannot be read, are not finite, fit another model, or were trained
            on another base.
    """
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RagenError(f"cannot read the adapter {path}: {error}") from error
    known = _read(folder / BASE).get("fingerprint") if (folder / BASE).exists() else None
    if known not in (None, fingerprint_of_base(model)):
        name = model.peft_config["policy"].base_model_name_or_path
        raise RagenError(
            f"the adapter {folder} was trained on another base than {name} is now: put the "
            "weights that it was trained on back there"
        )
    own = _tensors(model)
    for name in sorted(own.keys() | tensors.keys()):
        here, there = (list(each[name].shape) if name in each else None for each in (own, tensors))
        if here != there:
            raise RagenError(
                f"the adapter {folder} is of another model: {name} is {there or 'missing'} in it "
                f"and {here or 'nowhere'} here"
            )
        if not bool(torch.isfinite(tensors[name]).all()):
            raise RagenError(f"the adapter {folder} is damaged: {name} holds NaN or infinity")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(tensors[name])


def is_adapter(path: str | Path) -> bool:
    """Whether a path is a PEFT folder.

    Raises:
        RagenError: It is a model's folder too.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        return False
    if (folder / "config.json").is_file():
        raise RagenError(
            f"{folder} holds a model and an adapter ({CONFIG}): move one of them into a folder of "
            "its own, and name the one that is meant"
        )
    return True


def base_of(path: str | Path) -> str:
    """The folder or hub id of the base: of a PEFT folder the one it names, else the path itself.

    An embedded model that was part of another installation is found in this one.

    Raises:
        RagenError: The config cannot be read or names none, or the folder that it names is gone.
    """
    if not is_adapter(path):
        return str(path)
    folder = Path(path)
    name = str(_read(folder / CONFIG).get("base_model_name_or_path") or "")
    if not name:
        raise RagenError(
            f"{folder / CONFIG} names no base model: write its folder or hub id there, as "
            "base_model_name_or_path"
        )
    base = Path(name)
    embedded = embedded_folder(base.name)
    if base.is_dir():
        return name
    if base.parts[-4:-1] == ("ragen", "models", "bases") and embedded.is_dir():
        return str(embedded)
    if base.is_absolute():
        raise RagenError(
            f"the adapter {folder} belongs to the model {name}, which is not there any more: put "
            "it back, or put a link there to where it is now"
        )
    return name


def put_on(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapter of a PEFT folder on its base, as the policy's.

    Raises:
        RagenError: As `load_adapter`, or the adapter is more than LoRA.
    """
    from peft import LoraConfig, PeftConfig

    raw = _read(folder / CONFIG)
    for key, allowed in PLAIN.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise RagenError(
                f"the adapter {folder} is not plain LoRA ({key} = {json.dumps(raw[key])} in "
                f"{CONFIG}): merge it into its base with peft, and name the merged model"
            )
    try:
        config = PeftConfig.from_pretrained(str(folder))
        assert isinstance(config, LoraConfig)
        config.inference_mode, config.lora_dropout, config.init_lora_weights = False, 0.0, True
        _inject(model, "policy", config, base_of(folder))
    except (ValueError, TypeError) as error:
        raise RagenError(f"the adapter {folder} does not fit its base: {error}") from error
    load_adapter(model, folder)
    _act(model, "policy")


def fingerprint_of_base(model: PreTrainedModel) -> str:
    """A hash of the base's weights by which an adapter knows it again.

    The weights are rounded to bfloat16 first: loaded as float32 or as bfloat16, a base is the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        if not _is_thin(name):
            digest.update(name.replace(".base_layer.", ".").encode())
            rounded = weight.detach().to(torch.bfloat16).cpu().contiguous()
            digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _inject(model: PreTrainedModel, role: Role, config: Any, base: str) -> None:
    """Let peft build its layers; their first weights are the caller's business.

    Raises:
        RagenError: The output layer is among them, which is read as a matrix, or an embedding.
    """
    # Draws nothing that anyone would miss; peft's linear layers begin with random weights.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second role
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # Conv1D, handled
        model.add_adapter(config, role)
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    head = model.get_output_embeddings()
    for name, layer in _layers(model).items():
        if layer is head or not isinstance(layer.get_base_layer(), nn.Linear | Conv1D):
            raise RagenError(
                f"the adapter changes {name}, and only linear layers before the output layer may "
                "have one here: merge it into its base with peft, and name the merged model"
            )
        for matrix in MATRICES:
            getattr(layer, matrix)[role].float()  # peft gives it the base's dtype


def _act(model: PreTrainedModel, role: Role) -> None:
    """Compute as `role` from now on, all adapters keeping their gradients.

    peft freezes those that it switches off, and a weight that is frozen when the backward pass
    comes gets no gradient, without a word, even where the forward pass made use of it.
    """
    for layer in _layers(model).values():
        layer.enable_adapters(role != "reference")
        if role != "reference":
            layer.set_adapter(role)
        layer.set_requires_grad(list(layer.lora_A))


def _layers(model: PreTrainedModel) -> dict[str, Any]:
    """The layers with adapters, by name, in the model's order."""
    if not adapted(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: each for name, each in model.named_modules() if isinstance(each, LoraLayer)}


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The policy's matrices under their names in a PEFT folder."""
    return {
        f"base_model.model.{name}.{matrix}.weight": getattr(layer, matrix)["policy"].weight
        for name, layer in _layers(model).items()
        for matrix in MATRICES
    }


def _is_thin(name: str) -> bool:
    """Whether a parameter or module of this name is an adapter's."""
    return any(f".{matrix}." in name for matrix in MATRICES)


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RagenError(f"cannot read the adapter {path}: {error}") from error
    if not isinstance(read, dict):
        raise RagenError(f"cannot read the adapter {path}: it is no object")
    return read


def _refuse_other_shape(model: PreTrainedModel, rank: int, alpha: int, names: list[str]) -> None:
    layers = _layers(model)
    shapes = {(layer.r["policy"], layer.scaling["policy"]) for layer in layers.values()}
    wanted = [name for name in linear_layers(model) if name.rpartition(".")[2] in names]
    if shapes != {(rank, alpha / rank)} or list(layers) != wanted:
        found = " or ".join(f"rank {r} and alpha {r * scale:g}" for r, scale in sorted(shapes))
        covered = ",".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise RagenError(
            f"the adapter that model.path names has {found} on {len(layers)} layers ({covered}), "
            f"and lora.rank, lora.alpha and lora.targets ask for {rank} and {alpha} on "
            f"{len(wanted)}: set them so, or lora.rank = 0 to merge it and train all weights"
        )
