"""The corridor as a picture: ``ragen new-world NAME --picture`` adds this class to its file."""

from __future__ import annotations

import numpy as np

from ragen.envs.example import Corridor


class SeenCorridor(Corridor):
    """The same cells as a picture, in place of symbols.

    Observation:
        A picture with a square for each cell, in the colour of what it holds.

    Example:
        >>> env = SeenCorridor()
        >>> env.reset(seed=0)[0], env.pictures()[0].shape
        ('<image>', (8, 48, 3))
    """

    name = "seen_corridor"
    rules = "You are blue in a row of cells. Reach the green goal and keep out of the black hole."

    def show(self) -> str:
        return "<image>"  # the place of the picture

    def pictures(self) -> list[np.ndarray]:
        colours = {"P": (30, 80, 230), "G": (40, 180, 80), "H": (15, 20, 40), "_": (235, 240, 245)}
        cells = np.array([[colours[symbol] for symbol in self.symbols()]], np.uint8)
        return [cells.repeat(8, axis=0).repeat(8, axis=1)]
