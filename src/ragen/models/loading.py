"""Loading and saving causal language models and tokenizers, with checks that training needs."""

# mypy: allow-untyped-calls

from __future__ import annotations

import copy
import ctypes
import platform
import re
from contextlib import nullcontext
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ragen.core.errors import NotFiniteError, RagenError
from ragen.core.pictures import Picture
from ragen.models.adapter_folder import fingerprint_of_base, save_adapter
from ragen.models.hub import model_folder
from ragen.models.model_files import check_files, shapes, weight_files
from ragen.models.names import WORDS
from ragen.models.pictures import Reader, read_reader, token_types
from ragen.models.pretrained import load_errors, model_class, model_config
from ragen.networks.attention import Attending
from ragen.networks.decoder import HFDecoder, logits_of
from ragen.networks.device import to_device
from ragen.networks.lora import has_adapters
from ragen.networks.model import backbone, hidden_states
from ragen.networks.pictures import attach_reader, features, reader_of
from ragen.networks.precision import shape_of, widen_products

PROBE = "Go up, 你好 P _ G\n  x = 12345; don't  é🙂\t<b>\n\n end"
"""A text of all kinds, on which two tokenizers are compared."""
SLACK = 2**20
"""Numbers beyond those in the weights' files that a model may need: masks, frequencies."""


def load_policy(
    path: str | Path, device: str, dtype: str, *, max_length: int = 0, free: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    `path` is a local folder in Hugging Face layout or the id of a model on the Hub, `dtype` is
    ``float32`` or ``bfloat16``, `max_length` counts tokens, and `free` is how many bytes the
    weights may take. The model has no dropout: sampling and learning must compute the same.

    Raises:
        RagenError: The model does not exist, is not a causal language model, or has fewer positions
            than `max_length`; its weights are missing, pickled, too large or not finite; its
            tokenizer is missing or does not fit; or its output layer is more than a matrix.
    """
    logging.disable_progress_bar()
    name = str(path)
    folder = model_folder(path)
    config = model_config(folder, name, max_length)
    files = weight_files(folder, name)
    _check_size(config, files, name, getattr(torch, dtype).itemsize, free)
    model = _load_weights(folder, name, config, dtype)
    _tell_own_head(model)
    tokenizer = _read_tokenizer(folder, name)
    _check_fit(tokenizer, model, name)
    for weight_name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise RagenError(
                f"the weights of '{name}' are damaged: {weight_name} holds NaN or infinity"
            )
    with load_errors(name):
        torch.nn.Module.to(model, device)
        model.eval()
    if device == "cpu":
        keep_freed_memory()
        widen_products(model)
    with load_errors(name, str(folder / "config.json")):
        _check_output_layer(model, name)
    with load_errors(name, "its picture processor"):
        reader = read_reader(folder, config, tokenizer)
    if reader is not None:
        attach_reader(reader, model, model.get_decoder(), tokenizer)
        with load_errors(name, "its picture processor does not fit its weights"):
            _check_pictures(model, reader, name)
    _check_saving(model, folder)
    return model, tokenizer


def _check_size(
    config: PreTrainedConfig, files: list[Path], name: str, itemsize: int, free: int | None
) -> None:
    """Refuse a config that describes more than its weights hold: transformers makes up the rest."""
    held = sum(map(prod, chain.from_iterable(shapes(file).values() for file in files)))
    with load_errors(name, "config.json"), torch.device("meta"):
        model: PreTrainedModel = model_class(config).from_config(
            copy.deepcopy(config), trust_remote_code=False
        )
    tensors = {id(each): each.numel() for each in chain(model.parameters(), model.buffers())}
    needed = sum(tensors.values())
    if needed > 2 * held + SLACK:
        raise RagenError(
            f"the weights of '{name}' do not fit its config.json, which describes {needed} numbers "
            f"where the files hold {held}: copy or download the model again"
        )
    if free is not None and needed * itemsize > free:
        raise RagenError(
            f"the weights of '{name}' take {needed * itemsize / 2**30:.1f} GiB, and "
            f'{free / 2**30:.1f} GiB are free: use a smaller model, or model.dtype = "bfloat16"'
        )


def _check_saving(model: PreTrainedModel, folder: Path) -> None:
    """Write the configs once: transformers reads some that it refuses to write to a checkpoint."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # often a temperature without do_sample, which RAGEN does not read
        model.generation_config.do_sample = True
    cause = "config.json or generation_config.json could not be saved with a checkpoint"
    with TemporaryDirectory() as scratch, load_errors(folder, cause):
        model.config.save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)


def _load_weights(folder: Path, name: str, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it would print a table of what is one error line here
    try:
        with load_errors(name, "the weights or generation_config.json"):
            loaded: Any = model_class(config).from_pretrained(
                str(folder),
                config=config,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    finally:
        logging.set_verbosity(level)
    model: PreTrainedModel = loaded[0]
    # transformers fills weights that are missing or do not fit with random numbers.
    for key, *_ in sorted(loaded[1]["mismatched_keys"]):
        raise RagenError(f"the weights of '{name}' do not fit its config.json: {key} differs")
    for key in sorted(loaded[1]["missing_keys"]):
        raise RagenError(
            f"the weights of '{name}' are not those of a causal language model: {key} is missing"
        )
    for key in sorted(loaded[1]["unexpected_keys"]):
        if _belongs_to_layer(key, model):
            raise RagenError(
                f"the weights of '{name}' do not fit its config.json, which describes no "
                f"{key[:80]}: copy or download the model again"
            )
    return model


def _tell_own_head(model: PreTrainedModel) -> None:
    """Let the config say so if the files hold an output layer other than the embedding.

    transformers takes that layer even where the config ties the two. Programs that go by the config
    would read a saved model as another one.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False


def _belongs_to_layer(key: str, model: PreTrainedModel) -> bool:
    """True if weights that the model does not use belong to its layers, or to one more.

    Without these weights, RAGEN would train a different function. Weights of other parts, such as a
    vision tower, may be left out, and so may layers that predict further tokens.
    """
    modules = dict(model.base_model.named_modules()) | dict(model.named_modules())
    owner, _, kind = key.rpartition(".")
    found = re.match(r"(.+?)\.(\d+)\.", key)
    layers: Any = modules.get(found[1]) if found else None
    if found is None or not isinstance(layers, torch.nn.ModuleList):
        return False
    extra = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    if len(layers) <= int(found[2]) < len(layers) + extra:
        return False
    # In old files, `attn.bias` is a mask.
    is_mask = kind == "bias" and owner in modules and any(modules[owner].children())
    return kind in ("weight", "bias") and not is_mask


def load_tokenizer(
    folder: Path, name: str | Path, model: PreTrainedModel | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, checked against the model if one is given.

    Raises:
        RagenError: It is missing, malformed, or has an id too large for the embedding.
    """
    check_files(folder)
    tokenizer = _read_tokenizer(folder, name)
    if model is not None:
        _check_fit(tokenizer, model, name)
        attach_reader(reader_of(model), tokenizer)
    elif (folder / "config.json").is_file():
        config = model_config(folder, name)
        with load_errors(name, "its picture processor"):
            attach_reader(read_reader(folder, config, tokenizer), tokenizer)
    return tokenizer


def _read_tokenizer(folder: Path, name: str | Path) -> PreTrainedTokenizerBase:
    file, saved = folder / WORDS, None
    with load_errors(name, "it has no usable tokenizer"):
        if file.is_file():
            saved = Tokenizer.from_file(str(file))
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # transformers builds some tokenizers from the vocabulary alone, by the class that the
        # folder names. It takes DeepSeek's for a Llama tokenizer, which loses spaces and Chinese.
        if saved and backend and _ids(backend) != _ids(saved):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
            _ids(tokenizer.backend_tokenizer)
    # transformers replaces a missing tokenizer by one that has special tokens alone.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise RagenError(f"the model '{name}' has no tokenizer; save one in its folder")
    with load_errors(name, "its tokenizer cannot encode and decode a text"):
        tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False))
    found: PreTrainedTokenizerBase = tokenizer
    return found


def _ids(backend: Tokenizer) -> list[int]:
    """The ids of `PROBE`, once the tokenizer neither truncates nor pads nor samples."""
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None) is not None:  # it skips merges at random
        backend.model.dropout = None
    return backend.encode(PROBE, add_special_tokens=False).ids


def _check_fit(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str | Path
) -> None:
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if largest >= rows:
        raise RagenError(
            f"the tokenizer of '{name}' does not fit its weights: token {token!r} has the id "
            f"{largest}, but the embedding has {rows} rows; use the model's own tokenizer"
        )


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory in the process; saves small models 10–20 % of CPU time.

    By default glibc returns every large block and requests it again, page by page.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # the names in malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 2**30)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 2**26)


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    base: str | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> None:
    """Write the tokenizer with the model, or with its adapter as a PEFT folder.

    `base` and `tensors` are those of `save_adapter`; without an adapter, `tensors` are all weights.
    """
    logging.disable_progress_bar()
    if has_adapters(model):
        save_adapter(model, folder, base or fingerprint_of_base(model), tensors)
    else:
        model.save_pretrained(folder, state_dict=tensors)
    save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer, and how its model reads pictures."""
    tokenizer.save_pretrained(folder)
    reader: Reader | None = reader_of(tokenizer)
    if reader is not None:
        reader.save(folder)


def recompute_layers(model: PreTrainedModel) -> None:
    """Gradient checkpointing: keep each layer's input only, and recompute the rest when needed.

    transformers' own switch works in training mode only, where dropout would be on, so the layers
    are wrapped here, in copies of the model too. Without gradients they compute as usual.

    Raises:
        RagenError: The architecture has no layers that support it.
    """
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise RagenError(
            f"{type(model).__name__} does not support gradient checkpointing: "
            "set model.gradient_checkpointing = false"
        )
    for layer in layers:
        layer.gradient_checkpointing = True  # `is_fast` reads it
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_same_attention, backbone(model).config),
        )


def _same_attention(config: PreTrainedConfig) -> tuple[Any, Any]:
    """Contexts of a layer's forward and of its recomputation, which needs the same attention."""
    return nullcontext(), Attending(config)


@torch.no_grad()
def _check_output_layer(model: PreTrainedModel, name: str) -> None:
    """Refuse models that `token_logprobs` and the samplers would compute wrongly."""

    def check(agrees: bool, problem: str) -> None:
        if not agrees:
            raise RagenError(
                f"the model '{name}' {problem}; use a Qwen, Llama, Mistral, Gemma, Granite or "
                "similar model"
            )

    head = model.get_output_embeddings()
    check(head is not None, "has no output layer over a vocabulary")
    probe_BT = torch.arange(1, 5, device=model.device)[None] % head.weight.shape[0]
    logits = model(input_ids=probe_BT, use_cache=False).logits.float()
    if not bool(logits.isfinite().all()):
        raise NotFiniteError(f"the logits of '{name}'")
    before = model(input_ids=probe_BT[:, :2], use_cache=False).logits.float()
    is_causal = _agree(before, logits[:, :2], model.dtype)
    check(is_causal, "is not causal: its logits for a token depend on later tokens")
    with load_errors(name, "its architecture does not take the masks of the sampler"):
        decoded = HFDecoder(model, 1, probe_BT.shape[1]).prefill([0], [0], probe_BT.tolist())
    is_same = _agree(decoded, logits[:, -1], model.dtype)
    check(is_same, "computes other logits with a cache of keys and values")
    states = backbone(model)(input_ids=probe_BT, use_cache=False).last_hidden_state
    # A cap hardly changes the small logits of a probe, so the layer is also made to return large
    # ones.
    large_V = torch.linspace(-1e3, 1e3, head.weight.shape[0], device=model.device)
    hook = head.register_forward_hook(lambda _, __, out: large_V.to(out.dtype).expand_as(out))
    try:
        capped = model(input_ids=probe_BT, use_cache=False).logits.float()
    finally:
        hook.remove()
    shape = shape_of(model)
    is_known = _agree(logits, shape.of(head(states).float()), model.dtype)
    is_known = is_known and _agree(capped, shape.of(large_V).expand_as(capped), model.dtype)
    check(is_known, "transforms its logits after the output layer in an unknown way")


@torch.no_grad()
def _check_pictures(model: PreTrainedModel, reader: Reader, name: str) -> None:
    """Compare a row with a picture to the model's own forward.

    Raises:
        RagenError: They differ.
    """
    picture = Picture.of(np.arange(56 * 84 * 3).astype(np.uint8).reshape(56, 84, 3))
    ids_1T = torch.tensor([[1, 2, *reader(picture), 3, 4]])
    is_picture_1T = ids_1T < 0
    own: Any = model.base_model
    given = dict(reader.tensors(picture))
    given["input_ids"] = ids_1T.masked_fill(is_picture_1T, model.config.image_token_id)
    given |= token_types(model.config.model_type, is_picture_1T)
    given = {key: to_device(each, model.device) for key, each in given.items()}
    expected_1TD = own(**given, use_cache=False).last_hidden_state
    every_1T, lengths_1 = torch.ones_like(is_picture_1T), torch.tensor([ids_1T.shape[1]])
    seen = features(model, ids_1T, [picture])
    states_TD = hidden_states(model, ids_1T, lengths_1, every_1T, seen)
    decoder = HFDecoder(model, 1, ids_1T.shape[1])
    decoder.album.show([picture])
    logits_1V = decoder.prefill([0], [0], ids_1T.tolist())
    expected_1V = logits_of(model, expected_1TD[:, -1])
    is_same = _agree(states_TD, expected_1TD[0], model.dtype)
    if not (is_same and _agree(logits_1V, expected_1V, model.dtype)):
        raise RagenError(
            f"the model '{name}' computes pictures in a way that is not known here; use another "
            "one that reads pictures (docs/models.md)"
        )


def _agree(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the rounding of a whole forward pass: half the digits of `dtype`."""
    tolerance = torch.finfo(dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
