"""What a model sees: features of pictures, in the places of their tokens.

A forward gets token ids, and negative ones are picture tokens (`ragen.core.pictures`). Here, at a
model's border, words become rows of its embedding, and picture tokens rows of `Features`: what its
vision tower and projector make of the pixels. The model itself never looks for pictures in the ids,
so an image token of its vocabulary, even a sampled one, is an ordinary word.

Axes: **B** samples, **T** tokens of a sample, **N** picture tokens among given ids, **M** rows of
all pictures, **D** width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ragen.core.pictures import Picture, by_key, keys_and_indices
from ragen.networks.device import to_device

KEPT_ROWS = 2**14
"""Rows of features beyond which a decoder forgets the pictures of earlier prompts."""


class PictureReader(Protocol):
    """How a model reads pictures (`ragen.models.pictures`).

    `axis` is the axis of its tensors along which pictures are stacked. If `sees_ahead`, a picture's
    tokens see all of that picture, also what is behind them. If `has_grid`, positions have three
    axes (`places`).
    """

    axis: int
    sees_ahead: bool
    has_grid: bool

    def count(self, picture: Picture) -> int:
        """The number of its picture tokens."""

    def grid(self, picture: Picture) -> tuple[int, int] | None:
        """Rows and columns of its tokens, if the reader `has_grid`."""

    def tensors(self, picture: Picture) -> Mapping[str, Tensor]:
        """What the vision tower reads: tensors by the names of its arguments."""


def reader_of(owner: Any) -> Any:
    """The reader of a model, its decoder or its tokenizer; ``None`` if it reads no pictures."""
    return getattr(owner, "picture_reader", None)


def attach_reader(reader: PictureReader | None, *owners: Any) -> None:
    """Let a model, its decoder, its tokenizer, and copies of them, know how to read pictures."""
    for owner in owners:
        owner.picture_reader = reader


def freeze_vision(model: PreTrainedModel) -> None:
    """Train only the language model: vision tower and projector get no gradient."""
    head: Any = model.get_output_embeddings()
    language = {*model.get_decoder().parameters(), *head.parameters()}
    for weight in model.parameters():
        if weight not in language:
            weight.requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Features:
    """The rows of several pictures for the first layer, and those that the next layers add.

    `firsts` are the first rows by the pictures' keys, `grids` their `PictureReader.grid`.
    """

    rows_MD: Tensor
    added: tuple[Tensor, ...]
    firsts: Mapping[int, int]
    grids: Mapping[int, tuple[int, int] | None]

    def rows_of(self, ids_N: Tensor) -> Tensor:
        """The row (N,) of each picture token, which are given on the CPU."""
        keys, indices = keys_and_indices(ids_N.numpy())
        known, which = np.unique(keys, return_inverse=True)
        firsts = np.array([self.firsts[key] for key in known.tolist()], dtype=np.int64)
        return to_device(torch.from_numpy(firsts[which] + indices), self.rows_MD.device)

    def joined(self, others: Features) -> Features:
        """These and the features of other pictures."""
        count = len(self.rows_MD)
        return Features(
            torch.cat((self.rows_MD, others.rows_MD)),
            tuple(map(torch.cat, zip(self.added, others.added, strict=True))),
            {**self.firsts, **{key: count + first for key, first in others.firsts.items()}},
            {**self.grids, **others.grids},
        )


def look(model: PreTrainedModel, pictures: Sequence[Picture]) -> Features:
    """The features of at least one picture under a model's weights; differentiable."""
    tower: Any = model
    reader: PictureReader = reader_of(model)
    axis = reader.axis
    read = [(picture, reader.tensors(picture)) for picture in pictures]
    alike: dict[Any, list[tuple[Picture, Mapping[str, Tensor]]]] = defaultdict(list)
    for picture, tensors in read:
        shapes = tuple(each.shape[axis + 1 :] for each in tensors.values())
        alike[shapes].append((picture, tensors))
    firsts, num_rows, layers = {}, 0, []
    for members in alike.values():
        batch = {
            name: to_device(torch.cat([each[name] for _, each in members], axis), model.device)
            for name in members[0][1]
        }
        output = tower.get_image_features(**batch)
        layers.append([_flat(output.pooler_output)])
        layers[-1] += [_flat(each) for each in getattr(output, "deepstack_features", ())]
        for picture, _ in members:
            firsts[picture.key] = num_rows
            num_rows += reader.count(picture)
    rows_MD, *added = (torch.cat(parts).to(model.dtype) for parts in zip(*layers, strict=True))
    assert len(rows_MD) == num_rows, "every picture token has a row"
    grids = {picture.key: reader.grid(picture) for picture in pictures}
    return Features(rows_MD, tuple(added), firsts, grids)


def _flat(rows: Any) -> Tensor:
    """The rows (M, D) of one tensor, or of one for each picture."""
    parts = [rows] if isinstance(rows, Tensor) else rows
    return torch.cat([each.flatten(0, -2) for each in parts])


def features(model: PreTrainedModel, ids: Tensor, pictures: Iterable[Picture]) -> Features | None:
    """The features of the pictures that token ids show, of those given; ``None`` without any."""
    keys = shown_keys(ids)
    if not keys:
        return None
    known = by_key(pictures)
    return look(model, [known[key] for key in keys])


def shown_keys(ids: Tensor) -> list[int]:
    """The keys of the pictures that token ids show, ascending."""
    tokens_N = ids[ids < 0]
    keys: list[int] = np.unique(keys_and_indices(tokens_N.numpy())[0]).tolist()
    return keys


def embedded(words: Callable[[Tensor], Tensor], ids: Tensor, seen: Features | None) -> Tensor:
    """The inputs of the first layer, with a last axis (D): words and rows of features.

    `words` embeds ids on the device of the model. The ids are on the CPU if something is `seen`.
    """
    if seen is None:
        return words(ids)
    is_picture = ids < 0
    device = seen.rows_MD.device
    states = words(to_device(ids.clamp_min(0), device))
    where = tuple(to_device(axis_N, device) for axis_N in is_picture.nonzero(as_tuple=True))
    return states.index_put(where, seen.rows_MD[seen.rows_of(ids[is_picture])])


def inputs(decoder: PreTrainedModel, ids: Tensor, seen: Features | None) -> dict[str, Any]:
    """The arguments with which transformers' decoder reads token ids (B, T)."""
    if seen is None:
        return {"input_ids": to_device(ids, decoder.device)}
    given: dict[str, Any] = {"inputs_embeds": embedded(decoder.get_input_embeddings(), ids, seen)}
    if seen.added:
        is_picture = ids < 0
        rows_N = seen.rows_of(ids[is_picture])
        given["visual_pos_masks"] = to_device(is_picture, decoder.device)
        given["deepstack_visual_embeds"] = [rows_MD[rows_N] for rows_MD in seen.added]
    return given


def places(ids_BT: Tensor, seen: Features | None, first_B: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of tokens on three axes (3, B, T), and the position behind each token (B, T).

    This is the rule of M-RoPE (arXiv:2409.12191). A word's three are equal. A picture token's are
    the picture's own position, plus 0, its row and its column; what follows goes on after the
    larger of height and width. `first_B` are the positions of the rows' first tokens.
    """
    step_BT = torch.ones_like(ids_BT)
    offset_3BT = ids_BT.new_zeros(3, *ids_BT.shape)
    if seen is not None:
        where = (ids_BT < 0).nonzero(as_tuple=True)
        keys, indices = map(torch.from_numpy, keys_and_indices(ids_BT[where].numpy()))
        grids = [seen.grids[key] for key in keys.tolist()]
        rows_N, columns_N = torch.tensor(grids).unbind(1)
        is_last_N = indices == rows_N * columns_N - 1
        step_BT[where] = torch.where(is_last_N, torch.maximum(rows_N, columns_N), 0)
        offset_3BT[1][where] = indices // columns_N
        offset_3BT[2][where] = indices % columns_N
    next_BT = step_BT.cumsum(1) + first_B[:, None]
    return offset_3BT + (next_BT - step_BT), next_BT


def row_places(ids_BT: Tensor, seen: Features | None) -> Tensor:
    """`places` of whole rows."""
    return places(ids_BT, seen, ids_BT.new_zeros(len(ids_BT)))[0]


def last_seen(ids_BT: Tensor) -> Tensor:
    """The column (B, T) up to which a token sees if a picture's tokens see all of it.

    Example:
        >>> one = Picture.of(np.zeros((1, 1, 3), np.uint8)).token_ids(3)
        >>> last_seen(torch.tensor([[5, *one, *one[:1], 7]]))
        tensor([[0, 3, 3, 3, 4, 5]])
    """
    is_end_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    is_end_BT[:, :-1] = (ids_BT[:, :-1] >= 0) | (ids_BT[:, 1:] != ids_BT[:, :-1] - 1)
    columns_T = torch.arange(ids_BT.shape[1])
    ends_BT = torch.where(is_end_BT, columns_T, ids_BT.shape[1])
    return ends_BT.flip(1).cummin(1).values.flip(1)


def mask_up_to(last_NT: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The mask (N, 1, T, W) that is added to scores: each token sees up to its last column."""
    hidden_NTW = torch.arange(width, device=last_NT.device) > last_NT[:, :, None]
    mask_NTW = torch.zeros(hidden_NTW.shape, dtype=dtype, device=last_NT.device)
    return mask_NTW.masked_fill_(hidden_NTW, torch.finfo(dtype).min)[:, None]


class Album:
    """The pictures that a decoder reads: each is looked at once while the weights stay.

    If each is looked at `alone`, its features do not depend on the others, bit for bit.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.alone = model, False
        self._pictures: dict[int, Picture] = {}
        self._known: Features | None = None

    def show(self, pictures: Iterable[Picture]) -> None:
        """Say which pictures the next tokens may show, besides those shown before."""
        if self._known is not None and len(self._known.rows_MD) > KEPT_ROWS:
            self.forget()
        self._pictures = by_key((*self._pictures.values(), *pictures))

    def forget(self) -> None:
        """Drop all pictures: the weights have changed, or there are too many."""
        self._pictures, self._known = {}, None

    @torch.no_grad()
    def seen(self, ids: Tensor) -> Features | None:
        """Features of all pictures that token ids show, and of others; ``None`` without any."""
        keys = shown_keys(ids) if self._pictures else []
        known = self._known
        new = [self._pictures[key] for key in keys if known is None or key not in known.firsts]
        for part in [[each] for each in new] if self.alone else [new] if new else []:
            seen = look(self._model, part)
            known = self._known = seen if known is None else known.joined(seen)
        return known if keys else None


class SlotPlaces:
    """The positions of the tokens in a decoder's slots, where pictures move them (`places`)."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._next = torch.zeros(num_slots, max_length + 1, dtype=torch.long)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give `target` the positions of the first `length` tokens of `source`."""
        self._next[target, : length + 1] = self._next[source, : length + 1]

    def read(
        self,
        slots_N: Tensor,
        starts_N: Tensor,
        tokens_NT: Tensor,
        is_real_NT: Tensor,
        seen: Features | None,
    ) -> Tensor:
        """The positions (3, N, T) of new tokens behind the first `starts_N` of each slot."""
        places_3NT, next_NT = places(tokens_NT, seen, self._next[slots_N, starts_N])
        rows_F, columns_F = is_real_NT.nonzero(as_tuple=True)
        self._next[slots_N[rows_F], starts_N[rows_F] + columns_F + 1] = next_NT[is_real_NT]
        return places_3NT


def slot_places(model: PreTrainedModel, num_slots: int, max_length: int) -> SlotPlaces | None:
    """What a decoder of a model needs if pictures move the positions of what follows."""
    reader = reader_of(model)
    return SlotPlaces(num_slots, max_length) if reader is not None and reader.has_grid else None
