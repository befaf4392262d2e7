"""Pictures: one hash for equal pixels, exact files, and ids that say which picture they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ragen.core.errors import RagenError
from ragen.core.pictures import MOST_TOKENS, Picture, by_key, keys_and_indices, shown_in


def noise(height: int, width: int, *channels: int) -> Any:
    generator = np.random.default_rng(height * 100 + width)
    return generator.integers(0, 256, (height, width, *channels), dtype=np.uint8)


def test_equal_pixels_are_one_picture_and_a_file_keeps_them() -> None:
    pixels = noise(5, 7, 3)
    picture = Picture.of(pixels)
    assert picture == Picture.of(Image.fromarray(pixels)) == Picture.of_png(picture.png())
    assert picture.size == (5, 7)
    pixels[0, 0, 0] ^= 1
    assert picture != Picture.of(pixels), "one bit differs, and the picture has its own copy"
    assert Picture.of(pixels.reshape(7, 5, 3)) != Picture.of(pixels), "the size belongs to it"
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[0] = 0


def test_grey_and_transparent_pictures_become_red_green_and_blue() -> None:
    grey, alpha = noise(3, 3), noise(3, 3, 4)
    assert (Picture.of(grey).pixels == grey[:, :, None]).all()
    assert (Picture.of(alpha).pixels == alpha[:, :, :3]).all()


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (np.zeros((2, 2, 3)), "type float64"),
        ("picture.png", "type <U11"),
        (np.zeros((2, 2, 5), np.uint8), r"shape \(2, 2, 5\)"),
        (np.zeros((0, 2, 3), np.uint8), "0 × 2 pixels"),
        (np.zeros((5000, 5000), np.uint8), "5000 × 5000 pixels"),
    ],
)
def test_what_is_no_picture_is_refused(image: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Picture.of(image)


def test_ids_are_negative_and_say_which_picture_and_which_of_its_tokens() -> None:
    first, second = Picture.of(noise(2, 2, 3)), Picture.of(noise(3, 2, 3))
    ids = (7, *first.token_ids(3), 8, *second.token_ids(MOST_TOKENS), *first.token_ids(2))
    assert min(ids) >= -(2**63)
    assert max(token for token in ids if token not in (7, 8)) < 0
    keys, indices = keys_and_indices([token for token in ids if token < 0])
    assert keys.tolist() == [first.key] * 3 + [second.key] * MOST_TOKENS + [first.key] * 2
    assert indices.tolist() == [0, 1, 2, *range(MOST_TOKENS), 0, 1]
    known = by_key([first, second, first])
    assert shown_in(ids, known) == (first, second)
    assert shown_in((3, 4), known) == ()


def test_two_pictures_with_one_key_are_refused() -> None:
    picture = Picture.of(noise(2, 2, 3))
    twin = replace(picture, hash=picture.hash[:16] + "0" * 16)
    with pytest.raises(RagenError, match="cannot be told apart"):
        by_key([picture, twin])
