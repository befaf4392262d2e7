"""Key–value slots: a causal language model that continues reading each of its sequences.

A decoder holds the keys and values of a fixed number of slots. The caller says where in a slot new
tokens are written. Entries at or beyond a sequence's length are masked, and not cleared.

Axes: **N** rows of a call, **T** tokens, **V** vocabulary, **F** real tokens among N × T, **W**
stored positions in use, **H** heads, **K** key–value heads, **G** heads that share one, **Q**
queries of a key–value head (G × T), **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ragen.core.errors import RagenError
from ragen.networks import fast_qwen2, packed
from ragen.networks.attention import Run, grouped, read
from ragen.networks.device import to_device
from ragen.networks.fast_decoder import Qwen2Decoder
from ragen.networks.key_store import FEW, Apart, KeyStore, Reach, has_bags
from ragen.networks.pictures import (
    Album,
    inputs,
    last_seen,
    mask_up_to,
    reader_of,
    slot_places,
)
from ragen.networks.precision import output_logits, shape_of

PADDED_QUERIES = 4096
"""Maximum number of queries in one forward of `FlatDecoder`, with the padding inside attention. It
bounds the memory. Only a single longer row may have more."""

TESTED = 72
"""Tokens of the row with which it is tested whether rows depend on each other."""


def make_decoder(
    model: PreTrainedModel, num_slots: int, max_length: int, *, fast: bool = True
) -> Decoder:
    """The fastest decoder that is exact for this model, or the general one if not `fast`.

    The one for Qwen2 keeps fused copies of all weights, which pays off for small models on a CPU.
    """
    if fast and model.device.type == "cpu":
        if fast_qwen2.supports(model):
            return Qwen2Decoder(model, num_slots, max_length)
        if packed.longest(model.get_decoder()) >= max_length:
            return FlatDecoder(model, num_slots, max_length)
    return HFDecoder(model, num_slots, max_length)


def window_of(config: Any) -> float:
    """The tokens that every layer attends to: its window, infinity, or 0 if it chooses tokens."""
    window: int | None = getattr(config, "sliding_window", None)
    # Configs that name no types, like Mistral's, have layers of one kind.
    one_kind = ["full_attention" if window is None else "sliding_attention"]
    layer_types = set(getattr(config, "layer_types", None) or one_kind)
    return inf if layer_types == {"full_attention"} else window or 0


def logits_of(model: PreTrainedModel, states_ND: Tensor) -> Tensor:
    """A model's logits (N, V) in float32, from its last hidden states."""
    head = model.get_output_embeddings()
    logits_NV = output_logits(states_ND, head.weight, getattr(head, "bias", None))
    return shape_of(model).of(logits_NV)


class FlatDecoder:
    """Slots for a model on a CPU that reads flat tokens (`ragen.networks.packed.longest`).

    New tokens of all slots are one list without padding. Shared beginnings are held and read once.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model, self.album = model, Album(model)
        self.places = slot_places(model, num_slots, max_length)
        self.store = KeyStore(num_slots, max_length, model.dtype)

    @torch.no_grad()
    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Read new tokens as `HFDecoder` does; a long row is read apart from many short ones."""
        firsts, longest = [0], 0  # the first row of each forward
        for row, count in enumerate(map(len, tokens)):
            longest = max(longest, count)
            if row > firsts[-1] and (row + 1 - firsts[-1]) * longest > PADDED_QUERIES:
                firsts.append(row)
                longest = count
        slots_N, starts_N = torch.tensor(slots), torch.tensor(starts)
        counts_N = torch.tensor([len(row) for row in tokens])
        logits = []
        for part in map(slice, firsts, [*firsts[1:], len(tokens)]):
            token_ids_F = torch.tensor(list(chain.from_iterable(tokens[part])))
            what = slots_N[part], starts_N[part], counts_N[part]
            self.store.begin(*what[:2])
            reach = self.store.reach_many(*what)
            logits.append(self._read(reach, *what, token_ids_F))
        return torch.cat(logits)

    @torch.no_grad()
    def decode(self, slots_N: Tensor, starts_N: Tensor, tokens_N: Tensor) -> Tensor:
        """Read one new token in each of several slots."""
        counts_N = torch.ones_like(slots_N)
        self.store.begin(slots_N, starts_N)
        reach = self.store.reach(slots_N, starts_N, counts_N)
        return self._read(reach, slots_N, starts_N, counts_N, tokens_N)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` keys and values of `source`."""
        if self.places is not None:
            self.places.copy(source, target, length)
        if self.store.independent:
            self.store.copy(source, target, length)
        else:
            self.store.share(source, target, length)

    def refresh(self, is_idle: bool = True) -> None:
        """Read changed weights, which make every stored key and value out of date."""
        self.album.forget()
        if is_idle:  # or running slots may begin in others
            self.store.clear()

    def erase(self) -> None:
        """Zero all keys and values."""
        self.store.erase()

    def _read(
        self,
        reach: Reach | Apart,
        slots_N: Tensor,
        starts_N: Tensor,
        counts_N: Tensor,
        token_ids_F: Tensor,
    ) -> Tensor:
        """Logits (N, V) after each slot's last new token."""
        count, fill = len(token_ids_F), self.store.filled
        seen, positions_F = self.album.seen(token_ids_F), reach.places[1]
        if self.places is not None:
            is_real_NT = torch.arange(int(counts_N.max())) < counts_N[:, None]
            tokens_NT = torch.zeros(is_real_NT.shape, dtype=torch.long)
            tokens_NT[is_real_NT] = token_ids_F
            places_3NT = self.places.read(slots_N, starts_N, tokens_NT, is_real_NT, seen)
            positions_F = places_3NT[:, is_real_NT]

        def attention(
            layer: int, q_FHD: Tensor, k_FKD: Tensor, v_FKD: Tensor, scale: float
        ) -> Tensor:
            stored = self.store.write(layer, reach.places, k_FKD[:count], v_FKD[:count])
            mixed_FE = fill(reach.attend(q_FHD[:count].float().mul(scale), stored))
            return mixed_FE.view(*q_FHD.shape[:2], -1).to(q_FHD.dtype)

        decoder = self.model.get_decoder()
        positions_F = fill(positions_F.t()).t()  # on one axis or three
        states_FD = read(decoder, fill(token_ids_F), positions_F, Run(attention), seen)
        last_N = fill(counts_N.cumsum(0) - 1)
        return logits_of(self.model, states_FD[last_N])[: len(counts_N)]


class HFDecoder:
    """Slots for any causal language model of transformers.

    It must take a cache, a 4-D attention mask and position ids; nearly all do.

    Raises:
        RagenError: Its sliding window is shorter than `max_length`, or its past is not keys and
            values.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        config = model.config.get_text_config()
        accepted = signature(model.get_decoder().forward).parameters
        # `past_key_values` until transformers 5.23
        names = [name for name in ("cache", "past_key_values") if name in accepted]
        if not names or set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}:
            raise RagenError(
                f"models of the type {model.config.model_type} have no cache of keys and values, "
                "which is not supported; use a transformer"
            )
        window = window_of(config)
        if window < max_length:
            raise RagenError(
                f"layers of this model attend to {window or 'their own choice of'} tokens only; "
                f"model.max_length, here {max_length}, must not be above its sliding window"
            )
        self.model, self.album = model, Album(model)
        self.places = slot_places(model, num_slots, max_length)
        self.cache, self._cache_name = _SlotCache(num_slots, max_length), names[0]

    @torch.no_grad()
    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Read several new tokens in each of several slots, each given at most once.

        `starts` says how many tokens of each slot's sequence are in the cache already; each has at
        least one new token. Returns logits (N, V) in float32 after each slot's last new token.
        """
        counts_N = torch.tensor([len(row) for row in tokens])
        tokens_NT = torch.zeros(len(slots), int(counts_N.max()), dtype=torch.long)
        is_real_NT = torch.arange(tokens_NT.shape[1]) < counts_N[:, None]
        tokens_NT[is_real_NT] = torch.tensor(list(chain.from_iterable(tokens)))
        states_NTD = self._read(torch.tensor(slots), torch.tensor(starts), tokens_NT, is_real_NT)
        last_N1 = to_device((counts_N - 1)[:, None], states_NTD.device)
        last_ND = torch.take_along_dim(states_NTD, last_N1[:, :, None], 1)[:, 0]
        return logits_of(self.model, last_ND)

    @torch.no_grad()
    def decode(self, slots_N: Tensor, starts_N: Tensor, tokens_N: Tensor) -> Tensor:
        """Read one new token in each of several slots, given in ascending order."""
        is_real_N1 = torch.ones(len(slots_N), 1, dtype=torch.bool)
        states_N1D = self._read(slots_N, starts_N, tokens_N[:, None], is_real_N1)
        return logits_of(self.model, states_N1D[:, 0])

    def copy(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` keys and values of `source`."""
        if self.places is not None:
            self.places.copy(source, target, length)
        for stored in chain.from_iterable(self.cache.stored):
            stored[target, :, :length] = stored[source, :, :length]

    def refresh(self, is_idle: bool = True) -> None:
        """Read changed weights, which make every stored key and value out of date.

        Unless `is_idle`, unfinished sequences keep theirs. Here each call reads the weights anyway.
        """
        self.album.forget()

    def erase(self) -> None:
        """Zero keys and values after NaN or ∞, which no mask hides from later sequences."""
        for stored in chain.from_iterable(self.cache.stored):
            stored.zero_()

    def _read(
        self, slots_N: Tensor, starts_N: Tensor, tokens_NT: Tensor, is_real_NT: Tensor
    ) -> Tensor:
        """States (N, T, D); all arguments are on the CPU, so that a GPU is never waited for."""
        device = self.model.device
        positions_NT = starts_N[:, None] + torch.arange(tokens_NT.shape[1])
        width = int(positions_NT[is_real_NT].max()) + 1
        rows_F, columns_F = is_real_NT.nonzero(as_tuple=True)
        first, end = int(slots_N.min()), int(slots_N.max()) + 1
        neighbours = torch.equal(slots_N, torch.arange(first, end))  # read in place
        self.cache.aim(
            slice(first, end) if neighbours else to_device(slots_N, device),
            width,
            (to_device(rows_F, device), to_device(columns_F, device)),
            to_device(slots_N[rows_F], device),
            to_device(positions_NT[rows_F, columns_F], device),
        )
        columns_NT = positions_NT.clamp_max(width - 1)
        seen, last_NT, places = self.album.seen(tokens_NT), columns_NT, columns_NT
        if seen is not None and reader_of(self.model).sees_ahead:
            last_NT = starts_N[:, None] + last_seen(tokens_NT)
        if self.places is not None:
            places = self.places.read(slots_N, starts_N, tokens_NT, is_real_NT, seen)
        given = inputs(self.model.get_decoder(), tokens_NT, seen)
        return self._forward(given, to_device(places, device), to_device(last_NT, device), width)

    def _forward(
        self, given: dict[str, Any], places: Tensor, last_NT: Tensor, width: int
    ) -> Tensor:
        """States (N, T, D), with keys up to `width`; all tensors are on the model's device.

        `given` are the decoder's `inputs`, `places` positions (N, T), or on three axes (3, N, T).
        Each token sees up to its column of `last_NT`.
        """
        decoder = self.model.get_decoder()
        with grouped(decoder.config):
            states_NTD: Tensor = decoder(
                **given,
                attention_mask=mask_up_to(last_NT, width, self.model.dtype),
                position_ids=places,
                use_cache=True,
                **{self._cache_name: self.cache},
            ).last_hidden_state
        return states_NTD


Decoder = HFDecoder | FlatDecoder | Qwen2Decoder
PATHS = {
    Qwen2Decoder: "fast (fused layers of a plain Qwen2 in float32, no padding)",
    FlatDecoder: "flat (the library's layers on rows without padding)",
    HFDecoder: "general (the library's own forward)",
}
"""The ways to decode, as people read them."""


def set_independent(decoder: Decoder, wanted: bool) -> bool:
    """Let no row of a decoder without stored keys depend on the others, bit for bit, or end that.

    False if it is not wanted, the decoder cannot do it, or a test shows that products on this
    machine do not allow it.
    """
    if isinstance(decoder, HFDecoder):
        return False
    store = decoder.store
    store.independent = wanted and has_bags(store.dtype)
    if store.independent:
        store.independent = _passes(decoder)
    decoder.album.alone = store.independent
    return store.independent


def _passes(decoder: FlatDecoder | Qwen2Decoder) -> bool:
    """Compare logits of the first slot, read and decoded, alone and beside others."""
    num_slots, max_length = decoder.store.shape
    vocabulary = decoder.model.config.get_text_config().vocab_size

    def logits(count: int) -> Tensor:
        slots = list(range(count))
        lengths = [min(TESTED, max_length - 1), *(1 + slot % FEW for slot in slots[1:])]
        tokens = [[place % vocabulary for place in range(length)] for length in lengths]
        read = decoder.prefill(slots, [0] * count, tokens)
        decoded = decoder.decode(*map(torch.tensor, (slots, lengths, [0] * count)))
        return torch.cat((read[:1], decoded[:1]))

    alone = logits(1)
    counts = {min(count, num_slots) for count in (2, FEW, FEW + 1, 2 * FEW - 1, num_slots)}
    return all(torch.equal(logits(count), alone) for count in counts)


class _SlotCache(Cache):
    """The cache that a transformers model writes to and reads from: some of the slots."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.num_slots, self.max_length = num_slots, max_length
        self.stored: list[list[Tensor]] = []

    def aim(
        self,
        slots: slice | Tensor,
        width: int,
        sources: tuple[Any, Any],
        target_slots: Tensor,
        target_positions: Tensor,
    ) -> None:
        """Set which slots the next forward reads, and where it stores which of its tokens (N, T).

        These are indices for all layers: with a mask, every layer would wait for the GPU.
        """
        self.slots, self.width, self.sources = slots, width, sources
        self.target_slots, self.target_positions = target_slots, target_positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values (N, H, T, D); returns all up to the width in use."""
        new = key_states, value_states
        if layer_idx == len(self.stored):  # the first forward, which shows the shapes
            sizes = [(self.num_slots, x.shape[1], self.max_length, x.shape[3]) for x in new]
            self.stored.append([x.new_zeros(size) for x, size in zip(new, sizes, strict=True)])
        used = []
        for stored, states in zip(self.stored[layer_idx], new, strict=True):
            real_FHD = states.transpose(1, 2)[self.sources]
            stored[self.target_slots, :, self.target_positions] = real_FHD
            used.append(stored[self.slots, :, : self.width])
        return used[0], used[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions and masks are always given."""
        return 0
