"""Tiny random models that read pictures, in folders as the Hub has them, and pictures for them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen.core.pictures import Picture
from tests.shared import once
from tests.tiny import tiny_tokenizer

TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
KINDS = (
    *("llava", "llava-clip", "idefics3", "smolvlm"),
    *("qwen2_5_vl", "qwen3_vl", "gemma3"),
)
"""Architectures; the second is LLaVA with a tower of CLIP."""
EACH = [pytest.param(kind, marks=pytest.mark.slow if kind != "llava" else ()) for kind in KINDS]
"""The same for a parametrised test, which takes the first by default."""


def first_and_slow(*kinds: str) -> list[Any]:
    """The first kind and, in slow tests, those that compute differently in the tested point."""
    return ["llava", *(pytest.param(kind, marks=pytest.mark.slow) for kind in kinds)]


_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def board(number: int, height: int = 32, width: int = 32) -> Picture:
    """A picture of random tiles."""
    tiles = np.random.default_rng(number).integers(0, 256, (height // 8, width // 8, 3))
    return Picture.of(np.kron(tiles, np.ones((8, 8, 1))).astype(np.uint8))


def tokenizer_that_sees() -> Any:
    """A tiny tokenizer with the tokens that models put around pictures."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    return tokenizer


def model_folder(kind: str, folder: Path, seed: int = 0) -> Path:
    """A random model of a kind, with its tokenizer and picture processor."""
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = tokenizer_that_sees()
    config, processor = _parts(kind, tokenizer)
    for part in (config, config.get_text_config()):
        part.eos_token_id, part.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).eval()
        for weight in model.parameters():  # initial weights are small, and differences too
            weight.data.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _parts(kind: str, tokenizer: Any) -> tuple[Any, Any]:
    """The config and the picture processor of a kind."""
    import transformers as hf
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in TOKENS}
    text = _TEXT | {"vocab_size": len(tokenizer)}
    square = {"height": 32, "width": 32}
    if kind.startswith("llava"):
        with_clip = kind == "llava-clip"
        return hf.LlavaConfig(
            text_config=hf.Qwen2Config(**text),
            vision_config=(hf.CLIPVisionConfig if with_clip else hf.SiglipVisionConfig)(**_TOWER),
            image_token_id=ids["<image>"],
            vision_feature_layer=-1,
            vision_feature_select_strategy="default" if with_clip else "full",
            tie_word_embeddings=True,
        ), SiglipImageProcessorPil(size=square, resample=0)
    if kind in ("idefics3", "smolvlm"):
        config, make = (
            (hf.Idefics3Config, Idefics3ImageProcessorPil)
            if kind == "idefics3"
            else (hf.SmolVLMConfig, SmolVLMImageProcessorPil)
        )
        return config(
            text_config=(hf.Qwen2Config if kind == "idefics3" else hf.LlamaConfig)(**text),
            vision_config=_TOWER,
            scale_factor=2,
            image_token_id=ids["<image>"],
            tie_word_embeddings=True,
        ), make(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    if kind.startswith("qwen"):
        about = {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "tie_word_embeddings": True,
        }
        processor = Qwen2VLImageProcessorPil(
            patch_size=8, merge_size=2, size={"shortest_edge": 256, "longest_edge": 64 * 64}
        )
        tower = {
            "depth": 2,
            "num_heads": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "patch_size": 8,
            "out_hidden_size": 32,
        }
        rope = {"rope_type": "default", "rope_theta": 1e4}
        if kind == "qwen2_5_vl":
            return hf.Qwen2_5_VLConfig(
                text_config=text | {"rope_parameters": rope | {"mrope_section": [1, 1, 2]}},
                vision_config=tower | {"fullatt_block_indexes": [1], "window_size": 32},
                **about,
            ), processor
        more = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        return hf.Qwen3VLConfig(
            text_config=text | {"rope_parameters": rope | {"mrope_section": [2, 1, 1]}},
            vision_config=tower | more,
            **about,
        ), processor
    if kind == "gemma3":
        return hf.Gemma3Config(
            text_config=text | {"sliding_window": 1024, "query_pre_attn_scalar": 8},
            vision_config=_TOWER,
            mm_tokens_per_image=4,
            boi_token_id=ids["<start_of_image>"],
            eoi_token_id=ids["<end_of_image>"],
            image_token_id=ids["<image_soft_token>"],
            tie_word_embeddings=True,
        ), Gemma3ImageProcessorPil(size=square)
    return hf.PaliGemmaConfig(
        text_config=hf.GemmaConfig(**text),
        vision_config=hf.SiglipVisionConfig(**_TOWER, projection_dim=32),
        projection_dim=32,
        hidden_size=32,
        image_token_id=ids["<image>"],
        tie_word_embeddings=True,
    ), SiglipImageProcessorPil(size=square)


def folder_of(kind: str) -> Path:
    """The folder of a kind that all tests share."""
    return once(f"seeing-{kind}", lambda folder: model_folder(kind, folder))


@cache
def seeing(kind: str) -> Any:
    """The model and the tokenizer of a kind, loaded as a run loads them; do not change them."""
    from ragen.models.loading import load_policy

    return load_policy(folder_of(kind), "cpu", "float32", max_length=512)


def prompt_ids(tokenizer: Any, *parts: str | Picture) -> tuple[int, ...]:
    """The ids of texts and pictures."""
    form = tokenizer.picture_reader
    return tuple(
        token
        for part in parts
        for token in (form(part) if isinstance(part, Picture) else tokenizer.encode(part))
    )
