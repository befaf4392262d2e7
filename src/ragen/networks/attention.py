"""The attention of transformers' models, replaced: the one place that uses private parts of theirs.

transformers finds the attention of all layers by a name in the model's config. `Attending` puts
another name there: `FLAT` for one list of tokens in any order, whose attention the caller gives to
`read`, or `GROUPED` for padded rows with stored keys.

Axes: **N** rows, **T** tokens of a row, **F** flat tokens, **W** keys, **H** heads, **K** key–value
heads, **G** heads that share one, **Q** queries of a key–value head (G × T), **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ragen.networks.device import to_device
from ragen.networks.pictures import Features, inputs

Attention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Attention of a layer, given its number, queries (F, H, D), keys and values (F, K, D), and the
scale of the scores; returns (F, H, D)."""

FLAT, GROUPED = "ragen_flat", "ragen_grouped"
"""The names under which transformers finds `_flat` and `_grouped`."""
EAGER = "eager"
"""The attention that is written out in a model's own code; some models have no other."""
ADDITIONS = "softcap", "s_aux", "position_bias"
"""Arguments of attention that is more than scores, softmax and a sum."""


class UnknownAttention(Exception):
    """The model's attention is more than scores, softmax and a sum."""


def can_replace(model: PreTrainedModel) -> bool:
    """True if transformers lets a program replace the model's attention."""
    return bool(model._supports_attention_backend) and model.config._attn_implementation != EAGER


def use_eager(config: Any) -> None:
    """Let a model that is built from this config compute attention by its own code."""
    config._attn_implementation = EAGER


class Attending:
    """A context in which a model (by its config) has another attention, or keeps its own.

    It may be entered again. Inside, transformers does not check whether a row holds several
    sequences. Here it never does, and the check would wait for the GPU at each forward.
    """

    def __init__(self, config: Any, name: str = "") -> None:
        self._config, self._name = config, name or config._attn_implementation

    def __enter__(self) -> None:
        self._chosen = self._config._attn_implementation
        self._check = masking_utils.find_packed_sequence_indices
        self._config._attn_implementation = self._name
        masking_utils.find_packed_sequence_indices = lambda position_ids: None

    def __exit__(self, *_: object) -> None:
        self._config._attn_implementation = self._chosen
        masking_utils.find_packed_sequence_indices = self._check


def grouped(config: Any) -> Attending:
    """The context for padded rows with stored keys and a mask; flash attention takes no mask."""
    is_eager = config._attn_implementation == EAGER
    return Attending(config, EAGER if is_eager else GROUPED)


@dataclass(slots=True)
class Run:
    """A forward; `calls` counts its layers, `window` is the fewest tokens that one attends to."""

    attention: Attention
    calls: int = 0
    window: float = inf


def read(
    model: PreTrainedModel,
    token_ids_F: Tensor,
    positions_F: Tensor,
    run: Run,
    seen: Features | None = None,
) -> Tensor:
    """Last hidden states (F, D) of a backbone that has a `ragen.networks.packed.longest`.

    Differentiable if the attention is. Ids and positions, (F,) or on three axes (3, F), are on the
    CPU or on the model's device.

    Raises:
        UnknownAttention: The model has no `longest`.
    """
    with Attending(model.config, FLAT):
        states_1FD: Tensor = model(
            **inputs(model, token_ids_F[None], seen),
            position_ids=to_device(positions_F[..., None, :], model.device),
            use_cache=False,
            ragen_run=run,
        ).last_hidden_state
    return states_1FD[0]


def _flat(
    module: Any,
    query_1HFD: Tensor,
    key_1KFD: Tensor,
    value_1KFD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragen_run: Run | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention of a `Run`, called in every layer; returns (1, F, H, D)."""
    if ragen_run is None or any(more.get(name) is not None for name in ADDITIONS):
        raise UnknownAttention
    query, key, value = (x[0].transpose(0, 1) for x in (query_1HFD, key_1KFD, value_1KFD))
    scale = query.shape[2] ** -0.5 if scaling is None else scaling
    ragen_run.calls += 1
    ragen_run.window = min(ragen_run.window, sliding_window or inf)
    return ragen_run.attention(module.layer_idx, query, key, value, scale)[None], None


def _grouped(
    module: Any,
    query_NHTD: Tensor,
    key_NKWD: Tensor,
    value_NKWD: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention that treats the heads that share keys as more queries of one head.

    With a mask, transformers' own attention repeats keys and values for each head instead. For
    Qwen2.5-0.5B that is seven times the stored keys and values, in every layer, for each token.
    """
    if any(more.get(name) is not None for name in ADDITIONS):
        mixed: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_NHTD, key_NKWD, value_NKWD, attention_mask, scaling=scaling, **more
        )
        return mixed
    num_rows, num_heads, num_tokens, width = query_NHTD.shape
    num_keys = key_NKWD.shape[1]
    query_NKQD = query_NHTD.reshape(num_rows, num_keys, -1, width)
    mask_NGTW = attention_mask.expand(-1, num_heads // num_keys, num_tokens, -1)
    mixed_NKQD = functional.scaled_dot_product_attention(
        query_NKQD, key_NKWD, value_NKWD, mask_NGTW.flatten(1, 2)[:, None], scale=scaling
    )
    mixed_NHTD = mixed_NKQD.reshape(num_rows, num_heads, num_tokens, -1)
    return mixed_NHTD.transpose(1, 2).contiguous(), None


AttentionInterface.register(FLAT, _flat)
AttentionInterface.register(GROUPED, _grouped)
