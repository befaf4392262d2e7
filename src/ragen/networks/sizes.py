"""How large a model is, read from the headers of its weights and its config. Loads no torch.

The headers give every weight's shape, so that parameters are counted and not estimated. The config
gives what shapes do not tell: the number of heads, and whether the output layer is tied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ragen.core.errors import RagenError

Shape = tuple[int, ...]

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
"""Names of the same number in the configs of different architectures."""
USUAL_HEAD = 64
"""The width of a head if the config does not give it."""

KEPT_LOGITS = 2**24
"""Logits that may stay in memory until the backward pass (64 MB); more are computed again there."""
KEPT_LOGITS_GPU = 2**27
"""The same on a GPU (512 MB). Each chunk reads the output layer and its gradient once, which for a
vocabulary of 150,000 takes as long as the products of a thousand rows."""

KEPT_SCORES = 2**24
"""Weights of attention that a layer of the fast path may keep until the backward pass (64 MB); more
are computed again there, so that their memory does not grow with the square of the length."""

EMBEDDING = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe)\.weight$")
WORDS = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$")
"""The embedding of tokens, among all embeddings."""
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
MIXTURE = re.compile(r"\.experts\.|\.gate\.weight$")
VISION = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|connector)\.")
"""Weights of a vision tower, and of the projector behind it."""
BLOCK = re.compile(r"\.(\d+)\.")
MATRIX = 2
MASK = 4
"""Axes of the causal masks that old files hold beside weights; no weight has so many."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's weights and the numbers that its computation depends on.

    `weights` are the shapes of all parameters by name; a tied output layer is not repeated.
    `inner` is the width between the two layers of a feed-forward block. `stores_scores` says that
    attention keeps its scores for the backward pass, and `is_qwen2` that the fast path of
    `ragen.networks.fast_qwen2` usually computes it in float32.
    """

    weights: Mapping[str, Shape]
    num_layers: int
    width: int
    vocabulary: int
    heads: int
    key_heads: int
    head_width: int
    inner: int
    stores_scores: bool = False
    is_qwen2: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers the weights have."""
        return sum(map(prod, self.weights.values()))

    @property
    def backbone(self) -> list[Shape]:
        """The shapes of the language model's weights except the output layer's."""
        return [shape for name, shape in self.language.items() if not HEAD.search(name)]

    @property
    def language(self) -> Mapping[str, Shape]:
        """The shapes of all weights but those of a vision tower and its projector."""
        return {name: shape for name, shape in self.weights.items() if not VISION.search(name)}

    @property
    def linear(self) -> dict[str, Shape]:
        """The linear layers that an adapter may change, (outputs, inputs) by name.

        The output layer, embeddings, and a mixture's experts with their router are excluded.
        Experts and router are not linear modules, and a vision tower is not adapted.
        """
        return {
            name.removesuffix(".weight"): shape
            for name, shape in self.weights.items()
            if len(shape) == MATRIX
            and name.endswith(".weight")
            and not any(kind.search(name) for kind in (EMBEDDING, HEAD, MIXTURE, VISION))
        }


def sizes_of(raw: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Sizes:
    """The sizes by a config as it was read and the shapes in the files of the weights."""
    text = raw.get("text_config")
    config: Mapping[str, Any] = text if isinstance(text, dict) else raw
    weights = {name: shape for name, shape in shapes.items() if len(shape) < MASK}
    if config.get("tie_word_embeddings", raw.get("tie_word_embeddings")) is True:
        weights = {name: shape for name, shape in weights.items() if not HEAD.search(name)}
    language = [name for name in weights if not VISION.search(name)]
    matrices = [weights[name] for name in language if len(weights[name]) == MATRIX]
    words = [
        weights[name] for name in weights if WORDS.search(name) and len(weights[name]) == MATRIX
    ]
    vocabulary, width = (words or sorted(matrices, key=prod)[-1:] or [(1, 1)])[0]
    heads = _number(config, HEADS) or max(1, width // USUAL_HEAD)
    key_heads = _number(config, KEY_HEADS) or heads
    head_width = _number(config, ("head_dim",)) or max(1, width // heads)
    return Sizes(
        weights,
        num_layers=len({found[1] for found in map(BLOCK.search, language) if found}) or 1,
        width=width,
        vocabulary=vocabulary,
        heads=heads,
        key_heads=key_heads,
        head_width=head_width,
        inner=_number(config, INNER) or 4 * width,
        stores_scores=bool(config.get("attn_logit_softcapping")),
        is_qwen2=config.get("model_type") == "qwen2",
    )


def adapted(layers: Mapping[str, Shape], targets: str, rank: int) -> list[str]:
    """Names of the layers that get an adapter, each the last part of a layer's name.

    `layers` are shapes by name. `targets` is ``all-linear``, or names separated by commas.

    Raises:
        RagenError: The model has no layer of one of these names, or none of such a high rank.
    """
    highest = max((min(shape) for shape in layers.values()), default=0)
    if rank > highest:
        raise RagenError(
            f"lora.rank = {rank}: no layer of the model has a rank above {highest}, so an adapter "
            "would be larger than what it adapts; lower it, or set lora.rank = 0 to train all "
            "weights"
        )
    candidates = sorted({name.rpartition(".")[2] for name in layers})
    if targets == "all-linear":
        return candidates
    names = [name.strip() for name in targets.split(",")]
    for name in names:
        if name not in candidates:
            raise RagenError(
                f"lora.targets: the model has no linear layer {name!r} that can be adapted; "
                f"choose from {', '.join(candidates)}, or all-linear for all of them"
            )
    return names


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of the names that is a count; a malformed one is refused when the model loads."""
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None
