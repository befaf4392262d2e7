"""The sizes that are read from a model's files are those of the model that is built from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ragen.models.hub import read_sizes
from ragen.networks import fast_qwen2
from ragen.networks.lora import linear_layers

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 80}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 80}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", **SMALL, **HEADS, "tie_word_embeddings": True},
    "qwen2 with a sliding window": {
        **{"model_type": "qwen2", **SMALL, **HEADS},
        **{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    },
    "qwen3": {"model_type": "qwen3", **SMALL, **HEADS, "head_dim": 16},
    "llama": {"model_type": "llama", **SMALL, **HEADS},
    "mistral": {"model_type": "mistral", **SMALL, **HEADS},
    "gemma2": {"model_type": "gemma2", **SMALL, **HEADS, "head_dim": 8},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt-neox": {"model_type": "gpt_neox", **SMALL, "num_attention_heads": 4},
    "opt": {
        **{"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3},
        **{"vocab_size": 80, "num_attention_heads": 4, "word_embed_proj_dim": 32},
    },
    "phi3": {"model_type": "phi3", **SMALL, **HEADS, "pad_token_id": 0},
    "olmo2": {"model_type": "olmo2", **SMALL, **HEADS},
    "falcon": {
        **{"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 80},
        **{"num_attention_heads": 4, "new_decoder_architecture": False},
    },
    "mixtral": {"model_type": "mixtral", **SMALL, **HEADS, "num_local_experts": 4},
}


def build(config: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_built_model(name: str, tmp_path: Path) -> None:
    model = build(MODELS[name])
    model.save_pretrained(tmp_path)
    sizes = read_sizes(str(tmp_path))
    config: Any = model.config
    assert sizes.numbers == sum(weight.numel() for weight in model.parameters())
    assert (sizes.num_layers, sizes.vocabulary, sizes.width) == (3, 80, 32)
    assert sizes.heads == config.num_attention_heads
    built = {each: tuple(layer.weight.shape) for each, layer in linear_layers(model).items()}
    assert {each.rpartition(".")[2] for each in sizes.linear} == {
        each.rpartition(".")[2] for each in built
    }
    assert sorted(sizes.linear.values()) == sorted(built.values())
    backbone: nn.Module = model.get_decoder()
    own = sum(weight.numel() for weight in backbone.parameters())
    assert sum(torch.Size(shape).numel() for shape in sizes.backbone) == own
    assert sizes.is_qwen2 or not fast_qwen2.supports(model)


def test_a_tied_output_layer_that_is_saved_counts_once(tmp_path: Path) -> None:
    model = build(MODELS["llama"])
    model.save_pretrained(tmp_path)
    sizes = read_sizes(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert sizes.numbers - read_sizes(str(tmp_path)).numbers == 80 * 32
