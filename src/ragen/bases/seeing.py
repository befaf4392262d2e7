"""A small model that sees: an embedded model's network behind a vision tower of one layer.

The architecture is LLaVA's, with a tower of SigLIP (arXiv:2304.08485, 2303.15343). A patch of the
tower is a cell of the board, and a cell is one picture token.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from ragen.bases.demonstrations import CELL
from ragen.envs.contract import Env
from ragen.models.pictures import Reader
from ragen.networks.pictures import attach_reader

WIDTH = 64
NO_TEXT = "ÿ"
"""The token of the byte 0xFF, which no text has; it stands for a picture outside of RAGEN."""


def picture_side(make: Callable[[], Env]) -> int:
    """The pixels on a side of an environment's square picture; 0 if it shows none."""
    env = make()
    env.reset(seed=0)
    shown = env.pictures()
    return len(shown[0]) if shown else 0


def with_sight(
    language: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, side: int, seed: int
) -> PreTrainedModel:
    """A model that reads square pictures of `side` pixels; it has the network of `language`.

    The tokenizer then knows how to read pictures, too.
    """
    torch.manual_seed(seed)
    tower: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": side,
        "patch_size": CELL,
        "vision_use_head": False,
    }
    parts: dict[str, Any] = {
        "text_config": language.config,
        "vision_config": SiglipVisionConfig(**tower),
        "image_token_id": tokenizer.convert_tokens_to_ids(NO_TEXT),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
    }
    config = LlavaConfig(**parts)
    model: PreTrainedModel = LlavaForConditionalGeneration(config)
    model.get_decoder().load_state_dict(language.get_decoder().state_dict())
    model.generation_config = language.generation_config
    processor = SiglipImageProcessorPil(size={"height": side, "width": side}, resample=0)
    files = {"preprocessor_config.json": processor.to_json_string().encode()}
    attach_reader(Reader(config, processor, tokenizer, files), model, tokenizer)
    model.train(False)
    return model
