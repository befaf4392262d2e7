"""A pretrained model's files, checked by their library before weights are read."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from ragen.core.errors import RagenError
from ragen.models.experts import ChainConfig, ChainForCausalLM
from ragen.models.model_files import read_config, shown
from ragen.models.names import is_adapter
from ragen.models.pictures import RULES
from ragen.networks.attention import use_eager

AutoConfig.register(ChainConfig.model_type, ChainConfig)
AutoModelForCausalLM.register(ChainConfig, ChainForCausalLM)


def model_config(folder: Path, name: str | Path, max_length: int = 0) -> PreTrainedConfig:
    """The config of a causal language model, without its weights; messages name `name`.

    Raises:
        RagenError: The folder holds no causal language model, or the model brings its own code, has
            quantised weights, or has fewer positions than `max_length`.
    """
    path = folder / "config.json"
    raw = read_config(folder, name)
    is_adapter(folder)  # transformers would load an adapter that lies beside a model
    if "auto_map" in raw and str(raw.get("model_type")) not in CONFIG_MAPPING:
        raise RagenError(
            f"the model '{name}' brings code of its own, which is never run here; use one "
            "whose architecture is part of transformers"
        )
    with load_errors(name, str(path)):
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or config.model_type in RULES
    if not known and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise RagenError(
            f"the model '{name}' ({config.model_type}) reads pictures in a way that is not known "
            f"here; use a model of one of these: {', '.join(RULES)}"
        )
    if config.is_encoder_decoder or not known:
        raise RagenError(
            f"the model '{name}' ({config.model_type}) is no causal language model: it does not "
            "write on where a text ends; use one such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    with load_errors(name, str(path)):
        text = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise RagenError(
            f"{path}: a {config.model_type} model has no part {shown(text)}; use the model's own "
            "config.json"
        )
    if getattr(text, "attn_logit_softcapping", None):
        # Only the eager attention of transformers caps the scores; the others ignore the cap.
        use_eager(config)
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and max_length > most:
        raise RagenError(
            f"model.max_length = {max_length}: the model '{name}' knows {most} positions; "
            f"set model.max_length to {most} or less"
        )
    return config


def model_class(config: PreTrainedConfig) -> Any:
    """Transformers' class that builds and loads a model of this config."""
    return AutoModelForImageTextToText if config.model_type in RULES else AutoModelForCausalLM


@contextmanager
def load_errors(name: str | Path, cause: str = "") -> Iterator[None]:
    """The boundary to libraries that read files from outside: their errors become one line.

    The body only calls transformers, tokenizers, safetensors or peft. None documents what a
    malformed file raises, and tokenizers raises a bare `Exception`; so every exception is caught.

    Raises:
        RagenError: The body failed; the text names the model, `cause` and the library's reason.
    """
    try:
        yield
    except RagenError:
        raise
    except Exception as error:
        raise RagenError(
            f"cannot load the model '{name}': {cause and cause + ': '}{one_line(error)}; "
            "name a folder in Hugging Face layout, a model id of the Hub, or base"
        ) from error


def one_line(error: BaseException) -> str:
    """An error's text in one line, with its class if the text alone says too little."""
    text = " ".join(str(error).split()).rstrip(".:")[:300]
    explains = text and not isinstance(error, LookupError | AssertionError)
    return text if explains else f"{type(error).__name__} {text}".strip()
