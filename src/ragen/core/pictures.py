"""Pictures that an agent sees: pixels under a hash, and the tokens that stand for them.

A text shows a picture at a `PLACE`. In a sequence of token ids the picture is a run of *picture
tokens*: the j-th one of a picture has the id −1 − (key · 2¹⁶ + j), with the first 47 bits of its
hash as the key. So equal ids mean equal pictures, and whatever compares prompts, shares prefixes or
stores sequences treats them as it treats words. No vocabulary has negative ids: a picture token can
neither be sampled nor be spelled by a text. Only an engine replaces them, by rows of features
(`ragen.networks.pictures`) or by what its model takes.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragen.core.errors import RagenError

MARK = "<image>"
"""How an environment writes the place of a picture in an observation, and how people read it."""

PLACE = "\ufdd1"
"""The place of a picture in a text of RAGEN's own: a code point that Unicode reserves for programs.
No text of an environment, a user or a model contains it (`without_places`)."""

INDEX_BITS, KEY_BITS = 16, 47
MOST_TOKENS = 1 << INDEX_BITS
"""Maximum number of tokens of a picture."""

MOST_PIXELS = 1 << 24
"""Maximum number of pixels of a picture."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, known by the `hash` of its size and pixels (32 hexadecimal digits).

    `pixels` is ``(height, width, 3)``, uint8, red, green and blue, and read-only.
    """

    hash: str
    pixels: NDArray[np.uint8] = field(compare=False, repr=False)

    @classmethod
    def of(cls, image: Any) -> Picture:
        """A picture from a `PIL.Image.Image` or an array: grey, RGB or RGBA, of type uint8.

        Raises:
            ValueError: `image` is none of these, is empty, or has more than `MOST_PIXELS`.
        """
        if hasattr(image, "convert"):
            image = image.convert("RGB")
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8:
            raise ValueError(f"a picture of type {pixels.dtype}: uint8 is expected")
        if pixels.ndim == 2:
            pixels = np.stack([pixels] * 3, axis=-1)
        if pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
            raise ValueError(
                f"a picture of shape {pixels.shape}: (height, width) or (height, width, 3) is "
                "expected"
            )
        height, width = pixels.shape[:2]
        if not 0 < height * width <= MOST_PIXELS:
            raise ValueError(
                f"a picture of {height} × {width} pixels: 1 to {MOST_PIXELS:,} are allowed"
            )
        pixels = np.array(pixels[:, :, :3], order="C")  # a copy: the environment may draw on
        pixels.flags.writeable = False
        digest = hashlib.blake2b(f"{height}x{width};".encode(), digest_size=16)
        digest.update(pixels.data)
        return cls(digest.hexdigest(), pixels)

    @property
    def key(self) -> int:
        """The number in the ids of its tokens."""
        return key_of(self.hash)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def token_ids(self, count: int) -> tuple[int, ...]:
        """The ids of its first `count` picture tokens."""
        assert 0 < count <= MOST_TOKENS
        first = -1 - (self.key << INDEX_BITS)
        return tuple(range(first, first - count, -1))

    def png(self) -> bytes:
        """The picture as the bytes of a PNG file, the same on every machine with one Pillow."""
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(self.pixels).save(buffer, "PNG")
        return buffer.getvalue()

    @classmethod
    def of_png(cls, data: bytes) -> Picture:
        """The picture of a PNG file's bytes; the inverse of `png`."""
        from PIL import Image

        return cls.of(Image.open(io.BytesIO(data), formats=("PNG",)))

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        """In JSON, a picture is its PNG file in base64."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            lambda text: cls.of_png(base64.b64decode(text)),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda picture: base64.b64encode(picture.png()).decode()
            ),
        )


def key_of(hash: str) -> int:
    """The key of the picture with this hash."""
    return int(hash[:16], 16) >> (64 - KEY_BITS)


def keys_and_indices(ids: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys and indices of picture tokens, for an array of negative ids."""
    codes = -1 - np.asarray(ids, dtype=np.int64)
    return codes >> INDEX_BITS, codes & (MOST_TOKENS - 1)


def begins(token: int) -> bool:
    """True if a token id is the first one of a picture.

    Example:
        >>> first, second = Picture.of(np.zeros((2, 2), np.uint8)).token_ids(2)
        >>> begins(first), begins(second), begins(7)
        (True, False, False)
    """
    return token < 0 and (-1 - token) % MOST_TOKENS == 0


def by_key(pictures: Iterable[Picture]) -> dict[int, Picture]:
    """The distinct pictures by their keys.

    Raises:
        RagenError: Two pictures have one key, which no 10,000 runs should see.
    """
    found: dict[int, Picture] = {}
    for picture in pictures:
        if found.setdefault(picture.key, picture) != picture:
            raise RagenError(
                f"the pictures {found[picture.key].hash} and {picture.hash} begin with the same "
                "47 bits, so their tokens cannot be told apart: change one pixel of either"
            )
    return found


def shown_in(ids: Sequence[int], pictures: Mapping[int, Picture]) -> tuple[Picture, ...]:
    """The distinct pictures of a sequence of token ids, in order of appearance."""
    keys = (-1 - token >> INDEX_BITS for token in ids if token < 0)
    return tuple(pictures[key] for key in dict.fromkeys(keys))


def without_places(text: str) -> str:
    """A text of an environment, a user or a model, in which no `PLACE` is left."""
    return text.replace(PLACE, "\ufffd") if PLACE in text else text


def for_people(text: str) -> str:
    """A text in which `MARK` stands where pictures are shown."""
    return text.replace(PLACE, MARK)
