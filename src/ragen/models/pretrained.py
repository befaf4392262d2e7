"""A pretrained model's files, checked by their library before weights are read."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from ragen.core.errors import RagenError
from ragen.models.model_files import read_config, shown
from ragen.models.names import is_adapter

COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
"""Numbers of a config that must be at least 1 if they are given."""


def model_config(folder: Path, name: str | Path, max_length: int = 0) -> PreTrainedConfig:
    """The config of a causal language model; its weights are not read.

    `name` is the user's name for the model, for error messages.

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
    if hidden := [key for key in raw if callable(getattr(PreTrainedConfig, key, None))]:
        raise RagenError(f"{path}: {hidden[0]} is no setting of a model; remove this key")
    with load_errors(name, str(path)):
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RagenError(
            f"the model '{name}' ({config.model_type}) is no causal language model: it does not "
            "write on where a text ends; use one such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    with load_errors(name, str(path)):
        text = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        known = dir(type(config))
        part = next((k for k, value in raw.items() if value == text and k not in known), "a part")
        raise RagenError(
            f"{path}: {part} = {shown(text)}, but a {config.model_type} model has no such part; "
            "remove this key"
        )
    with load_errors(name, str(path)):
        _check_numbers(text, path)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # Only the eager attention of transformers caps the scores; the others ignore the cap.
        config._attn_implementation = "eager"
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max_length > most:
        raise RagenError(
            f"model.max_length = {max_length}: the model '{name}' knows {most} positions; "
            f"set model.max_length to {most} or less"
        )
    return config


def _check_numbers(config: PreTrainedConfig, path: Path) -> None:
    """Refuse sizes that no model has, and a padding token outside of the embedding."""
    for key in COUNTS:
        value = getattr(config, key, None)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and not (type(each) is int and each >= 1):
                raise RagenError(
                    f"{path}: {key} = {shown(value)}, but it must be a whole number above 0; use "
                    "the model's own config.json"
                )
    padding, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if padding is not None and rows is not None and not -rows <= padding < rows:
        raise RagenError(
            f"{path}: pad_token_id = {shown(padding)}, but the vocabulary has {rows} tokens; set "
            "it to one of them, or to null"
        )


@contextmanager
def load_errors(name: str | Path, cause: str = "") -> Iterator[None]:
    """The boundary to libraries that read files from outside: their errors become one line.

    The body should only call transformers, tokenizers, safetensors or peft on a model's folder.
    None of them documents what it raises for a malformed file, and tokenizers raises a bare
    `Exception`. So every exception is caught here, as `ragen.core.user_code` does for user code.

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
