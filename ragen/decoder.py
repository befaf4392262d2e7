"""Key–value slots: a causal language model that reads on where each of its sequences stands.

A decoder holds the keys and values of a fixed number of slots. Slots are told where to write by the
caller and never clear anything: what lies at or beyond a sequence's length is stale and masked.

Axes: **N** rows of a call, **T** tokens, **V** vocabulary.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragen import fast_qwen2
from ragen.errors import RagenError
from ragen.fast_decoder import Qwen2Decoder


class Decoder(Protocol):
    """What the sampler needs of a model."""

    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Read several new tokens in each of several slots.

        Args:
            slots: The slots, each at most once.
            starts: How many tokens of each slot's sequence are in the cache already.
            tokens: The new tokens of each, at least one.

        Returns:
            Logits (N, V) in float32 after each slot's last new token.
        """
        ...

    def decode(self, slots_N: Tensor, starts_N: Tensor, tokens_N: Tensor) -> Tensor:
        """Read one new token in each of several slots, given in ascending order."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` keys and values of `source`."""
        ...

    def refresh(self) -> None:
        """The weights have changed, and with them every stored key and value."""
        ...


def make_decoder(
    model: PreTrainedModel, num_slots: int, max_length: int, *, fast: bool = True
) -> Decoder:
    """The fastest decoder that is exact for this model; the general one where `fast` is off."""
    if fast and fast_qwen2.supports(model):
        return Qwen2Decoder(model, num_slots, max_length)
    return HFDecoder(model, num_slots, max_length)


class HFDecoder:
    """Slots for any causal language model of transformers.

    It must take a cache, a 4-D attention mask and position ids; nearly all do.

    Args:
        model: The model; its weights are read at every call, so an update is seen at once.
        num_slots: Sequences that are held.
        max_length: Tokens that each may have.

    Raises:
        RagenError: The model's sliding window is shorter than `max_length`, or its past is no keys
            and values.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        if "past_key_values" not in signature(model.get_decoder().forward).parameters:
            raise RagenError(
                f"a model of the kind {model.config.model_type} keeps its past in another way than "
                "as keys and values, which is not supported; use a transformer"
            )
        config = model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        if layer_types != {"full_attention"} and (window is None or window < max_length):
            raise RagenError(
                f"this model attends to {window or 'its own choice of'} tokens only; "
                "set model.max_length no higher than its sliding window"
            )
        self.model = model
        self.cache = _SlotCache(num_slots, max_length)

    @torch.no_grad()
    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """See `Decoder.prefill`."""
        device = self.model.device
        counts_N = torch.tensor([len(row) for row in tokens])
        tokens_NT = torch.zeros(len(slots), int(counts_N.max()), dtype=torch.long)
        is_real_NT = torch.arange(tokens_NT.shape[1]) < counts_N[:, None]
        tokens_NT[is_real_NT] = torch.tensor(list(chain.from_iterable(tokens)))
        states_NTD = self._read(torch.tensor(slots), torch.tensor(starts), tokens_NT, is_real_NT)
        last_ND = states_NTD[torch.arange(len(slots)), counts_N.to(device) - 1]
        logits_NV: Tensor = self.model.get_output_embeddings()(last_ND).float()
        return logits_NV

    @torch.no_grad()
    def decode(self, slots_N: Tensor, starts_N: Tensor, tokens_N: Tensor) -> Tensor:
        """See `Decoder.decode`."""
        is_real_N1 = torch.ones(len(slots_N), 1, dtype=torch.bool)
        states_N1D = self._read(slots_N, starts_N, tokens_N[:, None], is_real_N1)
        logits_NV: Tensor = self.model.get_output_embeddings()(states_N1D[:, 0]).float()
        return logits_NV

    def copy(self, source: int, target: int, length: int) -> None:
        """See `Decoder.copy`."""
        self.cache.copy(source, target, length)

    def refresh(self) -> None:
        """See `Decoder.refresh`: nothing to do, the weights are read at every call."""

    def _read(
        self, slots_N: Tensor, starts_N: Tensor, tokens_NT: Tensor, is_real_NT: Tensor
    ) -> Tensor:
        device = self.model.device
        positions_NT = starts_N[:, None] + torch.arange(tokens_NT.shape[1])
        width = int(positions_NT[is_real_NT].max()) + 1
        positions_NT = positions_NT.clamp_max(width - 1)
        hidden_NTW = torch.arange(width) > positions_NT[:, :, None]
        mask_N1TW = torch.zeros(hidden_NTW.shape, dtype=self.model.dtype)
        mask_N1TW = mask_N1TW.masked_fill_(hidden_NTW, torch.finfo(self.model.dtype).min)[:, None]
        self.cache.aim(slots_N.to(device), positions_NT.to(device), is_real_NT.to(device), width)
        decoder = self.model.get_decoder()
        states_NTD: Tensor = decoder(
            input_ids=tokens_NT.to(device),
            attention_mask=mask_N1TW.to(device),
            position_ids=positions_NT.to(device),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return states_NTD


class _SlotCache(Cache):
    """What a transformers model writes to and reads from, aimed at some slots for one forward."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.num_slots, self.max_length = num_slots, max_length
        self.stored: list[tuple[Tensor, Tensor]] = []

    def aim(self, slots_N: Tensor, positions_NT: Tensor, is_real_NT: Tensor, width: int) -> None:
        """Say where the next forward's tokens go; those that are padding go nowhere."""
        self.slots_N, self.is_real_NT, self.width = slots_N, is_real_NT, width
        self.target_slots = slots_N[:, None].expand(positions_NT.shape)[is_real_NT]
        self.target_positions = positions_NT[is_real_NT]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values (N, H, T, D); return all up to the used width."""
        if layer_idx == len(self.stored):  # the first forward: shapes are known only now
            self.stored.append((self._room(key_states), self._room(value_states)))
        used = []
        for stored, new in zip(self.stored[layer_idx], (key_states, value_states), strict=True):
            stored[self.target_slots, :, self.target_positions] = new.transpose(1, 2)[
                self.is_real_NT
            ]
            used.append(stored[self.slots_N, :, : self.width])
        return used[0], used[1]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` keys and values of `source`."""
        for stored in chain.from_iterable(self.stored):
            stored[target, :, :length] = stored[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions and masks are always given."""
        return 0

    def _room(self, states: Tensor) -> Tensor:
        heads, width = states.shape[1], states.shape[3]
        return states.new_zeros(self.num_slots, heads, self.max_length, width)
