"""Boards as pictures: a square tile for each symbol of `Env.drawing`.

The tiles are computed in integers, so their pixels are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Tile: TypeAlias = Literal[8, 16]
"""The side of a tile in pixels."""
Pixels: TypeAlias = npt.NDArray[np.uint8]
Layer: TypeAlias = tuple[str, int, int]
"""A form, its radius on a canvas of `CANVAS` points a side, and its colour as 0xRRGGBB."""

CANVAS = 32
EDGE: Layer = ("square", 16, 0xC4CCD4)
FLOOR: Layer = ("square", 15, 0xECF0F4)
PLAYER: Layer = ("disc", 9, 0x2050E0)
TARGET: Layer = ("diamond", 15, 0xE03030)
GOAL: Layer = ("square", 15, 0x30B050)
HOLE: Layer = ("disc", 15, 0x101828)
BOX: Layer = ("square", 13, 0x7A5028)
TILES: dict[str, tuple[Layer, ...]] = {
    "#": (("square", 16, 0x505458), ("square", 13, 0x70767C)),
    "_": (EDGE, FLOOR),
    "P": (EDGE, FLOOR, PLAYER),
    "X": (EDGE, FLOOR, BOX),
    "O": (EDGE, FLOOR, TARGET),
    "√": (EDGE, FLOOR, BOX, TARGET),
    "S": (EDGE, FLOOR, TARGET, PLAYER),
    "H": (EDGE, FLOOR, HOLE),
    "G": (EDGE, GOAL),
    "@": (EDGE, FLOOR, HOLE, PLAYER),
    "*": (EDGE, GOAL, PLAYER),
}
"""The layers of each tile, from the bottom to the top."""
PLACES = {symbol: index for index, symbol in enumerate(TILES)}


def board(rows: Sequence[str], side: Tile) -> Pixels:
    """The picture of a board, shape ``(rows · side, columns · side, 3)``.

    Example:
        >>> board(["P_", "HG"], 8).shape
        (16, 16, 3)
    """
    cells = [[PLACES[symbol] for symbol in row] for row in rows]
    return tiles(side)[cells].swapaxes(1, 2).reshape(len(rows) * side, -1, 3)


@cache
def tiles(side: Tile) -> Pixels:
    """The tiles in the order of `TILES`, shape ``(tiles, side, side, 3)``."""
    return draw(tuple(TILES.values()), side)


def draw(tiles: Sequence[Sequence[Layer]], side: Tile) -> Pixels:
    """Tiles by their layers, from the bottom to the top; shape ``(tiles, side, side, 3)``."""
    distance = np.abs(2 * np.arange(CANVAS) - CANVAS + 1)  # from the middle, in half points
    down, right = np.meshgrid(distance, distance, indexing="ij")
    # A form is what lies within its radius, where distances are measured in its way.
    forms = {
        "square": np.maximum(down, right) ** 2,
        "diamond": (down + right) ** 2,
        "disc": down**2 + right**2,
    }
    drawn = np.zeros((len(tiles), CANVAS, CANVAS, 3), np.int64)
    for tile, layers in zip(drawn, tiles, strict=True):
        for form, radius, colour in layers:
            tile[forms[form] < (2 * radius) ** 2] = list(colour.to_bytes(3))
    step = CANVAS // side
    parts = drawn.reshape(len(tiles), side, step, side, step, 3)
    means: Pixels = (parts.sum((2, 4)) // step**2).astype(np.uint8)
    return means
